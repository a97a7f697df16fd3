"""Options that several commands share, and the values that they stand for."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from dynamic_cp.decide.cli.flag_names import with_own_flags
from dynamic_cp.decide.tried import sizes_in
from dynamic_cp.errors import DynamicCPError, IllegalPlanError, InvalidInputError
from dynamic_cp.lengths.read import STDIN, is_pipe
from dynamic_cp.models import catalog
from dynamic_cp.models.layers import LayerFeatures, hardware_of_layers, is_of_local_layers
from dynamic_cp.setting import TP_OVERLAPS, TpOverlap
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
    masks_by_rule,
)
from dynamic_cp.types.experts import EXPERT_IMBALANCE as DEFAULT_IMBALANCE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_MAX_SEQLEN = 131072
MAX_SAMPLES = 10_000_000
"""Samples of one global batch: more would take gigabytes and minutes."""
MAX_BATCHES = 1000
OVERLONG = ("truncate", "drop", "split", "error")
KINDS = ".npy, .txt, .csv, .jsonl, .parquet, .idx"
"""Files that `lengths.read_length_array` reads (which imports numpy)."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Values = TypeVar("_Values")


class Option(click.Option):
    """An option that --help shows in a section of its own."""

    def __init__(self, *args: Any, section: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Argument(click.Argument):
    """An argument that --help explains."""

    section = "Arguments"

    def __init__(self, *args: Any, help: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return what --help shows."""
        return self.make_metavar(ctx), self.text


class Command(click.Command):
    """A command whose --help has sections and keeps its examples as they are, and whose errors name its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words of the command line; an error says whose they are, which click forgets for some."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of the planner comes out with the names that were typed."""
        try:
            return super().invoke(ctx)
        except IllegalPlanError:
            raise
        except DynamicCPError as error:
            options = {name for parameter in self.params for name in parameter.opts}
            error.args = (with_own_flags(str(error), options),)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "") or "Options", []).append(record)
        first, last = sections.pop("Arguments", []), sections.pop("Options", [])
        for title, records in [("Arguments", first), *sections.items(), ("Options", last)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class TokensOrAuto(click.ParamType[Any]):
    """A number of tokens, or 'auto' for what memory holds."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or 'auto'."""
        if value == "auto" or isinstance(value, int):
            return cast("int | str", value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of tokens nor 'auto'", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return what --help shows."""
        return "N|auto"


class Names(click.ParamType[Any]):
    """A name out of a list that shells complete, or a path; the reader of the value judges it."""

    def __init__(self, metavar: str, names: Callable[[], Sequence[str]]) -> None:
        self.name = metavar
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return what --help shows."""
        return self.name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so, then files."""
        found = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]


def workload_names() -> tuple[str, ...]:
    """Return the bundled workloads (numpy is imported here, not at start)."""
    from dynamic_cp.decide import workloads

    return workloads.workload_names()


LENGTHS = Names("FILE|NAME", workload_names)


def _section(title: str, *options: Any) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for names, settings in reversed(options):
            command = click.option(*names, cls=Option, section=title, **settings)(command)
        return command

    return add


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


CUT_OPTIONS = (
    _option(
        "--max-seqlen",
        type=int,
        metavar="TOKENS",
        help=f"Longest sample that is drawn. [default: {DEFAULT_MAX_SEQLEN} for a workload, no limit for a file]",
    ),
    _option(
        "--overlong",
        type=click.Choice(OVERLONG),
        help="What to do with drawn documents longer than --max-seqlen. [default: truncate]",
    ),
)
"""How what is drawn is cut."""


MASK = _option(
    "--mask",
    default=CAUSAL.name,
    show_default=True,
    metavar="MASK",
    help="Which keys of its sample a token attends to: causal, full, lambda:SINK,WINDOW (tokens), "
    "causal_blockwise:BLOCK,LOCAL[,SINK] (tokens of a block, blocks), shared_question:4x0.2 (4 answers, a prompt of "
    "0.2 of the tokens), or tree:2x4x0.2 (so at several levels). To plan with: pretrain_gpt.py trains causal, "
    "prompts whose lines have responses, and trees of turns.",
)


def batch_options(
    *, several: bool, default_batches: int = 1, required: bool = True, with_mask: bool = True
) -> Callable[[_Command], _Command]:
    """Add the options that say which global batches there are."""
    options = [
        _option(
            "--lengths",
            required=required,
            type=LENGTHS,
            help=f"File of lengths ({KINDS}), which is one global batch unless "
            "--global-batch-size draws from it, or - for stdin; a bundled workload to draw from (`dynamic-cp lengths` "
            "lists them); or lognormal:mean=..,sigma=..",
        ),
        _option("--global-batch-size", type=int, metavar="N", help="Number of samples to draw, with replacement."),
    ]
    if several:
        options.append(
            _option(
                "--batches",
                type=int,
                metavar="N",
                help=f"Number of global batches to draw. [default: {default_batches}]",
            )
        )
    options += [
        _option(
            "--seed",
            type=int,
            metavar="N",
            help="Seed of the first batch; each further batch takes the next number. [default: 0]",
        ),
        *CUT_OPTIONS,
    ]
    if with_mask:
        options.append(MASK)
    return _section("Global batch", *options)


SET = _option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Override a number of the hardware, such as bandwidth_across_nodes=12.5GB/s; may be given several times.",
)
MODEL_AND_HARDWARE = (
    _option(
        "--model",
        default="llama-3-8b",
        show_default=True,
        type=Names("NAME|FILE", catalog.model_names),
        help=f"Model: {', '.join(catalog.model_names())}, a file like those or a Hugging Face config.json.",
    ),
    _option(
        "--hardware",
        default="h100",
        show_default=True,
        type=Names("NAME|FILE", catalog.hardware_names),
        help=f"Hardware: {', '.join(catalog.hardware_names())}, or a file (`dynamic-cp hardware` writes one). Of a "
        "model that trains with local layers only, h100 and h200 are those of these layers.",
    ),
    SET,
)
OF_MODEL = (
    _option(
        "--mtp-num-layers",
        type=int,
        metavar="N",
        help="Modules of multi-token prediction behind the last layer; Qwen3-Next and Qwen3.5 are published with one, "
        "which their files here leave out. [default: as the model file says]",
    ),
    _option(
        "--expert-imbalance",
        type=float,
        metavar="X",
        help="Tokens that routing sends to the rank which gets most, over their mean: time and memory of experts are "
        f"for so many. [default: as the model file says, else {DEFAULT_IMBALANCE}]",
    ),
)


