"""`dynamic-cp sweep`: which settings suit a number of GPUs, whether dynamic CP pays there, and flags to start it."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp.decide.cli.parameters import (
    LOSS_CHUNK,
    MODEL_AND_HARDWARE,
    NO_DISTRIBUTED_OPTIMIZER,
    NO_OVERLAP_GRAD_REDUCE,
    OF_MODEL,
    RANKS_PER_NODE,
    SEARCH,
    STATE,
    STATE_EXCHANGE,
    TP_OVERLAP,
    BatchInput,
    Command,
    batch_options,
    check_state_exchange,
    data_parallel_of,
    exchange_option,
    json_option,
    load_model,
    one_option,
    options_in,
    said_of,
    taken,
    trained_hardware,
)
from dynamic_cp.decide.cli.simulate import policies_in, policy_option
from dynamic_cp.decide.cli.tables import console, progress
from dynamic_cp.decide.cli.tuned import check_memory_is_known, exchanges_tried, searched
from dynamic_cp.decide.files import STDOUT, check_writable, write_json
from dynamic_cp.decide.tried import LIMIT_DIVISORS, MAX_VP_SIZE, RECOMPUTED
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models import catalog
from dynamic_cp.types import Hardware, ModelShape

if TYPE_CHECKING:
    from dynamic_cp.decide.comparison import Comparison
    from dynamic_cp.decide.sweep import Point, Space, Sweep, SweepJob
    from dynamic_cp.models.architecture import Architecture

SCHEMA_VERSION = 2
DEFAULT_BATCHES = 4
_LINE = 92
_CHANGED_HARDWARE = "hardware.json"
"""What the trainer reads in place of --set."""
_PARTS = " and ".join(f"1/{divisor}" for divisor in LIMIT_DIVISORS[1:])


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between."""

    name = "N,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(word) for word in value.split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)
        if min(numbers) < 1 and param is not None:
            raise InvalidInputError(f"{param.opts[0]} is {min(numbers)}, at least 1 is needed: change it")
        return numbers

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return what --help shows."""
        return self.name


@click.command(
    "sweep",
    cls=Command,
    epilog="""\b
