"""The command line: Megatron-LM's flag names, parsed and checked before anything heavy is imported.

    settings = parse_args(argv, world_size)  # InvalidInputError or UnsupportedFeatureError, the same on every rank

DEVIATION: dropout is 0. Reason: resuming is then exact on any layout. Recovery: --hidden-dropout.

DEVIATION: RoPE and softmax are never fused, and CPU ranks fuse nothing unless asked. Reason: the rotation of packed
shards is our own, attention of packed sequences has its softmax in its kernels, and compiling for CPUs takes longer
than it gives. Recovery: --bias-swiglu-fusion and its kin on CPU ranks; none for the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import DTYPES_OF
from megatron.dynamic_cp.flags.arguments import add_dynamic_cp_arguments
from megatron.dynamic_cp.flags.experts import BALANCING, DEFAULTS, layer_freq
from megatron.dynamic_cp.flags.fp8 import ALIGNMENTS, FORMATS
from megatron.dynamic_cp.flags.latent_attention import ROPE_TYPES
from megatron.dynamic_cp.flags.layer_needs import TRANSFORMER_IMPLS
from megatron.dynamic_cp.flags.positions import SOFTMAX_TYPES, no_rope_freq
from megatron.dynamic_cp.flags.windows import skip_freq, window_size
from megatron.trainer.data.config import OVERLONG_POLICIES, TOKENIZERS
from megatron.trainer.flags.launcher import environment_number
from megatron.trainer.flags.settings import Settings
from megatron.trainer.flags.validation import checked_settings

# Megatron-LM switches that are already so here: accepted, because scripts carry them, and without effect.
ALREADY_SO = (
    "--use-mcore-models",
    "--use-dist-ckpt",
    "--calculate-per-token-loss",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message} (--help lists the flags)")


def parse_args(argv: Sequence[str] | None = None, world_size: int | None = None) -> Settings:
    """Return the settings of a run, checked and complete.

    Args:
        argv: words of the command line; None takes sys.argv.
        world_size: ranks of the job; None reads what the launcher set (WORLD_SIZE), or 1.

    Raises:
        DynamicCPError: a flag is unknown, malformed or unsupported, or two values disagree.
    """
    args = build_parser().parse_args(argv)
    args.world_size = world_size if world_size is not None else environment_number("WORLD_SIZE", 1)
    return checked_settings(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags; abbreviations are not accepted."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Train a GPT with megatron-core and dynamic context parallelism.",
        allow_abbrev=False,
    )
    _add_model_arguments(parser)
    _add_expert_arguments(parser)
    _add_training_arguments(parser)
    _add_optimizer_arguments(parser)
    _add_parallel_arguments(parser)
    _add_data_arguments(parser)
    _add_checkpoint_arguments(parser)
    _add_logging_arguments(parser)
    _add_profiling_arguments(parser)
    add_dynamic_cp_arguments(parser)
    return parser


def _switch(group: Any, *flags: str, help: str) -> None:
    group.add_argument(*flags, action="store_true", help=help)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, required=True)
    group.add_argument("--num-attention-heads", type=int, required=True)
    group.add_argument("--ffn-hidden-size", type=int, help="default: 4 * hidden, with --swiglu 8/3 * hidden (mod 64)")
    group.add_argument("--kv-channels", type=int, help="width of a head; default: hidden / heads")
    _switch(group, "--group-query-attention", help="several query heads share each KV head")
    group.add_argument("--num-query-groups", type=int, help="KV heads, with --group-query-attention")
    group.add_argument("--seq-length", type=int, required=True, help="longest sample in tokens")
    group.add_argument("--max-position-embeddings", type=int, help="default: --seq-length")
    group.add_argument(
        "--window-size",
        type=window_size,
        metavar="BEFORE,0",
        help="tokens before itself that a token attends to, a window; default: all",
    )
    group.add_argument(
        "--window-attn-skip-freq",
        type=skip_freq,
        metavar="N|LIST",
        help="layers without the window: every N-th, or a list with 1 for each layer with it and 0 without, such as "
        "[1,1,0]*4; default: none",
    )
    group.add_argument(
        "--position-embedding-type", choices=("rope", "yarn", "learned_absolute", "none"), default="learned_absolute"
    )
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--rotary-percent", type=float, default=1.0)
    _switch(group, "--rotary-interleaved", help="rotate neighbouring channels instead of halves")
    _add_stretched_positions(group)
    _switch(group, "--qk-layernorm", help="normalize queries and keys")
    _switch(group, "--qk-l2-norm", help="normalize queries and keys without weights, as Llama 4")
    _switch(group, "--attention-output-gate", help="multiply what attention finds by a gate of its own, as Qwen3-Next")
    group.add_argument(
        "--softmax-type",
        choices=SOFTMAX_TYPES,
        default=SOFTMAX_TYPES[0],
        help="scores of keys alone; or one of 0, or a learned one for each head, beside them, as gpt-oss (local layers "
        "only)",
    )
    _switch(group, "--multi-latent-attention", help="queries, keys and values are projected from narrow latents")
    group.add_argument("--q-lora-rank", type=int, help="width of the latent of queries; default: none, no latent")
    group.add_argument("--kv-lora-rank", type=int, help="width of the latent of keys and values; default: 32")
    group.add_argument("--qk-head-dim", type=int, help="channels of a key that are not rotated; default: 128")
    group.add_argument("--qk-pos-emb-head-dim", type=int, help="channels of a key that are rotated; default: 64")
    group.add_argument("--v-head-dim", type=int, help="channels of a value; default: 128")
    group.add_argument(
        "--rope-type",
        choices=ROPE_TYPES,
        help="with --multi-latent-attention: how positions are rotated; default: yarn with --rotary-scaling-factor "
        "above 1, else rope",
    )
    group.add_argument(
        "--mtp-num-layers", type=int, help="modules behind the last layer, each predicts a token one place further on"
    )
    group.add_argument(
        "--mtp-loss-scaling-factor",
        type=float,
        default=0.1,
        help="weight of the mean of their losses; with --mtp-num-layers",
    )
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    _switch(group, "--swiglu", help="gated MLP with SiLU")
    _switch(group, "--quick-geglu", help="gated MLP with x * sigmoid(1.702 x), as gpt-oss (local layers only)")
    group.add_argument(
        "--activation-func-clamp-value",
        type=float,
        metavar="X",
        help="with --quick-geglu: what is gated stays between -X and X, and its gate below X; default: no limits",
    )
    group.add_argument(
        "--glu-linear-offset",
        type=float,
        default=0.0,
        metavar="X",
        help="with --quick-geglu: added to what is gated; 1 in gpt-oss; default: 0",
    )
    _switch(group, "--disable-bias-linear", help="no biases in the linear layers")
    _switch(group, "--add-qkv-bias", help="biases in the QKV projection only")
    _switch(group, "--untie-embeddings-and-output-weights", help="separate output layer")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--hidden-dropout", type=float, default=0.0)
    group.add_argument(
        "--attention-backend",
        choices=("auto", "flash", "fused", "unfused"),
        default="auto",
        help="kernels of torch's attention: FlashAttention-2, cuDNN, or block-wise matrix products; auto logs its "
        "choice; passed on to TransformerEngine where its layers are used",
    )
    _switch(group, "--bf16", help="bfloat16 weights and activations, float32 gradients and optimizer")
    _switch(
        group,
        "--grad-reduce-in-bf16",
        help="with --bf16: gradients are added up, kept and reduced in bfloat16; the optimizer's step copies its share "
        "of them to float32",
    )
    _switch(
        group,
        "--fp32-residual-connection",
        help="with --bf16: what attention and MLP add up stays in float32 from layer to layer (local layers only)",
    )
    group.add_argument(
        "--fp8-format",
        dest="fp8",
        choices=FORMATS,
        help="with --bf16 and TransformerEngine's layers: their matrix products are in FP8; hybrid: gradients in e5m2; "
        "a rank's tokens are padded to multiples of 16, of 32 for mxfp8, times TP with sequence parallelism",
    )
    group.add_argument(
        "--fp8-recipe",
        choices=tuple(ALIGNMENTS),
        help="how products in FP8 are scaled; delayed (the default, as in Megatron-LM) follows what was packed before",
    )
    _switch(group, "--use-cpu-initialization", help="initialise weights on the CPU (always so on CPU ranks)")
    group.add_argument(
        "--transformer-impl",
        choices=TRANSFORMER_IMPLS,
        help="layers of megatron-core with torch's attention, or those of TransformerEngine; default: the latter where "
        "they can be used (installed, CUDA, --bf16), otherwise local",
    )
    _add_fusions(group)
    for flag in ALREADY_SO:
        _switch(group, flag, help=argparse.SUPPRESS)


def _add_stretched_positions(group: Any) -> None:
    group.add_argument(
        "--no-rope-freq",
        type=no_rope_freq,
        metavar="N|LIST",
        help="layers without RoPE: every N-th, or a list with 1 for each layer without it and 0 with it, such as "
        "[0,0,0,1]*4; default: none",
    )
    group.add_argument(
        "--rotary-seq-len-interpolation-factor", type=int, metavar="N", help="RoPE: divide positions by this"
    )
    _switch(group, "--use-rope-scaling", help="RoPE: lower the slow frequencies, as Llama 3.1, for samples beyond 8192")
    group.add_argument("--rope-scaling-factor", type=float, default=8.0, help="with --use-rope-scaling: by how much")
    group.add_argument("--rotary-scaling-factor", type=float, help="YaRN: stretch positions by this, above 1")
    group.add_argument(
        "--yarn-original-max-position-embeddings",
        type=int,
        help="YaRN: longest sample before positions were stretched; default: 4096",
    )
    group.add_argument("--yarn-beta-fast", type=float, help="YaRN: turns from which on none is stretched; default: 32")
    group.add_argument("--yarn-beta-slow", type=float, help="YaRN: turns up to which all are stretched; default: 1")
    group.add_argument("--mscale", type=float, help="YaRN: weight of its concentration; default: 1")
    group.add_argument(
        "--mscale-all-dim", type=float, help="YaRN: weight of what the concentration is divided by; default: 0"
    )
    group.add_argument(
        "--yarn-correction-range-round-to-int",
        action=argparse.BooleanOptionalAction,
        help="YaRN: round where stretching begins and ends to whole channels; default: yes",
    )


def _add_expert_arguments(parser: argparse.ArgumentParser) -> None:
    """Without a value each is as `experts.DEFAULTS` says; what is given without --num-experts is refused."""
    group = parser.add_argument_group("experts")
    group.add_argument("--num-experts", type=int, help="experts of a layer that has some; default: a dense model")
    group.add_argument(
        "--moe-layer-freq",
        type=layer_freq,
        metavar="N|LIST",
        help="layers with experts: the first of every N, or a list with 1 for each layer that has some and 0 for a "
        "dense one, such as [0]+[1]*3; default: all",
    )
    group.add_argument("--moe-ffn-hidden-size", type=int, help="of each expert; default: --ffn-hidden-size")
    group.add_argument(
        "--moe-shared-expert-intermediate-size", type=int, help="of the expert that every token goes to; default: none"
    )
    _optional_switch(group, "--moe-shared-expert-gate", help="weigh the shared expert by a gate")
    _optional_switch(
        group, "--moe-grouped-gemm", help="all experts of a rank in one product (TransformerEngine's layers only)"
    )
    group.add_argument(
        "--moe-router-topk", type=int, help=f"experts of a token; default: {DEFAULTS['moe_router_topk']}"
    )
    group.add_argument(
        "--moe-router-score-function", choices=("softmax", "sigmoid"), help="weights of experts; default: softmax"
    )
    _optional_switch(group, "--moe-router-pre-softmax", help="softmax over all experts, before some are chosen")
    group.add_argument("--moe-router-num-groups", type=int, help="groups of experts that tokens are limited to some of")
    group.add_argument("--moe-router-group-topk", type=int, help="groups of a token")
    group.add_argument("--moe-router-topk-scaling-factor", type=float, help="factor of the weights of chosen experts")
    group.add_argument("--moe-router-dtype", choices=("fp32", "fp64"), help="default: that of activations")
    _optional_switch(
        group, "--moe-router-enable-expert-bias", help="shift the choice towards experts that had fewer tokens"
    )
    group.add_argument(
        "--moe-router-bias-update-rate",
        type=float,
        help=f"by how much in each step; default: {DEFAULTS['moe_router_bias_update_rate']}",
    )
    group.add_argument(
        "--moe-router-load-balancing-type",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(BALANCING)}; the first two are the same here: each sample has a loss; default: aux_loss",
    )
    group.add_argument(
        "--moe-aux-loss-coeff", type=float, nargs="+", metavar="X", help="factor of it, one for each; default: 0"
    )
    group.add_argument("--moe-z-loss-coeff", type=float, help="factor of the loss on large logits; default: 0")
    group.add_argument(
        "--moe-token-dispatcher-type", choices=("alltoall", "allgather", "flex"), help="alltoall is the one supported"
    )
    _optional_switch(group, "--moe-per-layer-logging", help="router losses of each layer, to TensorBoard and W&B")


def _optional_switch(group: Any, *flags: str, help: str) -> None:
    """A switch that says whether it was given."""
    group.add_argument(*flags, action="store_true", default=None, help=help)


def _add_fusions(group: Any) -> None:
    """Megatron-LM has the four switches in their negative form only; without either form it depends on the device."""
    for flag, what in (
        (
            "--gradient-accumulation-fusion",
            "matrix products add weight gradients to their buffers; needs apex's kernel",
        ),
        ("--bias-swiglu-fusion", "compile bias and SwiGLU into one kernel"),
        ("--bias-gelu-fusion", "compile bias and GELU into one kernel, which uses the tanh form of GELU"),
        ("--bias-dropout-fusion", "compile bias, dropout and residual into one kernel"),
    ):
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, help=f"{what}; default: on CUDA, where it is available"
        )
    _switch(group, "--cross-entropy-loss-fusion", help="fewer passes over the logits in the loss")
    group.add_argument(
        "--cross-entropy-fusion-impl",
        choices=("native", "te"),
        help="with --cross-entropy-loss-fusion: megatron-core's compiled one or TransformerEngine's; default: native",
    )


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=1, help="always 1: a micro-batch is a pack of samples")
    group.add_argument("--global-batch-size", type=int, help="samples of one step; default: one per lane")
    group.add_argument(
        "--rampup-batch-size",
        type=int,
        nargs="+",
        metavar="N",
        help="START INCREMENT SAMPLES: global batches begin with START samples and grow by INCREMENT, in equal shares "
        "of the first SAMPLES samples, up to --global-batch-size",
    )
    group.add_argument("--train-iters", type=int, help="iterations of the whole run, including those before a resume")
    group.add_argument("--train-samples", type=int, help="samples of the whole run, instead of --train-iters")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--exit-interval", type=int, help="save and exit at every iteration that is a multiple of this")
    group.add_argument("--exit-duration-in-mins", type=float, help="save and exit after this time")
    group.add_argument("--eval-interval", type=int, help="iterations between evaluations; default: only at the end")
    group.add_argument("--eval-iters", type=int, default=0, help="global batches of one evaluation; 0 = no evaluation")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"))
    group.add_argument("--recompute-num-layers", type=int)
    group.add_argument(
        "--recompute-modules",
        nargs="+",
        metavar="NAME",
        help="with --recompute-granularity selective: core_attn (attention with its exchange), mlp, layernorm (both "
        "norms of a layer, local layers only), moe (router and experts with their exchange); default: core_attn",
    )
    _switch(group, "--recompute-activations", help="same as --recompute-granularity selective")


def _add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=("adam",), default="adam")
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"), default="linear"
    )
    group.add_argument("--lr-warmup-init", type=float, default=0.0)
    group.add_argument("--lr-warmup-iters", type=int)
    group.add_argument("--lr-warmup-samples", type=int)
    group.add_argument("--lr-warmup-fraction", type=float, help="share of the decay")
    group.add_argument("--lr-decay-iters", type=int, help="default: the whole run")
    group.add_argument("--lr-decay-samples", type=int)
    group.add_argument("--lr-wsd-decay-iters", type=int)
    group.add_argument("--lr-wsd-decay-samples", type=int)
    group.add_argument("--lr-wsd-decay-style", choices=("linear", "cosine", "exponential"), default="exponential")
    _switch(group, "--override-opt_param-scheduler", help="after loading, keep the schedule of the command line")
    _switch(group, "--use-checkpoint-opt_param-scheduler", help="after loading, keep the schedule of the checkpoint")
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    _switch(
        group,
        "--use-precision-aware-optimizer",
        help="with --bf16 and --use-distributed-optimizer: TransformerEngine's FusedAdam (CUDA) keeps its state in the "
        "dtypes below, and of a float32 master weight the half that the bfloat16 weight lacks",
    )
    for name, dtypes in DTYPES_OF.items():
        help = "with it: of gradients; bf16: as --grad-reduce-in-bf16" if name == "main_grads_dtype" else None
        group.add_argument(f"--{name.replace('_', '-')}", choices=dtypes, default="fp32", help=help)


def _add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument(
        "--expert-model-parallel-size",
        type=int,
        default=1,
        metavar="EP",
        help="neighbouring ranks of a stage that share the experts of a layer: 1, 2, 4, ...",
    )
    group.add_argument(
        "--expert-tensor-parallel-size",
        type=int,
        metavar="1",
        help="always 1 here, which is the default: whole experts",
    )
    for place in ("first", "last"):
        group.add_argument(
            f"--decoder-{place}-pipeline-num-layers",
            type=int,
            help=f"layers of the {place} stage; the others share the rest evenly; default: as many as every stage",
        )
    _switch(group, "--account-for-embedding-in-pipeline-split", help="the embedding counts as a layer of its stage")
    _switch(group, "--account-for-loss-in-pipeline-split", help="LM head and loss count as a layer of their stage")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    _switch(group, "--sequence-parallel", help="split activations of norms and dropout over tensor-parallel ranks")
    _switch(group, "--use-distributed-optimizer", help="shard the optimizer over the lanes")
    _switch(group, "--overlap-grad-reduce", help="reduce gradients during the backward pass")
    _switch(group, "--overlap-param-gather", help="gather parameters during the forward pass")
    group.add_argument("--distributed-timeout-minutes", type=float, default=10.0)
    group.add_argument(
        "--stopped-process-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds after which a stopped process of a rank (SIGSTOP) is killed; 0: never",
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        help="[WEIGHT] PATH ...: folders, JSONL, JSON or parquet files, .bin/.idx prefixes",
    )
    group.add_argument(
        "--num-workers",
        type=int,
        default=1,
        help="processes per rank that read and pack the samples of coming steps; 0: the rank does it inside the step",
    )
    group.add_argument("--data-glob", default="**/*", help="files of a folder in --data-path")
    group.add_argument(
        "--data-cache-path",
        metavar="DIR",
        help="where indexes of data, and lines of packed files, are kept; default: beside the data, or else in the "
        "user's cache folder",
    )
    group.add_argument("--json-key", default="text", help="text field of a JSONL line")
    group.add_argument(
        "--overlong",
        choices=OVERLONG_POLICIES,
        help="documents longer than --seq-length: refuse, cut, leave out, or split into consecutive pieces; "
        "default: split, with --sft error",
    )
    group.add_argument("--split", default="969,30,1", help="shares of training, validation and test documents")
    group.add_argument("--tokenizer-type", choices=TOKENIZERS, default="ByteTokenizer", help="text to tokens")
    group.add_argument(
        "--tokenizer-model", metavar="DIR", help="local folder with the tokenizer.json of HuggingFaceTokenizer"
    )
    group.add_argument(
        "--eod-id",
        type=int,
        help="token that ends a document of .bin/.idx data, if it has one; or instead of eos_token",
    )
    group.add_argument("--vocab-size", type=int, help="token ids of .bin/.idx data; text tokenizers know theirs")
    _switch(group, "--sft", help="records are chats (docs/how-to/sft.md); loss only on what the assistant wrote")
    group.add_argument(
        "--chat-template", metavar="FILE|NAME", help="with --sft: Jinja, or chatml; default: the tokenizer's own"
    )
    _switch(group, "--mock-data", help="random tokens")
    _switch(group, "--use-varlen-dataset", help="accepted: samples always have their own lengths")
    group.add_argument("--varlen-mock-dataset-config-json", metavar="JSON|FILE", help="lengths of --mock-data")


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR")
    group.add_argument("--save-interval", type=int, help="iterations between checkpoints; the last one is always saved")
    group.add_argument(
        "--load", metavar="DIR", help="resume from here; starts from scratch if the folder has no checkpoint"
    )
    _switch(
        group, "--async-save", help="write checkpoints in processes beside the training; the run waits for the last"
    )
    group.add_argument("--ckpt-format", choices=("torch_dist",), default="torch_dist")
    _switch(group, "--finetune", help="load the weights only and start at iteration 0")
    _switch(group, "--exit-on-missing-checkpoint", help="end with an error if --load has no checkpoint")


def _add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--log-interval", type=int, default=1, help="iterations that one log line averages")
    group.add_argument("--tensorboard-dir", metavar="DIR")
    group.add_argument("--wandb-project", metavar="NAME", help="also log to this project of Weights & Biases")
    group.add_argument("--wandb-exp-name", metavar="NAME", help="the run's name there")
    group.add_argument("--wandb-entity", metavar="NAME", help="whose project it is; default: the logged-in user's")
    group.add_argument("--wandb-save-dir", metavar="DIR", help="where wandb keeps its files; default: wandb in --save")


def _add_profiling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profiling")
    _switch(group, "--profile", help="record some iterations: NVTX ranges and the CUDA profiler's range, for nsys")
    group.add_argument("--profile-step-start", type=int, default=10, metavar="N", help="record after this iteration")
    group.add_argument("--profile-step-end", type=int, default=12, metavar="N", help="... up to this one")
    group.add_argument(
        "--profile-ranks", type=int, nargs="+", default=[0], metavar="RANK", help="ranks that record; default: 0"
    )
    _switch(group, "--use-pytorch-profiler", help="with --profile: write a trace of torch.profiler instead")
    group.add_argument("--profile-dir", metavar="DIR", help="where the traces go; default: --tensorboard-dir")
    _switch(group, "--pytorch-profiler-collect-shapes", help="shapes of operands in the trace")
    _switch(group, "--pytorch-profiler-collect-callstack", help="Python call stacks in the trace")
