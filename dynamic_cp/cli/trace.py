"""`dynamic-cp trace`: the timeline of a planned iteration as a file for Perfetto."""

from __future__ import annotations

from typing import Any

import click

from dynamic_cp.cli.output import check_writable
from dynamic_cp.cli.parameters import (
    Command,
    batch_options,
    job_options,
    one_option,
    options_in,
    output_option,
    planner_options,
)
from dynamic_cp.cli.simulate import compared
from dynamic_cp.errors import InvalidInputError


@click.command(
    "trace",
    cls=Command,
    short_help="Write a timeline for Perfetto or chrome://tracing.",
    epilog="""\b
Examples:
  dynamic-cp trace --lengths github --global-batch-size 64 --lanes 8 --pp 4 --tp 2 --output trace.json
  dynamic-cp trace --lengths lengths.npy --lanes 8 --policy dynamic,balanced --output trace.json.gz
""",
)
@batch_options(several=False)
@job_options()
@options_in(
    "Planner",
    one_option(
        "--policy", default="dynamic", show_default=True, metavar="NAME,..", help="Policies, one below the other."
    ),
)
@planner_options
@options_in(
    "Output", one_option("--first-lanes", type=int, metavar="N", help="Show lanes 0 to N - 1 only. [default: all]")
)
@output_option(True, "Trace to write; compressed if it ends in .gz.", "FILE.json")
def command(policy: str, output: str, first_lanes: int | None, **given: Any) -> None:
    """Write the timeline of one global batch as a trace: a process per pipeline stage, a row per lane.

    Open it at ui.perfetto.dev or in chrome://tracing.
    """
    check_writable(output, only_files=True)
    if first_lanes is not None and not 1 <= first_lanes <= given["lanes"]:
        raise InvalidInputError(f"--first-lanes is {first_lanes}, there are {given['lanes']} lanes: change it")
    comparison, batch = compared(policy, given)
    from dynamic_cp.report.trace import Event, trace_events, write_trace

    events: list[Event] = []
    for index, one in enumerate(comparison.policies):
        timeline = one.batches[0].timeline
        if timeline is None:
            raise InvalidInputError(f"policy {one.policy} has no timeline, only a time: leave it out")
        events += trace_events(
            timeline,
            label=one.policy if len(comparison.policies) > 1 else "",
            first_process=index * comparison.topology.pp_size,
            lanes=None if first_lanes is None else range(first_lanes),
        )
    write_trace(output, events, about={**batch.as_dict(), "policy": policy, "model": comparison.model_name})
    click.echo(f"{output}: {len(events)} events; open it at ui.perfetto.dev")
