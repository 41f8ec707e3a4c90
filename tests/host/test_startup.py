"""What is replaced in fairseq: the whole list, each of it once, and it takes all that fairseq's own takes."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import data_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import FairseqDecoder, FairseqLanguageModel, distributed_fairseq_model
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq_cli import train
from omegaconf import OmegaConf

from fairseq_ms.errors import UsageError
from fairseq_ms.host import checkpoints, startup
from fairseq_ms.lm.base import BaseLanguageModel
from tests.helpers.cli import ROOT


def replaced() -> list[tuple[Any, str, Any]]:
    """As in a process of fairseq-interactive, which imports fairseq-generate and replaces three more than others."""
    import fairseq_cli.interactive  # noqa: F401

    return startup.targets()


def test_what_is_replaced_in_fairseq_is_replaced_once_and_the_page_lists_it() -> None:
    targets = replaced()
    count = Counter(f"{owner.__name__}.{name}" for owner, name, _ in targets)
    assert set(count.values()) == {1}
    page = (ROOT / "docs" / "host.md").read_text(encoding="utf-8")
    assert not [name for _, name, _ in targets if f"{name}`" not in page]


def pairs() -> Iterator[tuple[str, Any, Any]]:
    """Of each function that is replaced: its name, fairseq's own, and what is called in its place."""
    for owner, name, around in replaced():
        original = inspect.unwrap(getattr(owner, name))
        if not isinstance(around, type):
            yield name, original, lambda *args, around=around, **settings: (around, (None, *args), settings)
            continue
        for method, own in vars(around).items():
            if inspect.isfunction(own) and hasattr(around.__base__, method):
                theirs = getattr(around.__base__, method)
                yield f"{name}.{method}", theirs, lambda *args, own=own, **settings: (own, args, settings)


def test_arguments_may_be_given_by_place_or_by_name_as_to_fairseqs_own() -> None:
    for name, original, call in pairs():
        known = [p for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        first = [object()] if known[0].name == "self" else []
        marks = {parameter.name: object() for parameter in known[len(first) :]}
        taken = []
        for args, settings in ((marks.values(), {}), ((), marks)):
            function, *given = call(*first, *args, **settings)
            signature = inspect.signature(function)
            found = signature.bind(*given[0], **given[1]).arguments
            taken.append({p: found.get(p) for p, kind in signature.parameters.items() if kind.kind not in (2, 4)})
        assert taken[0] == taken[1], name


class NoDecoder(FairseqDecoder):
    def __init__(self) -> None:
        super().__init__(SimpleNamespace(pad=lambda: 1))
        self.weight = torch.nn.Parameter(torch.zeros(1))


def whole() -> Any:
    return OmegaConf.structured(FairseqConfig())


KINDS = {
    "structured, without a task": whole,
    "the dataclass itself": FairseqConfig,
    "a namespace": lambda: SimpleNamespace(**{name: getattr(whole(), name) for name in ("common", "generation")}),
    "groups that are missing": lambda: OmegaConf.create({"generation": {"beam": 3}}),
    "an argparse namespace without the others": lambda: Namespace(generation=Namespace(beam=2)),
    "a task of another kind": lambda: OmegaConf.create({"generation": {}, "task": {"_name": "language_modeling"}}),
    "a task by its name": lambda: OmegaConf.create({"generation": {}, "task": "language_modeling"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_prepared_for_inference_by_any_configuration_that_fairseq_takes(kind: str) -> None:
    model = FairseqLanguageModel(NoDecoder())
    model.prepare_for_inference_(KINDS[kind]())
    assert not model.training
    with pytest.raises(RuntimeError, match="cannot train"):
        model.train()


def alone(**groups: Any) -> Any:
    training = whole().distributed_training
    training.distributed_world_size, training.tpu = 1, False
    return SimpleNamespace(distributed_training=training, common=whole().common, **groups)


@pytest.mark.parametrize("groups", [{}, {"task": None, "optimization": SimpleNamespace()}])
def test_a_program_of_ones_own_is_called_with_a_configuration_that_lacks_groups(groups: dict[str, Any]) -> None:
    seen = []
    distributed_utils.call_main(alone(**groups), lambda cfg, more: seen.append((cfg, more)), more=3)
    assert [more for _, more in seen] == [3]


def test_a_trainer_takes_a_namespace_as_fairseqs_own_does() -> None:
    cfg = Namespace(**{name: getattr(whole().common, name) for name in ("seed", "cpu")}, no_progress_bar=True)
    task = SimpleNamespace(target_dictionary=None)
    model = FairseqLanguageModel(NoDecoder())
    trainer = train.Trainer(cfg, FairseqTask(cfg), model, CrossEntropyCriterion(task, False))
    assert trainer.cfg.common.seed == cfg.seed


IDLE = {"retain_dropout": True, "print_alignment": "hard", "replace_unk": "@@ ", "constraints": "ordered", "beam_mt": 3}


@pytest.mark.parametrize("name", IDLE)
def test_generation_without_a_meaning_for_a_model_here_is_refused_and_fairseqs_own_models_keep_it(name: str) -> None:
    cfg = OmegaConf.create({"generation": {"retain_dropout_modules": None, name: IDLE[name]}})
    sentence = f"^--{name.replace('_', '-')} must be left out, .* a language model: got {IDLE[name]}$"
    ours = BaseLanguageModel(NoDecoder())
    for call in (ours.prepare_for_inference_, functools.partial(FairseqTask.build_generator, None, [ours])):
        with pytest.raises(UsageError, match=sentence):
            call(cfg if call == ours.prepare_for_inference_ else cfg.generation)
    theirs = FairseqLanguageModel(NoDecoder())
    theirs.prepare_for_inference_(cfg)
    ours.prepare_for_inference_(whole())


def test_batches_are_made_of_indices_from_a_generator() -> None:
    batches = data_utils.batch_by_size((index for index in range(5)), lambda index: 1, None, None, 2, 1)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert len(data_utils.batch_by_size(np.arange(5), lambda index: 1, fixed_shapes=None, max_sentences=5)) == 1


def test_a_sample_of_any_type_is_validated_and_an_empty_one_is_not() -> None:
    class Counting(FairseqTask):
        def __init__(self) -> None:
            super().__init__(None)

    model = SimpleNamespace(eval=lambda: None)
    found = Counting().valid_step(torch.ones(3), model, lambda model, sample: (sample.sum(), 3, {}))
    assert int(found[0]) == 3
    assert Counting().valid_step({}, model, None) == (0.0, 0, {})
    assert Counting().valid_step(None, model, None) == (0.0, 0, {})


def test_a_task_with_a_configuration_in_place_of_arguments_has_its_dictionary_compared() -> None:
    task = MaskedLMTask.__new__(MaskedLMTask)
    FairseqTask.__init__(task, OmegaConf.create({"data": "somewhere"}))
    task.dictionary = SimpleNamespace(symbols=["a"])
    with pytest.raises(UsageError, match=r"somewhere/dict\.txt has other symbols"):
        task.load_state_dict({checkpoints.DICTIONARY: 1})


def test_ddp_names_what_is_wrong_with_a_module_itself() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        distributed_fairseq_model.DistributedDataParallel(torch.nn.Module())
