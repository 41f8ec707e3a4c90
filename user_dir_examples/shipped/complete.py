"""Complete a Python file of thousands of tokens with the model in the package, at a cost that does not grow with it.

The cache holds what the windows are wide, so that a token costs as much after the whole file as near its beginning.
"""

import argparse
import pickle
import textwrap
import time
from pathlib import Path

import torch

from fairseq_ms.export import exported, tokenizer
from fairseq_ms.tools import arguments
from fairseq_ms_pipeline.indexed import BOS, PAD

# After so many tokens, and after all, a few are written to see what one costs.
LENGTHS, TRIED = (512, 2048, 8192), 64


def cut(text: str) -> str:
    """A file up to the signature of its last method or function."""
    before, define, after = text.rpartition("    def ")
    return before + define + after.partition("\n")[0] + "\n" if define else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path(argparse.__file__), help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, default=exported.SHIPPED, help="an exported folder (default: the box's)")
    parser.add_argument("--tokens", type=arguments.positive, default=100, help="to write (default: %(default)s)")
    parser.add_argument("--seed", type=arguments.seed, default=1, help="of what is drawn (default: %(default)s)")
    args = parser.parse_args()
    # Of so small a model, a token is too little work for several.
    torch.set_num_threads(1)
    core, config = exported.read(args.model, cpu=True)
    symbols = tokenizer.of_folder(args.model, config)[1]
    text = cut(args.file.read_text(encoding="utf-8"))
    tokens = torch.tensor([config["begin_token_id"], *symbols.tokens_of(text)])
    print(
        f"{args.file.name}: {len(tokens):,} tokens; the model was trained on rows of {config['tokens_per_sample']:,}\n"
    )
    print(f"{'after so many tokens':>20} {'cache, kB':>10} {'ms to write a token':>20}")
    state, read = core.new_state(1, len(tokens)), 0
    with torch.no_grad():
        for length in [*(length for length in LENGTHS if length < len(tokens)), len(tokens)]:
            # All but the last one, which is read with what is written.
            core.features(tokens[None, read : length - 1], state)
            read, tried = length - 1, state.copy()
            began = time.perf_counter()
            core.generate(tokens[read:length], TRIED, 0.0, state=tried)
            spent = (time.perf_counter() - began) / TRIED
            kept = len(pickle.dumps(list(tried.parts())))
            print(f"{length:20,} {kept / 1000:10,.0f} {1000 * spent:20.2f}", flush=True)
    drawn = arguments.DRAWN["temperature"], int(arguments.DRAWN["top_k"])
    generator = torch.Generator().manual_seed(args.seed)
    allowed = torch.ones(core.config.vocab_size, dtype=torch.bool)
    allowed[[BOS, PAD]] = False
    settings = {"state": state, "generator": generator, "allowed": allowed}
    written = core.generate(tokens[read:], args.tokens, *drawn, **settings)[1:]
    end = "".join(text.splitlines(keepends=True)[-3:])
    print("\n" + textwrap.indent(end + symbols.text_of(written.tolist()), "    "))


if __name__ == "__main__":
    main()
