"""The models that are exported in the tests."""

from tests.helpers import trained

GROUPS = ["--decoder-attention-heads", "4", "--kv-heads", "2"]
STREAM = ["--decoder-layers", "2", "--mem-len", "5", "--tokens-per-sample", "6"]
ADAPTIVE = ["--adaptive-input", "--adaptive-input-cutoff", "8,14", "--adaptive-softmax-cutoff", "8,14"]
ADAPTIVE += ["--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2", "--tie-adaptive-weights"]
SCALES = ["--scale-layers", "4x=1,2x=1,1x=1", "--tokens-per-sample", "40"]
CHUNKS = ["--token-embed-dim", "4", "--decoder-units", "8", "--max-segment-len", "3", "--tokens-per-sample", "40"]
HAED = ["--decoder-embed-dim", "12", "--position-embed-dim", "4", "--encoder-units", "6", "--init-std", "0.6", *CHUNKS]
MAIN = ["--decoder-layers", "1", "--decoder-ffn-embed-dim", "9", "--decoder-attention-heads", "2"]
PLAIN = ["--decoder-layers", "2", "--tokens-per-sample", "40"]
LOCAL = ["--add-bos-token", "--scale-windows", "1x=0:7", "--share-decoder-input-output-embed", "--kv-heads", "1"]
QL = ["--mem-len", "6", "--tokens-per-sample", "6", "--scale-layers", "1x=1,2x=1", "--output-layers", "1"]
QL += ["--decoder-normalize-before"]
PARTS = ["--positions", "rotary", "--norm", "rms", "--activation-fn", "swiglu", "--no-bias"]
PARTS += ["--scale-embedding", "--decoder-normalize-after", "--qk-norm", "scaled", "--sinks", "--short-conv", "2"]
WIDE = [*trained.NARROW, "--init-std", "0.4"]

# name -> flags; weights are large enough for every path to matter.
CASES = {
    "vanilla": ["--arch", "vanilla_lm", *WIDE, *PLAIN],
    "window": ["--arch", "vanilla_lm", *WIDE, *PLAIN, *LOCAL],
    "retina": ["--arch", "retina_lm", *WIDE, *PLAIN, "--scale-windows", "1x=0:4,2x=4:16"],
    "byte_bpe": ["--arch", "retina_lm", *WIDE, *PLAIN, "--scale-windows", "1x=0:4*2,2x=4:16*2", *GROUPS],
    "topdown": ["--arch", "multiscale_topdown", *WIDE, *SCALES],
    "parts": ["--arch", "retina_lm", *WIDE, *PLAIN, "--scale-windows", "1x=0:4,2x=4:16", *PARTS],
    "bottomup": ["--arch", "multiscale_bottomup", *WIDE, *SCALES],
    "transformer_xl": ["--arch", "transformer_xl", *WIDE, *STREAM, *ADAPTIVE, "--tie-adaptive-proj"],
    "compressive": ["--arch", "compressive_transformer", *WIDE, *STREAM, "--compressed-mem-len", "3"],
    "transformer_ql": ["--arch", "transformer_ql", *WIDE, *QL],
    "haed": [
        "--arch",
        "haed",
        *HAED,
        *MAIN,
        "--separators",
        "w0 w5",
        "--norm",
        "rms",
        "--short-conv",
        "2",
        "--qk-norm",
    ],
    "hred": ["--arch", "hred", *HAED, "--main-units", "5", "--segmentation", "fixed"],
}
STREAMING = ("transformer_xl", "compressive", "transformer_ql")
PROMPTS = ["w0 w1 w2", "w5", "w1 w2 w3 w4 w5 w6 w0 w1"]
ODD_PROMPTS = ["w0 w1 w2", "  東京\tw5", "😀 <s> "]
MAX_LENGTH = 22
LEVELS = ("bpe", "char", "byte", "word", "hf_byte_bpe", "hf_tokenizer")
ODD = "  x\ty \u00a0z\u2028 \r\n\n\n 東京 😀 <s> </s> <unk> @@ Ċ  \n<pad>\n"
TEXT = "He said: \"it's done\", didn't he?\nNaïve  word\n"
