# shellcheck shell=bash
# The run that the jobs of this folder start: Llama-3-8B on documents of up to 131072 tokens. Flags behind a job's name
# win over these: sbatch examples/slurm/multi_node.sbatch --seq-length 32768
#
#   FLAGS_FILE  another model and layout: a file that `dynamic-cp sweep --output job.flags` wrote
#   DATA        [WEIGHT] PREFIX ... of .bin/.idx data with the model's tokens   (default: mock data)
#   EOD_ID      token that ends a document there                                (default: 128001, Llama-3's)
#   HARDWARE    h100, h200-local, a100-80gb, ... or a file of `dynamic-cp`      (default: h100, or h100-local)
#
# FLAGS_FILE takes the place of the model and the layout below. Behind them it would not do: no later flag takes back
# --recompute-granularity or --swiglu. A job of `sweep --output job.sbatch` sets JOB_FLAGS instead.
if [[ -n ${FLAGS_FILE:-} ]]; then
  if [[ ! -r $FLAGS_FILE ]]; then
    echo "FLAGS_FILE is $FLAGS_FILE, which cannot be read here: give a file that \`dynamic-cp sweep --output\` wrote" >&2
    exit 2
  fi
  mapfile -d '' -t JOB_FLAGS < <(grep -v '^[[:space:]]*#' "$FLAGS_FILE" | xargs -r printf '%s\0') # quotes as in a shell
fi
if [[ -n ${JOB_FLAGS[*]:-} ]]; then
  FLAGS=("${JOB_FLAGS[@]}")
  TOKENS=(--tokenizer-type NullTokenizer)
else
  FLAGS=(
    --dynamic-cp --seq-length 131072 --max-seqlen-per-dp-cp-rank auto
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 500000
    --bf16 --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 256
  )
  TOKENS=(--tokenizer-type NullTokenizer --vocab-size 128256)
  EOD_ID=${EOD_ID:-128001}
fi
FLAGS+=(
  --train-iters 1000 --lr 1e-5 --lr-warmup-iters 20 --lr-decay-style cosine --min-lr 1e-6
  --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 100 --tensorboard-dir "$RUN_DIR/tensorboard"
)
if [[ -n ${HARDWARE:-} ]]; then
  FLAGS+=(--dynamic-cp-hardware "$HARDWARE")
fi
if [[ -n ${DATA:-} ]]; then
  read -rd '' -a prefixes <<<"$DATA" || true # to the end, over several lines; that is what it returns 1 for
  FLAGS+=(--data-path "${prefixes[@]}" "${TOKENS[@]}")
  if [[ -n ${EOD_ID:-} ]]; then FLAGS+=(--eod-id "$EOD_ID"); fi
elif [[ -n ${JOB_FLAGS[*]:-} ]]; then
  FLAGS+=(--mock-data "${TOKENS[@]}" --eod-id "${EOD_ID:-0}")
else
  FLAGS+=(--mock-data)
fi
