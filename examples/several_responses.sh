#!/bin/sh
# Trains a small GPT on prompts with 4 responses each, on 4 CPU ranks: a prompt and its responses are one sample, in which
# the prompt is there once. The data are made by examples/several_responses.py; nothing is downloaded.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   RUN_DIR  the data and their index                           (default: runs/responses)
#   APART    set it to train the same responses each with a prompt of its own, 4 times as many samples, to compare
#   "$@"     more flags; they win over those below
#
# An iteration trains 64 responses either way, so "elapsed time per iteration" says how much faster one way is.
set -eu

PYTHON=${PYTHON:-python3}
RUN_DIR=${RUN_DIR:-runs/responses}

way=together samples=16
if [ -n "${APART:-}" ]; then way=apart samples=64; fi

"$PYTHON" "$(dirname "$0")/several_responses.py" "$RUN_DIR"
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --distributed-backend gloo \
  --data-path "$RUN_DIR/$way.jsonl" --split 1,0,0 --overlong error --global-batch-size "$samples" \
  --seq-length 2048 --max-seqlen-per-dp-cp-rank 1024 \
  --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --train-iters 12 --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
