"""`dynamic-cp report`: a comparison, or a training run, as one HTML file."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import Any

import click

from dynamic_cp.decide.cli.console import progress
from dynamic_cp.decide.cli.output import check_suffix, check_writable, write_text
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
from dynamic_cp.decide.cli.simulate import DEFAULT_BATCHES, compared, policy_option
from dynamic_cp.errors import UnsupportedFeatureError


@click.command(
    "report",
    cls=Command,
    short_help="Write one HTML file with pictures, tables and inputs.",
    epilog="""\b
Examples:
  dynamic-cp report --lengths github --global-batch-size 256 --gpus 32 --output report.html
  dynamic-cp report --run runs/dump --output run.html
""",
)
@options_in(
    "Training run",
    one_option(
        "--run",
        metavar="DIR",
        help="Folder of a run's --dynamic-cp-dump, to compare measured and predicted times.",
    ),
)
@batch_options(several=True, default_batches=DEFAULT_BATCHES, required=False)
@job_options()
@options_in(
    "Planner",
    policy_option("Policies to compare, comma-separated; also pool and with-pool."),
)
@planner_options
@output_option(True, "HTML page to write.", "FILE.html")
def command(run: str | None, policy: str, output: str, **given: Any) -> None:
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
    again = _command_line(ctx)
    if run is not None:
        check_only_run(ctx, ("run", "output"))
        from dynamic_cp.decide.report.run import read_about, read_run
        from dynamic_cp.decide.report.run_page import render_run_report

        page = render_run_report(read_run(run), command=again, inputs={"run": run, **read_about(run)})
    else:
        require_batch(ctx, given)
        comparison, batch = compared(policy, given)
        inputs = {**batch.as_dict(), **given, "hardware": comparison.hardware_name}
        given_inputs = {name: value for name, value in inputs.items() if value not in (None, ())}
        with progress("drawing") as steps:
            steps(0, 1, "pictures")
            from dynamic_cp.decide.report.comparison_page import render_report

            page = render_report(comparison, command=again, inputs=given_inputs)
    write_text(output, page)
    click.echo(f"{output}: open it in a browser")


def _command_line(ctx: click.Context) -> str:
    """Return what to type to get the same again: the options that were given."""
    words = ["dynamic-cp", "report"]
    for parameter in ctx.command.params:
        assert parameter.name is not None
        if ctx.get_parameter_source(parameter.name) != click.core.ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[parameter.name]
        for one in value if isinstance(value, tuple) else (value,):
            words += [parameter.opts[0]] if one is True else [parameter.opts[0], shlex.quote(str(one))]
    return " ".join(words)