def why_local(model: str, hardware: str) -> str | None:
    """Return why a model, by name or file, trains with local layers; None: it trains with TransformerEngine's."""
    if is_of_local_layers(hardware):
        return f"hardware {hardware}"
    return LayerFeatures.of(catalog.load_model(model), catalog.load_architecture(model)).why_local


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
        model = dataclasses.replace(model, experts=dataclasses.replace(model.experts, grouped=False))
    if mtp_num_layers is not None:
        try:
            model = dataclasses.replace(model, mtp_num_layers=mtp_num_layers)
        except InvalidInputError as error:
            raise InvalidInputError(f"--mtp-num-layers {mtp_num_layers}: {error}", **error.details) from error
    if expert_imbalance is None:
        return model
    if model.experts is None:
        raise InvalidInputError(f"--expert-imbalance is {expert_imbalance}, {name} has no experts: leave it out")
    return dataclasses.replace(model, experts=dataclasses.replace(model.experts, imbalance=expert_imbalance))


def check_name(name: str | None) -> None:
    """Refuse a --name of hardware that tables cannot show; None is none given."""
    if name is not None and not (name.strip() and name.isprintable()):
        raise InvalidInputError(f"--name is {name!r}, which no table can show: give it a name")


RANKS_PER_NODE = _option(
    "--ranks-per-node", type=int, default=8, show_default=True, metavar="N", help="Number of GPUs in a node."
)
NO_DISTRIBUTED_OPTIMIZER = _option(
    "--no-distributed-optimizer", is_flag=True, help="Have every lane hold the whole optimizer state."
)
LOSS_CHUNK = _option(
    "--loss-chunk-tokens",
    type=TokensOrAuto(),
    default=0,
    show_default=True,
    help="LM head and loss over chunks of so many tokens, which the backward pass computes again, so that no more "
    f"logits exist at once; auto: {AUTO_CHUNK_TOKENS} times --tp; 0: all tokens.",
)
TP_OVERLAP = _option(
    "--tp-overlap",
    type=click.Choice(TP_OVERLAPS),
    default="none",
    show_default=True,
    help="Jobs of --gpus whose TP collectives overlap with GEMMs (--tp-comm-overlap): none, as pretrain_gpt.py runs "
    "them; static ones alone, as if padding every pack to one shape cost nothing; or all.",
)
NO_OVERLAP_GRAD_REDUCE = _option(
    "--no-overlap-grad-reduce",
    is_flag=True,
    help="Reduce gradients and gather parameters with nothing beside them, as without --overlap-grad-reduce and "
    "--overlap-param-gather.",
)
_KEPT = {
    "main_grads_dtype": "gradients",
    "main_params_dtype": "master weights",
    "exp_avg_dtype": "the first moment",
    "exp_avg_sq_dtype": "the second moment",
}
STATE = (
    _option(
        "--grad-reduce-in-bf16",
        is_flag=True,
        help="Keep and reduce gradients in bf16, not in fp32: half of their memory and of what is sent.",
    ),
    _option(
        "--use-precision-aware-optimizer",
        is_flag=True,
        help="Step by TransformerEngine's FusedAdam: its state has the dtypes below, an fp32 master weight takes 2 "
        "bytes beside the bf16 weight, and gradients in bf16 need no copy in fp32.",
    ),
    *(
        _option(
            f"--{name.replace('_', '-')}",
            type=click.Choice(dtypes),
            default="fp32",
            show_default=True,
            help=f"With it: dtype of {_KEPT[name]}.",
        )
        for name, dtypes in DTYPES_OF.items()
    ),
)
"""Options of `types.StateDtypes`."""


