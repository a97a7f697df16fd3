#!/bin/sh
# Trains a small GPT with dynamic context parallelism on 4 CPU ranks, on the source files of Python's standard library.
# A second run resumes from the checkpoint of the first and trains on.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   ITERS    iterations of this run                             (default: 15)
#   RUN_DIR  checkpoints and TensorBoard                        (default: runs/stdlib)
#   "$@"     more flags, e.g. --context-parallel-size 4; they win over those below
set -eu

PYTHON=${PYTHON:-python3}
ITERS=${ITERS:-15}
RUN_DIR=${RUN_DIR:-runs/stdlib}

DOCUMENTS=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
DONE=$(cat "$RUN_DIR/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --dynamic-cp-refine 5 --distributed-backend gloo \
  --seq-length 4096 --max-seqlen-per-dp-cp-rank 2048 \
  --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong split --split 98,2,0 --tokenizer-type ByteTokenizer \
  --train-iters $((DONE + ITERS)) --global-batch-size 8 \
  --lr 2e-3 --lr-warmup-iters 3 --lr-decay-style cosine --lr-decay-iters 2000 --min-lr 2e-4 --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-iters 2 --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 10 --tensorboard-dir "$RUN_DIR/tensorboard" \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
