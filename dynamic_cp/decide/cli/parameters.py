"""What several commands are given: options of a global batch and of a job, and the values that they stand for."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from dynamic_cp.decide.cli.options import Names, Numbers, TokensOrAuto, option, options_in, options_of, taken
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.config_json.architecture import as_flags
from dynamic_cp.decide.mask_rules import masks_by_rule
from dynamic_cp.decide.setting import (
    EXCHANGES,
    LIMIT_DIVISORS,
    MAX_VP_SIZE,
    RECOMPUTED,
    TP_OVERLAPS,
    TpOverlap,
    sizes_in,
)
from dynamic_cp.decide.stage_splits import in_stages, why_no_split
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.models.catalog import hardware_of_layers, is_of_local_layers
from dynamic_cp.models.flags import FP8_ALIGNMENTS, FP8_BLOCK, FP8_FORMATS, FP8_RECIPES
from dynamic_cp.types import (
    AUTO,
    AUTO_CHUNK_TOKENS,
    CAUSAL,
    CHOICES,
    DTYPES_OF,
    NOISE_MARGIN,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODES,
    SEARCH_EFFORTS,
    STATE_EXCHANGE_USES,
    CpCommType,
    DataParallel,
    Hardware,
    ModelShape,
    PlanOptions,
    Recompute,
    RecomputedLayers,
    RecomputeMethod,
    Sample,
    SearchEffort,
    StateDtypes,
    StateExchangeUse,
    Topology,
    allowed_exchanges,
    chunk_tokens,
    is_placed,
    is_power_of_two,
)
from dynamic_cp.types.experts import DISPATCHERS, Dispatcher
from dynamic_cp.types.experts import EXPERT_IMBALANCE as DEFAULT_IMBALANCE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dynamic_cp.decide.sweep import Space, SweepJob

DEFAULT_MAX_SEQLEN = 131072
MAX_SAMPLES = 10_000_000
"""Samples of one global batch: more would take gigabytes and minutes."""
MAX_BATCHES = 1000
OVERLONG = ("truncate", "drop", "split", "error")
KINDS = ".npy, .txt, .csv, .jsonl, .parquet, .idx"
"""Files that `length_files.read_length_array` reads (which imports numpy)."""
CP_COMM_TYPE = AUTO
"""Default exchange of a given layout."""
DEFAULT_POLICIES = "dynamic,static,balanced,megatron-dev"

Batches = tuple[tuple[Sample, ...], ...]
_Command = TypeVar("_Command", bound=Callable[..., Any])
_Input = TypeVar("_Input", bound="RunInput")


def workload_names() -> tuple[str, ...]:
    """Return the bundled workloads (numpy is imported here, not at start)."""
    from dynamic_cp.decide import workloads

    return workloads.workload_names()


LENGTHS = Names("FILE|NAME", workload_names)


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """Which global batches there are.

    Attributes:
        known: the lengths in the file, where somebody has read it already.
        size_flag: option that says how many samples are drawn, for messages.
    """

    lengths: str
    global_batch_size: int | None = option("Number of samples to draw, with replacement.", int)
    batches: int | None = option("Number of global batches to draw. [default: {batches}]", int)
    seed: int | None = option("Seed of the first batch; each further batch takes the next number. [default: 0]", int)
    max_seqlen: int | None = option(
        f"Longest sample that is drawn. [default: {DEFAULT_MAX_SEQLEN} for a workload, no limit for a file]",
        int,
        metavar="TOKENS",
    )
    overlong: str | None = option(
        "What to do with drawn documents longer than --max-seqlen. [default: truncate]", OVERLONG
    )
    mask: str = option(
        "Which keys of its sample a token attends to: causal, full, lambda:SINK,WINDOW (tokens), "
        "causal_blockwise:BLOCK,LOCAL[,SINK] (tokens of a block, blocks), shared_question:4x0.2 (4 answers, a prompt "
        "of 0.2 of the tokens), or tree:2x4x0.2 (so at several levels). To plan with: pretrain_gpt.py trains causal, "
        "prompts whose lines have responses, and trees of turns.",
        default=CAUSAL.name,
        metavar="MASK",
    )
    known: NDArray[np.int64] | None = None
    size_flag: str = "--global-batch-size"

    @property
    def is_file(self) -> bool:
        """Whether the lengths are a file or a pipe, not a workload or a formula."""
        from dynamic_cp.decide.length_files import STDIN  # with numpy, which --help does without

        name = self.lengths
        if name == STDIN or self.known is not None:
            return True
        if name.startswith("lognormal:") or name in workload_names():
            return False
        return "/" in name or Path(name).suffix != "" or os.path.lexists(name)

    @property
    def cut_tokens(self) -> int | None:
        """Tokens of the longest sample that may be drawn; None = as long as there are in a file."""
        if self.max_seqlen is not None:
            return self.max_seqlen
        return None if self.is_file or self.global_batch_size is None else DEFAULT_MAX_SEQLEN

    def draw(self, default_batches: int = 1) -> tuple[tuple[Sample, ...], ...]:
        """Return the global batches: those that a file marks, or as many as asked for, drawn from it or a workload.

        Raises:
            DynamicCPError: unknown name, unreadable file, numbers out of range.
        """
        from dynamic_cp.decide.given_batches import read_batches
        from dynamic_cp.decide.workloads import draw_lengths, workload_source

        name, num_samples = self.lengths, self.global_batch_size
        if num_samples is None:
            if not self.is_file:
                if not name.startswith("lognormal:"):
                    workload_source(name)  # an unknown name is the first thing to say
                raise InvalidInputError(
                    f"--lengths {name} is a workload without a number of samples: give --global-batch-size"
                )
            for flag in ("batches", "seed", "max_seqlen", "overlong"):
                if getattr(self, flag) is not None:
                    raise InvalidInputError(
                        f"--{flag.replace('_', '-')} is about drawing a batch, but all of {name} is taken as it "
                        f"is: give {self.size_flag}, or leave it out"
                    )
            given = read_batches(name) if self.known is None else (self.known,)
            if len(given) > MAX_BATCHES:
                raise InvalidInputError(
                    f"{name} holds {len(given)} global batches, 1 to {MAX_BATCHES} can be compared: give fewer"
                )
            return self._batches([one.tolist() for one in given])
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidInputError(
                f"--global-batch-size is {num_samples}, 1 to {MAX_SAMPLES} samples can be planned at once: change it"
            )
        num_batches = default_batches if self.batches is None else self.batches
        if not 1 <= num_batches <= MAX_BATCHES:
            raise InvalidInputError(f"--batches is {num_batches}, 1 to {MAX_BATCHES} can be compared: change it")
        return self._batches(
            [
                draw_lengths(self._source, num_samples, (self.seed or 0) + index, **self._cut()).tolist()
                for index in range(num_batches)
            ]
        )

    def draw_one(self) -> tuple[Sample, ...]:
        """Return the only global batch; errors as of `draw`, or of a file of several."""
        first, *others = self.draw()
        if others:
            raise InvalidInputError(
                f"{self.lengths} holds {len(others) + 1} global batches, and 1 is planned: compare all with simulate "
                "or sweep, give a file of one, or draw one with --global-batch-size"
            )
        return first

    def _batches(self, batches: Sequence[Sequence[int]]) -> tuple[tuple[Sample, ...], ...]:
        """Return the samples of each batch of lengths, with the masks that --mask gives them."""
        masks = iter(masks_by_rule(self.mask, list(itertools.chain.from_iterable(batches))))
        return tuple(
            tuple(Sample(sample_id=i, seqlen=seqlen, mask=next(masks)) for i, seqlen in enumerate(seqlens))
            for seqlens in batches
        )

    def longest_tokens(self, batches: Sequence[Sequence[Sample]]) -> int:
        """Return the tokens of the longest sample that any global batch may have, not only the drawn `batches`."""
        from dynamic_cp.decide.workloads import longest_length

        if self.global_batch_size is None:
            return max(sample.seqlen for batch in batches for sample in batch)
        return longest_length(self._source, **self._cut())

    @cached_property
    def _source(self) -> str | NDArray[np.int64]:
        """What is drawn from: a pipe is read once, it holds nothing afterwards."""
        from dynamic_cp.decide.length_files import is_pipe, read_length_array

        if self.known is not None or not is_pipe(self.lengths):
            return self.lengths if self.known is None else self.known
        return read_length_array(self.lengths)

    def _cut(self) -> dict[str, Any]:
        """Return what `draw_lengths` wants to know beside name, number and seed."""
        from dynamic_cp.decide.length_formats import MAX_LENGTH

        max_seqlen = MAX_LENGTH if self.cut_tokens is None else self.cut_tokens
        return {
            "max_seqlen": max_seqlen,
            # A file's lengths are the user's own; a workload's start where those of the planner's cases do.
            "min_seqlen": 1 if self.is_file else min(64, max(1, max_seqlen)),
            "overlong": self.overlong or "truncate",
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the options for the inputs of a JSON report, as they took effect; None: it has none here."""
        is_drawn = self.global_batch_size is not None
        return {
            "lengths": self.lengths,
            "global_batch_size": self.global_batch_size,
            "seed": (self.seed or 0) if is_drawn else None,
            "max_seqlen": self.cut_tokens,
            "overlong": (self.overlong or "truncate") if is_drawn else None,
            "mask": None if self.mask == CAUSAL.name else self.mask,
        }


