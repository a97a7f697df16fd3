#!/bin/sh
# Trains a small model on 4 CPU ranks, two pipeline stages of two lanes, whose attention is computed by servers of both
# stages: in ticks, in which all stages go forward or all go back. Documents are the source files of Python's standard
# library. The log has "in a pool" in every line; with --dynamic-cp-pool auto in those iterations in which the planner
# takes the pool to be faster, and with off never.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   "$@"     more flags; they win over those below
set -eu

PYTHON=${PYTHON:-python3}
DOCUMENTS=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --dynamic-cp-pool always --distributed-backend gloo --pipeline-model-parallel-size 2 \
  --seq-length 4096 --max-seqlen-per-dp-cp-rank 3072 \
  --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 \
  --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong split --split 98,2,0 --tokenizer-type ByteTokenizer \
  --train-iters 10 --global-batch-size 8 \
  --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
