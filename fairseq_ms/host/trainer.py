"""fairseq's trainer, which goes on where it was interrupted, stops when it is asked to, and counts all batches.

What the ranks have been asked, and whether a checkpoint is due, travels with the statistics that they add up in every
update, so that all of them stop or save after the same one and none waits for another; nothing more is sent for it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq import trainer as fairseq_trainer
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data.fairseq_dataset import EpochListening
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters, metrics
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import distributed, isfinite, save

from fairseq_ms.core.layers import compile_layers
from fairseq_ms.errors import UsageError
from fairseq_ms.host import checkpoints, data, launch, masters, rules, saving
from fairseq_ms.lm.config import flag
from fairseq_ms.optim import of_torch
from fairseq_ms.tools import whole_files

logger = logging.getLogger(__name__)

# What checkpoints hold beside fairseq's own state. Not "training_data", where they once held other checksums.
_PATIENCE, _CHECKSUMS, _VALID_TOKENS, _BATCHES = "patience", "data_checksums", "valid_tokens", "batches"
# Settings by which a run that is started anew does not go on from what it saved.
_BEGINS_AGAIN = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")
# The method of datasets that are the same in every epoch.
_HEARS_NOTHING = EpochListening.set_epoch
# They ask for the probabilities of all symbols, which fairseq's adaptive softmax gives without a gradient.
_ALL_SYMBOLS = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)


class Trainer(fairseq_trainer.Trainer):
    """fairseq's, with the same arguments; raises UsageError for what cannot be trained.

    Attributes:
        expected: checksums of the training data that the checkpoint was trained on, by their names
        began: the ``--required-batch-size-multiple`` of an epoch within which the checkpoint was written
        own_batches: of this run's current epoch, and the processes that share them
        expected_batches: those of the epoch within which the checkpoint was written, by the epoch
        multiple: that of the current epoch, None before there is one
        finished: what there is to say if the checkpoint's run has nothing left to train
        agreed: the signal that some rank had received in the last update, on all ranks alike
        due: whether by the clock of some rank a checkpoint was due in the last update, on all ranks alike
        saved: the update after which a checkpoint was last written
        leaving: the signal by which the run ends when the statistics of the epoch are printed
        valid_tokens: a validation reads about so many tokens, evenly spread, and all of them where it is None
    """

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        if isinstance(cfg, Namespace):
            cfg = convert_namespace_to_omegaconf(cfg)
        rules.refuse_to_train(cfg)
        rules.warn_of_warmup(cfg)
        # Batches of any number of rows under hydra, too: it composes fairseq's 8 before this package is read, while
        # fairseq-ms train, which has a screen, does so after it.
        by_hydra = ("job_logging_cfg" in cfg or HydraConfig.initialized()) and "screen" not in cfg
        if by_hydra and cfg.dataset.required_batch_size_multiple == 8:
            cfg.dataset.required_batch_size_multiple = 1
        check_criterion(criterion, model, cfg)
        forget_best()
        super().__init__(cfg, task, model, criterion, quantizer)
        # An optimizer, which is made later, is given parameters without names.
        optimizer = getattr(cfg.optimizer, "_name", None)
        if optimizer in ("adamw", "muon"):
            of_torch.note_undecayed(cfg, self.get_model())
        if optimizer == "muon":
            of_torch.prepare_muon(cfg, self.get_model())
        if getattr(cfg.model, "compile", False):
            try:
                compile_layers(self.get_model())
            except ValueError as error:
                raise UsageError(f"--{error}") from error
        self.expected: dict[str, int] = {}
        self.began: dict[int, int] = {}
        self.own_batches: tuple[int, int] | None = None
        self.expected_batches: dict[int, tuple[int, int]] = {}
        self.multiple: int | None = None
        self.finished: str | None = None
        self.agreed: int | None = None
        self.due = False
        self.saved: int | None = None
        self.saved_at = time.monotonic()
        self.leaving: int | None = None
        self.valid_tokens: int | None = OmegaConf.select(self.cfg, _VALID_TOKENS)
        self._updating = False
        # Processes that read data start later: they inherit that a signal is noted, and die of SIGTERM by torch.
        launch.held_log.show()
        launch.signals.listen()

    def load_checkpoint(
        self,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: Any = None,
        reset_meters: bool = False,
    ) -> Any:
        """As fairseq's, from the newest intact checkpoint, with masters, what was best so far and the meters.

        It comes before the training data are opened, and remembers what they have to be.
        """
        if self.cfg.checkpoint.restore_file != "checkpoint_last.pt" and not PathManager.isfile(filename):
            raise UsageError(f"--restore-file must be a checkpoint: {os.path.abspath(filename)} does not exist")
        intact = checkpoints.newest_intact(self, filename)
        averaged = self.cfg.ema.store_ema
        try:
            # fairseq would look for a checkpoint's weights, where it has no average of them, after it has dropped them.
            self.cfg.ema.store_ema = False
            resets = reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
            state = super().load_checkpoint(intact, *resets)
        except Exception as error:
            if (wrong := _misfit(self.cfg.checkpoint, filename, error)) is None:
                raise
            raise UsageError(wrong) from error
        finally:
            self.cfg.ema.store_ema = averaged
        self.expected, self.began, self.expected_batches, self.finished = {}, {}, {}, None
        if state is None:
            return None
        if averaged:
            self.ema.restore(state["ema"] if "ema" in state else self.get_model().state_dict())
            if self.cfg.ema.ema_fp32:
                self.ema.build_fp32_params(state.get("ema_fp32_params"))
        if wrong := data.other_dictionary(self.task, state.get(checkpoints.DICTIONARY)):
            chosen = _flag_of(self.cfg.checkpoint, filename)
            raise UsageError(
                f"{chosen} must hold a model of the same dictionary: got {filename} ({wrong}; {data.NEW_RUN})"
            )
        goes_on = not self.cfg.checkpoint.reset_dataloader and filename != self.cfg.checkpoint.finetune_from_model
        settings = state.pop(checkpoints.MODEL, None)
        if settings and not reset_optimizer and rules.is_ours(self.get_model()):
            self._refuse_changed(settings, goes_on, filename)
        if (others := state.pop(checkpoints.OTHERS, None)) and goes_on and not reset_optimizer:
            raise UsageError(
                f"{_flag_of(self.cfg.checkpoint, filename)} must hold a training without flags that are gone: got "
                f"{filename} ({others}; {data.NEW_RUN}, and --finetune-from-model one from these weights)"
            )
        # fairseq keeps the state for as long as it trains.
        kept = {name: state.pop(name) for name in (masters.MASTERS, masters.SCALER) if name in state}
        lost = None if reset_optimizer else masters.load_state_dict(self.optimizer, kept)
        stays = [] if reset_optimizer else of_torch.not_followed(self.cfg.optimizer, self.optimizer)
        for sentence in ([lost] if lost else []) + [f"{stay} (--optimizer-overrides changes it)" for stay in stays]:
            if self.data_parallel_rank == 0:
                logger.warning(f"{intact}: {sentence}")
        if not reset_meters and "metrics" in state:
            _restore_meters(state)
        if not (reset_meters or reset_optimizer) and _PATIENCE in state and (counts := _counts_patience()) is not None:
            counts.best, counts.num_runs = state[_PATIENCE]
        self.finished = saving.finished(self, intact, state if goes_on else {}, _counts_patience())
        # A model that is fine-tuned begins with an epoch of its own.
        if goes_on:
            self.expected = dict(state.get(_CHECKSUMS, {}))
            # What was best was so on the part that it was compared on.
            self.valid_tokens = state.get(_VALID_TOKENS)
            place = state["train_iterator"]
            if place.get("iterations_in_epoch", 0) > 0:
                if checkpoints.MULTIPLE in state:
                    self.began = {place["epoch"]: state[checkpoints.MULTIPLE]}
                if _BATCHES in state:
                    self.expected_batches = {place["epoch"]: state[_BATCHES]}
        return state

    def _refuse_changed(self, settings: dict[str, Any], goes_on: bool, filename: str) -> None:
        """Raise UsageError where the checkpoint's weights are of other settings, which their shapes need not show."""
        # The class of the flags: what it builds for the first phase of haed and hred is another's.
        if wrong := ARCH_MODEL_REGISTRY[self.cfg.model._name].changed(settings, self.cfg.model, goes_on):
            raise UsageError(
                f"{_flag_of(self.cfg.checkpoint, filename)} must hold a model of the same settings: got {filename} "
                f"(its {wrong}; {data.NEW_RUN}, and --finetune-from-model one from these weights)"
            )

    def get_train_iterator(
        self,
        epoch: int,
        combine: bool = True,
        load_dataset: bool = True,
        data_selector: Any = None,
        shard_batch_itr: bool = True,
        disable_iterator_cache: bool = False,
    ) -> EpochBatchIterator:
        """As fairseq's, whose batches are those of the uninterrupted run.

        Raises UsageError if the data are others, and launch.Finished if there is nothing left to train.

        fairseq draws the order of samples when it makes an iterator, from the seed and the epoch of that moment. A run
        resumed in a later epoch therefore makes an iterator in epoch 1 first, as the uninterrupted run did; the task
        decides whether it keeps it. Data loaded for every epoch (``DATA1:DATA2``) are ordered by epoch anyway.

        An epoch within which the checkpoint was written keeps its ``--required-batch-size-multiple``, or some of its
        rows would come twice; later epochs have this run's.
        """
        if self.leaving is not None:
            self.leave(self.leaving)
        flags = self.cfg.dataset
        own = flags.required_batch_size_multiple
        multiple = self.began.get(epoch, own)
        load_dataset |= self.multiple not in (None, multiple)
        repeat = load_dataset and epoch > 1 and not disable_iterator_cache
        more = data_selector, shard_batch_itr, disable_iterator_cache
        self.multiple = flags.required_batch_size_multiple = multiple
        try:
            if repeat:
                super().get_train_iterator(1, combine, True, *more)
            load_dataset &= not repeat
            iterator = super().get_train_iterator(epoch, combine, load_dataset, *more)
        finally:
            flags.required_batch_size_multiple = own
        if self.finished is not None:
            # Of sharded data, all that was trained on; others are compared when they are opened.
            for shard in {int(name.partition("/")[0]) for name in self.expected}:
                self.task.load_dataset(self.cfg.dataset.train_subset, epoch=shard + 1, combine=combine)
        data.refuse_changed(self.cfg, self.expected)
        if self.finished is not None:
            raise launch.Finished(self.finished)
        # fairseq keeps a data loader from its first epoch on, with that epoch's --curriculum, and with workers whose
        # copies of the dataset stay in that epoch; what is made when a checkpoint is read does not know all flags.
        iterator.ordered_batches = functools.partial(_ordered_batches, iterator, self.cfg)
        if iterator.num_workers > 0 and getattr(type(iterator.dataset), "set_epoch", None) is not _HEARS_NOTHING:
            iterator.dataloader = None
        if repeat:
            iterator.epoch = epoch
            iterator.dataset.set_epoch(epoch)
        self.own_batches = len(iterator.frozen_batches), self.data_parallel_world_size
        if (then := self.expected_batches.get(epoch, self.own_batches)) != self.own_batches:
            counts = "{} batches in {} process(es)"
            raise UsageError(
                f"--batch-size and the like must stay as they are within an epoch, or rows would be read twice: it has "
                f"{counts.format(*then)}, got {counts.format(*self.own_batches)} ({data.NEW_RUN}, and "
                "--reset-dataloader, checkpoint.reset_dataloader=true, this epoch)"
            )
        return iterator

    def get_valid_iterator(self, subset: str, disable_iterator_cache: bool = False) -> EpochBatchIterator:
        """As fairseq's, over ``valid_tokens``; streams, whose batches follow one another, are read as a whole."""
        iterator = super().get_valid_iterator(subset, disable_iterator_cache)
        if hasattr(self.task, "before_checkpoint"):
            return iterator
        # fairseq keeps the iterator.
        iterator.every_batch = getattr(iterator, "every_batch", iterator.frozen_batches)
        iterator._frozen_batches = data.spread(iterator.every_batch, iterator.dataset.num_tokens, self.valid_tokens)
        return iterator

    def train_step(self, samples: list[Any], raise_oom: bool = False) -> Any:
        """As fairseq's, which also counts the batches of an update in which this process has too few."""
        uneven = any(samples) and not all(samples)
        if uneven:
            samples = data.with_repeated(samples, self._dummy_batch)
            self.task.train_step = functools.partial(data.counting, self.task.train_step)
        self._updating = True
        try:
            return super().train_step(samples, raise_oom)
        finally:
            self._updating = False
            if uneven:
                del self.task.train_step

    def clip_grad_norm(self, clip_norm: float) -> Any:
        """As fairseq's; raises UsageError where gradients are not finite, and no smaller scale of the loss can help."""
        amp = self.cfg.common.amp
        # Without a GPU, --amp has a scaler that scales nothing, and whose scale fairseq cannot ask for.
        idle = amp and not self.optimizer.scaler.is_enabled()
        try:
            clip = self.optimizer.fp32_optimizer.clip_grad_norm if idle else super().clip_grad_norm
            norm = clip(clip_norm)
            if (amp and not idle) or isfinite(norm).all():
                return norm
        except FloatingPointError:  # the scale of the loss has been as small as it may be
            pass
        last = os.path.join(self.cfg.checkpoint.save_dir, "checkpoint_last.pt")
        kept = f"the last checkpoint is {last}" if os.path.exists(last) else "there is no checkpoint from before"
        raise UsageError(
            "--lr must be so low, or --clip-norm so small, that gradients stay finite: those of update "
            f"{self.get_num_updates() + 1}, at a learning rate of {self.get_lr()}, are not ({kept})"
        )

    def _aggregate_logging_outputs(self, logging_outputs: Any, *stats: Any, ignore: bool = False) -> Any:
        """As fairseq's, which adds up statistics over the ranks; signals and clocks of the ranks are among them."""
        own = [float(launch.signals.asked == signum) for signum in launch.SIGNALS]
        own.append(float(saving.is_due(self)))
        outputs, sums = super()._aggregate_logging_outputs(logging_outputs, *stats, *own, ignore=ignore)
        *asked, due = (ranks > 0 for ranks in sums[len(stats) :])
        self.agreed = next((signum for signum, wanted in zip(launch.SIGNALS, asked) if wanted), None)
        self.due = bool(due)
        return outputs, sums[: len(stats)]

    def consolidate_optimizer(self) -> None:
        """As fairseq's, which all ranks call before one of them writes: those of a stream send it their memories.

        A rank that fails within an update calls it alone, and would wait for the others.
        """
        if not self._updating:
            if hasattr(self.task, "before_checkpoint"):
                self.task.before_checkpoint()
            self.saved, self.saved_at = self.get_num_updates(), time.monotonic()
        super().consolidate_optimizer()

    def state_dict(self) -> dict[str, Any]:
        """As fairseq's; with the state of the optimizer go its masters."""
        state: dict[str, Any] = super().state_dict()
        if "last_optimizer_state" in state:
            state["extra_state"] |= masters.state_dict(self.optimizer)
        return state

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> str | None:
        """As fairseq's, a whole file or none, with the data's checksums and what ``--patience`` has counted.

        There is none of an update that fails (fairseq's crash.pt): nothing can go on from it, and where it cannot be
        written that would be shown instead of what has failed.
        """
        if self._updating:
            return None
        found = {name: checksum for name, _, checksum in data.training_data(self.cfg)}
        extra_state = {**extra_state, _CHECKSUMS: {**self.expected, **found}, checkpoints.MULTIPLE: self.multiple}
        extra_state |= {_VALID_TOKENS: self.valid_tokens, _BATCHES: self.own_batches}
        if (dictionary := data.dictionary_checksum(self.task)) is not None:
            extra_state[checkpoints.DICTIONARY] = dictionary
        if hasattr(counts := _counts_patience(), "best"):
            extra_state[_PATIENCE] = counts.best, counts.num_runs
        if not self.should_save_checkpoint_on_current_rank or not PathManager.supports_rename(filename):
            return super().save_checkpoint(filename, extra_state)
        path = os.path.abspath(filename)
        logger.info(f"Saving checkpoint to {path}")
        state = utils.move_to_cpu(self.state_dict())
        state["extra_state"].update(extra_state)
        whole_files.write(filename, lambda file: save(state, file))
        logger.info(f"Finished saving checkpoint to {path}")
        return path

    def leave(self, signum: int) -> None:
        """End this process, together with those of the other ranks."""
        if distributed.is_initialized():
            # A launcher ends all ranks when one has ended.
            distributed.barrier(distributed_utils.get_global_group())
        cfg, code = self.cfg.checkpoint, launch.SIGNALLED + signum
        saved = f"saved in {cfg.save_dir}; the same command goes on"
        again = [name for name in _BEGINS_AGAIN if getattr(cfg, name)]
        if cfg.restore_file != "checkpoint_last.pt":
            again.append("restore_file")
        if again:
            saved = f"saved in {cfg.save_dir}; without {' and '.join(map(flag, again))} the same command goes on"
        for name in ("no_save", "no_last_checkpoints"):
            saved = f"not saved, since {flag(name)} is given" if getattr(cfg, name) else saved
        name = signal.Signals(signum).name
        logger.info(f"stopped by {name} after update {self.get_num_updates()}, {saved} (exit code {code})")
        raise SystemExit(code)


