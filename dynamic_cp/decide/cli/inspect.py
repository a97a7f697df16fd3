"""Commands that look at one thing: a plan, hardware, the installation; and the shell's completion script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from dynamic_cp.decide.cli.options import Argument, Names, json_option, option, options_in, output_option, subcommand
from dynamic_cp.decide.cli.parameters import KINDS, SET, check_name
from dynamic_cp.decide.cli.tables import can_draw, console, make_table, progress
from dynamic_cp.decide.files import STDOUT, check_suffix, check_writable, write_json, write_text
from dynamic_cp.decide.length_files import is_pipe, name_of, piped_bytes, read_lengths
from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.models.hardware_numbers import KIND_OF
from dynamic_cp.types import Sample, counted


@subcommand(
    "check",
    """
  dynamic-cp check plan.json
  dynamic-cp check plan.json --lengths lengths.npy
  dynamic-cp plan --lengths lengths.npy --lanes 8 --tp 2 --output - | dynamic-cp check -
""",
)
@click.argument("plan", cls=Argument, metavar="PLAN.json", help="Plan that `plan --output` wrote, or - for stdin.")
@options_in(
    "Options",
    lengths=option(
        f"File of the lengths that the plan must hold, in the order of its sample numbers ({KINDS}).",
        Names("FILE", tuple),
    ),
)
def check(plan: str, lengths: str | None) -> None:
    """Judge whether PLAN.json is legal: buckets tile the lanes, limits are kept, every sample is there once.

    If not, the exit status is 2 and the message points at the place that is wrong.
    """
    from dynamic_cp.plans.serialize import digest, format_cp_sizes, loads
    from dynamic_cp.plans.validate import check_plan

    name = name_of(plan)
    try:
        text = piped_bytes(plan)
        if text is None:
            text = Path(plan).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DynamicCPError):
            raise
        raise InvalidInputError(
            f"cannot read {name}: {getattr(error, 'strerror', None) or error}: check the path"
        ) from error
    if b"\0" in text or text.startswith(b"\x1f\x8b"):
        raise InvalidInputError(f"{name} is binary, a plan is JSON: give a file that `plan --output` wrote")
    samples = None
    with progress(f"checking {name}") as steps:
        steps(0, 3, "reading")
        try:
            judged = loads(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}: {error}", **error.details) from error
        if lengths:
            samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate(read_lengths(lengths)))
        steps(1, 3, "rules")
        check_plan(judged, samples)
        steps(2, 3, "digest")
        plan_digest = digest(judged)
    num_samples = sum(1 for _ in judged.samples)
    placed = f", {judged.num_placed} of them placed" if judged.num_placed else ""
    if judged.extension is not None:
        placed = f", {judged.extension.describe()} on {counted(judged.num_servers, 'server')}"
    click.echo(
        f"legal: {counted(judged.num_microbatches, 'micro-batch')}, {counted(num_samples, 'sample')}, "
        f"{judged.num_tokens} tokens, buckets {format_cp_sizes(judged.cp_histogram)}{placed}"
    )
    click.echo(f"digest: {plan_digest}")


_LISTED = {
    "peak": "peak_flops_per_s",
    "memory": "hbm_bytes",
    "in a node": "bandwidth_in_node_bytes_per_s",
    "across nodes": "bandwidth_across_nodes_bytes_per_s",
}


@subcommand(
    "hardware",
    """
  dynamic-cp hardware                            # the bundled ones
  dynamic-cp hardware h100 > mine.json
  dynamic-cp hardware h100 --set bandwidth_across_nodes=12.5GB/s --name cloud --output cloud.json
""",
)
@click.argument(
    "hardware",
    required=False,
    cls=Argument,
    type=Names("NAME|FILE", catalog.hardware_names),
    metavar="[NAME|FILE]",
    help="Hardware to print; without one the bundled ones are listed.",
)
@options_in("Changes", settings=SET, called=option("Name that the file gives it.", flag="--name", metavar="NAME"))
@output_option("File to write instead of stdout.", "FILE.json")
def hardware(hardware: str | None, settings: tuple[str, ...], called: str | None, output: str | None) -> None:
    """Print a complete hardware file: every number of the cost and memory model with its source beside it.

    Change the numbers that you know better, give their sources, and pass the file by --hardware here or by
    --dynamic-cp-hardware in training. A file may also name a "base" and state only what differs from it.
    """
    check_writable(output)
    if output not in (None, STDOUT) and not is_pipe(output):
        check_suffix(output, "a hardware file", (".json",))
    if hardware is None:
        if settings or called or output:
            raise InvalidInputError("0 hardware is named, 1 is needed to change or write: give a name or a file")
        _list()
        return
    values = catalog.load_hardware(hardware, settings)
    check_name(called)
    if called is not None:
        values = replace(values, name=called)
    text = json.dumps(catalog.hardware_as_dict(values), indent=2, ensure_ascii=False)
    write_text(output or STDOUT, text + "\n")


def _list() -> None:
    table = make_table(["hardware", *_LISTED])
    for name in catalog.hardware_names():
        values = catalog.load_hardware(name)
        cells = (KIND_OF[number].describe(getattr(values, number)) for number in _LISTED.values())
        table.add_row(name, *(cell if cell[0] != "0" else "unknown" for cell in cells))
    console().print(table)


SCHEMA_VERSION = 1
_STYLES = {"ok": ("✓", "ok", "green"), "note": ("•", "note", "yellow"), "broken": ("✗", "broken", "bold red")}


@subcommand(
    "doctor",
    """
  dynamic-cp doctor
  dynamic-cp doctor --quick --json -
""",
)
@options_in("Options", quick=option("Skip the checks that import torch.", bool))
@json_option
def doctor(quick: bool, json: str | None) -> None:
    """Check Python, packages, the planner's compiled code, GPUs and the training side.

    Exit status 2 if something is broken. Notes are about optional parts.
    """
    check_writable(json)
    from dynamic_cp.decide.doctor import base_checks, other_checks, training_packages

    with progress("checking") as steps:
        steps(0, 2, "packages")
        checks = [*base_checks(), *training_packages()]
        if not quick:
            steps(1, 2, "torch and megatron-core")
            checks += other_checks()
    if json:
        write_json(json, {"schema_version": SCHEMA_VERSION, "checks": [check._asdict() for check in checks]})
    if json != STDOUT:
        from rich.text import Text

        out = console()
        table = make_table(["", "what", "found"], left=3)
        for check in checks:
            mark, word, style = _STYLES[check.state]
            found = Text(check.detail)
            if check.remedy:
                found.append(f"\n{check.remedy}", style="bold")
            table.add_row(Text(mark if can_draw(out) else word, style=style), check.name, found)
        out.print(table)
    broken = [check for check in checks if check.state == "broken"]
    if broken:
        raise UnsupportedFeatureError(
            f"{len(broken)} of {len(checks)} checks found something broken ({', '.join(one.name for one in broken)}): "
            "see the remedies"
        )


@subcommand(
    "completion",
    """
  eval "$(dynamic-cp completion bash)"                               # in ~/.bashrc
  eval "$(dynamic-cp completion zsh)"                                # in ~/.zshrc
  dynamic-cp completion fish > ~/.config/fish/completions/dynamic-cp.fish
""",
)
@click.argument("shell", cls=Argument, type=click.Choice(("bash", "zsh", "fish")), help="Shell to write it for.")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and bundled names in SHELL."""
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(ctx.find_root().command, {}, "dynamic-cp", "_DYNAMIC_CP_COMPLETE").source())
