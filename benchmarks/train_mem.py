"""The memory columns of Multi-scale Transformer LMs, Tables 2 to 4: a training step of every preset."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from fairseq.utils import apply_to_sample

from benchmarks.device import peak, ran_out
from benchmarks.peers import FAIRSEQ, GPT2, LOSSES, Shape, build_model, random_sample
from benchmarks.table import DOES_NOT_FIT, GB, Cell, Options, Row, Table, Work
from benchmarks.training import step
from fairseq_ms.presets.registry import PRESETS
from fairseq_ms.tools import untrained
from fairseq_ms.tools.training_step import training_sample

BATCH, TOKENS = 64, 512
# Symbols of the data sets (Table 1).
VOCABULARY = {"ccnews": 63_724, "wt103": 33_346, "books": 31_300}
# In GB, as printed. Table 4 also has 23.78 for the first of BookCorpus, beside its windows.
PAPER = {
    "vanilla_lm_ccnews_10": 16.76,
    "vanilla_lm_ccnews_12": 19.04,
    "vanilla_lm_ccnews_14": 21.31,
    "multiscale_topdown_ccnews_5_5_6_6": 14.66,
    "multiscale_topdown_ccnews_5_5_9_9": 18.35,
    "multiscale_topdown_ccnews_2_4_8_12": 20.96,
    "vanilla_lm_wt103_16": 26.85,
    "multiscale_topdown_wt103_6_12": 25.15,
    "multiscale_topdown_wt103_5_10": 22.08,
    "multiscale_bottomup_wt103_5_10": 21.83,
    "retina_lm_wt103_16": 29.92,
    "vanilla_lm_books_12": 20.98,
    "vanilla_lm_books_14": 23.78,
    "vanilla_lm_books_30_narrow": 22.07,
    "vanilla_lm_books_20_narrow": 22.77,
    "multiscale_topdown_books_8_12": 25.45,
    "multiscale_topdown_books_4_8_12": 25.23,
    "multiscale_topdown_books_2_4_8_12": 22.62,
    "multiscale_topdown_books_16_12_6_1": 10.61,
    "multiscale_topdown_books_10_10_8_5": 13.59,
    "multiscale_topdown_books_8_8_7_7": 16.87,
    "multiscale_topdown_books_7_7_8_8": 18.22,
    "multiscale_topdown_books_5_5_9_9": 19.47,
    "multiscale_topdown_books_3_3_10_10": 20.71,
    "multiscale_topdown_books_2_2_11_11": 22.05,
    "multiscale_topdown_books_1_1_12_12": 23.40,
    "multiscale_topdown_books_conv_7_7_8_8": 18.45,
    **{f"vanilla_lm_books_12_window{width}": 23.78 for width in (8, 16, 64, 128, 256)},
    **{f"retina_lm_books_12_{near}_256_512": 23.95 for near in (8, 16, 128)},
}
# Others of as many layers as a vanilla preset: data set and layers.
PEERS = {
    f"{peer} {layers}, {data}": (peer, data, layers)
    for data, layers in (("ccnews", 14), ("wt103", 16), ("books", 14))
    for peer in (FAIRSEQ, GPT2)
}
WIDTHS = {"ccnews": 1024}
# By column: flags, and the criterion.
VARIANTS: dict[str, tuple[list[str], str]] = {
    "everything": (["--recompute", "none"], "cross_entropy"),
    "pointwise": ([], "cross_entropy"),
    "linear": ([], "linear_cross_entropy"),
}
SMALL = ["--decoder-embed-dim", "24", "--decoder-ffn-embed-dim", "48", "--decoder-attention-heads", "12"]


def presets() -> list[str]:
    """The presets of Tables 2 to 4 of this paper."""
    of_paper = {name: preset for name, preset in PRESETS.items() if "Multi-scale" in preset.recipe.source}
    return [name for name, preset in of_paper.items() if preset.table in ("Table 2", "Table 3", "Table 4")]


def tables(options: Options) -> list[Table]:
    """A row a preset; ``quick`` takes one of each table, narrow ones."""
    names = presets()
    if options.quick:
        names = ["multiscale_topdown_ccnews_2_4_8_12", "multiscale_bottomup_wt103_5_10", "retina_lm_books_12_8_256_512"]
    names += list(PEERS)
    precision = "fp16" if options.on_gpu else "float32"
    about = (
        f"`--batch-size {BATCH}`, {TOKENS} tokens, {precision}, dropout 0.1 everywhere, peak in GB. On a GPU, "
        "`fairseq-ms memory --fp16` prints the middle column for a preset."
    )
    columns = {
        "paper": "paper",
        "everything": "`--recompute none`",
        "pointwise": "as it is",
        "linear": "with `linear_cross_entropy`",
    }
    rows = [
        Row((name,), lambda name=name: Work(run=lambda: None, others=partial(peaks, name, options))) for name in names
    ]
    title = "Train Mem of Multi-scale Transformer LMs, Tables 2 to 4"
    return [Table("train-mem", title, about, ["preset"], columns, rows)]


def peaks(name: str, options: Options) -> Mapping[str, Cell]:
    """Peaks of a preset, beside the paper's number, or of another library's model, as far as it has the variants."""
    found: dict[str, Cell] = {} if name in PEERS else {"paper": PAPER[name]}
    for column, (flags, criterion) in VARIANTS.items():
        if name in PEERS and (flags or (name.startswith(GPT2) and criterion == "linear_cross_entropy")):
            continue
        try:
            found[column] = _peak(name, flags, criterion, options) / GB
        except Exception as error:
            if not ran_out(error):
                raise
            found[column] = DOES_NOT_FIT
    return found


def _peak(name: str, flags: list[str], criterion: str, options: Options) -> int:
    rows, tokens = (2, 64) if options.quick else (BATCH, TOKENS)
    if name in PEERS:
        peer, data, layers = PEERS[name]
        dim = WIDTHS.get(data, 768)
        sizes = {"dim": 48, "ffn_dim": 96, "vocabulary": 97} if options.quick else {"dim": dim, "ffn_dim": 4 * dim}
        shape = Shape(**{"vocabulary": VOCABULARY[data], **sizes}, length=tokens, layers=layers, dropout=0.1)
        model, sample = build_model(peer, shape), random_sample(shape, rows)
    else:
        vocabulary = 97 if options.quick else VOCABULARY[name.split("_")[2]]
        settings = ["--arch", name, "--tokens-per-sample", str(tokens), *flags, *(SMALL if options.quick else [])]
        model = untrained.build_model(untrained.parse(settings), vocabulary)
        sample = training_sample(model, rows, tokens)
    model = model.to(options.device, torch.float16 if options.on_gpu else torch.float32).train()
    moved: Any = apply_to_sample(lambda tensor: tensor.to(options.device), sample)
    return peak(lambda: step([model], lambda: LOSSES[criterion](model, moved)), options)
