"""What mutants differ in: cosmic-ray's operators as far as they suit code over tensors, and two more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Name

# Operators of one kind replace each other; one of another kind mostly ends in a TypeError, which any test notices.
_KINDS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitAnd", "BitOr", "BitXor"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)
# The others need a name to put in.
_WITHOUT_ARGUMENTS = {
    *("AddNot", "ExceptionReplacer", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ReplaceUnaryOperator_Delete_Invert", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub"),
}
_PAIRS = (("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("cummin", "cummax"), ("tril_", "triu_"))
# ``positive`` gives the tensor itself, with its gradient.
_SWAPS = {"detach": "positive", **dict(_PAIRS), **{other: one for one, other in _PAIRS}}

Span = tuple[tuple[int, int], tuple[int, int]]


class SwapName(Operator):
    """A minimum for a maximum, an upper triangle for a lower one, a gradient where none was to go."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if isinstance(node, Name) and node.value in _SWAPS:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _SWAPS[node.value]
        return node

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return Example("max(0, x)", "min(0, x)"), Example("x.detach()", "x.positive()")


class DropBound(Operator):
    """A slice without its beginning or without its end."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        for child in self._bounds(node):
            yield child.start_pos, child.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        dropped = self._bounds(node)[index]
        node.children = [child for child in node.children if child is not dropped]
        return node

    @staticmethod
    def _bounds(node: Any) -> list[Any]:
        parts = node.children if node.type == "subscript" else []
        return [part for part in parts if part.type not in ("operator", "sliceop")]

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return Example("x[a:b]", "x[:b]"), Example("x[:, a : b + 1]", "x[:, a :]", occurrence=1)


def _fits(name: str) -> bool:
    """Whether an operator of cosmic-ray's is used."""
    name = name.removeprefix("core/")
    if name.startswith(("ReplaceBinaryOperator", "ReplaceComparisonOperator")):
        return any(kind.issuperset(name.split("_")[1:]) for kind in _KINDS)
    return name in _WITHOUT_ARGUMENTS


OPERATORS: dict[str, type[Operator]] = {
    **{name: get_operator(name) for name in sorted(operator_names()) if _fits(name)},
    "SwapName": SwapName,
    "DropBound": DropBound,
}