def _searched(given: str) -> str:
    """Return the default of an option whose values --gpus searches."""
    return f"[default: {given}; with --gpus the fastest]"


def job_options() -> Callable[[_Command], _Command]:
    """Add the options that describe the job."""
    return _section(
        "Job",
        _option(
            "--gpus",
            type=int,
            metavar="N",
            help="Number of ranks: every policy gets its own fastest layout among those that the options below allow.",
        ),
        _option(
            "--lanes",
            type=int,
            metavar="N",
            help="Number of lanes (data-parallel x context-parallel positions: GPUs / (TP x PP)) of one given layout, "
            "instead of --gpus.",
        ),
        *MODEL_AND_HARDWARE,
        _option(
            "--tp",
            type=int,
            metavar="N",
            help=f"Tensor-parallel size; above 1 with sequence parallelism. {_searched('1')}",
        ),
        _option("--pp", type=int, metavar="N", help=f"Number of pipeline stages. {_searched('1')}"),
        _option("--vpp", type=int, metavar="N", help=f"Number of model chunks per stage. {_searched('1')}"),
        _option(
            "--ep",
            type=int,
            metavar="N",
            help=f"Number of neighbouring ranks that share the experts of a layer: 1, 2, 4, ... {_searched('1')}",
        ),
        *OF_MODEL,
        RANKS_PER_NODE,
        _option(
            "--recompute",
            type=click.Choice(RECOMPUTE_MODES),
            help="What the backward pass recomputes to save memory: nothing, core attention, or whole layers. "
            f"{_searched('none')}",
        ),
        _option(
            "--recompute-method",
            type=click.Choice(RECOMPUTE_METHODS),
            help="Which layers --recompute full recomputes: all, in units of so many, or the first so many of every "
            "model chunk, and the others keep their activations. [default: uniform]",
        ),
        _option("--recompute-num-layers", type=int, metavar="N", help="Number of these layers. [default: 1]"),
        LOSS_CHUNK,
        NO_DISTRIBUTED_OPTIMIZER,
        NO_OVERLAP_GRAD_REDUCE,
        *STATE,
        TP_OVERLAP,
        _option(
            "--max-tokens-per-rank",
            type=TokensOrAuto(),
            default="auto",
            show_default=True,
            help="Largest number of padded tokens of a rank in a micro-batch; auto: as many as memory holds.",
        ),
    )


