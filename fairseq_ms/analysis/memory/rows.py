"""A memory footprint by scale and by purpose: the columns of the paper's Table 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fairseq_ms.analysis import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9

# Attribute, and how tables and figures call it.
COLUMNS = {
    "embeddings": "Emb",
    "projections": "Q,K,V",
    "scores": "QK^T",
    "context": "softmax V",
    "feed_forward": "FFN",
    "pointwise": "LN/drop/res",
    "output": "output",
    "gradient": "out. grad",
    "hierarchy": "hierarchy",
    "unnamed": "unnamed",
}


@dataclass(frozen=True)
class Row:
    """Bytes of all layers of one scale.

    Attributes:
        scale: the factor k
        layers: how many layers there are
        embeddings, projections, scores, context, feed_forward, pointwise: of tokens; of Q, K and V; of attention
            scores; of their products with V; of the feed-forward block; of norms, dropout and residuals
        output, gradient: of the logits and of their gradient
        hierarchy: of what joins scales
        unnamed: of what the paper's totals have and its columns do not
    """

    scale: int
    layers: int
    embeddings: float = 0.0
    projections: float = 0.0
    scores: float = 0.0
    context: float = 0.0
    feed_forward: float = 0.0
    pointwise: float = 0.0
    output: float = 0.0
    gradient: float = 0.0
    hierarchy: float = 0.0
    unnamed: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in COLUMNS)

    @property
    def kept(self) -> float:
        """Bytes kept for the backward pass: all but the gradient, which exists only during it."""
        return self.total - self.gradient


def scaled(row: Row, factor: float) -> Row:
    """The row with all its bytes multiplied."""
    bytes_of = {field.name: getattr(row, field.name) * factor for field in fields(row) if field.name in COLUMNS}
    return Row(row.scale, row.layers, **bytes_of)


def format_rows(rows: Sequence[Row], extra: Sequence[tuple[str, float]] = (), total: bool = True) -> str:
    """Rows in GB (1e9 bytes) without the columns that are empty everywhere, then further lines and the total."""
    shown = [name for name in COLUMNS if any(getattr(row, name) for row in rows)]
    header = ["scale", "layers", *(COLUMNS[name] for name in shown), "total (GB)"]
    table: list[list[object]] = [
        [f"{row.scale}x", row.layers, *(getattr(row, name) / GB for name in shown), row.total / GB] for row in rows
    ]
    blank = [None] * (len(shown) + 1)
    table += [[name, *blank, value / GB] for name, value in extra]
    if total:
        table.append(["total", *blank, (sum(row.total for row in rows) + sum(value for _, value in extra)) / GB])
    return report.format_table(header, table)


def as_json(rows: Sequence[Row]) -> list[dict[str, float]]:
    """The rows in bytes."""
    return [
        {"scale": row.scale, "layers": row.layers, "total": row.total} | {name: getattr(row, name) for name in COLUMNS}
        for row in rows
    ]


def draw(figure: Figure, bars: Sequence[tuple[str, Row]]) -> None:
    """One stacked bar a row, purposes told apart by hatching."""
    axes = figure.add_subplot()
    shown = [name for name in COLUMNS if any(getattr(row, name) for _, row in bars)]
    bottoms = [0.0] * len(bars)
    for index, name in enumerate(shown):
        heights = [getattr(row, name) / GB for _, row in bars]
        axes.bar(
            range(len(bars)),
            heights,
            bottom=bottoms,
            label=COLUMNS[name],
            hatch=report.HATCHES[index % len(report.HATCHES)],
            edgecolor="black",
            linewidth=0.5,
            alpha=0.75,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    report.finish_axes(axes, "scale", "memory (GB)", beside=True)
