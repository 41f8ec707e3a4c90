#!/usr/bin/env bash
# Train one of the HAED paper's models from its configuration, with Appendix B's hyper-parameters.
#
#   train.sh NAME DATA_BIN UPDATES|--small [MORE SETTINGS OF FAIRSEQ-HYDRA-TRAIN]
#   train.sh characters_iem data-bin/wikitext-103-characters 100000 common.fp16=true
#   train.sh characters_finetune data-bin/wikitext-103-characters 100000 common.fp16=true
#   train.sh pixels_haed data-bin/imagenet-32 --small
#
# NAME is what fairseq-ms config takes: characters_* or pixels_*, each with hred, hred_transformer and haed (Table 1,
# Figures 2 and 3 with model.encoder_units=N and model.decoder_units=N), iem and then finetune against end_to_end
# (Figure 4). The paper trains for a time and does not say how many updates that was. The configuration is written to
# checkpoints/NAME.yaml and checkpoints to checkpoints/NAME, and *_finetune begins with what *_iem left there.
# --small keeps the parts of the model but makes encoder and decoder narrow and the main transformer two layers, and
# takes 60 updates of 4 x 256 symbols (of one image, for pixels): minutes on a laptop. The loss begins near log2 of the
# number of symbols; that of characters falls by 3 or 4 bits, that of pixels by a tenth, and that of *_iem, which begins
# near log2 of the number of candidates, hardly moves.
#
# With 8 GPUs of one machine, and with 4 such machines under Slurm (a batch of 32 rows is 4 x 8 and 1 x 32):
#   train.sh NAME DATA_BIN UPDATES dataset.batch_size=4 distributed_training.distributed_world_size=8
#   sbatch -N 4 --ntasks-per-node 8 --gpus-per-node 8 --wrap "srun train.sh NAME DATA_BIN UPDATES \
#     dataset.batch_size=1 distributed_training.distributed_world_size=32 distributed_training.distributed_port=29500"
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: $0 NAME DATA_BIN UPDATES|--small [MORE SETTINGS]" >&2
    exit 2
fi
name=$1 data=$2 updates=$3
shift 3
case $name in
    characters_* | pixels_*) ;;
    *) echo "$0: NAME must be characters_* or pixels_*, as in the first lines of this script: got $name" >&2; exit 2 ;;
esac
fairseq-ms config "$name" --out "$PWD/checkpoints/$name.yaml"
size=()
if [ "$updates" = --small ]; then
    updates=60
    size=(optimization.clip_norm=1.0 common.log_interval=10 dataset.disable_validation=true
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
    for part in "${parts[@]}"; do
        size+=("optimizer.groups.$part.lr_scheduler.warmup_updates=10")
    done
fi

# Absolute, since hydra runs every job in a folder of its own.
size+=("checkpoint.save_dir=$PWD/checkpoints/$name")
if [[ $name == *_finetune ]]; then
    size+=("checkpoint.finetune_from_model=$PWD/checkpoints/${name%_finetune}_iem/checkpoint_last.pt")
fi

exec fairseq-hydra-train --config-dir "$PWD/checkpoints" --config-name "$name" \
    "common.user_dir=$(fairseq-ms user-dir)" "task.data=$(realpath -m "$data")" "optimization.max_update=$updates" \
    "${size[@]}" "$@"
