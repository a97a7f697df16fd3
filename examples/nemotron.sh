#!/bin/sh
# Trains a small model built as Nemotron 3 with dynamic context parallelism on 4 CPU ranks, on the source files of
# Python's standard library: layers of one half each, Mamba-2, attention without positions, or 8 experts, 2 on each
# rank, of which a token gets 2 beside a shared one. Lanes share Mamba-2 by heads or by states, as the planner chooses.
# Then the first iterations again with CP 4 for all samples, packed as well as that allows: compare tokens/s.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   "$@"     more flags, of both runs; they win over those below
set -eu

PYTHON=${PYTHON:-python3}
DOCUMENTS=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

train() {
  PATH="$(dirname "$PYTHON"):$PATH" torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
    --distributed-backend gloo --expert-model-parallel-size 4 --use-distributed-optimizer \
    --seq-length 4096 --max-seqlen-per-dp-cp-rank 1024 \
    --num-layers 7 --hybrid-override-pattern MEM*EME --hidden-size 128 \
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --position-embedding-type none \
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-num-groups 4 --mamba-state-dim 32 \
    --normalization RMSNorm --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights \
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128 \
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 \
    --moe-router-topk-scaling-factor 2.5 \
    --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong drop --split 98,2,0 --tokenizer-type ByteTokenizer \
    --global-batch-size 8 --lr-decay-iters 16 --lr-warmup-iters 3 --lr-decay-style cosine \
    --lr 4e-3 --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
    "$@"
}
train --dynamic-cp --train-iters 16 --eval-iters 1 "$@"
echo "CP 4 for all samples:"
train --context-parallel-size 4 --static-cp-policy balanced --train-iters 4 "$@"