def batch_options(
    *, default_batches: int | None = None, required: bool = True, with_mask: bool = True
) -> Callable[[_Command], _Command]:
    """Add the options that say which global batches there are; default_batches: of a command that takes several."""
    lengths = option(
        f"File of lengths ({KINDS}), or - for stdin: one global batch, or several between blank lines or by a column "
        "named batch, unless --global-batch-size draws from it; a bundled workload to draw from (`dynamic-cp lengths` "
        "lists them); or lognormal:mean=..,sigma=..",
        LENGTHS,
        required=required,
    )
    several = " batches" if default_batches else ""
    names = f"global_batch_size{several} seed max_seqlen overlong{' mask' if with_mask else ''}"
    drawn = options_of(BatchInput, "Global batch", names, batches=str(default_batches))
    return lambda command: options_in("Global batch", lengths=lengths)(drawn(command))


_KEPT = {
    "main_grads_dtype": "gradients",
    "main_params_dtype": "master weights",
    "exp_avg_dtype": "the first moment",
    "exp_avg_sq_dtype": "the second moment",
}
STATE = {
    "grad_reduce_in_bf16": option(
        "Keep and reduce gradients in bf16, not in fp32: half of their memory and of what is sent.", bool
    ),
    "use_precision_aware_optimizer": option(
        "Step by TransformerEngine's FusedAdam: its state has the dtypes below, an fp32 master weight takes 2 bytes "
        "beside the bf16 weight, and gradients in bf16 need no copy in fp32.",
        bool,
    ),
    **{name: option(f"With it: dtype of {_KEPT[name]}.", dtypes, "fp32") for name, dtypes in DTYPES_OF.items()},
}
"""Options of `types.StateDtypes`."""


