"""`dynamic-cp sweep`: which settings suit a number of GPUs, and the flags to start them."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp import catalog
from dynamic_cp.cli.console import can_draw, console, progress
from dynamic_cp.cli.output import STDOUT, check_writable, write_json
from dynamic_cp.cli.parameters import (
    MODEL_AND_HARDWARE,
    NO_DISTRIBUTED_OPTIMIZER,
    RANKS_PER_NODE,
    SEARCH,
    BatchInput,
    Command,
    batch_options,
    json_option,
    one_option,
    options_in,
    taken,
)
from dynamic_cp.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from dynamic_cp.architecture import Architecture
    from dynamic_cp.sweep import Point, Sweep, SweepJob

SCHEMA_VERSION = 1
WIDE = 100
_LINE = 92
DEFAULT_BATCHES = 2
_CHANGED_HARDWARE = "hardware.json"
"""What the trainer reads in place of --set."""
SWEPT_POLICIES = ("dynamic", "static", "balanced")


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
    short_help="Search TP, PP, VPP, limits and recomputation for some GPUs.",
    epilog="""\b
Examples:
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64
  dynamic-cp sweep --lengths lengths.npy --gpus 16 --model llama-2-13b --tp 2,4 --pp 1,2,4
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64 --policy balanced   # without dynamic CP
""",
)
@batch_options(several=True, default_batches=DEFAULT_BATCHES)
@options_in(
    "Job",
    one_option("--gpus", required=True, type=int, metavar="N", help="Number of GPUs of the job."),
    *MODEL_AND_HARDWARE,
    RANKS_PER_NODE,
    NO_DISTRIBUTED_OPTIMIZER,
)
@options_in(
    "What is tried",
    one_option("--tp", type=Numbers(), help="Tensor-parallel sizes to try. [default: powers of two inside a node]"),
    one_option(
        "--pp", type=Numbers(), help="Numbers of pipeline stages to try. [default: powers of two up to the layers]"
    ),
    one_option(
        "--vpp", type=Numbers(), help="Numbers of model chunks per stage to try. [default: 1,2,4 where they fit]"
    ),
    one_option(
        "--recompute",
        default="none,selective,full",
        show_default=True,
        metavar="MODE,..",
        help="What the backward pass may compute again to save memory.",
    ),
    one_option(
        "--max-tokens-per-rank",
        type=Numbers(),
        help="Token limits to try. [default: what memory holds, 1/2 and 1/4 of it]",
    ),
    one_option(
        "--policy", type=click.Choice(SWEPT_POLICIES), default="dynamic", show_default=True, help="Policy that plans."
    ),
    SEARCH,
    one_option("--jobs", type=int, metavar="N", help="Number of processes. [default: one per CPU]"),
)
@json_option
def command(json: str | None, gpus: int, jobs: int | None, **given: Any) -> None:
    """Search layouts and limits for a number of GPUs and a global batch; recommend one, with its flags.

    The table has every setting that no other beats in both time and memory. What cannot run is counted with its reason.
    """
    check_writable(json)
    if jobs is not None and jobs < 1:
        raise InvalidInputError(f"--jobs is {jobs}, at least 1 is needed: change it")
    batch = taken(given, BatchInput)
    model, hardware = catalog.load_model(given["model"]), catalog.load_hardware(given["hardware"], given["settings"])
    architecture = catalog.load_architecture(given["model"])
    if not hardware.hbm_bytes:
        raise InvalidInputError(
            f"hardware {hardware.name!r} gives no hbm_bytes, so nothing says what fits: use another --hardware"
        )
    with progress("sweeping") as steps:
        steps(0, 1, "lengths")
        from dynamic_cp.sweep import Space, SweepJob, sweep

        space = Space(
            num_gpus=gpus,
            ranks_per_node=given["ranks_per_node"],
            tp_sizes=given["tp"],
            pp_sizes=given["pp"],
            vp_sizes=given["vpp"],
            recompute=tuple(word.strip() for word in given["recompute"].split(",")),
        )
        batches = batch.draw(DEFAULT_BATCHES)
        longest = batch.longest_tokens(batches)
        job = SweepJob(
            batches=batches,
            model=model,
            hardware=hardware,
            policy=given["policy"],
            search=given["search"],
            distributed_optimizer=not given["no_distributed_optimizer"],
        )
        found = sweep(
            space,
            job,
            max_seqlen=longest,
            limits=given["max_tokens_per_rank"],
            num_processes=jobs or len(os.sched_getaffinity(0)),
            progress=steps,
        )
    from dynamic_cp.sweep.flags import why_not_trained

    refusal = why_not_trained(model, architecture)
    flags = [] if refusal else _flags(found.fastest, job, architecture, given, longest)
    if json:
        inputs = {
            **batch.as_dict(),
            "batches": len(batches),
            "gpus": gpus,
            "ranks_per_node": space.ranks_per_node,
            "distributed_optimizer": job.distributed_optimizer,
            "search": job.search,
            "recompute": space.recompute,
            **{name: given[name] for name in ("tp", "pp", "vpp", "max_tokens_per_rank")},
            "model": given["model"],
        }
        inputs |= {"hardware": given["hardware"], "set": given["settings"], "policy": job.policy}
        write_json(json, _as_dict(found, inputs, flags, refusal))
    if json != STDOUT:
        notes = _notes(given["model"], job, architecture, longest)
        _show(found, job, given, gpus, flags, refusal, notes, console())


def _flags(
    point: Point, job: SweepJob, architecture: Architecture | None, given: dict[str, Any], longest: int
) -> list[str]:
    """Return the lines of the command that starts `point`."""
    from dynamic_cp.sweep.flags import launch_flags, launcher

    groups = launch_flags(
        point.setting,
        model=job.model,
        architecture=architecture,
        hardware_name=_CHANGED_HARDWARE if given["settings"] else given["hardware"],
        max_seqlen=longest,
        global_batch_size=len(job.batches[0]),
        policy=job.policy,
        search=job.search,
        distributed_optimizer=job.distributed_optimizer,
    )
    lines = [line for group in groups for line in _wrapped(group)]
    return [f"{launcher(point.setting)} pretrain_gpt.py", *lines]


def _wrapped(flags: tuple[str, ...]) -> list[str]:
    """Return `flags` in lines of at most `_LINE` characters; a flag keeps its value."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) <= _LINE:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines


