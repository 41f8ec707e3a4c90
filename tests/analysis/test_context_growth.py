"""The figure of what context costs."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import run_cli


def test_context_grows_faster_than_what_is_kept_for_it_with_more_scales(tmp_path: Path) -> None:
    run_cli(
        *("fairseq-ms", "plot", "context", "--segments", "4,16", "--rounds", "1"),
        *("--decoder-embed-dim", "32", "--batch-size", "2"),
        *("--json", tmp_path / "curves.json", "--png", tmp_path / "curves.png"),
    )
    curves = json.loads((tmp_path / "curves.json").read_text())["curves"]
    xl, two_scales, three_scales = curves.values()
    for index, segment in enumerate((4, 16)):
        points = [curve[index] for curve in (xl, two_scales, three_scales)]
        assert [point["segment"] for point in points] == [segment] * 3
        contexts = [point["context"] for point in points]
        per_megabyte = [point["context"] / point["megabytes"] for point in points]
        assert contexts == sorted(contexts)
        assert per_megabyte == sorted(per_megabyte)
        assert all(point["milliseconds"] > 0 for point in points)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--segments", "6"), "--segments must be multiples of 4"),
        (("--decoder-embed-dim", "100"), "--decoder-embed-dim must be even, and a multiple of 64"),
        (("--png", "figure.pdf"), "--png must end in .png"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    done = run_cli("fairseq-ms", "plot", "context", *flags, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