SET = option(
    "Override a number of the hardware, such as bandwidth_across_nodes=12.5GB/s; may be given several times.",
    flag="--set",
    multiple=True,
    metavar="NAME=VALUE",
)


@dataclass(frozen=True, kw_only=True)
class RunInput:
    """What a job of a given layout and a search have in common."""

    model: str = option(
        f"Model: {', '.join(catalog.model_names())}, a file like those or a Hugging Face config.json.",
        Names("NAME|FILE", catalog.model_names),
        "llama-3-8b",
    )
    hardware: str = option(
        f"Hardware: {', '.join(catalog.hardware_names())}, or a file (`dynamic-cp hardware` writes one). Of a "
        "model that trains with local layers only, h100 and h200 are those of these layers.",
        Names("NAME|FILE", catalog.hardware_names),
        "h100",
    )
    settings: tuple[str, ...] = SET
    mtp_num_layers: int | None = option(
        "Modules of multi-token prediction behind the last layer; Qwen3-Next and Qwen3.5 are published with one, "
        "which their files here leave out. [default: as the model file says]",
        int,
    )
    expert_imbalance: float | None = option(
        "Tokens that routing sends to the rank which gets most, over their mean: time and memory of experts are "
        f"for so many. [default: as the model file says, else {DEFAULT_IMBALANCE}]",
        float,
        metavar="X",
    )
    moe_token_dispatcher_type: str = option(
        "How tokens travel to their experts: alltoall, a copy for each expert; flex, one for each node. "
        "pretrain_gpt.py has alltoall.",
        ("alltoall", "flex"),
        "alltoall",
    )
    moe_flex_dispatcher_backend: str | None = option(
        "With flex: the dispatcher. [default: deepep]", tuple(name for name in DISPATCHERS if name != "alltoall")
    )
    overlap_moe_expert_parallel_comm: bool = option(
        "Tokens travel to experts while another micro-batch computes. pretrain_gpt.py does not have it.", bool
    )
    fp8_format: str | None = option(
        "Products of layers in FP8, with the rates of the hardware; attention, head and weights stay in bf16.",
        FP8_FORMATS,
    )
    fp8_recipe: str | None = option(
        "How products in FP8 are scaled, which decides to how many tokens a rank's are padded. [default: delayed]",
        FP8_RECIPES,
    )
    ranks_per_node: int | None = option(
        "Number of GPUs in a node, or in its NVLink domain. [default: as the hardware says]", int
    )
    loss_chunk_tokens: int | str = option(
        "LM head and loss over chunks of so many tokens, which the backward pass computes again, so that no more "
        f"logits exist at once; auto: {AUTO_CHUNK_TOKENS} times --tp; 0: all tokens.",
        TokensOrAuto(),
        0,
    )
    no_distributed_optimizer: bool = option("Have every lane hold the whole optimizer state.", bool)
    no_overlap_grad_reduce: bool = option(
        "Reduce gradients and gather parameters with nothing beside them, as without --overlap-grad-reduce and "
        "--overlap-param-gather.",
        bool,
    )
    state: StateDtypes = field(default_factory=StateDtypes)
    tp_overlap: TpOverlap = option(
        "Jobs of --gpus whose TP collectives overlap with GEMMs (--tp-comm-overlap): none, as pretrain_gpt.py runs "
        "them; static ones alone, as if padding every pack to one shape cost nothing; or all.",
        TP_OVERLAPS,
        "none",
    )
    search: SearchEffort = option(
        "How long to search; thorough takes about ten times as long, for a better plan of a pipeline; "
        "exact proves the dynamic plan of a tiny batch the fastest.",
        SEARCH_EFFORTS,
        "fast",
    )
    cp_comm_type: str | None = option(
        "Exchange inside a CP group; latent: of multi-latent attention only, a ring of latents; blocks: each tile "
        "of attention on a lane of its own; auto: the fastest for every bucket, blocks only under a --mask or where "
        "layers have windows. [default: {exchange}]",
        CHOICES,
    )
    state_exchange: str = option(
        "How lanes share layers of linear attention: heads by an all-to-all each way, or states passed between the "
        "chunks of a sample, where these fit under the token limit; auto: for every bucket what is faster.",
        STATE_EXCHANGE_USES,
        STATE_EXCHANGE_USES[0],
    )

    @classmethod
    def of(cls: type[_Input], given: Mapping[str, Any]) -> _Input:
        """Return the values of the options of a command; says on stderr where other hardware is taken."""
        hardware = trained_hardware(given["model"], given["hardware"])
        return taken({**given, "hardware": hardware, "state": taken(given, StateDtypes)}, cls)

    @cached_property
    def whole_model(self) -> ModelShape:
        """The model as it trains, with the imbalance of its experts and the modules that are given."""
        model = load_model(self.model, self.hardware, self.expert_imbalance, self.mtp_num_layers)
        backend, overlaps = self.moe_flex_dispatcher_backend, self.overlap_moe_expert_parallel_comm
        is_flex = self.moe_token_dispatcher_type == "flex"
        if backend is not None and not is_flex:
            raise InvalidInputError(
                f"--moe-flex-dispatcher-backend {backend} is a flexible dispatcher, --moe-token-dispatcher-type is "
                f"{self.moe_token_dispatcher_type}: add --moe-token-dispatcher-type flex, or leave it out"
            )
        if model.experts is not None:
            dispatcher = cast(Dispatcher, backend or "deepep") if is_flex else "alltoall"
            return replace(model, experts=replace(model.experts, dispatcher=dispatcher, overlapped=overlaps))
        if is_flex or overlaps:
            flag = "--moe-token-dispatcher-type flex" if is_flex else "--overlap-moe-expert-parallel-comm"
            raise InvalidInputError(f"{flag} is about experts, and {self.model} has none: leave it out")
        return model

    @property
    def model_name(self) -> str:
        """What to call the model: as it was typed, with precision and dispatcher where they are not the usual ones."""
        experts = self.whole_model.experts
        words = ["FP8"] * self.fp8
        if experts is not None and (experts.dispatcher != "alltoall" or experts.overlapped):
            words.append(experts.dispatcher + ", overlapped" * experts.overlapped)
        return f"{self.model} ({', '.join(words)})" if words else self.model

    @cached_property
    def hardware_values(self) -> Hardware:
        """The hardware, with what --set changes."""
        return catalog.load_hardware(self.hardware, self.settings)

    @cached_property
    def fp8(self) -> bool:
        """Whether products of layers are in FP8.

        Raises:
            InvalidInputError: a recipe for nothing, hardware without a rate of FP8, or layers that have none.
        """
        if self.fp8_format is None:
            if self.fp8_recipe is not None:
                raise InvalidInputError(f"--fp8-recipe {self.fp8_recipe} is for products in FP8: add --fp8-format")
            return False
        if not self.hardware_values.fp8_linear_flops_per_s:
            raise InvalidInputError(
                f"--fp8-format {self.fp8_format}, and hardware {self.hardware_name} states no fp8_linear_flops_per_s: "
                "use another --hardware, or add it by --set"
            )
        if (why := why_local(self.model, self.hardware)) is not None:
            raise UnsupportedFeatureError(
                f"--fp8-format {self.fp8_format} is for TransformerEngine's layers, and {self.model} trains with local "
                f"ones ({why}): leave it out"
            )
        return True

    def token_alignment(self, tp_size: int) -> int:
        """Return what a rank's tokens are a multiple of, with sequence parallelism each share of them."""
        recipe = self.fp8_recipe or "delayed"
        if not self.fp8:
            return 1
        return FP8_BLOCK if recipe == "blockwise" and tp_size > 1 else FP8_ALIGNMENTS[recipe]

    def node_ranks(self, world_size: int) -> int:
        """Return the ranks of a node, as they are given or as the hardware has them."""
        return self.hardware_values.node_ranks(world_size) if self.ranks_per_node is None else self.ranks_per_node

    @property
    def hardware_name(self) -> str:
        """What to call the hardware: as it was typed, or with what --set changes."""
        return self.hardware_values.name if self.settings else self.hardware

    @property
    def data_parallel(self) -> DataParallel:
        is_sharded, overlaps = not self.no_distributed_optimizer, not self.no_overlap_grad_reduce
        return DataParallel(
            distributed_optimizer=is_sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and is_sharded,
            state=self.state,
        )

    @property
    def data_parallel_as_dict(self) -> dict[str, Any]:
        """What JSON says of `data_parallel`; of adapters the command has no options."""
        return {name: value for name, value in asdict(self.data_parallel).items() if name != "adapters"}

    @property
    def states(self) -> StateExchangeUse:
        """How lanes may share layers of linear attention.

        Raises:
            InvalidInputError: no default, and the model has none or --cp-comm-type does not go with it.
        """
        use, exchange = self.state_exchange, self.cp_comm_type
        if use != STATE_EXCHANGE_USES[0] and self.whole_model.linear_attention is None:
            raise InvalidInputError(
                f"--state-exchange {use} is for layers with linear attention, and the model has none: give the "
                "--model of a hybrid, or leave it out"
            )
        if use == "heads" and exchange is not None and is_placed(exchange):
            raise InvalidInputError(
                f"--state-exchange heads needs equal chunks of a sample on all lanes, and --cp-comm-type {exchange} "
                "places attention anywhere: leave one of them out"
            )
        return cast(StateExchangeUse, use)

    @property
    def exchanges(self) -> tuple[tuple[CpCommType, ...], ...]:
        return exchanges_tried(self.cp_comm_type, self.whole_model, self.states)

    def check_memory_is_known(self) -> None:
        """Refuse hardware that does not say what fits; InvalidInputError: it has no hbm_bytes."""
        if not self.hardware_values.hbm_bytes:
            raise InvalidInputError(
                f"hardware {self.hardware_values.name!r} gives no hbm_bytes, so nothing says what fits: use another "
                "--hardware, or simulate with --lanes and --max-tokens-per-rank"
            )

    def sweep_job(self, batch: BatchInput, batches: Batches) -> SweepJob:
        """Return what all settings share that are searched."""
        from dynamic_cp.decide.sweep import SweepJob

        self.check_memory_is_known()
        return SweepJob(
            batches=batches,
            max_seqlen=batch.longest_tokens(batches),
            model=self.whole_model,
            hardware=self.hardware_values,
            search=self.search,
            data_parallel=self.data_parallel,
            tp_overlap=self.tp_overlap,
            state_exchange=self.states,
            fp8=self.fp8,
        )


