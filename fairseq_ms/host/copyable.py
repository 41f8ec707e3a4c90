"""Models that can be copied and pickled after fairseq has made them ready for generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq.models import BaseFairseqModel as _Model
else:
    _Model = object


class CopyableModel(_Model):
    """A base in front of fairseq's: its hook leaves a local function on the model, which nothing can pickle."""

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """As fairseq's, without its local ``train`` that refuses."""
        super().make_generation_fast_(**kwargs)
        self.__dict__.pop("train", None)

    def train(self, mode: bool = True) -> Any:
        """As ``nn.Module.train``; a model that was made fast for generation cannot be trained."""
        if mode and self._is_generation_fast:
            raise RuntimeError("cannot train after make_generation_fast")
        return super().train(mode)
