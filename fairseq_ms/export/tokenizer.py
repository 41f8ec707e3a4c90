"""The files of an exported model's tokenizer, which repeats the pipeline of its data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_ms.errors import UsageError
from fairseq_ms.export import sources
from fairseq_ms.tools import report
from fairseq_ms.tools.tokenizing import LEVELS, FastSymbols, Pipeline, Symbols, classes_of, lines_of

# Levels whose codes an exported folder has as codes.bpe.
OWN_CODES = ("bpe", "hf_tokenizer")
# What reading an exported folder raises where it is not as it was written.
WRONG = (OSError, ValueError, TypeError, LookupError, RuntimeError)


def of_folder(folder: Path, config: Mapping[str, Any]) -> tuple[Pipeline, Symbols | FastSymbols]:
    """The pipeline of an exported folder, by its ``config.json``; none of the folder's code runs.

    Raises UsageError where a file is not as ``write`` makes it, or has more symbols than the model.
    """
    try:
        settings = config["pipeline"]
        pipeline = Pipeline(**settings, codes=folder / "codes.bpe" if settings["level"] in OWN_CODES else None)
        if pipeline.level not in LEVELS or not all(isinstance(setting, str) for setting in settings.values()):
            raise ValueError(f"pipeline must say by names how text becomes symbols: got {settings}")
        if pipeline.level == "hf_byte_bpe":
            found: Symbols | FastSymbols = FastSymbols(folder / "tokenizer.json")
        else:
            symbols = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
            if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
                raise ValueError("vocab.json must be a list of symbols")
            found = Symbols(lines_of(pipeline), symbols)
        if len(found.symbols) > config["vocab_size"]:
            raise ValueError(f"it has {len(found.symbols)} symbols for the {config['vocab_size']} of its model")
    except UsageError:
        raise
    except WRONG as error:
        raise unlike_written(folder, error) from error
    return pipeline, found


def unlike_written(folder: Path, error: Exception) -> UsageError:
    """The sentence for an exported folder in which something is wrong."""
    reason = " ".join(str(error).split())
    return UsageError(f"CHECKPOINT must be as fairseq-ms export writes a folder: {folder} is not ({reason})")


def write(folder: Path, pipeline: Pipeline, symbols: Sequence[str], positions: int | None) -> None:
    """Write the tokenizer's files; a text begins and ends with the symbol `<s>`, which stands in none."""
    settings: dict[str, object] = {
        "bos_token": "<s>",
        "eos_token": "<s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    if positions is not None:
        settings["model_max_length"] = positions
    write_files = _write_fast if pipeline.level == "hf_byte_bpe" else _write_lines
    settings |= write_files(folder, pipeline, symbols)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_fast(folder: Path, pipeline: Pipeline, symbols: Sequence[str]) -> dict[str, object]:
    """Write ``tokenizer.json``, which needs no Python of ours; a newline is the end of a line."""
    report.require_package("tokenizers", "fairseq-ms export", "tokenizers")
    from fairseq_ms_pipeline import byte_bpe

    assert pipeline.codes is not None
    try:
        tokenizer = byte_bpe.for_transformers(pipeline.codes.parent, symbols)
    except (LookupError, ValueError) as error:
        raise UsageError(f"--bpe-codes must be those of the data: {pipeline.codes} is not ({error})") from error
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # What looks like a special symbol in a text is text, as in the data.
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _write_lines(folder: Path, pipeline: Pipeline, symbols: Sequence[str]) -> dict[str, object]:
    """Write the pipeline's classes and what they read."""
    classes = classes_of(pipeline, ("fairseq_ms.export.hf.tokenization", "LineTokenizer"))
    text = f'''class FairseqMsTokenizer({", ".join(name for _, name in classes)}):
    """The tokenizer of this folder\'s model."""

    level = "{pipeline.level}"
'''
    sources.write(folder, "tokenization_fairseq_ms", classes, text)
    vocabulary = json.dumps(list(symbols), ensure_ascii=False, indent=0)
    (folder / "vocab.json").write_text(vocabulary + "\n", encoding="utf-8")
    if pipeline.codes is not None:
        (folder / "codes.bpe").write_bytes(pipeline.codes.read_bytes())
    return {
        "tokenizer_class": "FairseqMsTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_fairseq_ms.FairseqMsTokenizer", None]},
        "language": pipeline.language,
    }