def _flag_of(cfg: Any, filename: str) -> str:
    """The flag that chose a checkpoint."""
    if filename == cfg.finetune_from_model:
        return "--finetune-from-model"
    return "--save-dir" if cfg.restore_file == "checkpoint_last.pt" else "--restore-file"


def _misfit(cfg: Any, filename: str, error: Exception) -> str | None:
    """The sentence for a checkpoint that does not fit, with the flag that chose it; None for other errors."""
    chosen = _flag_of(cfg, filename)
    if str(error).startswith("Cannot load model parameters from checkpoint"):
        why = error.__context__ if isinstance(error.__context__, UsageError) else error
        rule = "must hold a model of the same --arch, sizes and dictionary"
        return f"{chosen} {rule}: got {filename} ({why}; {data.NEW_RUN})"
    if re.match(r"(Optimizer|Criterion) does not match|loaded state dict .* parameter group", str(error)):
        return (
            f"{chosen} must hold the state of the same --optimizer and --criterion: --reset-optimizer, "
            f"checkpoint.reset_optimizer=true, begins anew ({str(error).rstrip('.')})"
        )
    if str(error) == "'best'":  # what every schedule but the default keeps
        rule = "must hold the state of the same --lr-scheduler"
        return f"{chosen} {rule}: --reset-lr-scheduler, checkpoint.reset_lr_scheduler=true, begins a new one"
    return None


