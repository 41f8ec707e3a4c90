"""What lm-evaluation-harness makes of checkpoints: python -m tests.harness.asking FOLDER, a line of JSON for each.

A process of its own, because it needs lm_eval, which lies beside the environment.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from fairseq_ms import cli
from fairseq_ms.harness.model import FairseqMsLM
from fairseq_ms.tools.checkpoints import Checkpoint
from tests.harness.cases import CASES, QUESTIONS, REFUSED, TEXTS
from tests.helpers import trained
from tests.importing import making
from tests.importing.cases import OF_TEXTS, PROMPT

BATCHES = (1, 3)
LONG = TEXTS["train"].replace("\n", " ").strip()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    for number, (name, case) in enumerate(CASES.items()):
        data = prepared(folder, case.prepare)
        torch.manual_seed(number)
        path = trained.write_checkpoint(folder / name / "model.pt", data, *case.flags, task=case.task)
        print(json.dumps({"name": name, **asked(folder, data, path, case.window)}), flush=True)
    print(json.dumps({"name": "imported", **imported(folder)}), flush=True)
    print(json.dumps({"name": "commands", **commands(folder / "retina")}), flush=True)


def prepared(folder: Path, command: tuple[str, ...]) -> Path:
    """The data folder of a pipeline, made once."""
    out = folder / "-".join(part.strip("-") for part in command)
    if not out.exists():
        flags = ["--input", str(folder / "texts"), "--out", str(out), "--workers", "1", "--quiet"]
        assert cli.main(["prepare", *command, *flags]) == 0
    return out / "bin"


def asked(folder: Path, data: Path, path: Path, window: dict[str, int]) -> dict[str, Any]:
    """Every kind of question, asked through the harness."""
    tasks = path.parent / "tasks"
    raw, tokenised = folder / "texts" / "test.txt", data.parent / "text" / "test.txt"
    assert cli.main(["lm-eval-task", str(raw), str(tasks), "--name", "raw"]) == 0
    assert cli.main(["lm-eval-task", str(tokenised), str(tasks), "--name", "tokenised"]) == 0
    model = FairseqMsLM(str(path), device="cpu", batch_size=2)
    write_questions(tasks, model)
    flags = [part for name, value in window.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--batch-size", "2", "--json", str(path.with_suffix(".json"))]
    assert cli.main(["perplexity", str(path), "--cpu", *flags]) == 0
    found: dict[str, Any] = {"perplexity": json.loads(path.with_suffix(".json").read_text())}
    given = ",".join([f"path={path}", *(f"{name}={value}" for name, value in window.items())])
    for batch in BATCHES:
        found[f"raw {batch}"] = harness(given, "raw", tasks, batch)["bits_per_byte"]
    # What is tokenised already is not tokenised again.
    found["tokenised"] = harness(f"{given},tokenise=none", "tokenised", tasks, 2)["bits_per_byte"]
    found["chosen"] = [harness(given, "chosen", tasks, batch)["acc"] for batch in BATCHES]
    found["written"] = [harness(given, "written", tasks, batch)["exact_match"] for batch in BATCHES]
    return {**found, **log_likelihoods(path, model), **texts(model)}


@torch.no_grad()
def imported(folder: Path) -> dict[str, float]:
    """How far answers of an imported model, whose tokenizer begins a text with <s>, are from those of its source."""
    making.make(folder, "llama_text", *OF_TEXTS["llama_text"])
    assert cli.main(["import", str(folder / "llama_text"), str(folder / "imported")]) == 0
    source = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama_text", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama_text")
    pairs = [("", PROMPT), ("the cat", " sat on the mat"), ("a naïve café", " the cat"), (PROMPT, "?"), ("the", " m")]
    differences = []
    for batch in BATCHES:
        model = FairseqMsLM(str(folder / "imported" / "checkpoint.pt"), device="cpu", batch_size=batch)
        model.checkpoint.model.double()
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        for (context, text), (found, _) in zip(pairs, model.loglikelihood(asked, disable_tqdm=True), strict=True):
            read = tokenizer(context + text, return_tensors="pt").input_ids
            own = source(read).logits[0, :-1].log_softmax(-1).gather(1, read[0, 1:, None])[:, 0]
            pairwise = enumerate(zip(read[0].tolist(), tokenizer(context).input_ids))
            shared = next((at for at, (one, other) in pairwise if one != other), len(tokenizer(context).input_ids))
            differences.append(abs(found - float(own[shared - 1 :].sum())))
            if context == "":
                whole = [Instance("loglikelihood_rolling", {}, (text,), 0)] * 2
                rolling = model.loglikelihood_rolling(whole, disable_tqdm=True)
                differences += [abs(value - float(own.sum())) for value in rolling]
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    best = source.generate(ids, **settings)[0, ids.size(1) :]
    given = [Instance("generate_until", {}, (PROMPT, {"until": [], "max_gen_toks": 9}), 0)]
    (written,) = model.generate_until(given, disable_tqdm=True)
    return {"difference": max(differences), "written": written == tokenizer.decode(best)}


def commands(folder: Path) -> dict[str, Any]:
    """What the command prints: its table, and what it says of arguments that cannot work."""

    def command(arguments: str, *more: str) -> tuple[int, str, str]:
        given = ",".join(part for part in (f"path={folder / 'model.pt'}", arguments) if part)
        flags = ["--model", "fairseq_ms", "--device", "cpu", "--model_args", given]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(["lm-eval", *flags, "--include_path", str(folder / "tasks"), *more])
        return code, out.getvalue(), err.getvalue()

    window = ",".join(f"{name}={value}" for name, value in CASES["retina"].window.items())
    return {
        "table": command(window, "--batch_size", "2", "--tasks", "raw"),
        "refused": [command(arguments, "--tasks", "written", *more) for arguments, more, _ in REFUSED],
    }


def harness(given: str, task: str, tasks: Path, batch: int) -> dict[str, float]:
    """The results of a task, without the names of its filters."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(
        "fairseq_ms", given, [task], batch_size=batch, device="cpu", task_manager=manager, bootstrap_iters=0
    )
    return {name.partition(",")[0]: value for name, value in results["results"][task].items()}


