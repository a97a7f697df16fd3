#!/bin/sh
# Trains a small model with experts, built as Qwen3-MoE, with dynamic context parallelism on 4 CPU ranks, on the source
# files of Python's standard library: 8 experts in each layer, 2 on each rank, 2 for each token, and a loss that keeps
# them evenly loaded. The log has that loss (1 is even) and how many tokens the busiest expert gets over the mean.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   "$@"     more flags; they win over those below
#
# The same with a shared expert and no such loss, as DeepSeek-V3 (experts that had fewer tokens are preferred):
#   sh examples/experts.sh --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
#     --moe-shared-expert-intermediate-size 64
set -eu

PYTHON=${PYTHON:-python3}
DOCUMENTS=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --distributed-backend gloo --expert-model-parallel-size 4 \
  --seq-length 2048 --max-seqlen-per-dp-cp-rank 1024 \
  --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --position-embedding-type rope --normalization RMSNorm --qk-layernorm --swiglu --disable-bias-linear \
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-router-dtype fp32 \
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-4 \
  --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong split --split 98,2,0 --tokenizer-type ByteTokenizer \
  --train-iters 20 --global-batch-size 8 \
  --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