Examples:
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64
  dynamic-cp sweep --lengths lengths.npy --gpus 16 --model llama-2-13b --tp 2,4 --pp 1,2,4
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64 --policy balanced   # without dynamic CP
""",
)
@batch_options(several=True, default_batches=DEFAULT_BATCHES, with_mask=False)
@options_in(
    "Job",
    one_option("--gpus", required=True, type=int, metavar="N", help="Number of GPUs of the job."),
    *MODEL_AND_HARDWARE,
    *OF_MODEL,
    RANKS_PER_NODE,
    NO_DISTRIBUTED_OPTIMIZER,
    NO_OVERLAP_GRAD_REDUCE,
    *STATE,
    TP_OVERLAP,
)
@options_in(
    "What is tried",
    one_option("--tp", type=Numbers(), help="Tensor-parallel sizes to try. [default: powers of two inside a node]"),
    one_option(
        "--pp", type=Numbers(), help="Numbers of pipeline stages to try. [default: powers of two up to the layers]"
    ),
    one_option(
        "--vpp",
        type=Numbers(),
        help=f"Numbers of model chunks per stage to try. [default: those of 1 to {MAX_VP_SIZE} that are whole layers]",
    ),
    one_option(
        "--ep",
        type=Numbers(),
        help="Numbers of ranks that share experts to try. [default: powers of two that divide the experts]",
    ),
    one_option(
        "--recompute",
        default=",".join(RECOMPUTED),
        show_default=True,
        metavar="MODE,..",
        help="What the backward pass may recompute to save memory; block: the first layers of every model chunk, as "
        "few as hold a limit.",
    ),
    LOSS_CHUNK,
    one_option(
        "--max-tokens-per-rank",
        type=Numbers(),
        help=f"Token limits to try. [default: what memory holds, {_PARTS} of it]",
    ),
    exchange_option("auto or p2p, whichever is faster"),
    STATE_EXCHANGE,
    policy_option("Policies to compare, comma-separated, each at its own fastest setting."),
    SEARCH,
    one_option("--jobs", type=int, metavar="N", help="Number of processes. [default: one per CPU]"),
)
@json_option
def command(json: str | None, gpus: int, jobs: int | None, policy: str, **given: Any) -> None:
    """Search layouts and limits for a number of GPUs; say which is fastest and whether dynamic CP pays there.

    Policies are compared, each at its own fastest setting: the last line has the best static setting, the dynamic one
    and the gain. For the recommended policy it prints the settings that no other beats in both time and memory, and
    the flags to start it. Settings that cannot run are counted, with the reason.
    """
    check_writable(json)
    if jobs is not None and jobs < 1:
        raise InvalidInputError(f"--jobs is {jobs}, at least 1 is needed: change it")
    policies = policies_in(policy)
    batch = taken(given, BatchInput)
    model = load_model(given["model"], given["hardware"], given["expert_imbalance"], given["mtp_num_layers"])
    given["hardware"] = trained_hardware(given["model"], given["hardware"])
    hardware = catalog.load_hardware(given["hardware"], given["settings"])
    architecture = catalog.load_architecture(given["model"])
    check_memory_is_known(hardware)
    with progress("sweeping") as steps:
        steps(0, 1, "lengths")
        from dynamic_cp.decide.comparison import compare_settings

        space = _space(gpus, model, given)
        job = _job(batch, model, hardware, given)
        found = searched(space, job, policies, steps, jobs)
        names = given["model"], hardware.name if given["settings"] else given["hardware"]
        settings, other_prices = found.settings, found.other_prices
        comparison = compare_settings(job, settings, names=names, other_prices=other_prices, progress=steps)
    refusal = _why_no_line(found, job, architecture)
    flags = [] if refusal else _flags(found.front[0], job, architecture, given)
    if json:
        inputs = _inputs(batch, space, job, given) | {"policies": policies}
        write_json(json, _as_dict(found, comparison, inputs, flags, refusal))
    if json != STDOUT:
        from dynamic_cp.decide.cli.comparison_tables import LaunchLine, show_sweep

        notes = _notes(given["model"], job, architecture)
        line = LaunchLine(flags=flags, refusal=refusal, notes=notes, before=_hardware_command(given))
        show_sweep(found, comparison, batch, line, console())


def _space(gpus: int, model: ModelShape, given: dict[str, Any]) -> Space:
    from dynamic_cp.decide.sweep import Space

    return Space(
        num_gpus=gpus,
        ranks_per_node=given["ranks_per_node"],
        tp_sizes=given["tp"],
        pp_sizes=given["pp"],
        vp_sizes=given["vpp"],
        ep_sizes=given["ep"],
        limits=given["max_tokens_per_rank"],
        recompute=tuple(word.strip() for word in given["recompute"].split(",")),
        loss_chunk_tokens=given["loss_chunk_tokens"],
        exchanges=exchanges_tried(given["cp_comm_type"], model, given["state_exchange"]),
    )


def _job(batch: BatchInput, model: ModelShape, hardware: Hardware, given: dict[str, Any]) -> SweepJob:
    from dynamic_cp.decide.sweep import SweepJob

    batches = batch.draw(DEFAULT_BATCHES)
    return SweepJob(
        batches=batches,
        max_seqlen=batch.longest_tokens(batches),
        model=model,
        hardware=hardware,
        search=given["search"],
        data_parallel=data_parallel_of(given),
        tp_overlap=given["tp_overlap"],
        state_exchange=check_state_exchange(given["state_exchange"], model, given["cp_comm_type"]),
    )


def _inputs(batch: BatchInput, space: Space, job: SweepJob, given: dict[str, Any]) -> dict[str, Any]:
    as_given = (
        *("tp", "pp", "vpp", "ep", "expert_imbalance", "mtp_num_layers", "max_tokens_per_rank"),
        *("cp_comm_type", "state_exchange", "model", "hardware"),
    )
    return {
        **batch.as_dict(),
        "batches": len(job.batches),
        "gpus": space.num_gpus,
        "ranks_per_node": space.ranks_per_node,
        **said_of(job.data_parallel),
        "tp_overlap": job.tp_overlap,
        "search": job.search,
        "recompute": space.recompute,
        "loss_chunk_tokens": space.loss_chunk_tokens,
        **{name: given[name] for name in as_given},
        "set": given["settings"],
    }


def _why_no_line(found: Sweep, job: SweepJob, architecture: Architecture | None) -> str:
    """Return why there is no launch line, nothing where there is one."""
    from dynamic_cp.decide.sweep import TRAINED_POLICIES
    from dynamic_cp.decide.sweep.flags import why_not_trained

    if found.recommended not in TRAINED_POLICIES:
        return f"pretrain_gpt.py has no policy {found.recommended}"
    reason = why_not_trained(job.model, architecture)
    return f"pretrain_gpt.py does not train this model: {reason}" if reason else ""


def _flags(point: Point, job: SweepJob, architecture: Architecture | None, given: dict[str, Any]) -> list[str]:
    """Return the lines of the command that starts `point`."""
    from dynamic_cp.decide.sweep.flags import launch_flags, launcher

    groups = launch_flags(
        point.setting,
        model=job.model,
        architecture=architecture,
        hardware_name=_CHANGED_HARDWARE if given["settings"] else given["hardware"],
        max_seqlen=job.max_seqlen,
        global_batch_size=len(job.batches[0]),
        options=job.options_of(point.setting),
        data_parallel=job.data_parallel,
    )
    lines = [line for group in groups for line in _wrapped(group)]
    return [f"{launcher(point.setting)} pretrain_gpt.py", *lines]


def _hardware_command(given: dict[str, Any]) -> str:
    """Return the command that writes the hardware file which the launch line names; nothing without --set."""
    if not given["settings"]:
        return ""
    changes = " ".join(f"--set {shlex.quote(one)}" for one in given["settings"])
    return f"dynamic-cp hardware {shlex.quote(given['hardware'])} {changes} --output {_CHANGED_HARDWARE}"


def _wrapped(flags: tuple[str, ...]) -> list[str]:
    """Return `flags` in lines of at most `_LINE` characters; a flag keeps its value."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) <= _LINE:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines


