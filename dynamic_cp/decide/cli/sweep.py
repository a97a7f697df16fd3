"""`dynamic-cp sweep`: which settings suit a number of GPUs, whether dynamic CP pays there, and flags to start it."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dynamic_cp.decide.cli.options import json_option, options_in, options_of, subcommand, taken
from dynamic_cp.decide.cli.parameters import STATE, BatchInput, SweepInput, batch_options
from dynamic_cp.decide.cli.simulate import policies_in, searched
from dynamic_cp.decide.cli.tables import console, progress
from dynamic_cp.decide.files import STDOUT, check_writable, write_json
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models import catalog

if TYPE_CHECKING:
    from dynamic_cp.decide.comparison import Comparison
    from dynamic_cp.decide.sweep import Point, Space, Sweep, SweepJob
    from dynamic_cp.models.architecture import Architecture

SCHEMA_VERSION = 2
DEFAULT_BATCHES = 4
_LINE = 92
_CHANGED_HARDWARE = "hardware.json"
"""What the trainer reads in place of --set."""


@subcommand(
    "sweep",
    """
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64
  dynamic-cp sweep --lengths lengths.npy --gpus 16 --model llama-2-13b --tp 2,4 --pp 1,2,4
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64 --policy balanced   # without dynamic CP
""",
)
@batch_options(default_batches=DEFAULT_BATCHES, with_mask=False)
@options_of(
    SweepInput,
    "Job",
    "gpus model hardware settings mtp_num_layers expert_imbalance ranks_per_node no_distributed_optimizer "
    "no_overlap_grad_reduce",
)
@options_in("Job", **STATE)
@options_of(SweepInput, "Job", "tp_overlap")
@options_of(
    SweepInput,
    "What is tried",
    "tp pp vpp ep recompute loss_chunk_tokens max_tokens_per_rank cp_comm_type state_exchange policy search jobs",
    exchange="auto or p2p, whichever is faster",
)
@json_option
def command(json: str | None, **given: Any) -> None:
    """Search layouts and limits for a number of GPUs; say which is fastest and whether dynamic CP pays there.

    Policies are compared, each at its own fastest setting: the last line has the best static setting, the dynamic one
    and the gain. For the recommended policy it prints the settings that no other beats in both time and memory, and
    the flags to start it. Settings that cannot run are counted, with the reason.
    """
    check_writable(json)
    if given["jobs"] is not None and given["jobs"] < 1:
        raise InvalidInputError(f"--jobs is {given['jobs']}, at least 1 is needed: change it")
    policies = policies_in(given["policy"])
    batch, run = taken(given, BatchInput), SweepInput.of(given)
    architecture = catalog.load_architecture(run.model)
    run.check_memory_is_known()
    with progress("sweeping") as steps:
        steps(0, 1, "lengths")
        from dynamic_cp.decide.comparison import compare_settings

        space = run.space
        job = run.sweep_job(batch, batch.draw(DEFAULT_BATCHES))
        found = searched(space, job, policies, steps, run.jobs)
        names, other_prices = (run.model, run.hardware_name), found.other_prices
        comparison = compare_settings(job, found.settings, names=names, other_prices=other_prices, progress=steps)
    refusal = _why_no_line(found, job, architecture)
    flags = [] if refusal else _flags(found.front[0], job, architecture, run)
    if json:
        inputs = _inputs(batch, space, job, run) | {"policies": policies}
        write_json(json, _as_dict(found, comparison, inputs, flags, refusal))
    if json != STDOUT:
        from dynamic_cp.decide.cli.comparison_tables import LaunchLine, show_sweep

        notes = _notes(run.model, job, architecture)
        line = LaunchLine(flags=flags, refusal=refusal, notes=notes, before=_hardware_command(run))
        show_sweep(found, comparison, batch, line, console())


def _inputs(batch: BatchInput, space: Space, job: SweepJob, run: SweepInput) -> dict[str, Any]:
    as_given = (
        *("tp", "pp", "vpp", "ep", "expert_imbalance", "mtp_num_layers", "max_tokens_per_rank"),
        *("cp_comm_type", "state_exchange", "model", "hardware"),
    )
    return {
        **batch.as_dict(),
        "batches": len(job.batches),
        "gpus": space.num_gpus,
        "ranks_per_node": space.ranks_per_node,
        **run.data_parallel_as_dict,
        "tp_overlap": job.tp_overlap,
        "search": job.search,
        "recompute": space.recompute,
        "loss_chunk_tokens": space.loss_chunk_tokens,
        **{name: getattr(run, name) for name in as_given},
        "set": run.settings,
    }


def _why_no_line(found: Sweep, job: SweepJob, architecture: Architecture | None) -> str:
    """Return why there is no launch line, nothing where there is one."""
    from dynamic_cp.decide.sweep import TRAINED_POLICIES
    from dynamic_cp.decide.sweep.flags import why_not_trained

    if found.recommended not in TRAINED_POLICIES:
        return f"pretrain_gpt.py has no policy {found.recommended}"
    reason = why_not_trained(job.model, architecture)
    return f"pretrain_gpt.py does not train this model: {reason}" if reason else ""


def _flags(point: Point, job: SweepJob, architecture: Architecture | None, run: SweepInput) -> list[str]:
    """Return the lines of the command that starts `point`."""
    from dynamic_cp.decide.sweep.flags import launch_flags, launcher

    groups = launch_flags(
        point.setting,
        model=job.model,
        architecture=architecture,
        hardware_name=_CHANGED_HARDWARE if run.settings else run.hardware,
        max_seqlen=job.max_seqlen,
        global_batch_size=len(job.batches[0]),
        options=job.options_of(point.setting),
        data_parallel=job.data_parallel,
    )
    lines = [line for group in groups for line in _wrapped(group)]
    return [f"{launcher(point.setting)} pretrain_gpt.py", *lines]


def _hardware_command(run: SweepInput) -> str:
    """Return the command that writes the hardware file which the launch line names; nothing without --set."""
    if not run.settings:
        return ""
    changes = " ".join(f"--set {shlex.quote(one)}" for one in run.settings)
    return f"dynamic-cp hardware {shlex.quote(run.hardware)} {changes} --output {_CHANGED_HARDWARE}"


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
    elif 0 < architecture["max_position_embeddings"] < job.max_seqlen:
        notes.append(
            f"samples have up to {job.max_seqlen} tokens, the model was made for "
            f"{architecture['max_position_embeddings']}"
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
