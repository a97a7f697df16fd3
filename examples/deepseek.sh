#!/bin/sh
# Trains a small model built as DeepSeek-V3 with dynamic context parallelism on 4 CPU ranks, on the source files of
# Python's standard library: multi-head latent attention; a dense layer, then layers with 8 experts, 2 on each rank, of
# which a token gets 2 from 2 of 4 groups beside a shared one; and a module that predicts the token after the next, with
# experts of its own. No loss keeps the experts evenly loaded: those that had fewer tokens are preferred.
#
#   PYTHON   interpreter with the packages of this repository   (default: python3)
#   "$@"     more flags; they win over those below
set -eu

PYTHON=${PYTHON:-python3}
DOCUMENTS=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
export OMP_NUM_THREADS=1 # 4 ranks share the cores of one machine

set -- torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py \
  --dynamic-cp --distributed-backend gloo --expert-model-parallel-size 4 --use-distributed-optimizer \
  --seq-length 2048 --max-seqlen-per-dp-cp-rank 1024 \
  --num-layers 3 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 320 \
  --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 48 \
  --qk-head-dim 24 --qk-pos-emb-head-dim 8 --v-head-dim 24 \
  --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4 --mscale-all-dim 1 \
  --yarn-original-max-position-embeddings 512 \
  --normalization RMSNorm --qk-layernorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --num-experts 8 --moe-layer-freq '[0,1,1]' --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 \
  --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 \
  --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 \
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 \
  --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong split --split 98,2,0 --tokenizer-type ByteTokenizer \
  --train-iters 20 --global-batch-size 8 \
  --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
