"""`dynamic-cp lengths`: what a data set's lengths are like, and which of them hold the work."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp.cli.console import can_draw, console
from dynamic_cp.cli.output import STDOUT, check_writable, write_json
from dynamic_cp.cli.parameters import (
    CUT_OPTIONS,
    LENGTHS,
    BatchInput,
    Command,
    json_option,
    one_option,
    options_in,
    workload_names,
)
from dynamic_cp.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
DEFAULT_SAMPLES = 10_000


@click.command(
    "lengths",
    cls=Command,
    short_help="Describe lengths: quantiles, and what each class of them holds.",
    epilog="""\b
Examples:
  dynamic-cp lengths                             # the bundled workloads
  dynamic-cp lengths my_lengths.csv
  dynamic-cp lengths github sft_short
  dynamic-cp lengths lognormal:mean=1024,sigma=1.5 --samples 100000 --json -
""",
)
@click.argument("lengths", nargs=-1, type=LENGTHS, metavar="[FILE|NAME]...")
@options_in(
    "Drawing",
    one_option(
        "--samples",
        type=int,
        metavar="N",
        help=f"Samples to draw. [default: all of a file, {DEFAULT_SAMPLES} of a workload]",
    ),
    one_option("--seed", type=int, metavar="N", help="Of the draw. [default: 0]"),
    *CUT_OPTIONS,
)
@json_option
def command(lengths: tuple[str, ...], samples: int | None, json: str | None, **given: Any) -> None:
    """Describe lengths in files (.npy, .txt, .csv, .jsonl, .idx) or of bundled workloads; without any, list those.

    A few long samples hold most of the attention work: that is what one CP size for all cannot suit.
    """
    check_writable(json)
    out = console()
    if not lengths:
        _list_workloads(out, json)
        return
    described = {name: _describe(name, samples, given) for name in dict.fromkeys(lengths)}
    if json:
        write_json(json, {"schema_version": SCHEMA_VERSION, "lengths": described})
    if json != STDOUT:
        for index, (name, one) in enumerate(described.items()):
            if index:
                out.print()
            _show(name, one, out)


def _describe(name: str, samples: int | None, given: dict[str, Any]) -> dict[str, Any]:
    from dynamic_cp.length_classes import length_classes
    from dynamic_cp.workloads import describe, workload_source

    batch = BatchInput(lengths=name, **given)
    if samples is not None or not batch.is_file:
        if samples is not None and samples < 1:
            raise InvalidInputError(f"--samples is {samples}, at least 1 is needed: change it")
        batch = BatchInput(lengths=name, global_batch_size=samples or DEFAULT_SAMPLES, **given)
    (drawn,) = batch.draw()
    values = [sample.seqlen for sample in drawn]
    summary = describe(values)
    return {
        "source": workload_source(name) if name in workload_names() else None,
        "is_drawn": batch.global_batch_size is not None,
        **{key: value for key, value in asdict(summary).items() if key not in ("quantiles_tokens", "tails")},
        "quantiles": [{"percent": percent, "tokens": tokens} for percent, tokens in summary.quantiles_tokens],
        "tails": [asdict(tail) for tail in summary.tails],
        "classes": [asdict(one) for one in length_classes(values)],
    }


def _show(name: str, described: dict[str, Any], out: Console) -> None:
    from rich.text import Text

    from dynamic_cp.cli.tables import bar, grouped, heading, make_table, percent, tokens

    out.print(heading(name), Text(f"  {described['source']}" if described["source"] else "", style="dim"))
    what = "drawn samples" if described["is_drawn"] else "samples"
    out.print(
        f"{grouped(described['num_samples'])} {what}, {grouped(described['num_tokens'])} tokens, "
        f"mean {described['mean_tokens']:.0f}"
    )
    quantiles = make_table(["percentile", *(f"{one['percent']:g}" for one in described["quantiles"])])
    quantiles.add_row("tokens", *(str(one["tokens"]) for one in described["quantiles"]))
    out.print()
    out.print(quantiles)
    width = max(8, min(40, (out.width - 40) // 2))
    classes = make_table(["up to", "samples", "", "tokens", "work", ""], left=1)
    classes.columns[2].justify = classes.columns[5].justify = "left"
    classes.columns[2].min_width = classes.columns[5].min_width = width
    most = max(max(one["samples"], one["tokens_squared"]) for one in described["classes"])
    for one in described["classes"]:
        classes.add_row(
            tokens(one["up_to_tokens"]),
            percent(one["samples"]),
            Text(bar(one["samples"] / most, width, out), style="cyan"),
            percent(one["tokens"]),
            percent(one["tokens_squared"]),
            Text(bar(one["tokens_squared"] / most, width, out), style="magenta"),
        )
    out.print()
    out.print(classes)
    squared = "tokens²" if can_draw(out) else "tokens squared"
    out.print()
    note = f"up to: tokens of a sample; work: share of the attention work, which grows as {squared}"
    if described["is_drawn"] and described["source"]:
        note += "\ndrawn as `plan` and `simulate` draw: what is shorter than 64 tokens becomes 64"
    out.print(Text(note, style="dim"))


def _list_workloads(out: Console, json: str | None) -> None:
    from dynamic_cp.cli.tables import make_table
    from dynamic_cp.workloads import workload_source

    sources = {name: workload_source(name) for name in workload_names()}
    if json:
        write_json(json, {"schema_version": SCHEMA_VERSION, "workloads": sources})
    if json != STDOUT:
        table = make_table(["workload", "what it is"], left=2)
        for name, source in sources.items():
            table.add_row(name, source)
        out.print(table)
