"""`dynamic-cp check`: the one judge of legality, on a file."""

from __future__ import annotations

from pathlib import Path

import click

from dynamic_cp.decide.cli.parameters import KINDS, Argument, Command, Names
from dynamic_cp.errors import DynamicCPError, InvalidInputError
from dynamic_cp.lengths.streams import name_of, piped_bytes
from dynamic_cp.types import Sample, counted


@click.command(
    "check",
    cls=Command,
    short_help="Judge a plan that `plan --output` wrote.",
    epilog="""\b
Examples:
  dynamic-cp check plan.json
  dynamic-cp check plan.json --lengths lengths.npy
  dynamic-cp plan --lengths lengths.npy --lanes 8 --tp 2 --output - | dynamic-cp check -
""",
)
@click.argument("plan", cls=Argument, metavar="PLAN.json", help="Plan that `plan --output` wrote, or - for stdin.")
@click.option(
    "--lengths",
    type=Names("FILE", tuple),
    help=f"File of the lengths that the plan must hold, in the order of its sample numbers ({KINDS}).",
)
def command(plan: str, lengths: str | None) -> None:
    """Judge whether PLAN.json is legal: buckets tile the lanes, limits are kept, every sample is there once.

    If not, the exit status is 2 and the message points at the place that is wrong.
    """
    from dynamic_cp.lengths.read import read_lengths
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
    try:
        judged = loads(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: {error}", **error.details) from error
    samples = None
    if lengths:
        samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate(read_lengths(lengths)))
    check_plan(judged, samples)
    num_samples = sum(1 for _ in judged.samples)
    placed = f", {judged.num_placed} of them placed" if judged.num_placed else ""
    if judged.extension is not None:
        placed = f", {judged.extension.describe()} on {counted(judged.num_servers, 'server')}"
    click.echo(
        f"legal: {counted(judged.num_microbatches, 'micro-batch')}, {counted(num_samples, 'sample')}, "
        f"{judged.num_tokens} tokens, buckets {format_cp_sizes(judged.cp_histogram)}{placed}"
    )
    click.echo(f"digest: {digest(judged)}")
