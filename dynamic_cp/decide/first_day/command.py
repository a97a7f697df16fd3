"""The command `dynamic-cp first-day`: its options; runs the parts one after the other."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from dynamic_cp.decide.cli.options import Names, command_line, option, options_in, subcommand
from dynamic_cp.decide.cli.parameters import SET
from dynamic_cp.decide.cli.tables import progress
from dynamic_cp.decide.files import write_json, write_text
from dynamic_cp.decide.first_day.day import PARTS, SMALL_MODEL, Day, State, parts_of, script
from dynamic_cp.decide.first_day.page import page_of
from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog

PAGE = "report.md"
HTML = "report.html"
"""The same for a browser; written where jinja2 is installed."""
_MOST_CPU_RANKS = 4
_DEVICES = """
import torch
print(torch.version.cuda or torch.version.hip)
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index))
"""
_HARDWARE = {"H200": "h200", "A100-SXM4-40GB": "a100-40gb", "A100-PCIE-40GB": "a100-40gb", "A100": "a100-80gb"}
"""Part of a GPU's name -> the nearest bundled hardware file; h100 for other GPUs."""


@subcommand(
    "first-day",
    """
  dynamic-cp first-day --output runs/first-day           # all GPUs of this node; without one, CPU ranks
  dynamic-cp first-day --output runs/first-day --again calibration
Then: train with --dynamic-cp-hardware runs/first-day/hardware.json
""",
)
@options_in(
    "Job",
    model=option(
        "Model, of which as many layers are trained as memory holds: a bundled name or a file. "
        "[default: llama-3-8b, a small one on CPU ranks]",
        Names("NAME|FILE", catalog.model_names),
    ),
    ranks=option("Number of ranks on this node.", click.IntRange(1), show_default="its GPUs, or up to 4 CPU ranks"),
    tp=option("Tensor-parallel size of all parts.", click.IntRange(1), show_default="2 on 4 GPUs and more, else 1"),
    hardware=option(
        "Hardware to start from. [default: the bundled one that is nearest; if its memory is another, --set "
        "hbm_bytes=48GB]",
        Names("NAME|FILE", catalog.hardware_names),
    ),
    settings=SET,
    max_tokens=option(
        "Limit of padded tokens of a rank in one micro-batch.",
        click.IntRange(512),
        show_default="8192, or 1024 on CPU ranks",
    ),
    quick=option("Calibrate with less and for a shorter time, and train fewer steps.", bool),
)
@options_in(
    "Parts",
    output=option("Folder of the page, the hardware file, logs and dumps.", required=True, metavar="DIR"),
    again=option("Part to run again, though it ended well; may be given several times.", tuple(PARTS), multiple=True),
    timeout=option(
        "Time after which a part is ended and has failed.",
        click.FloatRange(min=0, min_open=True),
        20.0,
        metavar="MINUTES",
    ),
)
def command(output: str, again: tuple[str, ...], timeout: float, **given: Any) -> None:
    """Show in an hour what this node does: check the installation, compare kernels and exchanges with float64,
    calibrate, train the same samples with static and with dynamic CP, and write one page.

    Started again with the same --output it goes on with what is missing. After a part that fails the others run all the
    same. Exit status 2 if one failed.
    """
    if not timeout < math.inf:
        raise InvalidInputError(f"--timeout is {timeout}, a number of minutes is needed, such as 20")
    folder = _folder(output)
    names = _gpus()
    day = _day(given, folder, names)
    catalog.load_hardware(day.hardware)  # if this or the script is missing, fail now and not after the first parts
    script()
    device = f"{len(names)} x {names[0]}" if names else "CPU ranks"
    click.echo(f"{device}: {day.num_ranks} ranks, TP {day.tp_size}, {day.model} with {day.trained.num_layers} layers")
    states: dict[str, State] = {}
    for part in parts_of(day):
        with progress("first-day") as steps:
            steps(len(states), len(PARTS), PARTS[part.name])
            before = None if part.name in again else part.state()
            state = before or part.run(60 * timeout)
        result = f"failed: {state.why}; see {part.log}" if state.why else f"ok, {state.seconds:.0f} s"
        click.echo(f"{part.name:<12} {PARTS[part.name]}: {result}{', before' if before else ''}")
        states[part.name] = state
        page = page_of(day, device, states)
        write_text(str(folder / PAGE), page.as_markdown())
        if find_spec("jinja2"):
            write_text(str(folder / HTML), page.as_html(" ".join(command_line(click.get_current_context()))))
    click.echo(f"wrote {folder / PAGE}" + (f" and {HTML}" if find_spec("jinja2") else ""))
    failed = [name for name, state in states.items() if state.why]
    if failed:
        raise DynamicCPError(f"{len(failed)} of {len(states)} parts failed ({', '.join(failed)}): see {folder / PAGE}")


def _folder(path: str) -> Path:
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"--output {path}: {error.strerror or error}: give another folder") from error
    return folder


def _gpus() -> list[str]:
    """Return the names of the GPUs that torch sees. Another process asks torch, because this one does without it."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _DEVICES], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UnsupportedFeatureError(
            f"first-day needs torch and megatron-core ({why}): pip install 'megatron-dynamic-cp[train]'"
        )
    built_for, *names = done.stdout.splitlines()
    if not names and built_for != "None":
        click.echo("torch is built for GPUs and sees none: repair the driver, or go on with CPU ranks", err=True)
    return names


def _day(given: dict[str, Any], folder: Path, names: list[str]) -> Day:
    """Return the job from the options and what the node has. InvalidInputError: more ranks than GPUs, or ranks that are
    not a multiple of --tp."""
    num_ranks = given["ranks"] or len(names) or min(_MOST_CPU_RANKS, os.cpu_count() or 1)
    if names and num_ranks > len(names):
        raise InvalidInputError(f"--ranks is {num_ranks}, torch sees {len(names)} GPUs: lower it")
    tp_size = given["tp"] or (2 if names and num_ranks >= 4 and num_ranks % 2 == 0 else 1)
    if num_ranks % tp_size:
        raise InvalidInputError(f"--tp {tp_size} does not divide {num_ranks} ranks: change --tp or --ranks")
    model = given["model"] or ("llama-3-8b" if names else str(folder / "small.json"))
    if model == str(folder / "small.json"):
        write_text(model, json.dumps(SMALL_MODEL, indent=1) + "\n")
    hardware = given["hardware"] or _nearest(names)
    if given["settings"]:
        changed = catalog.load_hardware(hardware, given["settings"])
        hardware = str(folder / "base.json")
        write_json(hardware, catalog.hardware_as_dict(changed))
    return Day(
        folder=folder,
        on_gpu=bool(names),
        num_ranks=num_ranks,
        tp_size=tp_size,
        model=model,
        hardware=hardware,
        max_tokens=given["max_tokens"] or (8192 if names else 1024),
        num_samples=64 if names else 32,
        num_steps=4 if given["quick"] else 12,
        quick=given["quick"],
    )


def _nearest(names: list[str]) -> str:
    if not names:
        return "cpu"
    return next((hardware for part, hardware in _HARDWARE.items() if part in names[0]), "h100")
