# shellcheck shell=bash
# The run that the jobs of this folder start: Llama-3-8B on documents of up to 131072 tokens. Flags behind a job's name
# win over these: sbatch examples/slurm/multi_node.sbatch --seq-length 32768
#
#   DATA      [WEIGHT] PREFIX ... of .bin/.idx data with Llama-3 tokens   (default: mock data)
#   HARDWARE  h100, h200-local, a100-80gb, ... or a file of `dynamic-cp`  (default: h100, with local layers h100-local)
FLAGS=(
  --dynamic-cp --seq-length 131072 --max-seqlen-per-dp-cp-rank auto
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
  --num-attention-heads 32 --group-query-attention --num-query-groups 8
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
  --position-embedding-type rope --rotary-base 500000
  --bf16 --tensor-model-parallel-size 2 --sequence-parallel
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --global-batch-size 256 --train-iters 1000 --lr 1e-5 --lr-warmup-iters 20 --lr-decay-style cosine --min-lr 1e-6
  --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 100 --tensorboard-dir "$RUN_DIR/tensorboard"
)
if [[ -n ${HARDWARE:-} ]]; then
  FLAGS+=(--dynamic-cp-hardware "$HARDWARE")
fi
if [[ -n ${DATA:-} ]]; then
  read -rd '' -a prefixes <<<"$DATA" || true # to the end, over several lines; that is what it returns 1 for
  FLAGS+=(--data-path "${prefixes[@]}" --tokenizer-type NullTokenizer --vocab-size 128256 --eod-id 128001)
else
  FLAGS+=(--mock-data)
fi
