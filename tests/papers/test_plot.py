"""`fairseq-ms plot`: what context costs, and losses from fairseq's logs."""

from pathlib import Path

import pytest

from fairseq_ms.cli import main
from tests.helpers.asked import answer

# Both of fairseq's formats, through fairseq-train and through hydra; fairseq-ms train adds milliseconds. The first run
# was killed and went on later, when fairseq's own "wall" stays 0.
JSON_LOG = """\
2026-01-01 09:59:25 | INFO | fairseq_cli.train | {'_name': None, 'common': {'_name': None, 'log_format': 'json'}}
2026-01-01 09:59:25 | INFO | fairseq_cli.train | num. shared model params: 4,096 (num. trained: 4,096)
2026-01-01 09:59:25 | INFO | fairseq_cli.train | {"num_updates": "3"}
2026-01-01 10:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "9", "ppl": "512", "num_updates": "10", \
"train_wall": "30", "wall": "35"}
2026-01-01 10:00:01 | INFO | valid | {"epoch": 1, "valid_loss": "8", "valid_ppl": "256", "valid_num_updates": "10"}
2026-01-01 10:00:30 | INFO | train_inner | {"epoch": 1, "update": 0.9, "loss": "8.5", "num_updates": "18", "wall": "65"}
2026-01-01 10:00:37 | INFO | train_inner | {"epoch": 1, "update": 0.9, "lo
2026-01-01 11:00:00,001 | INFO | fairseq_cli.train | {'_name': None, 'common': {'_name': None, 'log_format': 'json'}}
2026-01-01 11:00:00 | INFO | fairseq_ms.tasks.streaming_language_modeling | dictionary: 8000 types
2026-01-01 11:00:00 | INFO | fairseq_cli.train | num. shared model params: 4,096 (num. trained: 4,096)
2026-01-01 11:00:35 | INFO | train_inner | {"epoch": 1, "update": 0.9, "loss": "7", "num_updates": "18", "wall": "0"}
2026-01-01 11:00:36,933 | INFO | valid | {"epoch": 1, "valid_loss": "6", "valid_ppl": "64", "valid_num_updates": "20"}
2026-01-01 11:00:45 | INFO | train | {"epoch": 1, "train_loss": "7.5", "train_num_updates": "20", "train_wall": "0", \
"train_train_wall": "30"}
2026-01-01 11:00:45,007 | INFO | valid | {"epoch": 2, "valid_loss": "6.5", "valid_ppl": "91", "valid_num_updates": "30"}
"""
SIMPLE_LOG = """\
[2026-01-01 10:00:00,000][fairseq_cli.train][INFO] - num. shared model params: 4,096 (num. trained: 4,096)
[2026-01-01 10:00:17,000][train_inner][INFO] - epoch 001:     10 / 40 loss=9, ppl=512, num_updates=10, wall=18
[2026-01-01 10:00:18,000][valid][INFO] - epoch 001 | valid on 'valid' subset | loss 7.25 | ppl 152 | num_updates 10
"""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name, text in (("first", JSON_LOG), ("second", SIMPLE_LOG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text(text, encoding="utf-8")
    return tmp_path


def test_context_grows_faster_than_what_is_kept_for_it_with_more_scales(tmp_path: Path) -> None:
    sizes = ("--rounds", "1", "--decoder-embed-dim", "32", "--batch-size", "2")
    xl, two_scales, three_scales = answer(tmp_path, "plot", "context", "--segments", "4,16", *sizes)["curves"].values()
    for index, segment in enumerate((4, 16)):
        points = [curve[index] for curve in (xl, two_scales, three_scales)]
        assert [point["segment"] for point in points] == [segment] * 3
        contexts = [point["context"] for point in points]
        per_megabyte = [point["context"] / point["megabytes"] for point in points]
        assert contexts == sorted(contexts)
        assert per_megabyte == sorted(per_megabyte)
        assert all(point["milliseconds"] > 0 for point in points)


def curves_of(logs: Path, *arguments: str) -> list[dict[str, object]]:
    return list(answer(logs, "plot", "curves", *arguments)["runs"])


def test_losses_are_read_from_both_formats_and_hours_add_up_over_restarts(logs: Path) -> None:
    first, second = curves_of(logs, str(logs / "first" / "log"), f"hydra={logs / 'second' / 'log'}", "--over", "hours")
    # 36 s; then 72 s until the kill and 36 or 45 s after the next start.
    assert first == {"label": "first", "updates": [10, 20, 30], "hours": [0.01, 0.03, 0.0325], "loss": [8, 6, 6.5]}
    assert second == {"label": "hydra", "updates": [10], "hours": [0.005], "loss": [7.25]}


def test_a_later_phase_begins_when_the_earlier_one_has_ended(logs: Path) -> None:
    both = ",".join(str(logs / name / "log") for name in ("first", "second"))
    (curve,) = curves_of(logs, f"two phases={both}", "--over", "hours", "--metric", "ppl")
    assert curve == {"label": "two phases", "updates": [10], "hours": [0.0375], "ppl": [152]}


def test_a_log_may_have_an_equals_sign_or_a_comma_in_its_path_and_losses_that_are_not_finite(logs: Path) -> None:
    log = logs / "lr=0.1,clip" / "log"
    log.parent.mkdir()
    text = SIMPLE_LOG + SIMPLE_LOG.splitlines()[-1].replace("loss 7.25", "loss nan").replace("updates 10", "updates 20")
    log.write_text(text + "\n", encoding="utf-8")
    for given, label in ((str(log), "lr=0.1,clip"), (f"a={log}", "a")):
        (curve,) = curves_of(logs, given)
        assert (curve["label"], curve["loss"]) == (label, [7.25, None])
    log.write_text(text.replace("7.25", "inf") + "\n", encoding="utf-8")
    (curve,) = curves_of(logs, str(log))
    assert curve["loss"] == [None, None]


def test_training_points_take_the_later_line_of_an_update(logs: Path) -> None:
    (curve,) = curves_of(logs, str(logs / "first" / "log"), "--gen-subset", "train")
    assert curve["updates"] == [10, 18, 20]
    assert curve["loss"] == [9, 7, 7.5]


def test_the_best_of_each_run_is_drawn_over_its_size(logs: Path, capsys) -> None:
    curves_of(logs, f"256={logs / 'first/log'}", f"mlp={logs / 'second/log'}", "--over", "label")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["256", "30", "0.0325", "6", "6.5"] in lines
    assert ["mlp", "10", "0.005", "7.25", "7.25"] in lines


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("context --segments 6", "--segments must be multiples of 4"),
        ("context --decoder-embed-dim 100", "--decoder-embed-dim must be even, and a multiple of 64"),
        ("context --png figure.pdf", "--png must end in .png"),
        ("curves nowhere/log", "there is no log nowhere/log"),
        ("curves LOG --gen-subset test", "has no line about 'test'"),
        ("curves LOG --metric bleu", "--metric must be one of epoch, loss, num_updates, ppl: got bleu"),
        ("curves LOG --over label", "--over label needs labels that are numbers"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(logs: Path, command: str, sentence: str, capsys) -> None:
    assert main(["plot", *command.replace("LOG", str(logs / "first/log")).split()]) == 2
    assert sentence in capsys.readouterr().err
