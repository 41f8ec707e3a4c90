"""Train the model that the package brings, on the source code of Python's standard library, and write its folder.

    python make.py                          # everything is made in the folder shipped; OUT/fairseq_ms is the result
    python make.py --updates 20 --out try   # to see it run

The text is every file *.py of the running Python's library, tests included and installed packages left out, each once;
whole folders are held out for validation and test. It is under the Python Software Foundation's licence, version 2.
A command that was stopped goes on where it was.
"""

import argparse
import hashlib
import json
import lzma
import platform
import subprocess
import sys
from pathlib import Path

from fairseq_ms.tools.report import write_json, write_text

PRESET, MERGES, ROW, ROWS = "retina_lm_long_2048", 8000, 2048, 2
UPDATES = 2400  # 10 million tokens
LICENSE = "PSF-2.0, the Python Software Foundation License Version 2"
LIMITS = """
## Limits

It completes Python in the style of the standard library, line by line plausible, and does not know what a program is
for. It has seen no prose but comments and docstrings, and no code but this library's. Names and numbers that it writes
are often wrong; do not run what it writes unread.
"""


def run(*words: object) -> None:
    """Run a command of ``fairseq-ms``."""
    print(f"$ fairseq-ms {' '.join(map(str, words))}", flush=True)
    subprocess.run([sys.executable, "-m", "fairseq_ms", *map(str, words)], check=True)


def bits_of_xz(text: bytes) -> float:
    """Bits a byte of xz at its best."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def training(out: Path, updates: int, xz: float) -> str:
    """What the card says beyond what every card says."""
    splits = json.loads((out / "data" / "manifest.json").read_text())["splits"]
    measured = json.loads((out / "perplexity.json").read_text())["bits_per_byte"]
    seen, tokens = updates * ROWS * ROW, splits["train"]["targets"]
    rows = {
        "text": f"`*.py` of the standard library of Python {platform.python_version()}",
        "licence of the text": LICENSE,
        "bytes to train on, held out for test": f"{splits['train']['bytes']:,}, {splits['test']['bytes']:,}",
        "tokens seen": f"{seen:,}, {seen / tokens:.1f} passes over {tokens:,}, in {updates:,} updates of `{PRESET}`",
        "bits a byte of the test files": f"{measured:.3f} (windows of {ROW} tokens, half of them context)",
        "bits a byte of `xz -9e` on the same files": f"{xz:.3f}",
        "made by": "`python user_dir_examples/shipped/make.py`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"\n## Training\n\n| | |\n| --- | --- |\n{table}\n{LIMITS}"


def record(made: Path, numbers: Path) -> float:
    """Write the record of a folder, its files' hashes and its bits a byte of this script, which a test scores anew."""
    run("perplexity", made, "--data", __file__, "--cpu", "--json", numbers)
    bits: float = json.loads(numbers.read_text())["bits_per_source_byte"]
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(made.iterdir())
        if file.name not in ("README.md", "record.json")
    }
    write_json(made / "record.json", {"bits_per_byte_of_its_recipe": bits, "sha256": digests})
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("shipped"), help="folder for everything (default: shipped)")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"of 4,096 tokens (default: {UPDATES})")
    parser.add_argument("--input", type=Path, help="a folder of Python files (default: this Python's library)")
    args = parser.parse_args()
    out, made = args.out, args.out / "fairseq_ms"
    out.mkdir(parents=True, exist_ok=True)
    own = [] if args.input is None else ["--input", args.input]
    run("prepare", "code", *own, "--names", "*.py", "--bpe-merges", MERGES, "--out", out / "data", "--quiet")
    settings = [f"checkpoint.save_dir={out.absolute() / 'python_library'}", "checkpoint.save_interval_updates=200"]
    settings += ["dataset.disable_validation=true"]
    run("train", PRESET, "--data", out / "data" / "bin", "--max-update", args.updates, *settings)
    last = out / "python_library" / "checkpoint_last.pt"
    run("perplexity", last, "--json", out / "perplexity.json")
    if not made.exists():
        licences = ["--license", "mit", "--data-license", LICENSE]
        run("export", last, made, "--fp16", "--no-python", *licences, "--perplexity", out / "perplexity.json")
    held_out = (out / "data" / "text" / "test.txt").read_bytes()
    card = (made / "README.md").read_text(encoding="utf-8").partition("\n## Training\n")[0]
    write_text(made / "README.md", card + training(out, args.updates, bits_of_xz(held_out)))
    bits = record(made, out / "recipe.json")
    size = sum(file.stat().st_size for file in made.iterdir())
    print(f"{made}: {size / 1e6:.2f} MB, {bits:.3f} bits a byte of this script; in the package, fairseq_ms/shipped")


if __name__ == "__main__":
    main()
