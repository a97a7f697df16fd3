"""Megatron-LM's command line with the flags of dynamic context parallelism: added, refused, translated.

`--context-parallel-size C` becomes the CP size of the static plan; Megatron-LM itself is built with 1, because every
micro-batch brings its own group. Other flags of Megatron-LM keep their meaning and their parser.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import TRANSFORMER_IMPLS
from dynamic_cp.models.table import add_group, check_ranges, destination_of
from dynamic_cp.types import AUTO, RING_ALONE, UNPLACED, ModelShape, PipelineLayers, StateDtypes
from megatron.dynamic_cp.flags import shape
from megatron.dynamic_cp.flags.attention import check_norms, check_positions
from megatron.dynamic_cp.flags.exclusions import PATTERN
from megatron.dynamic_cp.flags.experts import check_experts
from megatron.dynamic_cp.flags.features import check_activation, check_latent_attention, has_latents, qk_width
from megatron.dynamic_cp.flags.linear_attention import check_linear_attention, pattern_of
from megatron.dynamic_cp.flags.settings import PlanningSettings, tokens_or_auto
from megatron.dynamic_cp.flags.supported import UNSUPPORTED, Unsupported
from megatron.integrations.lm_adaptor import checkout
from megatron.trainer.data.config import OVERLONG_POLICIES
from megatron.trainer.flags.settings import DYNAMIC_CP, TABLE
from megatron.trainer.flags.validation import check_micro_batch_size, planning_settings

_DESTINATIONS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}  # attributes that are not named like the flag
_EXCHANGE_NAMES = {"allgather": "all_gather"}  # Megatron-LM's name -> ours
_LOOP = "it changes the training loop that dynamic context parallelism takes part in"
_DATA = "global batches are drawn in the order of one data set"
_OURS = "(pretrain_gpt.py of this project has the flag)"
_LIMIT = "--max-seqlen-per-dp-cp-rank"

STOCK_SPECS = (
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
)
"""Values of --spec that are let through: 0.18 needs them for layers of a pattern, and ours take their places."""

REFUSED: tuple[Unsupported, ...] = (
    *UNSUPPORTED,
    Unsupported("--use-legacy-models", "only megatron-core models take a CP group per micro-batch"),
    Unsupported("--spec", "--dynamic-cp has its own layer specification", off=STOCK_SPECS),
    Unsupported(
        "--transformer-impl", "layers for inference do not train with a CP group per micro-batch", off=TRANSFORMER_IMPLS
    ),
    Unsupported("--dataloader-type", _DATA, off=("single",)),
    Unsupported("--dataloader-save", "what was drawn ahead is not part of a loader's state"),
    Unsupported(
        "--mtp-num-layers",
        f"columns of later tokens are made where samples are read, which a checkout's script does itself {_OURS}",
        off=(0,),
    ),
    Unsupported("--dynamic-cp-pool", f"it was not checked in a checkout {_OURS}", off=("off",)),
    Unsupported("--fp8-format", f"it was not checked in a checkout {_OURS}", "fp8"),
    Unsupported("--perform-rl-step", _LOOP),
    Unsupported("--inprocess-restart", _LOOP),
    Unsupported("--iterations-to-skip", _LOOP, off=([],)),
    Unsupported("--result-rejected-tracker-filename", _LOOP),
    Unsupported("--save-wgrads-interval", _LOOP),
    Unsupported("--save-dgrads-interval", _LOOP),
    Unsupported("--save-activations-interval", _LOOP),
    Unsupported("--save-tokens-per-expert-interval", _LOOP),
    Unsupported("--logits-save-dir", _LOOP),
    Unsupported("--logits-load-dir", _LOOP),
    Unsupported("--optimizer-cuda-graph", _LOOP),
    Unsupported("--vision-pretraining", _LOOP),
    Unsupported("--decrease-batch-size-if-needed", "a global batch of any size is possible"),
    Unsupported("--rampup-batch-size", f"global batches of a checkout are drawn with one size {_OURS}"),
    Unsupported("--step-batch-size-schedule", "the global batch has one size for the whole run"),
    Unsupported("--eval-global-batch-size", "evaluation has the global batch size of training"),
    Unsupported("--eval-micro-batch-size", "a micro-batch is a pack of samples", off=(1,)),
    Unsupported("--dataloader-inter-document-masking", "--use-varlen-dataset makes documents samples"),
    Unsupported("--full-validation", _DATA),
    Unsupported("--multiple-validation-sets", _DATA),
    Unsupported("--phase-transition-iterations", _DATA),
    Unsupported("--data-parallel-random-init", "lanes hold the same weights"),
    Unsupported("--log-max-attention-logit", "the attention does not report it"),
)
PATTERNS = tuple(
    Unsupported(flag, f"checkouts train layers of a pattern from {checkout.BATCH_OF_FIELDS.since} on {_OURS}")
    for flag in (PATTERN, "--hybrid-layer-pattern")
)
"""Refused in checkouts before `checkout.BATCH_OF_FIELDS`, whose script builds its micro-batches in another form."""


def _refused() -> tuple[Unsupported, ...]:
    return REFUSED if checkout.BATCH_OF_FIELDS.here else REFUSED + PATTERNS


class Setting(NamedTuple):
    """A value of Megatron-LM's arguments, set by users with `flag`, that --dynamic-cp sets whatever the command line
    says. If `is_planned`, the plan follows what the user gave; only Megatron-LM itself gets `value`."""

    name: str
    flag: str
    value: Any
    reason: str
    is_planned: bool = False


_STATIC = "every micro-batch brings its own CP group; the flag's value is the CP size of the static plan"
FORCED: tuple[Setting, ...] = (
    Setting("context_parallel_size", "--context-parallel-size", 1, _STATIC, is_planned=True),
    Setting("cp_comm_type", "--cp-comm-type", [*RING_ALONE], "each bucket of the plan has its own", is_planned=True),
    Setting("max_seqlen_per_dp_cp_rank", _LIMIT, None, "the planner keeps the limit", is_planned=True),
    Setting(
        "calculate_per_token_loss",
        "--calculate-per-token-loss",
        True,
        "gradients are sums over tokens, divided once: exact for any mixture of CP sizes",
    ),
    Setting(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type",
        "alltoall",
        "megatron-core accepts variable_seq_lengths with it only, also without experts",
    ),
    Setting(
        "create_attention_mask_in_dataloader",
        "--no-create-attention-mask-in-dataloader",
        False,
        "attention is causal within each sample",
    ),
    Setting(
        "rerun_mode",
        "--rerun-mode",
        "disabled",
        "a step cannot be run again from its micro-batches; losses are still checked for NaN",
    ),
)


class _Additions:
    """A parser that adds only flags that the wrapped one lacks."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def add_argument_group(self, *args: Any, **kwargs: Any) -> _Additions:
        return _Additions(self._parser.add_argument_group(*args, **kwargs))

    def add_argument(self, *flags: str, **kwargs: Any) -> None:
        with contextlib.suppress(argparse.ArgumentError):  # Megatron-LM has it
            self._parser.add_argument(*flags, **kwargs)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron-LM's parser and return it."""
    additions = _Additions(parser)
    add_group(additions, DYNAMIC_CP, TABLE)
    group = additions.add_argument_group("samples of their own lengths")
    group.add_argument(
        "--use-varlen-dataset",
        action="store_true",
        help="each document of --data-path (.bin/.idx) or of --mock-data is a sample of its own length",
    )
    group.add_argument("--varlen-mock-dataset-config-json", metavar="JSON|FILE", help="lengths of --mock-data")
    group.add_argument(
        "--overlong",
        choices=OVERLONG_POLICIES,
        default="split",
        help="documents of --use-varlen-dataset that are longer than --seq-length",
    )
    group.add_argument("--eod-id", type=int, help="token that ends a document of .bin/.idx data, if it has one")
    return parser


