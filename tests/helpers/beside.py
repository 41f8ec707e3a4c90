"""Libraries that lie beside the environment, since they are no requirement of the plugin's."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.cli import ROOT


def library(name: str, into: Path) -> Path:
    """The folder of ``requirements/NAME.txt``: what `make test` fills, or one in ``into`` that is filled here."""
    bundled = Path(sys.prefix) / name
    if (bundled / ".installed").is_file():
        return bundled
    if not (into / name).exists():
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(into / name)]
        subprocess.run([*command, "-r", str(ROOT / "requirements" / f"{name}.txt")], check=True)
    return into / name
