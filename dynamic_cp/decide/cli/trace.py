"""`dynamic-cp trace`: the timeline of a planned iteration as a file for Perfetto."""

from __future__ import annotations

from typing import Any

import click

from dynamic_cp.decide.cli.output import check_suffix, check_writable
from dynamic_cp.decide.cli.parameters import (
    Command,
    batch_options,
    job_options,
    one_option,
    options_in,
    output_option,
    planner_options,
)
from dynamic_cp.decide.cli.run_options import check_only_run, require_batch
from dynamic_cp.decide.cli.simulate import compared, policy_option
from dynamic_cp.errors import InvalidInputError


@click.command(
    "trace",
    cls=Command,
    short_help="Write a timeline for Perfetto or chrome://tracing.",
    epilog="""\b
Examples:
  dynamic-cp trace --lengths github --global-batch-size 64 --lanes 8 --pp 4 --tp 2 --output trace.json
  dynamic-cp trace --lengths lengths.npy --gpus 8 --policy dynamic,balanced --output trace.json.gz
  dynamic-cp trace --run runs/dump --iterations 3-5 --output measured.json.gz
""",
)
@options_in(
    "Training run",
    one_option("--run", metavar="DIR", help="Folder of a run's --dynamic-cp-dump, to show its iterations as measured."),
    one_option("--iterations", metavar="A-B", help="Iterations of --run to show. [default: all]"),
)
@batch_options(several=False, required=False)
@job_options()
@options_in(
    "Planner",
    policy_option("Policies to show, comma-separated, one below the other.", default="dynamic"),
)
@planner_options
@options_in(
    "Output",
    one_option("--first-lanes", type=int, metavar="N", help="Number of lanes to show, from 0 on. [default: all]"),
)
@output_option(True, "Trace to write, compressed if it ends in .gz.", "FILE.json")
def command(
    run: str | None, iterations: str | None, policy: str, output: str, first_lanes: int | None, **given: Any
) -> None:
    """Write the timeline of one global batch, or of a training run, as a trace: a process per pipeline stage, a row per
    lane.

    Give either --lengths and --gpus or --lanes, or --run. Open it at ui.perfetto.dev or in chrome://tracing.
    """
    check_writable(output, only_files=True)
    check_suffix(output, "a trace", (".json", ".json.gz"))
    if run is not None:
        check_only_run(click.get_current_context(), ("run", "iterations", "output"))
        _write_measured(run, _range_of(iterations), output)
        return
    if iterations is not None:
        raise click.UsageError("--iterations chooses from a training run: give --run, too.")
    require_batch(click.get_current_context(), given)
    if first_lanes is not None:
        _check_first_lanes(first_lanes, given["lanes"] or given["gpus"] or first_lanes)
    comparison, batch = compared(policy, given, with_verdict=False)
    if first_lanes is not None:
        _check_first_lanes(first_lanes, min(one.setting.topology.num_lanes for one in comparison.policies))
    from dynamic_cp.decide.report.trace import Event, tick_events, trace_events, write_trace

    events: list[Event] = []
    first_process = 0
    for one in comparison.policies:
        timeline, pool = one.batches[0].timeline, one.batches[0].pool
        label = one.policy if len(comparison.policies) > 1 else ""
        lanes = None if first_lanes is None else range(first_lanes)
        if timeline is not None:
            events += trace_events(timeline, label=label, first_process=first_process, lanes=lanes)
        elif pool is not None:
            events += tick_events(pool, label=label, first_process=first_process, lanes=lanes)
        else:
            raise InvalidInputError(f"policy {one.policy} has no timeline, only a time: leave it out")
        first_process += one.setting.topology.pp_size
        if comparison.is_tuned:
            click.echo(f"{one.name} at its own fastest setting: {one.setting.layout}")
    write_trace(output, events, about={**batch.as_dict(), "policy": policy, "model": comparison.model_name})
    click.echo(f"{output}: {len(events)} events; open it at ui.perfetto.dev")


def _check_first_lanes(first_lanes: int, num_lanes: int) -> None:
    if not 1 <= first_lanes <= num_lanes:
        raise InvalidInputError(f"--first-lanes is {first_lanes}, there are {num_lanes} lanes: change it")


def _range_of(text: str | None) -> range | None:
    """Return the iterations that "3" or "3-5" names."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise InvalidInputError(f"--iterations is {text!r}: give a number or a range such as 3-5, from 1 on")
    return range(int(first), int(last or first) + 1)


def _write_measured(run: str, iterations: range | None, output: str) -> None:
    from dynamic_cp.decide.report.measured import measured_trace_events, read_spans
    from dynamic_cp.decide.report.trace import write_trace

    events = measured_trace_events(read_spans(run, iterations))
    write_trace(output, events, about={"run": run})
    click.echo(f"{output}: {len(events)} events; open it at ui.perfetto.dev")