PRECISION_AND_EXPERTS = (
    "fp8_format fp8_recipe expert_imbalance moe_token_dispatcher_type moe_flex_dispatcher_backend "
    "overlap_moe_expert_parallel_comm"
)
"""Options of commands that price a job."""
_SEARCHED = "; with --gpus the fastest]"


@dataclass(frozen=True, kw_only=True)
class JobInput(RunInput):
    """A job of a given layout (--lanes), or of the fastest one (--gpus)."""

    gpus: int | None = option(
        "Number of ranks: every policy gets its own fastest layout among those that the options below allow.", int
    )
    lanes: int | None = option(
        "Number of lanes (data-parallel x context-parallel positions: GPUs / (TP x PP)) of one given layout, "
        "instead of --gpus.",
        int,
    )
    tp: int | None = option(f"Tensor-parallel size; above 1 with sequence parallelism. [default: 1{_SEARCHED}", int)
    pp: int | None = option(f"Number of pipeline stages. [default: 1{_SEARCHED}", int)
    vpp: int | None = option(f"Number of model chunks per stage. [default: 1{_SEARCHED}", int)
    ep: int | None = option(
        f"Number of neighbouring ranks that share the experts of a layer: 1, 2, 4, ... [default: 1{_SEARCHED}", int
    )
    recompute: str | None = option(
        "What the backward pass recomputes to save memory: nothing, core attention, or whole layers. "
        f"[default: none{_SEARCHED}",
        RECOMPUTE_MODES,
    )
    recompute_method: str | None = option(
        "Which layers --recompute full recomputes: all, in units of so many, or the first so many of every "
        "model chunk, and the others keep their activations. [default: uniform]",
        RECOMPUTE_METHODS,
    )
    recompute_num_layers: int | None = option("Number of these layers. [default: 1]", int)
    max_tokens_per_rank: int | str = option(
        "Largest number of padded tokens of a rank in a micro-batch; auto: as many as memory holds.",
        TokensOrAuto(),
        "auto",
    )
    max_dynamic_cp_size: int | None = option(
        "Largest CP size of dynamic and megatron-dev, as the trainer's flag: groups of fewer lanes leave memory for "
        "tokens. [default: the fastest that memory holds]",
        int,
    )
    static_cp_size: int | None = option(
        "CP size of static and balanced. [default: the fastest that holds the longest sample; plan with --lanes: "
        "the smallest]",
        int,
    )
    mask: str = CAUSAL.name

    @cached_property
    def model_shape(self) -> ModelShape:
        """The model; with --lanes in stages that are unlike where they have to be."""
        model = self.whole_model
        if self.lanes is None or model.num_layers % (self.topology.pp_size * self.topology.vp_size) == 0:
            return model
        return in_stages(model, self.topology.pp_size, self.topology.vp_size)

    @cached_property
    def topology(self) -> Topology:
        """The given arrangement of ranks, with --lanes."""
        assert self.lanes is not None
        sizes = [1 if size is None else size for size in (self.tp, self.pp, self.vpp, self.ep)]
        return Topology(
            num_lanes=self.lanes,
            tp_size=sizes[0],
            pp_size=sizes[1],
            vp_size=sizes[2],
            ranks_per_node=self.node_ranks(self.lanes * sizes[0] * sizes[1]),
            sequence_parallel=sizes[0] > 1,
            ep_size=sizes[3],
            token_alignment=self.token_alignment(sizes[0]),
        )

    @property
    def limit_from_memory(self) -> bool:
        """Whether the token limit still has to follow from memory."""
        return self.max_tokens_per_rank == "auto"

    @property
    def recompute_layers(self) -> RecomputedLayers:
        """Which layers full recomputation repeats."""
        method = "uniform" if self.recompute_method is None else cast(RecomputeMethod, self.recompute_method)
        return RecomputedLayers(method, 1 if self.recompute_num_layers is None else self.recompute_num_layers)

    @cached_property
    def options(self) -> PlanOptions:
        """The planner's options, with --lanes; with a limit of 1 token where it still has to follow from memory."""
        size = self.static_cp_size
        if size is not None and (size < 1 or self.topology.num_lanes % size):
            raise InvalidInputError(
                f"--static-cp-size {size} does not divide --lanes {self.topology.num_lanes}: use a divisor"
            )
        if size is not None and not is_power_of_two(size):
            raise InvalidInputError(f"--static-cp-size {size} is not a power of two: use 1, 2, 4, ...")
        has_masks = self.mask != CAUSAL.name
        exchanges = allowed_exchanges(
            self.cp_comm_type or CP_COMM_TYPE,
            self.model_shape,
            has_masks=has_masks,
            may_be_placed=self.topology.expert_lanes == 1,  # as in training
            state_exchange=self.states,
        )
        return PlanOptions(
            max_tokens_per_rank=1 if self.limit_from_memory else cast(int, self.max_tokens_per_rank),
            static_cp_size=size,
            max_cp_size=self.max_dynamic_cp_size,
            cp_comm_types=exchanges,
            recompute=cast(Recompute, self.recompute or "none"),
            recompute_layers=self.recompute_layers,
            loss_chunk_tokens=chunk_tokens(self.loss_chunk_tokens, self.topology.tp_size),
            search=self.search,
            state_exchange=self.states,
            fp8=self.fp8,
        )

    def _check_searched_layers(self) -> None:
        """Refuse what --gpus does not search of full recomputation: its layers in units, or other recomputation."""
        method, number = self.recompute_layers
        is_given = self.recompute_method is not None or self.recompute_num_layers is not None
        in_units = method == "uniform" and number > 1
        if is_given and (self.recompute != "full" or in_units):
            of = "no --recompute" if self.recompute is None else f"--recompute {self.recompute}"
            raise InvalidInputError(
                f"--recompute-method {method} --recompute-num-layers {number} with {of}: "
                "with --gpus use --recompute full --recompute-method block, or leave them out"
            )

    def check(self) -> None:
        """Find what is wrong with the options before any work; DynamicCPError says what.

        Raises:
            click.UsageError: neither --gpus nor --lanes, or both.
        """
        if (self.gpus is None) == (self.lanes is None):
            raise click.UsageError(
                "Missing option '--lanes' (a given layout) or '--gpus' (the fastest one)."
                if self.gpus is None
                else "--gpus searches a layout, --lanes is a given one: leave one of them out.",
                click.get_current_context(silent=True),
            )
        _ = self.model_shape, self.hardware_values, self.states, self.fp8
        if self.gpus is not None:
            self._check_searched_layers()
            return
        if self.tp_overlap != "none":
            raise InvalidInputError(
                f"--tp-overlap {self.tp_overlap} is for jobs of --gpus, --lanes {self.lanes} is a given layout: "
                "give --gpus with the sizes of that layout, or leave it out"
            )
        topology, model, _ = self.topology, self.model_shape, self.options
        reason = why_no_split(
            model,
            tp_size=topology.tp_size,
            pp_size=topology.pp_size,
            vp_size=topology.vp_size,
            ranks_per_node=min(topology.ranks_per_node, topology.world_size),
            ep_size=topology.ep_size,
        )
        if reason:
            change = " or ".join(sizes_in(reason))
            ep = f" --ep {topology.ep_size}" if topology.ep_size > 1 else ""
            raise InvalidInputError(
                f"--tp {topology.tp_size} --pp {topology.pp_size} --vpp {topology.vp_size}{ep}: {reason} (the model "
                f"has {model.num_layers} layers, {model.num_attention_heads} heads, {model.num_query_groups} KV heads "
                f"and an MLP of {model.ffn_hidden_size}, a node {topology.ranks_per_node} GPUs): change {change}"
            )

    @property
    def space(self) -> Space:
        """What --gpus searches: all that the other options leave open."""
        from dynamic_cp.decide.sweep import Space

        def alone(value: Any) -> Any:
            return None if value is None else (value,)

        assert self.gpus is not None
        recompute = "block" if self.recompute_method == "block" else self.recompute
        return Space(
            num_gpus=self.gpus,
            ranks_per_node=self.node_ranks(self.gpus),
            token_alignment=self.token_alignment,
            tp_sizes=alone(self.tp),
            pp_sizes=alone(self.pp),
            vp_sizes=alone(self.vpp),
            ep_sizes=alone(self.ep),
            limits=None if self.limit_from_memory else alone(self.max_tokens_per_rank),
            recompute=alone(recompute) or RECOMPUTED,
            recompute_num_layers=self.recompute_num_layers,
            loss_chunk_tokens=self.loss_chunk_tokens,
            exchanges=self.exchanges,
            static_cp_size=self.static_cp_size,
            max_cp_size=self.max_dynamic_cp_size,
        )


