"""What every test stands on: one seed, one thread, a device, and no test that skips without anybody noticing."""

import logging
import os
import random
import re
import signal
from pathlib import Path

import pytest

# Set before torch is imported anywhere: tests run side by side, one to a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, and so would the trainings that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = 20240917

# The only reasons for which a test may be skipped when CI is set; anything else fails the run.
ALLOWED_SKIPS = (
    re.compile(r"needs a CUDA device"),
    re.compile(r"kenlm does not compile on Python 3\.13"),
    re.compile(r"needs torch\.optim\.Muon"),
)

_unexpected_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda", "meta"],
        default="cpu",
        help="where tests make tensors and models (meta: of shapes alone, to see that nothing is mixed)",
    )


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("device")
    if device == "cpu":
        return
    import torch

    if device == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError(f"--device cuda needs a GPU: torch {torch.__version__} finds none")
        # Tolerances are float32's; convolutions and LSTMs would take ten bits of each factor.
        torch.backends.cudnn.allow_tf32 = False
    torch.set_default_device(device)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that slow.txt names are slow. On another device, those of paths that only a CPU takes are left out.

    pytest counts them as deselected.
    """
    slow = set(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").split())
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker("slow")
    if config.getoption("device") == "cpu":
        return
    left_out = [item for item in items if item.get_closest_marker("cpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """Everything is registered, before any fixture makes a model.

    The import takes seconds, which the process that only hands tests to others need not spend.
    """
    import fairseq_ms

    fairseq_ms.register()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)
    np.random.seed(SEED)


@pytest.fixture(autouse=True)
def _loggers_that_say_everything() -> None:
    """A command that quietened fairseq in this process, in a fixture even, did so for itself alone."""
    for name in ("fairseq", "fairseq_cli", "fairseq_cli.train"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).disabled = False


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints that commands are asked about."""
    from tests.helpers.asked import write_models

    return write_models(tmp_path_factory.mktemp("models"))


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(allowed.search(reason) for allowed in ALLOWED_SKIPS):
        _unexpected_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unexpected_skips and os.environ.get("CI") and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _unexpected_skips and os.environ.get("CI"):
        terminalreporter.section("skipped without a reason on the list in tests/conftest.py: the run fails")
        for line in _unexpected_skips:
            terminalreporter.write_line(line)
