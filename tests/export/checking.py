"""What transformers makes of the exported folders: python checking.py FOLDER NAME..., where no fairseq is.

It prints a line of JSON for each, whose every value is a number that is to be small or a statement that is to be true.
"""

import importlib.abc
import json
import logging
import pickle
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NoFairseq(importlib.abc.MetaPathFinder):
    """There is no fairseq, none of what it brings, and no plugin."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_ms", "fairseq_ms_pipeline", "omegaconf", "hydra"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoFairseq())
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

# The environment's does not load beside its torch, and peft has transformers look for it.
sys.modules["torchaudio"] = None  # type: ignore[assignment]
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Trainer, set_seed, trainer_utils  # noqa: E402

# Of fairseq's dictionaries; no text ends with it.
END_OF_LINE = 2


def refuse(*args, **settings):
    raise AssertionError("something is unpickled")


def main(folder: Path, names: list) -> None:
    torch.set_num_threads(1)
    torch.load = pickle.load = pickle.loads = refuse
    for name in names:
        torch.manual_seed(0)
        is_model = (folder / name / "reference.json").is_file()
        results = found(folder / name, folder / name / name) if is_model else text_and_back(folder / name)
        print(json.dumps({"name": name, **results}))


def text_and_back(folder: Path) -> dict:
    """A tokenizer without a model."""
    expected = json.loads((folder / "expected.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    # transformers caches code by the folder's own name, and Python takes a file of one size and second for unchanged.
    saved = folder / f"saved_{folder.name}"
    tokenizer.save_pretrained(saved)
    again = AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
    ids = tokenizer(expected["text"]).input_ids
    added = folder / f"added_{folder.name}"
    return {
        "it begins": ids[0] == tokenizer.bos_token_id,
        "symbols are the pipeline's": ids[1:] == expected["ids"],
        "text comes back": " ".join(tokenizer.decode(ids[1:]).split()) == " ".join(expected["plain"].split()),
        "nothing is lost": folder.name != "hf_byte_bpe" or tokenizer.decode(ids[1:]) == expected["text"],
        "lines stay apart": tokenizer.decode([1, *ids], skip_special_tokens=True) == tokenizer.decode(ids[1:]),
        "a copy is the same": again(expected["text"]).input_ids == ids,
        **{f"{what} with a token more": holds for what, holds in with_a_token_more(tokenizer, added).items()},
    }


def with_a_token_more(tokenizer, folder: Path) -> dict:
    """A token that is added is found in a text, in a copy of the tokenizer, too; what is special is not."""
    count, plain = len(tokenizer), [tokenizer(part).input_ids[1:] for part in ("word <s>", "word")]
    tokenizer.add_tokens(["<new>", "<new>er"])
    tokenizer.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found = [one("word <s><new>word<new>er").input_ids[1:] for one in (tokenizer, again)]
    expected = [*plain[0], count, *plain[1], count + 1]
    return {
        "there are two": len(again) == count + 2,
        "they are found": found[0] == expected,
        "a copy finds them": found[1] == expected,
        "their text comes back": [again.decode(ids).count("<new>") for ids in found] == [2, 2],
    }


@torch.no_grad()
def found(folder: Path, exported: Path) -> dict:
    model, loading = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    reference = json.loads((folder / "reference.json").read_text())
    tokens, expected = torch.tensor(reference["tokens"]), torch.tensor(reference["log_probs"])
    log_probs = model(tokens).logits.log_softmax(-1)
    kept = torch.tensor([0, 3])
    results = {
        "nothing is missing": not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")),
        "logits": float((log_probs - expected).abs().max() / expected.abs().max()),
        "positions that are asked for": model(tokens, logits_to_keep=kept).logits.equal(model(tokens).logits[:, kept]),
        "padded logits": padded_difference(model, tokens, log_probs),
        "padded loss": loss_difference(exported, tokens),
        "cached logits": cached_difference(model, tokens, log_probs),
        "logits of turns": turns_difference(model, tokens, log_probs),
        **second_turn(model, tokens),
        **positions(model, tokens),
        **resized(exported, tokens),
        **checkpointed(exported, tokens),
        "caches of others are refused": refused(model, tokens, past_key_values=DynamicCache()),
        "generation refuses caches of others": refused(
            model.generate, tokens, past_key_values=DynamicCache(), max_new_tokens=2
        ),
        **(adapted(exported, tokens) if find_spec("peft") else {}),
        **(offloaded(exported, tokens, model) if find_spec("accelerate") else {}),
    }
    prompts, package = reference["prompts"], type(model).__module__.rpartition(".")[0]
    replay: Any = sys.modules[f"{package}.core_steps_replay"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    columns = batch.input_ids.size(1)
    same, ends_at_lines = [], {"eos_token_id": END_OF_LINE, "min_length": 2}
    for prompt, expected_tokens in zip(prompts, reference["continued"]):
        alone = tokenizer([prompt], return_tensors="pt")
        most = len(expected_tokens)
        one = model.generate(**alone, do_sample=False, max_length=most + 1, **ends_at_lines)[0, 1:].tolist()
        # At the greatest length fairseq ends every sequence.
        same.append(one[: most - 1] == expected_tokens[:-1])
    results["greedy is fairseq's"] = all(same)
    settings = {"max_new_tokens": 12}
    greedy = model.generate(**batch, do_sample=False, **settings)[:, columns:]
    singles = [model.generate(**tokenizer([p], return_tensors="pt"), do_sample=False, **settings)[0] for p in prompts]
    ends = [single[tokenizer([p], return_tensors="pt").input_ids.size(1) :] for p, single in zip(prompts, singles)]
    results["a row of a batch is what it is alone"] = all(
        row[: end.numel()].equal(end) and bool((row[end.numel() :] == model.config.pad_token_id).all())
        for row, end in zip(greedy, ends)
    )
    for kind, more in {"greedy": {}, "beam": {"num_beams": 3}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        texts = []
        for through in ("steps", "cache", None):
            # The steps are those that a GPU captures; here they run one by one.
            replay.takes_graphs = lambda model, graphs, steps=through == "steps": steps and replay.has_steps(model)
            set_seed(5)
            texts.append(model.generate(**batch, **{"do_sample": False, **more, **settings}, use_cache=bool(through)))
        results[f"{kind} is the same by steps, with a cache and without"] = all(map(texts[0].equal, texts))
    results["steps are the model's again"] = (model.decoder.steps is not None) == replay.has_steps(model.decoder)
    replay.takes_graphs = lambda model, graphs: replay.has_steps(model)
    results["logits of turns by steps"] = turns_difference(model, tokens, log_probs)
    for wanted in ("output_hidden_states", "output_attentions"):
        results[f"generation refuses {wanted}"] = False
        try:
            model.generate(tokens, return_dict_in_generate=True, **{wanted: True}, **settings)
        except ValueError as error:
            results[f"generation refuses {wanted}"] = wanted in str(error)
    set_seed(1)
    alone = tokenizer(prompts[:1], return_tensors="pt")
    room = 300 if model.config.max_position_embeddings is None else model.config.max_position_embeddings - columns
    line = model.generate(**alone, do_sample=True, temperature=5.0, top_k=0, max_new_tokens=room)
    on = line[0, alone.input_ids.size(1) :].tolist()
    results["it goes on over ends of lines"] = len(on) == room and (room < 300 or END_OF_LINE in on)
    ten = model.generate(**tokenizer(["w1 w2 w3"] * 10, return_tensors="pt"), do_sample=False, **settings)
    results["ten equal prompts are continued equally"] = bool((ten == ten[0]).all())
    results["it is drawn as fairseq-ms sample draws"] = drawn_as(model.generation_config)
    results["texts end as before after a training"] = ends_alike_after_training(model, tokenizer, folder)
    return results


def drawn_as(generation) -> bool:
    return (generation.do_sample, generation.temperature, generation.top_k) == (True, 0.8, 40)


def ends_alike_after_training(model, tokenizer, folder: Path) -> bool:
    """Trainer changes nothing about what ends a text, which no text has, and neither does saving."""
    before = [model.config.eos_token_id, model.generation_config.eos_token_id]
    if hasattr(trainer_utils, "align_special_tokens"):
        trainer_utils.align_special_tokens(model, tokenizer)
    else:
        Trainer._align_special_tokens(SimpleNamespace(model=model, processing_class=tokenizer))
    model.save_pretrained(folder / "trained")
    again = AutoModelForCausalLM.from_pretrained(folder / "trained", trust_remote_code=True)
    ends = [getattr(part, kind).eos_token_id for part in (model, again) for kind in ("config", "generation_config")]
    return all(end in (0, [0]) for end in [*before, *ends, tokenizer.eos_token_id])


@torch.enable_grad()
def adapted(exported: Path, tokens) -> dict:
    """Adapters of peft's in all linear layers, of which every one counts and is trained."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.Adam(adapters.values(), 0.01), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # What compresses memories is trained on a loss of its own.
    idle = [name for name, p in adapters.items() if ".compress." not in name and (p.grad is None or not p.grad.any())]
    with torch.no_grad():
        log_probs = model(input_ids=tokens).logits.log_softmax(-1)
        return {
            "adapted cached logits": cached_difference(model, tokens, log_probs) / float(log_probs.abs().max()),
            "adapters are in every layer": len(adapters) >= 4 and not idle,
            "adapters are trained": losses[-1] < losses[0] - 0.05,
        }


