"""Writes tests/golden/command/*: what `dynamic-cp` prints, at 80 and 160 columns and as JSON, and all its options.

python -m tools.command_goldens

Models and hardware are files in inputs/ there, so that no measured price changes them. Planning seconds are those of a
clock that ticks once per look. Numbers in JSON are rounded to 6 digits: floats differ between CPU types.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click

from dynamic_cp import __version__
from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.app import group

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "command"
INPUTS = FOLDER / "inputs"

_FILES = "--model ./model.json --hardware ./hardware.json"
_BATCHES = "--lengths ./lengths.txt --global-batch-size 24 --batches 3"
_FEW = "--lengths lognormal:mean=5000,sigma=1 --global-batch-size 6"
_PLACED = "--cp-comm-type blocks --mask lambda:64,1024"
COMMANDS = {
    "lengths": "lengths ./lengths.txt",
    "lengths_listed": "lengths",
    "plan": f"plan --lengths ./lengths.txt --lanes 4 --pp 2 {_FILES} --max-tokens-per-rank 10240 --bound",
    "plan_placed": f"plan {_FEW} --lanes 6 --pp 2 {_FILES} --max-tokens-per-rank 10240 --bound {_PLACED}",
    "simulate": f"simulate {_BATCHES} --batches 6 --lanes 8 {_FILES} --ranks-per-node 2 --max-tokens-per-rank 8192 "
    "--policy dynamic,balanced",
    "simulate_one_batch": f"simulate --lengths ./lengths.txt --lanes 8 {_FILES} --policy dynamic,megatron-dev",
    "simulate_pipeline": f"simulate {_BATCHES} --lanes 4 --tp 2 --pp 4 --vpp 2 {_FILES} --recompute full",
    "simulate_placed": f"simulate {_FEW} --batches 2 --lanes 8 {_FILES} --ranks-per-node 4 --max-tokens-per-rank 10240 "
    f"--policy dynamic,balanced {_PLACED}",
    "simulate_equal": "simulate --lengths lognormal:mean=2000,sigma=0 --global-batch-size 16 --batches 2 --lanes 4 "
    + _FILES,
    "sweep": f"sweep --lengths ./lengths.txt --gpus 8 --tp 1,2 --pp 1 --recompute none {_FILES} --jobs 1",
}
"""Name of the golden files -> words of the command."""

WIDTHS = (80, 160)


def render(name: str, width: int) -> str:
    """Return what the command of a golden prints at `width` columns."""
    return _run(COMMANDS[name].split(), width)


def render_json(name: str) -> str:
    """Return the JSON of the command of a golden, without what differs from run to run."""
    data = json.loads(_run([*COMMANDS[name].split(), "--json", "-"], 80))
    assert data.pop("version") == __version__
    return json.dumps(_rounded(data), indent=1) + "\n"


def surface() -> str:
    """Return all commands with all options: what users' scripts rely on."""
    context = click.Context(group, info_name="dynamic-cp")
    lines = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        lines.append(name)
        for parameter in command.params:
            kind = parameter.type
            choices = f" {{{','.join(kind.choices)}}}" if isinstance(kind, click.Choice) else ""
            default = "" if parameter.default in (None, False) or parameter.required else f" = {parameter.default}"
            if isinstance(parameter, click.Option):
                needed = " (required)" if parameter.required else ""
                lines.append(f"  {' '.join(parameter.opts)}{choices}{needed}{default}".replace("Sentinel.UNSET", ""))
            else:
                lines.append(f"  {parameter.name}{choices}")
    return "\n".join(line.rstrip(" =") for line in lines) + "\n"


def _run(words: list[str], width: int) -> str:
    out = io.StringIO()
    ticks = itertools.count()
    with (
        _inside(INPUTS),
        contextlib.redirect_stdout(out),
        mock.patch.dict(os.environ, {"COLUMNS": str(width), "NO_COLOR": "1"}),
        mock.patch("dynamic_cp.decide.comparison.compare.time.perf_counter", side_effect=lambda: next(ticks) / 1000),
    ):
        status = cli.main(words)
    assert status == 0, words
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items() if name != "plan_s"}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def text_file(name: str, width: int) -> str:
    """Return the name of the golden file of a text."""
    return f"{name}.{width}.txt"


def json_file(name: str) -> str:
    """Return the name of the golden file of a JSON."""
    return f"{name}.json"


def files() -> dict[str, str]:
    """Return golden file name -> text."""
    texts = {"surface.txt": surface()}
    for name in COMMANDS:
        texts |= {text_file(name, width): render(name, width) for width in WIDTHS}
        texts[json_file(name)] = render_json(name)
    return texts


def write() -> None:
    """Write all golden files."""
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    write()