def _notes(name: str, job: SweepJob, architecture: Architecture | None) -> list[str]:
    """Return what to know before the recommended line is used."""
    notes = ["add your data and tokenizer, --lr and --train-iters"]
    if architecture is None:
        kind = "Llama (RoPE with base 10000)" if job.model.gated_linear_unit else "GPT-2"
        notes.append(f"{name} has no entry architecture: norms, positions and biases are assumed to be those of {kind}")
    elif 0 < architecture.max_position_embeddings < job.max_seqlen:
        notes.append(
            f"samples have up to {job.max_seqlen} tokens, the model was made for {architecture.max_position_embeddings}"
        )
    if job.tp_overlap != "none":
        notes.append("pretrain_gpt.py has no --tp-comm-overlap: the seconds are those of a trainer that has it")
    if architecture is not None and architecture.not_imported:
        notes.append(f"this starts with new weights: {'; '.join(architecture.not_imported)}")
    if architecture is not None and architecture.not_read:
        notes.append(f"left out of {name}, as by transformers: {', '.join(architecture.not_read)}")
    return notes


def _as_dict(
    found: Sweep, comparison: Comparison, inputs: dict[str, Any], flags: list[str], refusal: str
) -> dict[str, Any]:
    from dynamic_cp.decide.comparison import judgement_to_dict, setting_to_dict

    def point(one: Point | None) -> dict[str, Any] | None:
        if one is None:
            return None
        figures = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "setting"}
        return {**setting_to_dict(one.setting), "iteration_s": one.iteration_s, **figures}

    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": inputs,
        "policies": {
            policy: {
                "best": point(one.best),
                "next_best": point(one.next_best),
                "num_planned": one.num_planned,
                "refused": dict(one.refused),
            }
            for policy, one in found.policies.items()
        },
        **judgement_to_dict(comparison),
        "front": [point(one) for one in found.front],
        "recommended": {
            "policy": found.recommended,
            **(point(found.front[0]) or {}),
            "command": flags or None,
            "no_command": refusal or None,
        },
    }
