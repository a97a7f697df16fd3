#!/bin/sh
# Trains a small model built as gpt-oss with dynamic context parallelism on 4 CPU ranks, on the source files of Python's
# standard library: learned sinks, windows of 128 tokens in every second layer, YaRN, biases everywhere, and 8 experts in
# each layer, 2 on each rank, of which a token gets 4, with clamped gates.
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
  --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
  --normalization RMSNorm --untie-embeddings-and-output-weights \
  --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 \
  --position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512 \
  --no-yarn-correction-range-round-to-int \
  --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 \
  --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 96 --moe-router-dtype fp32 \
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 \
  --data-path "$DOCUMENTS" --data-glob '**/*.py' --overlong split --split 98,2,0 --tokenizer-type ByteTokenizer \
  --train-iters 20 --global-batch-size 8 \
  --lr 4e-3 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 4e-4 --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-iters 1 \
  "$@"
echo "$@"
PATH="$(dirname "$PYTHON"):$PATH" exec "$@"