def write_questions(tasks: Path, model: FairseqMsLM) -> None:
    """Tasks whose every answer is right if the harness is told what whole forward passes say."""
    chosen: list[dict[str, Any]] = []
    written: list[dict[str, Any]] = []
    for context, choices in QUESTIONS:
        scores = [score(model.checkpoint, model.tokens(context), model.tokens(context + text))[0] for text in choices]
        chosen.append({"context": context, "choices": choices, "label": scores.index(max(scores))})
        written.append({"context": context, "answer": greedy(model, context, 9)})
    shared = {"dataset_path": "json", "test_split": "test", "doc_to_text": "context"}
    kinds: dict[str, dict[str, Any]] = {
        "chosen": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "written": {
            "output_type": "generate_until",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 9},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for (name, kind), documents in zip(kinds.items(), (chosen, written), strict=True):
        file = tasks / f"{name}.json"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = {"task": name, **shared, "dataset_kwargs": {"data_files": {"test": str(file)}}, **kind}
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))


@torch.no_grad()
def score(checkpoint: Checkpoint, context: torch.Tensor, whole: torch.Tensor) -> tuple[float, bool]:
    """The log-probability of tokens after a context by one forward pass, and whether each is the most probable."""
    words, model, own = checkpoint.dictionary, checkpoint.model, whole[context.numel() :]
    first = [words.bos()] if checkpoint.adds_bos else []
    source = torch.cat([torch.tensor([*first, words.eos()]), whole])
    log_probs = model.get_normalized_probs(model(source[None]), log_probs=True)[0, len(first) + context.numel() : -1]
    return float(log_probs.gather(1, own[:, None]).double().sum()), bool((log_probs.argmax(-1) == own).all())


