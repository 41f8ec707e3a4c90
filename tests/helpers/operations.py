"""What torch computes."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """The names of the operations that run within, in order, and of those that would be a kernel of a GPU: no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket._qualified_op_name)
        name = func.overloadpacket.__name__
        if not (func.is_view or name in ("_unsafe_view", "empty")):
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))
