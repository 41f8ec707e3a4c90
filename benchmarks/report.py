"""How results of benchmarks are shown: the machine they were measured on, and a table a section."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from benchmarks.runner import SectionResult


def cpu_name() -> str:
    """The processor, as its maker calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": list(os.getloadavg()),
    }


def table(result: SectionResult) -> str:
    """A section's result as text."""
    lines = [result["title"]]
    if "error" in result:
        return "\n".join([*lines, f"  NOT MEASURED, parity failed: {result['error']}"])
    lines.append(f"  parity: {result['parity']}")
    width = max(len(row["name"]) for row in result["rows"])
    timed = result["measure"] == "time"
    header = f"  {'':<{width}} {result['unit']:>16}" + (f" {'min .. max':>21}" if timed else "")
    lines.append(header + f" {'ratio':>7}" + (f" {'min .. max':>15}" if timed else "") + "  goal")
    for row in result["rows"]:
        line = f"  {row['name']:<{width}} {_number(row['median']):>16}"
        if timed:
            spread = f"{_number(row['min'])} .. {_number(row['max'])}"
            line += f" {spread:>21}"
        line += f" {row['ratio']:>7.3f}"
        if timed:
            spread = f"{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}"
            line += f" {spread:>15}"
        if row["goal"] is not None:
            line += f"  <= {row['goal']:g}" + ("" if row["meets_goal"] else "  falls short")
        lines.append(line)
    for other in result["further"]:
        lines.append(
            f"  {other['name']} to {other['baseline']}: {other['ratio']:.3f}"
            f" ({other['ratio_min']:.3f} .. {other['ratio_max']:.3f})  <= {other['goal']:g}"
            + ("" if other["meets_goal"] else "  falls short")
        )
    lines.append(f"  load average {result['load_before']:.1f} before, {result['load_after']:.1f} after")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
