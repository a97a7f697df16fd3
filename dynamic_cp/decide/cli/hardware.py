"""`dynamic-cp hardware`: a hardware file to start from, complete and with the source of every number."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from dynamic_cp.decide.cli.console import console
from dynamic_cp.decide.cli.output import STDOUT, check_suffix, check_writable, write_text
from dynamic_cp.decide.cli.parameters import (
    SET,
    Argument,
    Command,
    Names,
    check_name,
    one_option,
    options_in,
    output_option,
)
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.lengths.streams import is_pipe
from dynamic_cp.models import catalog
from dynamic_cp.models.hardware_numbers import KIND_OF

_LISTED = {
    "peak": "peak_flops_per_s",
    "memory": "hbm_bytes",
    "in a node": "bandwidth_in_node_bytes_per_s",
    "across nodes": "bandwidth_across_nodes_bytes_per_s",
}


@click.command(
    "hardware",
    cls=Command,
    short_help="Print a hardware file with its sources, ready to edit.",
    epilog="""\b
Examples:
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
@options_in("Changes", SET, one_option("--name", "called", metavar="NAME", help="Name that the file gives it."))
@output_option(False, "File to write instead of stdout.", "FILE.json")
def command(hardware: str | None, settings: tuple[str, ...], called: str | None, output: str | None) -> None:
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
    from dynamic_cp.decide.cli.tables import make_table

    table = make_table(["hardware", *_LISTED])
    for name in catalog.hardware_names():
        values = catalog.load_hardware(name)
        cells = (KIND_OF[number].describe(getattr(values, number)) for number in _LISTED.values())
        table.add_row(name, *(cell if cell[0] != "0" else "unknown" for cell in cells))
    console().print(table)