def _notes(name: str, job: SweepJob, architecture: Architecture | None, longest: int) -> list[str]:
    """Return what to know before the recommended line is used."""
    notes = ["add your data and tokenizer, --lr and --train-iters"]
    if architecture is None:
        kind = "Llama (RoPE with base 10000)" if job.model.gated_linear_unit else "GPT-2"
        notes.append(f"{name} has no entry architecture: norms, positions and biases are taken as those of {kind}")
    elif 0 < architecture.max_position_embeddings < longest:
        notes.append(
            f"samples have up to {longest} tokens, the model was made for {architecture.max_position_embeddings}"
        )
    return notes


def _as_dict(found: Sweep, inputs: dict[str, Any], flags: list[str], refusal: str | None) -> dict[str, Any]:
    def point(one: Point) -> dict[str, Any]:
        topology = one.setting.topology
        return {
            "tp": topology.tp_size,
            "pp": topology.pp_size,
            "vpp": topology.vp_size,
            "lanes": topology.num_lanes,
            "recompute": one.setting.recompute,
            "max_tokens_per_rank": one.setting.max_tokens_per_rank,
            "cp_comm_type": "auto" if len(one.setting.cp_comm_types) > 1 else one.setting.cp_comm_types[0],
            **{name: value for name, value in asdict(one).items() if name != "setting"},
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": inputs,
        "num_evaluated": found.num_evaluated,
        "refused": dict(found.refused),
        "front": [point(one) for one in found.front],
        "recommended": {**point(found.fastest), "command": None if refusal else flags, "no_command": refusal},
    }


def _show(
    found: Sweep,
    job: SweepJob,
    given: dict[str, Any],
    gpus: int,
    flags: list[str],
    refusal: str | None,
    notes: list[str],
    out: Console,
) -> None:
    from rich.text import Text

    from dynamic_cp.cli.tables import heading, make_table, percent

    cross = "×" if can_draw(out) else "x"
    plural = "batch" if len(job.batches) == 1 else "batches"
    out.print(
        heading(f"{given['model']} on {gpus} {cross} {job.hardware.name if given['settings'] else given['hardware']}"),
        Text(f"policy {job.policy}, {len(job.batches)} global {plural} of {len(job.batches[0])} samples"),
    )
    out.print(f"{found.num_evaluated} settings planned; each of these is beaten by none in both time and memory:")
    out.print()
    wide = out.width >= WIDE
    columns = ["s/batch", "GB", "tok/s/GPU", "TP", "PP", "VPP", "lanes", "limit", "recompute", "exchange", "CP"]
    table = make_table([name for name in columns if wide or name != "lanes"], left=0)
    for index, one in enumerate(found.front):
        topology, setting = one.setting.topology, one.setting
        cells = [
            f"{one.iteration_s:.3f}",
            f"{one.peak_bytes / 1e9:.1f}",
            f"{one.tokens_per_s_per_gpu:.0f}",
            str(topology.tp_size),
            str(topology.pp_size),
            str(topology.vp_size),
            *([str(topology.num_lanes)] if wide else []),
            str(setting.max_tokens_per_rank),
            setting.recompute,
            "auto" if len(setting.cp_comm_types) > 1 else setting.cp_comm_types[0],
            f"1-{one.largest_cp_size}" if job.policy == "dynamic" else str(one.largest_cp_size),
        ]
        table.add_row(*cells, style="bold" if index == 0 else "")
    out.print(table)
    out.print()
    out.print(Text("limit: padded tokens per rank and micro-batch; CP: sizes that the plans use", style="dim"))
    if found.refused:
        out.print()
        out.print(Text(f"{sum(found.refused.values())} more cannot run:", style="dim"))
        for reason, number in found.refused.items():
            out.print(Text(f"{number:5d}  {reason}", style="dim"))
    if len(found.front) > 1:
        least = found.front[-1]
        out.print()
        out.print(
            f"The fastest needs {found.fastest.peak_bytes / 1e9:.1f} GB; the smallest {least.peak_bytes / 1e9:.1f} GB "
            f"and {percent(least.iteration_s / found.fastest.iteration_s - 1)} more time."
        )
    out.print()
    if refusal:
        out.print(Text(f"no launch line, as pretrain_gpt.py does not train this model: {refusal}", style="dim"))
        return
    if any("$HEAD_NODE" in line for line in flags):
        notes.append("HEAD_NODE is the host of node 0, NODE_RANK the number of each node")
    out.print(heading("Recommended"))
    out.print(Text(f"({'; '.join(notes)})", style="dim"))
    out.print()
    if given["settings"]:
        changes = " ".join(f"--set {shlex.quote(one)}" for one in given["settings"])
        click.echo(f"dynamic-cp hardware {shlex.quote(given['hardware'])} {changes} --output {_CHANGED_HARDWARE}")
    click.echo(" \\\n    ".join(flags))
