#!/bin/sh
# Continued pre-training on long documents: takes the weights of a checkpoint that was trained on shorter ones, raises
# the base of RoPE, and trains on a blend of long and short .bin/.idx data. Started again, it resumes its own run.
#
#   BASE     checkpoint folder of the short run, of the same model   (required)
#   DATA     [WEIGHT] PREFIX ...: .bin/.idx prefixes                 (required)
#   RUN_DIR  checkpoints of this run                                 (default: runs/long_context)
#   NPROC    ranks of this node                                      (default: 8)
#   "$@"     more flags; they win over those below (--distributed-backend gloo trains on CPU ranks)
#
# On many nodes give the flags below to examples/slurm/requeue.sbatch.
set -eu

PYTHON=${PYTHON:-python3}
RUN_DIR=${RUN_DIR:-runs/long_context}
: "${BASE:?the checkpoint folder to start from}" "${DATA:?the .bin/.idx prefixes to train on}"

# Weights only and iteration 0 at the first start, everything at later ones.
if [ -e "$RUN_DIR/latest_checkpointed_iteration.txt" ]; then
  set -- --load "$RUN_DIR" "$@"
else
  set -- --load "$BASE" --finetune --exit-on-missing-checkpoint "$@"
fi

# Llama-3-8B from 8192 tokens to 131072. A document stays one sample up to --seq-length, so that a long dependency is
# seen; only longer ones are split. Short documents cost what they cost alone: they get CP size 1.
# shellcheck disable=SC2086 # DATA is several words
set -- "$PYTHON" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node "${NPROC:-8}" pretrain_gpt.py \
  --dynamic-cp --seq-length 131072 --max-seqlen-per-dp-cp-rank auto --rotary-base 8000000 \
  --data-path $DATA --tokenizer-type NullTokenizer --vocab-size 128256 --eod-id 128001 --overlong split \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --bf16 --tensor-model-parallel-size 2 --sequence-parallel \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --global-batch-size 32 --train-iters 1000 --lr 1e-5 --lr-warmup-iters 20 --lr-decay-style cosine --min-lr 1e-6 \
  --save "$RUN_DIR" --save-interval 100 \
  "$@"
echo "$@"
exec "$@"
