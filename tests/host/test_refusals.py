"""A training that is refused leaves no folder, and nothing on the screen but its sentence."""

import logging
from pathlib import Path

import pytest
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from fairseq_ms.errors import UsageError

CFG = OmegaConf.create(
    {
        "checkpoint": {"write_checkpoints_asynchronously": False},
        "common": {"bf16": False, "tpu": False},
        "distributed_training": {"ddp_backend": "pytorch_ddp", "distributed_init_method": None},
    }
)
CFG.distributed_training.update({"distributed_world_size": 1, "distributed_no_spawn": False, "tpu": False})
CFG.distributed_training.update({"pipeline_model_parallel": False, "distributed_port": 0})


def trained(folder: Path, error: Exception | None) -> None:
    """What ``fairseq_cli.train.main`` does until its model is built."""
    logger = logging.getLogger("fairseq_cli.train")

    def main(cfg: object) -> None:
        logger.info("begin")
        checkpoint_utils.verify_checkpoint_directory(str(folder))
        logger.info("configuration")
        logging.getLogger("fairseq.tasks").info("dictionary")
        if error is not None:
            raise error
        logger.info("model")

    distributed_utils.call_main(CFG, main)


@pytest.mark.parametrize("there", [False, True])
def test_looking_whether_a_folder_can_be_written_leaves_it_as_it_was(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    if there:
        folder.mkdir(parents=True)
    checkpoint_utils.verify_checkpoint_directory(str(folder))
    assert folder.exists() == there
    assert (tmp_path / "runs").exists() == there
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--save-dir must be a folder in which files can be made"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "file" / "mine"))


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (None, ["begin", "configuration", "dictionary", "model"]),
        (ValueError("a bug"), ["begin", "configuration", "dictionary"]),
        (UsageError("--x must be 1: got 2"), ["begin"]),
    ],
)
def test_a_refused_training_prints_no_configuration(error, shown, tmp_path: Path, caplog) -> None:
    handlers = logging.getLogger().handlers[:]
    with caplog.at_level(logging.INFO):
        if error is None:
            trained(tmp_path, None)
        else:
            with pytest.raises(type(error)):
                trained(tmp_path, error)
    assert caplog.messages == shown
    assert logging.getLogger().handlers == handlers