def offloaded(exported: Path, tokens, model) -> dict:
    """Weights that accelerate brings to each module only while it runs."""
    from accelerate import cpu_offload

    away = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    away = cpu_offload(away, execution_device=torch.device("cpu"))
    settings = {"do_sample": False, "max_new_tokens": 8}
    if model.config.model.get("sinks"):
        return {"sinks that are away are refused": refused(away, tokens) and refused(away.generate, tokens, **settings)}
    return {
        "weights are away": all(weight.is_meta for weight in away.parameters()),
        "logits of weights that are away": float((away(tokens).logits - model(tokens).logits).abs().max()) < 1e-5,
        "texts of weights that are away": away.generate(tokens, **settings).equal(model.generate(tokens, **settings)),
    }


def padded_difference(model, tokens, log_probs) -> float:
    """Rows with padding before, after, and on both sides."""
    rows, length = tokens.shape
    padded = torch.full((rows, length + 4), model.config.pad_token_id)
    mask = torch.zeros_like(padded)
    for row, start in enumerate((0, 2, 4)):
        padded[row, start : start + length] = tokens[row]
        mask[row, start : start + length] = 1
    found = model(padded, attention_mask=mask).logits.log_softmax(-1)
    own = torch.stack([found[row, start : start + length] for row, start in enumerate((0, 2, 4))])
    return float((own - log_probs).abs().max())