def job_options(command: _Command) -> _Command:
    layout = f"gpus lanes model hardware settings tp pp vpp ep mtp_num_layers {PRECISION_AND_EXPERTS} ranks_per_node"
    memory = "recompute recompute_method recompute_num_layers loss_chunk_tokens"
    names = f"{layout} {memory} no_distributed_optimizer no_overlap_grad_reduce"
    for add in (
        options_of(JobInput, "Job", "tp_overlap max_tokens_per_rank max_dynamic_cp_size"),
        options_in("Job", **STATE),
        options_of(JobInput, "Job", names),
    ):
        command = add(command)
    return command


planner_options = options_of(
    JobInput,
    "Planner",
    "search cp_comm_type state_exchange static_cp_size",
    exchange=f"{CP_COMM_TYPE}; with --gpus auto or p2p, whichever is faster",
)
"""Adds the options of the planner."""

POOL = {
    "noise_margin": option(
        "By which ticks of a pool last longer than planned: every layer waits for the slowest of all servers, at "
        "2% jitter 4% longer with 64 of them.",
        float,
        NOISE_MARGIN,
        metavar="SHARE",
    ),
    "no_ping_pong": option(
        "Compute layers in a pool whole, not in two nano-batches of which one travels while the other computes.", bool
    ),
}
"""Options of commands that plan pools."""


