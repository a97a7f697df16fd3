"""Measures section by section, saves after each, fits, writes the files and reports the fit's errors."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.decide.calibration import Calibration, Measurements, Setup, calibrate
from dynamic_cp.decide.calibration.measurements import SECTIONS
from dynamic_cp.decide.cli.tables import console, make_table, progress, say_nothing
from dynamic_cp.decide.files import write_json, write_text
from dynamic_cp.decide.stage_splits import why_no_split
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.models import catalog
from dynamic_cp.types import RING_ALONE, Hardware, Topology
from megatron.decide.calibration.bench import Bench, SmallGPT
from megatron.decide.calibration.device import Place, num_cores, set_up
from megatron.decide.calibration.sections import RUN
from megatron.decide.calibration.timing import Timer
from megatron.dynamic_cp.agreement.verify import agree, run_on_all_ranks, run_on_rank_zero
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

_MAX_TOKENS = {"cuda": 32768, "cpu": 4096}
_LEAST_TOKENS = 512
_WINDOW_S = {"cuda": 0.15, "cpu": 0.25}
_QUICK_WINDOW_S = 0.03
_GROUPS_TIMEOUT_S = 600.0
EXIT_NOT_GOOD = 3


def run(given: dict[str, Any], base: Hardware, kept: str) -> int:
    """Run the command and destroy the process groups that it made; return the exit status, the same on all ranks.

    It is EXIT_NOT_GOOD if --strict is among the options `given` and the calibration is not good. `base` provides what
    is not measured; the file `kept` gets the measurements after each section.
    """
    joined = dist.is_initialized()
    place = set_up(given["device"])
    try:
        return _profile(given, base, kept, place)
    finally:
        if not joined and dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _profile(given: dict[str, Any], base: Hardware, kept: str, place: Place) -> int:
    setup = agree(
        lambda: _setup(given, place),
        lambda own: hashlib.sha256(repr(replace(own, date="")).encode()).hexdigest(),
        what="the device, torch or ranks of a node that are measured",
        device=place.device,
    )
    measured = Measurements(setup=setup)
    if given["resume"]:
        measured = run_on_all_ranks(lambda: Measurements.load(kept, setup))
    started_with = tuple(measured.sections)
    _measure(measured, place, kept)

    def fit() -> bool:
        calibration = calibrate(base, measured, name=given["name"] or Path(given["output"]).stem)
        write_json(given["output"], catalog.hardware_as_dict(calibration.hardware))
        if given["plot"] is not None:
            from dynamic_cp.decide.calibration.picture import save_picture

            save_picture(given["plot"], measured.setup, calibration)
        _show(calibration, measured, started_with, given)
        wrong = calibration.why_not_good()
        if wrong is not None:
            click.echo(f"dynamic-cp: warning: {wrong}", err=True)
        return wrong is None

    return 0 if run_on_rank_zero(fit) or not given["strict"] else EXIT_NOT_GOOD


def _setup(given: dict[str, Any], place: Place) -> Setup:
    model, tp_size, kind = catalog.load_model(given["model"]), given["tp"], place.device.type
    reason = why_no_split(model, tp_size=tp_size, pp_size=1, vp_size=1, ranks_per_node=tp_size)
    if reason is not None:
        raise InvalidInputError(f"--tp {tp_size} does not suit --model {given['model']}: {reason}: use a divisor")
    max_tokens = _MAX_TOKENS[kind] if given["max_tokens"] is None else given["max_tokens"]
    if max_tokens < _LEAST_TOKENS:
        raise InvalidInputError(f"--max-tokens is {max_tokens}, at least {_LEAST_TOKENS} are needed to see rates grow")
    dtype = {"auto": "bf16" if kind == "cuda" else "fp32"}.get(given["dtype"], given["dtype"])
    return Setup(
        device=place.name,
        torch_version=torch.__version__,
        model=model,
        tp_size=tp_size,
        element_bytes=2 if dtype == "bf16" else 4,
        num_ranks=place.num_ranks,
        ranks_per_node=place.ranks_per_node,
        max_tokens=max_tokens,
        quick=given["quick"],
        date=date.today().isoformat(),
    )


def _measure(measured: Measurements, place: Place, kept: str) -> None:
    """Measure the missing sections; rank 0 saves after each."""
    setup = measured.setup
    todo = [name for name in SECTIONS if name not in measured.sections]
    if not todo:
        return
    try:
        gpt = run_on_all_ranks(lambda: SmallGPT(setup, place.device))
        topology = Topology(num_lanes=place.num_ranks, ranks_per_node=place.ranks_per_node)
        groups = DynamicCPGroups.build(topology, timeout_s=_GROUPS_TIMEOUT_S, exchanges=RING_ALONE)
        timer = Timer(
            device=place.device,
            window_s=_QUICK_WINDOW_S if setup.quick else _WINDOW_S[place.device.type],
            num_windows=3 if setup.quick else 5,
            alone=place.num_ranks == 1,
            ranks_per_core=max(1.0, place.ranks_per_node / num_cores()),
        )
        with progress("measuring") if place.rank == 0 else nullcontext(say_nothing) as steps:
            for index, name in enumerate(todo):

                def tell(text: str, index: int = index, name: str = name) -> None:
                    steps(index, len(todo), f"{SECTIONS[name]}, {text}")

                bench = Bench(setup=setup, place=place, timer=timer, gpt=gpt, groups=groups, tell=tell)
                measured.sections[name] = tuple(RUN[name](bench))
                run_on_rank_zero(lambda: write_text(kept, measured.to_json()))
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{setup.device} ran out of memory with up to {setup.max_tokens} tokens: lower --max-tokens, or raise --tp"
        ) from error


def _show(calibration: Calibration, measured: Measurements, resumed: tuple[str, ...], given: dict[str, Any]) -> None:
    from rich.text import Text

    out, setup = console(), measured.setup
    ranks = "1 rank" if setup.num_ranks == 1 else f"{setup.num_ranks} ranks at once"
    out.print(
        f"{setup.device}, {ranks}, torch {setup.torch_version}, {setup.element_bytes * 8}-bit, tp {setup.tp_size}"
    )
    table = make_table(["part", "", "numbers", "median error", "p95", "predicted / measured"], left=2)
    for one in calibration.errors:
        row = [
            one.name,
            "fitted" if one.fitted else "check",
            str(one.num_points),
            f"{one.median:.1%}",
            f"{one.p95:.1%}",
        ]
        style = "" if one.fitted else "bold"
        table.add_row(*(Text(cell, style=style) for cell in [*row, f"{one.predicted_over_measured:.3f}"]))
    out.print(table)
    for what, why in calibration.kept.items():
        out.print(f"kept from {given['hardware']}: {what} ({why})")
    for note in calibration.notes:
        out.print(f"note: {note}")
    if resumed:
        out.print(f"resumed: {', '.join(resumed)} measured on {setup.date}")
    out.print(f"wrote {given['output']}: {len(calibration.changed)} coefficients measured")
