"""The training curves as a picture."""

from pathlib import Path

from commands import records


def draw_curves(logs: dict[str, Path], png: Path) -> None:
    """Training loss in bits a token against updates, one line a model, told apart without colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, log), style, marker in zip(logs.items(), ("-", "--"), ("o", "s"), strict=True):
        points = {int(record["num_updates"]): float(record["loss"]) for record in records(log.read_text())}
        updates = sorted(points)
        losses = [points[update] for update in updates]
        axes.plot(updates, losses, style, marker=marker, markevery=max(1, len(updates) // 10), label=name)
    axes.set_xlabel("updates")
    axes.set_ylabel("training loss (bits a subword)")
    axes.grid(alpha=0.3)
    axes.legend()
    unfinished = png.with_suffix(".unfinished.png")
    figure.savefig(unfinished, dpi=140)
    unfinished.replace(png)
    plt.close(figure)
