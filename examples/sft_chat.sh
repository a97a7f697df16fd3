#!/bin/sh
# Trains a small GPT on chats with dynamic context parallelism on 4 CPU ranks: loss only on what the assistant says.
# The chats are made by examples/sft_chat.py; the byte tokenizer and the template chatml need no download.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   RUN_DIR  the chats and their index                          (default: runs/sft)
#   "$@"     more flags; they win over those below
#
# With a model's own tokenizer and template (a local folder, nothing is downloaded):
#   sh examples/sft_chat.sh --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR
set -eu

PYTHON=${PYTHON:-python3}
RUN_DIR=${RUN_DIR:-runs/sft}

"$PYTHON" "$(dirname "$0")/sft_chat.py" "$RUN_DIR/chats.jsonl"
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --distributed-backend gloo \
  --sft --data-path "$RUN_DIR/chats.jsonl" --split 95,5,0 --overlong error \
  --seq-length 2048 --max-seqlen-per-dp-cp-rank 768 \
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --train-iters 30 --global-batch-size 16 --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