CP_COMM_TYPE = AUTO
"""Default exchange of a given layout."""


def exchange_option(default: str) -> Any:
    """Return --cp-comm-type; `default`: what its help says."""
    return _option(
        "--cp-comm-type",
        type=click.Choice(CHOICES),
        help="Exchange inside a CP group; latent: of multi-latent attention only, a ring of latents; blocks: each tile "
        "of attention on a lane of its own; auto: the fastest for every bucket, blocks only under a --mask or where "
        f"layers have windows. [default: {default}]",
    )


STATE_EXCHANGE = _option(
    "--state-exchange",
    type=click.Choice(STATE_EXCHANGE_USES),
    default=STATE_EXCHANGE_USES[0],
    show_default=True,
    help="How lanes share layers of linear attention: heads by an all-to-all each way, or states passed between the "
    "chunks of a sample, where these fit under the token limit; auto: for every bucket what is faster.",
)


def check_state_exchange(use: str, model: ModelShape, cp_comm_type: str | None) -> StateExchangeUse:
    """Return the value of --state-exchange.

    Raises:
        InvalidInputError: no default, and the model has no linear attention or --cp-comm-type does not go with it.
    """
    if use != STATE_EXCHANGE_USES[0] and model.linear_attention is None:
        raise InvalidInputError(
            f"--state-exchange {use} is for layers with linear attention, and the model has none: give the --model of "
            "a hybrid, or leave it out"
        )
    if use == "heads" and cp_comm_type is not None and is_placed(cp_comm_type):
        raise InvalidInputError(
            f"--state-exchange heads needs equal chunks of a sample on all lanes, and --cp-comm-type {cp_comm_type} "
            "places attention anywhere: leave one of them out"
        )
    return cast(StateExchangeUse, use)


SEARCH = _option(
    "--search",
    type=click.Choice(SEARCH_EFFORTS),
    default="fast",
    show_default=True,
    help="How long to search; thorough takes about ten times as long, for a better plan of a pipeline; "
    "exact proves the dynamic plan of a tiny batch the fastest.",
)

planner_options = _section(
    "Planner",
    SEARCH,
    exchange_option(f"{CP_COMM_TYPE}; with --gpus auto or p2p, whichever is faster"),
    STATE_EXCHANGE,
    _option(
        "--static-cp-size",
        type=int,
        metavar="N",
        help="CP size of static and balanced. [default: the fastest that holds the longest sample; plan with --lanes: "
        "the smallest]",
    ),
)
"""Adds the options of the planner."""

json_option = _section(
    "Output", _option("--json", metavar="FILE|-", help="Write the figures as JSON ('-': to stdout, instead of text).")
)
"""Adds --json."""


def output_option(required: bool, help: str, metavar: str = "FILE") -> Callable[[_Command], _Command]:
    """Add --output."""
    return _section("Output", _option("--output", required=required, metavar=metavar, help=help))


def options_in(title: str, *options: Any) -> Callable[[_Command], _Command]:
    """Add `options` (of `one_option`) in a section."""
    return _section(title, *options)


one_option = _option


def noise_margin_option() -> Any:
    """Return --noise-margin, of commands that plan pools."""
    return _option(
        "--noise-margin",
        type=float,
        default=NOISE_MARGIN,
        show_default=True,
        metavar="SHARE",
        help="By which ticks of a pool last longer than planned: every layer waits for the slowest of all servers, at "
        "2% jitter 4% longer with 64 of them.",
    )