def accept_auto(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let Megatron-LM's flag for the token limit take "auto" beside a number; return its parser."""
    for action in parser._actions:
        if _LIMIT in action.option_strings:
            action.type = tokens_or_auto
    return parser


def refuse(args: argparse.Namespace) -> None:
    """Raise UnsupportedFeatureError for a refused flag of Megatron-LM, InvalidInputError for a value that cannot be."""
    for feature in _refused():
        if not feature.is_off(getattr(args, destination(feature.flag), None)):
            raise feature.error()
    check_micro_batch_size(args.micro_batch_size)
    if len(args.cp_comm_type) != 1:
        raise InvalidInputError(
            f"--cp-comm-type has {len(args.cp_comm_type)} values, one per layer is not possible: give one"
        )
    exchange = exchange_of(args)
    if exchange not in (AUTO, *UNPLACED):
        raise InvalidInputError(f"--cp-comm-type {exchange} is unknown: use auto, {', '.join(UNPLACED)}")
    check_ranges(args, PlanningSettings)
    if args.use_varlen_dataset and (args.sft or args.fim_data):
        raise InvalidInputError("--use-varlen-dataset excludes --sft and --fim-data: leave one of them out")


def refuse_without_effect(args: argparse.Namespace) -> None:
    """Raise InvalidInputError for a flag of ours that needs another one which was not given."""
    for flag in ("--eod-id", "--varlen-mock-dataset-config-json"):
        if not args.use_varlen_dataset and getattr(args, destination(flag)) is not None:
            raise InvalidInputError(f"{flag} needs --use-varlen-dataset: add it, or leave {flag} out")
    if args.dynamic_cp:
        return
    needing = "--dynamic-cp-dump --dynamic-cp-replay --dynamic-cp-refine --use-varlen-dataset"
    for flag in (*needing.split(), "--window-sink-tokens", "--loss-chunk-tokens"):
        if getattr(args, destination(flag)):
            raise InvalidInputError(f"{flag} needs --dynamic-cp in a checkout: add it, or leave {flag} out")
    if args.max_seqlen_per_dp_cp_rank == "auto":
        raise InvalidInputError(f"{_LIMIT} auto needs --dynamic-cp in a checkout: add it, or leave {_LIMIT} out")


def refuse_on_cpu(args: argparse.Namespace) -> None:
    """Raise UnsupportedFeatureError for a flag that does not work on CPU ranks."""
    worker = Unsupported(
        "--use-persistent-ckpt-worker",
        "on CPU ranks Megatron-LM's worker ends, for lack of a CUDA device, and the first save waits for it",
    )
    if getattr(args, destination(worker.flag), False):
        raise worker.error()


@contextlib.contextmanager
def any_evaluation_batch(args: argparse.Namespace) -> Iterator[None]:
    """Let Megatron-LM validate a global batch for evaluation that lanes divide, and set training's afterwards."""
    if not hasattr(args, "eval_global_batch_size"):
        yield
        return
    args.eval_global_batch_size = args.world_size
    yield
    args.eval_global_batch_size = args.global_batch_size


def refuse_loaded(args: argparse.Namespace) -> None:
    """Check validated arguments again, because --use-checkpoint-args may have changed them. UnsupportedFeatureError
    names a flag; InvalidInputError: flags of positions, activations, experts, latent or linear attention disagree."""
    follows_from_others = {"--eval-global-batch-size"}
    for feature in _refused():
        value = getattr(args, destination(feature.flag), None)
        if feature.flag not in follows_from_others and not feature.is_off(value):
            raise feature.error()
    check_norms(args)
    check_positions(args)
    check_experts(args)
    check_activation(args)
    if has_latents(args):
        check_latent_attention(with_heads(args))
    check_linear_attention(with_heads(args))
    if "gdn_norm_out" in (getattr(args, "recompute_modules", None) or ()) and not checkout.NORMS_RECOMPUTED.here:
        raise Unsupported(
            "--recompute-modules gdn_norm_out",
            f"the TransformerConfig of checkouts knows it from {checkout.NORMS_RECOMPUTED.since} on {_OURS}",
        ).error()


def destination(flag: str) -> str:
    """Return the attribute in which Megatron-LM's parser puts the value of `flag`."""
    return _DESTINATIONS.get(flag, destination_of(flag))


def exchange_of(args: argparse.Namespace) -> str:
    """Return the exchange that --cp-comm-type names, in our spelling."""
    name = str(args.cp_comm_type[0])
    return _EXCHANGE_NAMES.get(name, name)


def translate(args: argparse.Namespace) -> argparse.Namespace:
    """Set what --dynamic-cp needs in `args` before Megatron-LM validates them; return what was given. See `refuse`."""
    refuse(args)
    asked = copy.copy(args)
    if args.micro_batch_size is None:
        args.micro_batch_size = 1
    for setting in FORCED:
        if hasattr(args, setting.name):
            setattr(args, setting.name, setting.value)
    return asked


def overridden(asked: argparse.Namespace, argv: Sequence[str]) -> list[tuple[int, str]]:
    """Return (logging level, line) for each value of `asked`, given on the command line `argv`, that FORCED changes."""
    given = {word.split("=", 1)[0] for word in argv}
    lines = []
    for setting in FORCED:
        value = getattr(asked, setting.name, setting.value)
        if setting.flag not in given or value == setting.value:
            continue
        old, new = (" ".join(map(str, one)) if isinstance(one, list) else one for one in (value, setting.value))
        if setting.is_planned:
            lines.append((logging.INFO, f"{setting.flag} {old} is for plans, Megatron-LM gets {new}: {setting.reason}"))
        else:
            lines.append((logging.WARNING, f"{setting.flag} {old} becomes {new}: {setting.reason}"))
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """How a checkout's run is planned. `arguments` are Megatron-LM's, for dumps, with what the user asked for."""

    settings: PlanningSettings
    arguments: Mapping[str, Any]


def planned(asked: argparse.Namespace, args: argparse.Namespace) -> Planned:
    """Return how a run is planned, from arguments as the user gave them (`asked`) and as Megatron-LM validated them;
    raise DynamicCPError for a CP size, limit or sample length that does not fit the lanes."""
    ours = with_heads(args)
    ours.context_parallel_size = asked.context_parallel_size
    ours.cp_comm_type = exchange_of(asked)
    ours.max_seqlen_per_dp_cp_rank = asked.max_seqlen_per_dp_cp_rank
    for field in fields(StateDtypes):  # as typed: Megatron-LM turns them into torch's dtypes
        setattr(ours, field.name, getattr(asked, field.name, field.default))
    settings = planning_settings(ours, auto_places=False)
    return Planned(settings=settings, arguments=MappingProxyType({**vars(ours), **settings.completed_flags()}))


def model_shape(args: argparse.Namespace, pipeline_layers: PipelineLayers = ()) -> ModelShape:
    """Return the numbers of a checkout's model that decide its cost, from arguments with the padded vocabulary."""
    return shape.model_shape(with_heads(args), args.padded_vocab_size, pipeline_layers)


def with_heads(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of Megatron-LM's arguments that says heads and layers of a pattern as our own trainer does.

    `num_query_groups` is the number of KV heads also without --group-query-attention, and `kv_channels` the width of a
    head also with latent attention, where Megatron-LM neither sets nor reads it.
    """
    copied = copy.copy(args)
    if not args.group_query_attention:
        copied.num_query_groups = args.num_attention_heads
    if has_latents(args):
        copied.kv_channels = qk_width(args)
    copied.hybrid_override_pattern = pattern_of(args) or None
    return copied
