"""The thread that reads batches ahead, and the end of its process."""

import pytest

from tests.helpers.cli import run_cli

READ_AHEAD = """
import sys
import torch
import fairseq_ms
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 1000
    def __iter__(self):
        for _ in range(1000):
            {work}
            yield 0

batches = BufferedIterator({size}, Batches())
next(batches)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("work", "size"),
    [
        # Nearly all of its time, the thread is in an operation of torch.
        pytest.param("torch.rand(3_000_000).sort()", 500, id="at work"),
        pytest.param("pass", 2, id="in front of a full queue"),
    ],
)
def test_a_process_ends_with_its_own_exit_code_while_batches_are_read_ahead(work: str, size: int) -> None:
    done = run_cli("python", "-c", READ_AHEAD.format(work=work, size=size), check=False)
    assert (done.returncode, done.stderr) == (3, "")