@torch.no_grad()
def greedy(model: FairseqMsLM, context: str, most: int) -> str:
    """What follows a context up to the end of the line, the most probable token each time, by whole forward passes.

    A text begins as where it is scored. What the model has no room for is cut off at the beginning.
    """
    words, tokens, room = model.checkpoint.dictionary, model.tokens(context), model.checkpoint.longest
    if room is not None:
        tokens = tokens[max(0, tokens.numel() - (room - most)) :]
    start = tokens.numel()
    for _ in range(most):
        first = [words.bos()] if model.checkpoint.adds_bos else []
        source = torch.cat([torch.tensor([*first, words.eos()]), tokens])
        network = model.checkpoint.model
        log_probs = network.get_normalized_probs(network(source[None]), log_probs=True)[0, -1]
        log_probs[[words.bos(), words.pad()]] = -torch.inf
        best = int(log_probs.argmax())
        if best == words.eos():
            break
        tokens = torch.cat([tokens, torch.tensor([best])])
    return model.symbols.text_of(tokens[start:].tolist())


def log_likelihoods(path: Path, model: FairseqMsLM) -> dict[str, Any]:
    """How far log-likelihoods are from those of single forward passes, and whether what is greedy is known."""
    pairs = [(context, text) for context, choices in QUESTIONS for text in choices]
    # What greedy search writes is greedy: the end of a line, where it is nothing.
    written = [(context, greedy(model, context, 5)) for context, _ in QUESTIONS]
    pairs += [(context, " " * (context != "") + text if text else "\n") for context, text in written]
    pairs += [("", QUESTIONS[0][0])]
    expected = []
    for context, text in pairs:
        whole, before = model.tokens(context + text), model.tokens(context)
        shared = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
        expected.append(score(model.checkpoint, before[:shared], whole))
    # White space is a symbol of some models.
    odd = [(context, text) for context in ("", QUESTIONS[0][0]) for text in ("", "\t", " ", "\n")]
    empty = [model.tokens(context + text).equal(model.tokens(context)) for context, text in odd]
    found: dict[str, Any] = {
        "nothing is refused": [bool(refusal(model, "loglikelihood", pair)) for pair in odd] == empty and any(empty)
    }
    for batch in BATCHES:
        alike = FairseqMsLM(str(path), device="cpu", batch_size=batch)
        given = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        answers = alike.loglikelihood(given, disable_tqdm=True)
        found[f"difference {batch}"] = max(abs(a[0] - b[0]) for a, b in zip(answers, expected, strict=True))
        found[f"greedy {batch}"] = [a[1] for a in answers] == [b[1] for b in expected]
    for weight in alike.checkpoint.model.parameters():
        torch.nn.init.constant_(weight, float("nan"))
    asked = (("loglikelihood", pairs[0]), ("loglikelihood_rolling", (LONG,)))
    found["finite weights"] = [refusal(alike, *one).startswith("logits must be finite") for one in asked]
    return {**found, "some are greedy": sorted({b[1] for b in expected}) == [False, True]}


def refusal(model: FairseqMsLM, kind: str, arguments: tuple[str, ...]) -> str:
    """What a model says of a request that it refuses."""
    try:
        getattr(model, kind)([Instance(kind, {}, arguments, 0)], disable_tqdm=True)
    except ValueError as error:
        return str(error)
    return ""


def texts(model: FairseqMsLM) -> dict[str, Any]:
    """What is written, by settings."""

    def written(context: str, **settings: Any) -> str:
        torch.manual_seed(3)
        return model.generate_until([Instance("generate_until", {}, (context, settings), 0)], disable_tqdm=True)[0]

    context = QUESTIONS[0][0]
    whole = written(context, until=[], max_gen_toks=12)
    stop = next((symbol for symbol in whole.split() if symbol.strip()), whole[:1])
    return {
        "a stop string is cut off": written(context, until=[stop], max_gen_toks=12) == whole.partition(stop)[0],
        "one string may stop": written(context, until=stop, max_gen_toks=12) == whole.partition(stop)[0],
        "samples differ from greedy": written(context, until=[], max_gen_toks=12, temperature=2.0) != whole,
        "a nucleus of one is greedy": written(context, until=[], max_gen_toks=12, do_sample=True, top_p=1e-9) == whole,
        "the best alone is greedy": written(context, until=[], max_gen_toks=12, do_sample=True, top_k=1) == whole,
        "long contexts are cut": written(LONG, until=["\n"], max_gen_toks=9) == greedy(model, LONG, 9),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
