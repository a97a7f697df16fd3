"""`dynamic-cp check`: the one judge of legality, on a file."""

from __future__ import annotations

from pathlib import Path

import click

from dynamic_cp.cli.parameters import Command, Names
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Sample


@click.command(
    "check",
    cls=Command,
    short_help="Judge a plan that `plan --output` wrote.",
    epilog="""\b
Examples:
  dynamic-cp check plan.json
  dynamic-cp check plan.json --lengths lengths.npy
""",
)
@click.argument("plan", metavar="PLAN.json")
@click.option("--lengths", type=Names("FILE", tuple), help="Lengths that the plan must hold, numbered from 0.")
def command(plan: str, lengths: str | None) -> None:
    """Judge whether PLAN.json may run: lanes tiled, limits kept, every sample there once.

    Exit status 2 and the place that is wrong if not.
    """
    from dynamic_cp.lengths import read_lengths
    from dynamic_cp.serialize import digest, loads
    from dynamic_cp.validate import check_plan

    try:
        text = Path(plan).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"cannot read {plan}: {reason}: check the path") from error
    judged = loads(text)
    samples = None
    if lengths:
        samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate(read_lengths(lengths)))
    check_plan(judged, samples)
    num_samples = sum(1 for _ in judged.samples)
    sizes = " ".join(f"{cp}:{count}" for cp, count in judged.cp_histogram.items())
    click.echo(
        f"legal: {judged.num_microbatches} micro-batches, {num_samples} samples, {judged.num_tokens} tokens, "
        f"buckets by cp size {sizes}"
    )
    click.echo(f"digest: {digest(judged)}")
