"""`dynamic-cp sweep`: which settings suit a number of GPUs, whether dynamic CP pays there, and flags to start it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp import __version__
from dynamic_cp.decide.cli.options import (
    command_line,
    json_option,
    option,
    options_in,
    options_of,
    output_option,
    subcommand,
    taken,
)
from dynamic_cp.decide.cli.parameters import PRECISION_AND_EXPERTS, STATE, BatchInput, SweepInput, batch_options
from dynamic_cp.decide.cli.simulate import policies_in, searched
from dynamic_cp.decide.cli.tables import Progress, console, progress
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.files import STDOUT, check_apart, check_writable, write_json
from dynamic_cp.errors import InvalidInputError

if TYPE_CHECKING:
    from dynamic_cp.decide.cli.starting import Starter
    from dynamic_cp.decide.comparison import Comparison
    from dynamic_cp.decide.sweep import Point, Space, Sweep, SweepJob

SCHEMA_VERSION = 2
DEFAULT_BATCHES = 4
_OF_SEARCH = (
    *("gpus", "tp", "pp", "vpp", "ep", "recompute", "loss_chunk_tokens", "max_tokens_per_rank", "cp_comm_type"),
    *("policy", "jobs", "tp_overlap", "output", "json"),
)
"""Options that say what is searched, and how; `simulate` takes the others as they are."""


@subcommand(
    "sweep",
    """
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64
  dynamic-cp sweep --lengths lengths.npy --gpus 16 --model llama-2-13b --tp 2,4 --pp 1,2,4
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64 --policy balanced   # without dynamic CP
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64 --output job.sbatch
""",
)
@batch_options(default_batches=DEFAULT_BATCHES, with_mask=False)
@options_of(
    SweepInput,
    "Job",
    f"gpus model hardware settings mtp_num_layers {PRECISION_AND_EXPERTS} ranks_per_node no_distributed_optimizer "
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
@output_option(
    "Write what starts the recommended setting: flags for `pretrain_gpt.py @FILE`, or a SLURM job. The fastest static "
    "setting goes beside it, as FILE-static (FILE-dynamic where a static one is recommended).",
    "FILE.flags|.sbatch",
    callback=lambda ctx, parameter, given: _only_one(given),
    multiple=True,
)
@json_option
@options_in(
    "Output",
    resume=option(
        "Keep what is planned in FILE as it is found. The same command goes on from there after it was ended.",
        metavar="FILE",
    ),
)
def command(output: str | None, json: str | None, resume: str | None, **given: Any) -> None:
    """Search layouts and limits for a number of GPUs; say which is fastest and whether dynamic CP pays there.

    Policies are compared, each at its own fastest setting: the last line has the best static setting, the dynamic one
    and the gain. For the recommended policy it prints the settings that no other beats in both time and memory, and
    the flags to start it. Settings that cannot run are counted, with the reason.
    """
    check_writable(json)
    check_writable(resume, only_files=True)
    check_apart(output=output, json=json, resume=resume)
    if given["jobs"] is not None and given["jobs"] < 1:
        raise InvalidInputError(f"--jobs is {given['jobs']}, at least 1 is needed: change it")
    policies = policies_in(given["policy"])
    batch, run = taken(given, BatchInput), SweepInput.of(given)
    architecture = hugging_face.load_architecture(run.model)
    run.check_memory_is_known()
    with ExitStack() as at_end, progress("sweeping") as steps:
        steps(0, 1, "lengths")
        from dynamic_cp.decide.cli.starting import Starter, check_output

        check_output(output, policies, run.whole_model, architecture)
        ctx = click.get_current_context()
        starter = Starter(
            job=run.sweep_job(batch, batch.draw(DEFAULT_BATCHES)),
            run=run,
            architecture=architecture,
            command=" ".join(command_line(ctx)),
            shared=command_line(ctx, "simulate", without=_OF_SEARCH),
            output=output,
            resume=resume,
        )
        found, comparison = _found(starter, policies, steps, at_end)
    refusal = starter.why_no_line(found.recommended)
    flags = [] if refusal else starter.line(found.front[0])
    files = starter.write(found)
    if json:
        inputs = _inputs(batch, run.space, starter.job, run) | {"policies": policies}
        write_json(json, _as_dict(found, comparison, inputs, flags, refusal))
    if json != STDOUT:
        from dynamic_cp.decide.cli.comparison_tables import show_sweep

        show_sweep(found, comparison, batch, starter, files, console())


def _only_one(given: Sequence[str]) -> str | None:
    """Return the file of --output; two kinds of files invite to name both, and the first would be left out in silence.
    InvalidInputError: there are several."""
    if len(given) > 1:
        raise InvalidInputError(
            f"--output is given {len(given)} times ({', '.join(given)}), 1 is written: leave out the others "
            "(--resume FILE keeps what is planned for a second sweep)"
        )
    return given[0] if given else None


def _found(starter: Starter, policies: Sequence[str], steps: Progress, at_end: ExitStack) -> tuple[Sweep, Comparison]:
    """Return the best settings and their comparison; where a signal ends the search, `at_end` shows what it has."""
    from dynamic_cp.decide.comparison import compare_settings
    from dynamic_cp.decide.sweep.journal import Journal
    from dynamic_cp.decide.sweep.search import SweepEndedError
    from dynamic_cp.decide.sweep.workers import sigterm_as_an_exception

    job, run = starter.job, starter.run
    journal = None
    if starter.resume is not None:
        journal = at_end.enter_context(closing(Journal(starter.resume, job, __version__)))
    best: Mapping[str, Point] = {}
    try:
        with sigterm_as_an_exception():
            found = searched(run.space, job, policies, steps, run.jobs, journal=journal, tells_end=True)
            best = found.best
            names, others = (run.model, run.hardware_name), found.other_prices
            return found, compare_settings(job, found.settings, names=names, other_prices=others, progress=steps)
    except SweepEndedError as ended:
        at_end.callback(_show_ended, ended.best, starter)
        raise ended.cause from None
    except (KeyboardInterrupt, SystemExit):
        at_end.callback(_show_ended, best, starter)
        raise


def _show_ended(best: Mapping[str, Point], starter: Starter) -> None:
    from dynamic_cp.decide.cli.comparison_tables import show_ended

    trained = [point for name, point in best.items() if not starter.why_no_line(name)]
    fastest = min(trained, key=lambda one: (-len(one.batches_s), one.iteration_s), default=None)
    line = [] if fastest is None else starter.line(fastest)
    show_ended(best, len(starter.job.batches), line, starter.resume, console())


def _inputs(batch: BatchInput, space: Space, job: SweepJob, run: SweepInput) -> dict[str, Any]:
    as_given = (
        *("tp", "pp", "vpp", "ep", *PRECISION_AND_EXPERTS.split(), "mtp_num_layers", "max_tokens_per_rank"),
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