def _ordered_batches(iterator: Any, cfg: Any, epoch: int, fixed: bool, shuffle: bool) -> Any:
    """An iterator's ``ordered_batches``, by the flags of this run and the epoch itself.

    ``--grouped-shuffling`` makes groups of a batch for every process, and fairseq forgets the last batches if they are
    too few for a group.
    """
    if iterator.grouped_shuffling:
        missing = -len(iterator.frozen_batches) % iterator.num_shards
        iterator._frozen_batches = (*iterator.frozen_batches, *[[]] * missing)
    shuffle = epoch > cfg.dataset.curriculum and not iterator.disable_shuffling
    return type(iterator).ordered_batches(iterator, epoch, cfg.distributed_training.fix_batches_to_gpus, shuffle)


def _restore_meters(state: dict[str, Any]) -> None:
    """Restore a checkpoint's meters, which fairseq drops between two epochs, and begin speeds anew.

    Without them, the first loss printed would be the mean of fewer updates than ``--log-interval``.
    """
    place = state["train_iterator"]
    if place.get("version", 1) >= 2 and place["iterations_in_epoch"] == 0:
        metrics.load_state_dict(state["metrics"])
        metrics.reset_meters("train")
    for meter in (metrics.get_meters("default") or {}).values():
        if isinstance(meter, meters.TimeMeter):
            meter.reset()


