#!/usr/bin/env bash
# Train one of the HAED paper's models from its configuration, with Appendix A's hyper-parameters.
#
#   train.sh NAME DATA_BIN [--small] [MORE SETTINGS OF FAIRSEQ-HYDRA-TRAIN]
#   train.sh characters_iem data/wikitext103-chars/bin
#   train.sh characters_finetune data/wikitext103-chars/bin
#   train.sh pixels_haed data/imagenet32/bin --small
#
# NAME is what fairseq-ms config takes: characters_* or pixels_*, each with hred and hred_transformer (Table 1) and
# haed (Figures 2 and 3, with model.encoder_units=N and model.decoder_units=N), iem and then finetune against end_to_end
# (Figure 4). A run is one epoch, over which the learning rates fall: as many updates of 32 rows as DATA_BIN has
# (optimization.max_update=N for another number). iem and finetune take one half of the training data each, from
# halves/ beside DATA_BIN, and finetune begins with what iem left in checkpoints/. For Figure 4's baseline of the same
# training time, add optimization.stop_time_hours=H, the hours that iem and finetune took together. The configuration is
# written to checkpoints/NAME.yaml and checkpoints to checkpoints/NAME. The paper does not say in
# what precision it trains: common.fp16=true is mixed precision.
# --small keeps the parts of the model but makes encoder and decoder narrow and the main transformer two layers, and
# takes 60 updates of 4 x 256 symbols (of one image, for pixels): minutes on a laptop. The loss begins near log2 of the
# number of symbols; that of characters falls by 3 or 4 bits, that of pixels by a tenth, and that of *_iem, which begins
# near log2 of the number of candidates, hardly moves.
#
# With 8 GPUs of one machine, and with 4 such machines under Slurm (a batch of 32 rows is 4 x 8 and 1 x 32):
#   train.sh NAME DATA_BIN dataset.batch_size=4 distributed_training.distributed_world_size=8
#   sbatch -N 4 --ntasks-per-node 8 --gpus-per-node 8 --wrap "srun train.sh NAME DATA_BIN \
#     dataset.batch_size=1 distributed_training.distributed_world_size=32 distributed_training.distributed_port=29500"
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 NAME DATA_BIN [--small] [MORE SETTINGS]" >&2
    exit 2
fi
name=$1 data=$2
shift 2
case $name in
    characters_* | pixels_*) ;;
    *) echo "$0: NAME must be characters_* or pixels_*, as in the first lines of this script: got $name" >&2; exit 2 ;;
esac
size=() updates=()
if [ "${1:-}" = --small ]; then
    shift
    updates=(--max-update 60)
    size=(common.log_interval=10 dataset.disable_validation=true
        model.decoder_units=128 model.encoder_units=64)
    case $name in
        characters_*) size+=(dataset.batch_size=4 task.tokens_per_sample=256) ;;
        pixels_*) size+=(dataset.batch_size=1) ;;
    esac
    case $name in
        *_hred) size+=(model.main_units=128) ;;
        *) size+=(model.decoder_layers=2 model.decoder_ffn_embed_dim=256) ;;
    esac
    parts=(encoder main decoder)
    [[ $name == *_iem ]] && parts=(encoder main)
    [[ $name == *_hred ]] && parts=()
    # As in the paper, about a third of each phase's updates: the first phase collapses with a short warm-up.
    warmup=10
    [[ $name == *_iem || $name == *_finetune ]] && warmup=20
    for part in "${parts[@]}"; do
        size+=("optimizer.groups.$part.lr_scheduler.warmup_updates=$warmup")
    done
fi
for setting in "$@"; do
    case $setting in
        optimization.max_update=*) updates=(--max-update "${setting#*=}") ;;
    esac
done
fairseq-ms config "$name" --data "$(realpath -m "$data")" "${updates[@]}" --out "$PWD/checkpoints/$name.yaml"

# Absolute, since hydra runs every job in a folder of its own.
if [[ $name == *_finetune ]]; then
    size+=("checkpoint.finetune_from_model=$PWD/checkpoints/${name%_finetune}_iem/checkpoint_last.pt")
fi

exec fairseq-hydra-train --config-dir "$PWD/checkpoints" --config-name "$name" "${size[@]}" "$@"
