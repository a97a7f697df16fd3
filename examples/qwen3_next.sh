#!/bin/sh
# Trains a small model built as Qwen3-Next with dynamic context parallelism on 4 CPU ranks, on the source files of
# Python's standard library: a gated delta net in three of four layers and gated attention in the fourth, RoPE on a
# quarter of its channels, and 8 experts in each layer, 2 on each rank, of which a token gets 2 beside a gated shared
# one. Lanes share the linear layers of each bucket by heads or by states, as the planner chooses.
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
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
    --kv-channels 32 --attention-output-gate --qk-layernorm --position-embedding-type rope --rotary-percent 0.25 \
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 \
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 \
    --moe-shared-expert-gate --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3 \
    --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong drop --split 98,2,0 --tokenizer-type ByteTokenizer \
    --global-batch-size 8 --lr-decay-iters 16 --lr-warmup-iters 3 --lr-decay-style cosine \
    --lr 4e-3 --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
    "$@"
}
train --dynamic-cp --train-iters 16 --eval-iters 1 "$@"
echo "CP 4 for all samples:"
train --context-parallel-size 4 --static-cp-policy balanced --train-iters 4 "$@"