def loss_difference(exported: Path, tokens) -> float:
    """Of the loss of a padded batch to that of its rows alone, in float64 up to the loss of transformers."""
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float64)
    lengths = [9, 2, 5]
    alone = [float(model(row[None, :n], labels=row[None, :n]).loss) for row, n in zip(tokens, lengths)]
    expected = sum(loss * (n - 1) for loss, n in zip(alone, lengths)) / sum(n - 1 for n in lengths)
    differences = []
    for left in (True, False):
        padded, mask = torch.full((3, 9), model.config.pad_token_id), torch.zeros(3, 9, dtype=torch.long)
        for row, length in enumerate(lengths):
            own = slice(9 - length, 9) if left else slice(length)
            padded[row, own], mask[row, own] = tokens[row, :length], 1
        loss = model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss
        differences.append(abs(float(loss) - expected))
    # After a cache, the first of the columns has nothing before it.
    cache = model(padded[:1, :4], use_cache=True).past_key_values
    given = {"attention_mask": mask[:1], "past_key_values": cache, "use_cache": True}
    after = model(padded[:1, 4:], labels=padded[:1, 4:], **given)
    own = after.logits[0, :-1].log_softmax(-1).gather(1, padded[0, 5:, None]).mean()
    return max(*differences, abs(float(after.loss + own)))


