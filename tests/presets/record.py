"""Write ``fairseq_ms/presets/sizes.json`` anew: ``python -m tests.presets.record``, from the top of the source tree."""

from __future__ import annotations

import json

from tqdm import tqdm

import fairseq_ms.models  # noqa: F401  (registers everything)
from fairseq_ms.commands.config import SIZES
from fairseq_ms.errors import UsageError
from fairseq_ms.presets.registry import CONFIGS
from fairseq_ms.tools import report, training_step, untrained
from tests.helpers.hydra import by_hydra

# Symbols by paper and data: Table 1 of the first, Table 4 of the second, all bytes or colours in the third.
SYMBOLS = {
    "Multi-scale": {"wt103": 33_346, "books": 31_300, "ccnews": 63_724},
    "Transformer-QL": {"simplebooks92": 98_304, "simplebooks2": 11_492, "wt103": 267_735},
    "Hierarchical": {"": 260},
    "docs/models.md": {"haed": 260, "base": 32_000},
}
# Of a preset for no data of a paper's: what fairseq-ms prepare text is shown with.
OTHERWISE = 8_000


def symbols_of(name: str) -> int:
    """The vocabulary over which a preset is counted."""
    data = next((data for paper, data in SYMBOLS.items() if paper in CONFIGS[name].recipe.source), {})
    return next((count for key, count in data.items() if key in name), OTHERWISE)


def sizes(name: str) -> tuple[int, int, int | None]:
    """Symbols, parameters, and bytes that a step keeps for each target; None where they depend on the text."""
    cfg, symbols = by_hydra(name), symbols_of(name)
    cfg.task.data = "unread"
    with training_step.ShapesAlone():
        model = untrained.build_model(cfg, symbols)
        parameters, tokens = sum(parameter.numel() for parameter in model.parameters()), training_step.tokens_of(cfg)
        try:
            # The first phase of HAED has no decoder, whose output this would be.
            kept = training_step.step_bytes(model, 1, tokens) if hasattr(model, "decoder") else None
        except UsageError:
            kept = None
    return symbols, parameters, kept and round(kept / tokens)


def main() -> None:
    """Count every preset and replace the file at once; one preset a line, so that a diff names what has changed."""
    rows = [f"  {json.dumps(name)}: {json.dumps(sizes(name))}" for name in tqdm(sorted(CONFIGS), unit="preset")]
    report.write_text(SIZES, "{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
