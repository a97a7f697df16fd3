"""Commands that write pictures of a comparison or of a training run: `report` (HTML) and `trace` (Perfetto)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

import click

from dynamic_cp.decide.cli.options import command_line, option, options_in, output_option, subcommand
from dynamic_cp.decide.cli.parameters import batch_options, job_options, planner_options, policy_option
from dynamic_cp.decide.cli.simulate import DEFAULT_BATCHES, compared
from dynamic_cp.decide.cli.tables import progress
from dynamic_cp.decide.files import check_suffix, check_writable, write_text
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError


def check_only_run(ctx: click.Context, allowed: Collection[str]) -> None:
    """Refuse options that say what to simulate beside --run; `allowed`: names of parameters that fit a run."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in allowed and source == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} says what to simulate, --run is about a run.", ctx)


def require_batch(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Refuse a command without a global batch; click.UsageError: --lengths is missing."""
    if given["lengths"] is None:
        raise click.UsageError("Missing option '--lengths' (or '--run DIR' for a training run).", ctx)


@subcommand(
    "report",
    """
  dynamic-cp report --lengths github --global-batch-size 256 --gpus 32 --output report.html
  dynamic-cp report --run runs/dump --output run.html
""",
)
@options_in(
    "Training run",
    run=option("Folder of a run's --dynamic-cp-dump, to compare measured and predicted times.", metavar="DIR"),
)
@batch_options(default_batches=DEFAULT_BATCHES, required=False)
@job_options
@options_in("Planner", policy=policy_option("Policies to compare, comma-separated; also pool and with-pool."))
@planner_options
@output_option("HTML page to write.", "FILE.html", required=True)
def report(run: str | None, policy: str, output: str, **given: Any) -> None:
    """Write one HTML file that needs no network: a comparison as by `simulate`, with pictures, or a training run.

    Give either --lengths and --gpus or --lanes, or --run. It needs matplotlib and jinja2.
    """
    check_writable(output, only_files=True)
    check_suffix(output, "a report", (".html", ".htm"))
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise UnsupportedFeatureError(
                f"report needs {package}, which is not installed: pip install 'megatron-dynamic-cp[report]'"
            )
    ctx = click.get_current_context()
    again = " ".join(command_line(ctx))
    if run is not None:
        check_only_run(ctx, ("run", "output"))
        from dynamic_cp.decide.report.run import read_about, read_run
        from dynamic_cp.decide.report.run_page import render_run_report

        with progress("drawing") as steps:
            steps(0, 1, "iterations")
            page = render_run_report(read_run(run), command=again, inputs={"run": run, **read_about(run)})
    else:
        require_batch(ctx, given)
        comparison, batch, _ = compared(policy, given)
        inputs = {**batch.as_dict(), **given, "hardware": comparison.hardware_name}
        given_inputs = {name: value for name, value in inputs.items() if value not in (None, ())}
        with progress("drawing") as steps:
            steps(0, 1, "pictures")
            from dynamic_cp.decide.report.comparison_page import render_report

            page = render_report(comparison, command=again, inputs=given_inputs)
    write_text(output, page)
    click.echo(f"{output}: open it in a browser")


@subcommand(
    "trace",
    """
  dynamic-cp trace --lengths github --global-batch-size 64 --lanes 8 --pp 4 --tp 2 --output trace.json
  dynamic-cp trace --lengths lengths.npy --gpus 8 --policy dynamic,balanced --output trace.json.gz
  dynamic-cp trace --run runs/dump --iterations 3-5 --output measured.json.gz
""",
)
@options_in(
    "Training run",
    run=option("Folder of a run's --dynamic-cp-dump, to show its iterations as measured.", metavar="DIR"),
    iterations=option("Iterations of --run to show. [default: all]", metavar="A-B"),
)
@batch_options(required=False)
@job_options
@options_in(
    "Planner", policy=policy_option("Policies to show, comma-separated, one below the other.", default="dynamic")
)
@planner_options
@options_in("Output", first_lanes=option("Number of lanes to show, from 0 on. [default: all]", int))
@output_option("Trace to write, compressed if it ends in .gz.", "FILE.json", required=True)
def trace(
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
    comparison, batch, _ = compared(policy, given, with_verdict=False)
    if first_lanes is not None:
        _check_first_lanes(first_lanes, min(one.setting.topology.num_lanes for one in comparison.policies))
    from dynamic_cp.decide.comparison import PlanOutcome, PoolOutcome
    from dynamic_cp.decide.report.trace import Event, tick_events, trace_events, write_trace

    events: list[Event] = []
    first_process = 0
    with progress("writing") as steps:
        for number, one in enumerate(comparison.policies):
            steps(number, len(comparison.policies), one.policy)
            batch_outcome = one.batches[0]
            label = one.policy if len(comparison.policies) > 1 else ""
            lanes = None if first_lanes is None else range(first_lanes)
            if isinstance(batch_outcome, PoolOutcome):
                events += tick_events(batch_outcome.pool, label=label, first_process=first_process, lanes=lanes)
            elif isinstance(batch_outcome, PlanOutcome):
                events += trace_events(batch_outcome.timeline, label=label, first_process=first_process, lanes=lanes)
            first_process += one.setting.topology.pp_size
        write_trace(output, events, about={**batch.as_dict(), "policy": policy, "model": comparison.model_name})
    for one in comparison.policies if comparison.is_tuned else ():
        click.echo(f"{one.name} at its own fastest setting: {one.setting.layout}")
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
    from dynamic_cp.decide.report.run import read_spans
    from dynamic_cp.decide.report.trace import measured_trace_events, write_trace

    with progress("writing") as steps:
        steps(0, 1, "spans of the run")
        events = measured_trace_events(read_spans(run, iterations))
        write_trace(output, events, about={"run": run})
    click.echo(f"{output}: {len(events)} events; open it at ui.perfetto.dev")