def _counts_patience() -> Any:
    """fairseq's function that counts for how long nothing has been better; None outside of ``fairseq-train``.

    Run by ``python -m``, it is the program's own.
    """
    programs = (sys.modules["__main__"], sys.modules.get("fairseq_cli.train"))
    return next((found for program in programs if (found := getattr(program, "should_stop_early", None))), None)


def forget_best() -> None:
    """Have a run count for itself what is best, and for how long nothing has been better (``--patience``).

    fairseq keeps both as attributes of functions, so that hydra's ``--multirun`` compares a job with the one before it.
    """
    for function in (checkpoint_utils.save_checkpoint, _counts_patience()):
        for name in ("best", "num_runs"):
            if hasattr(function, name):
                delattr(function, name)


def check_criterion(criterion: Any, model: Any, cfg: Any) -> None:
    """Raise UsageError unless the criterion trains the model."""
    from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion

    cutoff, name = getattr(cfg.model, "adaptive_softmax_cutoff", None), getattr(cfg.criterion, "_name", None)
    if type(model).__module__.startswith("fairseq_ms."):
        if cutoff and isinstance(criterion, _ALL_SYMBOLS):
            raise UsageError(
                f"--criterion must be adaptive_loss to train with --adaptive-softmax-cutoff {cutoff}: got {name}"
            )
        if not cutoff and isinstance(criterion, AdaptiveLoss):
            raise UsageError(f"--adaptive-softmax-cutoff must be given with --criterion {name}: got none")
        never = getattr(cfg.model, "unpredicted_symbols", None)
        # Smoothing gives every symbol a share, and fairseq's criterion of it adds 0 times infinity where there is none.
        smooth = isinstance(criterion, LabelSmoothedCrossEntropyCriterion)
        if never and smooth and (criterion.eps or not isinstance(criterion, LinearCrossEntropyCriterion)):
            rule = "--criterion must be cross_entropy, or linear_cross_entropy without --label-smoothing"
            raise UsageError(f"{rule}, with --unpredicted-symbols {never}: got {name} with {criterion.eps}")
    if isinstance(criterion, LinearCrossEntropyCriterion):
        criterion.check(model)


# fairseq looks for the argument's name before it passes it.
def build_for(original: Callable[..., Any], task: Any, args: Any, from_checkpoint: bool = False) -> Any:
    """A task's ``build_model``, by which it knows whether that is to be trained.

    A checkpoint that is loaded for evaluation keeps loading whatever it was trained with.
    """
    task.from_checkpoint = from_checkpoint
    return original(task, args, from_checkpoint)