def ping_pong_option() -> Any:
    """Return --no-ping-pong, of commands that plan pools."""
    return _option(
        "--no-ping-pong",
        is_flag=True,
        help="Compute layers in a pool whole, not in two nano-batches of which one travels while the other computes.",
    )


def taken(given: Mapping[str, Any], values: type[_Values]) -> _Values:
    """Return `values` filled from the options of the same names."""
    names = {field.name for field in dataclasses.fields(cast(Any, values))}
    return values(**{name: value for name, value in given.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """Options of `batch_options`.

    Attributes:
        known: the lengths in the file, where somebody has read it already.
        size_flag: option that says how many samples are drawn, for messages.
    """

    lengths: str
    global_batch_size: int | None = None
    batches: int | None = None
    seed: int | None = None
    max_seqlen: int | None = None
    overlong: str | None = None
    mask: str = CAUSAL.name
    known: NDArray[np.int64] | None = None
    size_flag: str = "--global-batch-size"

    @property
    def is_file(self) -> bool:
        """Whether the lengths are a file or a pipe, not a workload or a formula."""
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
        """Return the global batches: one of all of a file, or as many as asked for, drawn from it or a workload.

        Raises:
            DynamicCPError: unknown name, unreadable file, numbers out of range.
        """
        from dynamic_cp.decide.workloads import draw_lengths, workload_source
        from dynamic_cp.lengths.read import read_length_array

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
                        f"--{flag.replace('_', '-')} is about drawing a batch, but all of {name} is one batch: "
                        f"give {self.size_flag}, or leave it out"
                    )
            return self._batches([(read_length_array(name) if self.known is None else self.known).tolist()])
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

    def _batches(self, batches: Sequence[Sequence[int]]) -> tuple[tuple[Sample, ...], ...]:
        """Return the samples of each batch of lengths, with the masks that --mask gives them."""
        masks = iter(masks_by_rule(self.mask, list(itertools.chain.from_iterable(batches))))
        return tuple(
            tuple(Sample(sample_id=i, seqlen=seqlen, mask=next(masks)) for i, seqlen in enumerate(seqlens))
            for seqlens in batches
        )

    def longest_tokens(self, batches: Sequence[Sequence[Sample]]) -> int:
        """Return the tokens of the longest sample that any global batch may have, not only `batches`, which were drawn.

        Raises:
            DynamicCPError: as `draw`.
        """
        from dynamic_cp.decide.workloads import longest_length

        if self.global_batch_size is None:
            return max(sample.seqlen for batch in batches for sample in batch)
        return longest_length(self._source, **self._cut())

    @cached_property
    def _source(self) -> str | NDArray[np.int64]:
        """What is drawn from: a pipe is read once, it holds nothing afterwards."""
        if self.known is not None or not is_pipe(self.lengths):
            return self.lengths if self.known is None else self.known
        from dynamic_cp.lengths.read import read_length_array

        return read_length_array(self.lengths)

    def _cut(self) -> dict[str, Any]:
        """Return what `draw_lengths` wants to know beside name, number and seed."""
        from dynamic_cp.lengths.read import MAX_LENGTH

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


def data_parallel_of(given: Mapping[str, Any]) -> DataParallel:
    """Return how lanes share gradients and optimizer state, from the options of a job."""
    is_sharded, overlaps = not given["no_distributed_optimizer"], not given["no_overlap_grad_reduce"]
    return DataParallel(
        distributed_optimizer=is_sharded,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and is_sharded,
        state=taken(given, StateDtypes),
    )


def said_of(data_parallel: DataParallel) -> dict[str, Any]:
    """Return what JSON says of it; of adapters the command has no options."""
    return {name: value for name, value in asdict(data_parallel).items() if name != "adapters"}


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """Options of `job_options` and `planner_options`; those of `DataParallel` are one value."""

    gpus: int | None
    lanes: int | None
    model: str
    hardware: str
    tp: int | None
    pp: int | None
    vpp: int | None
    ep: int | None
    ranks_per_node: int
    recompute: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    loss_chunk_tokens: int | str
    data_parallel: DataParallel
    tp_overlap: TpOverlap
    max_tokens_per_rank: int | str
    settings: tuple[str, ...] = ()
    search: str = "fast"
    cp_comm_type: str | None = None
    state_exchange: str = STATE_EXCHANGE_USES[0]
    static_cp_size: int | None = None
    mask: str = CAUSAL.name
    expert_imbalance: float | None = None
    mtp_num_layers: int | None = None

    @cached_property
    def model_shape(self) -> ModelShape:
        """The model; with --lanes in stages that are unlike where they have to be."""
        model = load_model(self.model, self.hardware, self.expert_imbalance, self.mtp_num_layers)
        if self.lanes is None or model.num_layers % (self.topology.pp_size * self.topology.vp_size) == 0:
            return model
        return model.in_stages(self.topology.pp_size, self.topology.vp_size)

    @cached_property
    def hardware_values(self) -> Hardware:
        """The hardware, with what --set changes."""
        return catalog.load_hardware(self.hardware, self.settings)

    @property
    def hardware_name(self) -> str:
        """What to call the hardware: as it was typed, or with what --set changes."""
        return self.hardware_values.name if self.settings else self.hardware

    @property
    def effort(self) -> SearchEffort:
        """How long to look for plans."""
        return cast(SearchEffort, self.search)

    @property
    def states(self) -> StateExchangeUse:
        """How lanes may share layers of linear attention."""
        return check_state_exchange(self.state_exchange, self.model_shape, self.cp_comm_type)

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
            ranks_per_node=self.ranks_per_node,
            sequence_parallel=sizes[0] > 1,
            ep_size=sizes[3],
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
            self.cp_comm_type or CP_COMM_TYPE, self.model_shape, has_masks=has_masks, state_exchange=self.states
        )
        return PlanOptions(
            max_tokens_per_rank=1 if self.limit_from_memory else cast(int, self.max_tokens_per_rank),
            static_cp_size=size,
            cp_comm_types=exchanges,
            recompute=cast(Recompute, self.recompute or "none"),
            recompute_layers=self.recompute_layers,
            loss_chunk_tokens=chunk_tokens(self.loss_chunk_tokens, self.topology.tp_size),
            search=self.effort,
            state_exchange=self.states,
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
        _ = self.model_shape, self.hardware_values, self.states
        if self.gpus is not None:
            self._check_searched_layers()
            return
        if self.tp_overlap != "none":
            raise InvalidInputError(
                f"--tp-overlap {self.tp_overlap} is for jobs of --gpus, --lanes {self.lanes} is a given layout: "
                "give --gpus with the sizes of that layout, or leave it out"
            )
        topology, model, _ = self.topology, self.model_shape, self.options
        reason = model.why_no_split(
            tp_size=topology.tp_size,
            pp_size=topology.pp_size,
            vp_size=topology.vp_size,
            ranks_per_node=min(self.ranks_per_node, topology.world_size),
            ep_size=topology.ep_size,
        )
        if reason:
            change = " or ".join(sizes_in(reason))
            ep = f" --ep {topology.ep_size}" if topology.ep_size > 1 else ""
            raise InvalidInputError(
                f"--tp {topology.tp_size} --pp {topology.pp_size} --vpp {topology.vp_size}{ep}: {reason} "
                f"(the model has {model.num_layers} layers, "
                f"{model.num_attention_heads} heads, {model.num_query_groups} KV heads and an MLP of "
                f"{model.ffn_hidden_size}, a node {self.ranks_per_node} GPUs): change {change}"
            )


def job_of(given: Mapping[str, Any]) -> JobInput:
    """Return the options of a job."""
    hardware = trained_hardware(given["model"], given["hardware"])
    return taken({**given, "hardware": hardware, "data_parallel": data_parallel_of(given)}, JobInput)