def policy_option(help: str, default: str = DEFAULT_POLICIES) -> Any:
    return option(help, default=default, metavar="NAME,..")


_PARTS = " and ".join(f"1/{divisor}" for divisor in LIMIT_DIVISORS[1:])


@dataclass(frozen=True, kw_only=True)
class SweepInput(RunInput):
    """What a sweep searches; None: all that makes sense."""

    gpus: int = option("Number of GPUs of the job.", int, required=True)
    tp: tuple[int, ...] | None = option(
        "Tensor-parallel sizes to try. [default: powers of two inside a node]", Numbers()
    )
    pp: tuple[int, ...] | None = option(
        "Numbers of pipeline stages to try. [default: powers of two up to the layers]", Numbers()
    )
    vpp: tuple[int, ...] | None = option(
        f"Numbers of model chunks per stage to try. [default: those of 1 to {MAX_VP_SIZE} that are whole layers]",
        Numbers(),
    )
    ep: tuple[int, ...] | None = option(
        "Numbers of ranks that share experts to try. [default: powers of two that divide the experts]", Numbers()
    )
    recompute: str = option(
        "What the backward pass may recompute to save memory; block: the first layers of every model chunk, as "
        "few as hold a limit.",
        default=",".join(RECOMPUTED),
        metavar="MODE,..",
    )
    max_tokens_per_rank: tuple[int, ...] | None = option(
        f"Token limits to try. [default: what memory holds, {_PARTS} of it]", Numbers()
    )
    policy: str = policy_option("Policies to compare, comma-separated, each at its own fastest setting.")
    jobs: int | None = option("Number of processes. [default: one per CPU]", int)

    @property
    def space(self) -> Space:
        from dynamic_cp.decide.sweep import Space

        return Space(
            num_gpus=self.gpus,
            ranks_per_node=self.node_ranks(self.gpus),
            token_alignment=self.token_alignment,
            tp_sizes=self.tp,
            pp_sizes=self.pp,
            vp_sizes=self.vpp,
            ep_sizes=self.ep,
            limits=self.max_tokens_per_rank,
            recompute=tuple(word.strip() for word in self.recompute.split(",")),
            loss_chunk_tokens=self.loss_chunk_tokens,
            exchanges=self.exchanges,
        )


