#!/bin/sh
# Fine-tunes a Hugging Face model on chats with dynamic context parallelism on 4 CPU ranks, and writes it back as one.
#
#   PYTHON   interpreter with the packages of this repository and transformers (default: python3)
#   RUN_DIR  everything that is written; it must be new                        (default: runs/fine_tune)
#   MODEL    llama, or qwen3_moe: 8 experts, shared out over 2 ranks           (default: llama)
#   "$@"     more flags; they win over those below
#
# The model is a tiny one with random weights (examples/fine_tune.py), the chats are those of examples/sft_chat.py; nothing
# is downloaded. With a model of your own take its tokenizer: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR.
set -eu

PYTHON=${PYTHON:-python3}
RUN_DIR=${RUN_DIR:-runs/fine_tune}
MODEL=${MODEL:-llama}
HERE=$(dirname "$0")
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

"$PYTHON" "$HERE/sft_chat.py" "$RUN_DIR/chats.jsonl"
"$PYTHON" "$HERE/fine_tune.py" model "$RUN_DIR/model" "$MODEL"
"$PYTHON" -m dynamic_cp.decide.cli weights import "$RUN_DIR/model" --output "$RUN_DIR/imported"

case $MODEL in
  *_moe) set -- --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.001 "$@" ;;
esac

# shellcheck disable=SC2046 # the flags of the model are words
set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --distributed-backend gloo $(cat "$RUN_DIR/imported/model.flags") \
  --load "$RUN_DIR/imported" --exit-on-missing-checkpoint --save "$RUN_DIR/tuned" \
  --sft --data-path "$RUN_DIR/chats.jsonl" --split 95,5,0 --overlong error \
  --seq-length 2048 --max-seqlen-per-dp-cp-rank 768 \
  --train-iters 30 --global-batch-size 16 --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" "$@"

"$PYTHON" -m dynamic_cp.decide.cli weights export "$RUN_DIR/tuned" --output "$RUN_DIR/tuned_model" --like "$RUN_DIR/model"
"$PYTHON" "$HERE/fine_tune.py" compare "$RUN_DIR/model" "$RUN_DIR/tuned_model" "$RUN_DIR/chats.jsonl"