def cached_difference(model, tokens, log_probs) -> float:
    """A prompt of nine tokens, two at once after it, and the others one by one."""
    parts, cache = [], None
    for piece in tokens.split([9, 2, *[1] * (tokens.size(1) - 11)], dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return float((torch.cat(parts, dim=1).log_softmax(-1) - log_probs).abs().max())


def turns_difference(model, tokens, log_probs) -> float:
    """Rows whose turns have different numbers of tokens, or none, with padding before them or after."""
    found, cache, mask, done = [], None, torch.zeros(3, 0, dtype=torch.long), [0, 0, 0]
    for number, counts in enumerate([(4, 4, 0), (2, 7, 3), (0, 3, 5), (4, 4, 4), (1, 1, 1), (0, 1, 3)]):
        piece, own = torch.full((2, 3, max(counts)), model.config.pad_token_id)
        own.zero_()
        starts = [(number + row) % 2 * (max(counts) - count) for row, count in enumerate(counts)]
        for row, (start, count) in enumerate(zip(starts, counts)):
            piece[row, start : start + count] = tokens[row, done[row] : done[row] + count]
            own[row, start : start + count] = 1
        mask = torch.cat([mask, own], dim=1)
        out = model(piece, attention_mask=mask, past_key_values=cache, use_cache=True)
        expected = torch.cat([log_probs[row, done[row] : done[row] + count] for row, count in enumerate(counts)])
        found.append(float((out.logits.log_softmax(-1)[own.bool()] - expected).abs().max()))
        done, cache = [before + count for before, count in zip(done, counts)], out.past_key_values
        if number == 2:
            order = [1, 2, 1]
            cache.reorder_cache(torch.tensor(order))
            tokens, log_probs, mask, done = tokens[order], log_probs[order], mask[order], [done[row] for row in order]
    return max(found)


def resized(exported: Path, tokens) -> dict:
    """Symbols are added where they are neither in bands nor in chunks, and the others predict as before."""
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    before, count = model(tokens).logits, model.config.vocab_size
    if "adaptive" in str(model.decoder) or not hasattr(model.decoder, "embed"):
        return {
            "bands and chunks keep their symbols": refused(model.resize_token_embeddings, count + 5)
            and model.config.vocab_size == count
            and model(tokens).logits.equal(before)
        }
    model.resize_token_embeddings(count)
    same = model(tokens).logits
    model.resize_token_embeddings(count + 5)
    after = model(tokens).logits
    with torch.enable_grad():
        new = torch.cat([tokens[:, :5], torch.full((len(tokens), 3), count + 2)], dim=1)
        model(new, labels=new).loss.backward()
    gradient = model.get_input_embeddings().weight.grad[count + 2]
    model.save_pretrained(exported.parent / "resized")
    again = AutoModelForCausalLM.from_pretrained(exported.parent / "resized", trust_remote_code=True)
    padding = model.get_input_embeddings().padding_idx
    model.resize_token_embeddings(count)
    return {
        "no symbol is added to as many": same.equal(before),
        "symbols that are added leave others as they were": after.size(-1) == count + 5
        and torch.allclose(after[..., :count], before, atol=1e-6),
        "symbols that are added are read and trained": bool(gradient.any()),
        "symbols that are added are saved": again(tokens).logits.equal(after),
        "symbols that are added can be drawn with a cache": again.generate(
            new, do_sample=False, max_new_tokens=3
        ).equal(again.generate(new, do_sample=False, max_new_tokens=3, use_cache=False)),
        "padding stays": padding == 1,
        "symbols that are taken away leave others as they were": torch.allclose(
            model(tokens).logits, before, atol=1e-6
        ),
    }


def nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for the order of float32 sums."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@torch.enable_grad()
def checkpointed(exported: Path, tokens) -> dict:
    """Gradient checkpointing keeps less and changes nothing."""
    kept: list[int] = []
    gradients = []

    def count(x: torch.Tensor) -> torch.Tensor:
        kept[-1] += x.numel()
        return x

    for enabled in (False, True):
        model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
        if enabled and "TransformerLayer" not in str(model) and "Layer" not in str(model):
            return {"there are layers to make again": refused(model.gradient_checkpointing_enable)}
        if enabled:
            model.gradient_checkpointing_enable()
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model(tokens, labels=tokens).loss.backward()
        found = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients.append(found)
    model.gradient_checkpointing_disable()
    return {
        "checkpointing keeps less": kept[1] < kept[0],
        "checkpointing changes no gradient": all(map(nearly, *gradients)),
        "checkpointing is told": not model.is_gradient_checkpointing,
    }


def positions(model, tokens) -> dict:
    """Positions are those of the mask; packed documents would see each other."""
    rows, length = tokens.shape
    mask = torch.ones(rows, length + 2, dtype=torch.long)
    padded = torch.cat([torch.full((rows, 2), model.config.pad_token_id), tokens], dim=1)
    mask[:, :2] = 0
    own = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    plain = torch.arange(length)
    whole = model(padded, attention_mask=mask, position_ids=own).logits
    cache = model(padded[:, :9], attention_mask=mask[:, :9], position_ids=own[:, :9], use_cache=True).past_key_values
    given = {"past_key_values": cache, "attention_mask": mask, "use_cache": True}
    packed = torch.cat([plain[:9], plain[: length - 9]])
    settings = {"do_sample": False, "max_new_tokens": 2}
    return {
        "positions of the mask are taken": whole.equal(model(padded, attention_mask=mask).logits)
        and model(tokens, position_ids=plain.expand(rows, -1)).logits.equal(model(tokens).logits),
        "packed documents are refused": refused(model, tokens, position_ids=packed.unsqueeze(0)),
        "positions that begin anew after a cache are refused": refused(
            model, padded[:, 9:], position_ids=plain[: length - 7].unsqueeze(0), **given
        ),
        "positions after a cache are taken": bool(model(padded[:, 9:], position_ids=own[:, 9:], **given)),
        "generation refuses others": refused(
            model.generate, padded, attention_mask=mask, position_ids=plain.new_zeros(rows, length + 2), **settings
        ),
        "generation takes those of the mask": model.generate(
            padded, attention_mask=mask, position_ids=own, **settings
        ).equal(model.generate(padded, attention_mask=mask, **settings)),
    }


def refused(call, *given, **more) -> bool:
    try:
        call(*given, **more)
    except ValueError:
        return True
    return False


def second_turn(model, tokens) -> dict:
    """``generate`` after a turn that a cache has read, and masks that cannot be."""
    lengths, pad = [(9, 2), (4, 5)], model.config.pad_token_id
    columns, mask = torch.full((2, 14), pad), torch.zeros(2, 14, dtype=torch.long)
    for row, (first, second) in enumerate(lengths):
        columns[row, 9 - first : 9], columns[row, 14 - second :] = tokens[row, : first + second].split([first, second])
        mask[row, 9 - first : 9] = mask[row, 14 - second :] = 1
    settings = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}

    def continued(row_mask):
        cache = model(columns[:, :9], attention_mask=mask[:, :9], use_cache=True).past_key_values
        return model.generate(columns, attention_mask=row_mask, past_key_values=cache, **settings)[:, 14:]

    alone = [
        model.generate(tokens[row : row + 1, : sum(own)], **settings)[0, sum(own) :] for row, own in enumerate(lengths)
    ]
    hidden, turned = mask.clone(), {"attention_mask": mask[:, :9].flip(1), **settings}
    hidden[0, 8] = 0
    return {
        "a second turn is what it is alone": continued(mask).equal(torch.stack(alone)),
        "tokens that were read cannot be hidden": refused(continued, hidden),
        "a mask has the cache's columns": refused(continued, mask[:, 9:]),
        "a prompt ends in a token": refused(model.generate, columns[:, :9], **turned),
        "a prompt ends in a token without a cache": refused(model.generate, columns[:, :9], use_cache=False, **turned),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
