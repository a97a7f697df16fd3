"""`dynamic-cp doctor`: what is installed, what is missing, how to fix it."""

from __future__ import annotations

from dataclasses import asdict

import click

from dynamic_cp.decide.cli.console import can_draw, console, progress
from dynamic_cp.decide.cli.output import STDOUT, check_writable, write_json
from dynamic_cp.decide.cli.parameters import Command, json_option
from dynamic_cp.errors import UnsupportedFeatureError

SCHEMA_VERSION = 1
_STYLES = {"ok": ("✓", "ok", "green"), "note": ("•", "note", "yellow"), "broken": ("✗", "broken", "bold red")}


@click.command(
    "doctor",
    cls=Command,
    short_help="Check the installation and say how to fix it.",
    epilog="""\b
Examples:
  dynamic-cp doctor
  dynamic-cp doctor --quick --json -
""",
)
@click.option("--quick", is_flag=True, help="Skip the checks that import torch.")
@json_option
def command(quick: bool, json: str | None) -> None:
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
        write_json(json, {"schema_version": SCHEMA_VERSION, "checks": [asdict(check) for check in checks]})
    if json != STDOUT:
        from rich.text import Text

        from dynamic_cp.decide.cli.tables import make_table

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