def why_local(model: str, hardware: str) -> str | None:
    """Return why a model, by name or file, trains with local layers; None: it trains with TransformerEngine's."""
    if is_of_local_layers(hardware):
        return f"hardware {hardware}"
    return catalog.why_local(as_flags(catalog.load_model(model), hugging_face.load_architecture(model)))


def trained_hardware(model: str, hardware: str) -> str:
    """Return the bundled hardware of the layers that a model trains with, and say so where it is another; or a file."""
    why = why_local(model, hardware)
    name = hardware_of_layers(hardware, is_local=why is not None)
    if name != hardware:
        click.echo(f"dynamic-cp: {model} trains with local layers ({why}): --hardware {name} is taken", err=True)
    return name


def load_model(name: str, hardware: str, expert_imbalance: float | None, mtp_num_layers: int | None) -> ModelShape:
    """Return a model by name or file as it trains, with the imbalance of its experts and the modules that are given."""
    model = catalog.load_model(name)
    if model.experts is not None and why_local(name, hardware) is not None:
        model = replace(model, experts=replace(model.experts, grouped=False))
    if mtp_num_layers is not None:
        try:
            model = replace(model, mtp_num_layers=mtp_num_layers)
        except InvalidInputError as error:
            raise InvalidInputError(f"--mtp-num-layers {mtp_num_layers}: {error}", **error.details) from error
    if expert_imbalance is None:
        return model
    if model.experts is None:
        raise InvalidInputError(f"--expert-imbalance is {expert_imbalance}, {name} has no experts: leave it out")
    return replace(model, experts=replace(model.experts, imbalance=expert_imbalance))


def check_name(name: str | None) -> None:
    """Refuse a --name of hardware that tables cannot show; None is none given."""
    if name is not None and not (name.strip() and name.isprintable()):
        raise InvalidInputError(f"--name is {name!r}, which no table can show: give it a name")


def exchanges_tried(
    cp_comm_type: str | None, model: ModelShape, state_exchange: StateExchangeUse
) -> tuple[tuple[CpCommType, ...], ...]:
    """Return the sets of exchanges that a sweep tries for a value of --cp-comm-type; None: all it has.

    `auto` is what it is in a run of `model`, whose memory has to hold what any of them keeps.
    """
    allowed = allowed_exchanges(cp_comm_type or AUTO, model, state_exchange=state_exchange)
    return (allowed, *EXCHANGES[1:]) if cp_comm_type is None else (allowed,)
