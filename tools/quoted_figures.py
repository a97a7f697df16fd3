"""Runs the comparisons that README, docs/how-to/decide.md and docs/peers.md quote, and rewrites their tables.

python -m tools.quoted_figures

Headline figures are tuned against tuned: `dynamic-cp sweep`, every policy at its own fastest layout. Those at a given
layout are `dynamic-cp simulate`, and say so. All follow from the planner and the cost model: run this when one of them
has changed, some minutes on 2 cores; what a job took is printed. Measured figures come from `make bench`
(docs/figures/planner.md#measured-on-cpu-ranks) and are typed here. The date is that of the run.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from dynamic_cp import cli

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin quoted figures: `python -m tools.quoted_figures` -->", "<!-- end quoted figures -->"


class Job(NamedTuple):
    """A comparison: what the pages call it, and the words of the command."""

    name: str
    words: str
    in_readme: bool = True


TUNED = (
    Job("64 H100, 256 samples (the picture)", "--lengths github --global-batch-size 256 --gpus 64 --batches 8"),
    Job(
        "32 H100, 256 samples of at most 64k tokens",
        "--lengths github --global-batch-size 256 --max-seqlen 65536 --gpus 32 --batches 8",
        in_readme=False,
    ),
    Job(
        "128 H100, 1024 samples",
        "--lengths github --global-batch-size 1024 --gpus 128 --batches 4",
        in_readme=False,
    ),
    Job(
        "512 H100, 1024 samples",
        "--lengths github --global-batch-size 1024 --gpus 512 --batches 4",
        in_readme=False,
    ),
    Job(
        "8 H100, 256 samples of at most 8k tokens",
        "--lengths github --max-seqlen 8192 --global-batch-size 256 --gpus 8 --batches 8",
        in_readme=False,
    ),
    Job(
        "32 H100, 256 samples of `sft_longalign`",
        "--lengths sft_longalign --global-batch-size 256 --gpus 32 --batches 8",
    ),
)
"""Jobs of `dynamic-cp sweep`."""

GIVEN = (
    Job(
        "16 lanes × TP 2 × PP 2, 256 samples",
        "--lengths github --global-batch-size 256 --lanes 16 --tp 2 --pp 2 --cp-comm-type auto",
    ),
    Job(
        "the same with ring exchange only",
        "--lengths github --global-batch-size 256 --lanes 16 --tp 2 --pp 2 --cp-comm-type p2p",
    ),
    Job(
        "32 lanes × TP 2 × PP 8, full recomputation, 1024 samples",
        "--lengths github --global-batch-size 1024 --lanes 32 --tp 2 --pp 8 --recompute full --cp-comm-type auto "
        "--batches 4",
    ),
    Job(
        "16 lanes × TP 2, full recomputation, 256 samples of `sft_longalign`",
        "--lengths sft_longalign --global-batch-size 256 --lanes 16 --tp 2 --recompute full --cp-comm-type auto",
    ),
)
"""Jobs of `dynamic-cp simulate`."""

MEASURED = ("4 CPU ranks: lengths of chats, small GPT", "1.47x over balanced CP 4")


def main() -> int:
    """Write the tables; return 0."""
    tuned = [(job, _result("sweep", job.words)) for job in TUNED]
    given = [(job, _result("simulate", job.words)) for job in GIVEN]
    date = datetime.date.today().isoformat()
    pages = {"README.md": _readme(tuned, date), "docs/how-to/decide.md": _decide(tuned, given, date)}
    pages["docs/peers.md"] = _peers(tuned, date)
    for name, lines in pages.items():
        path = ROOT / name
        path.write_text(with_figures(path.read_text(encoding="utf-8"), lines, name), encoding="utf-8")
    return 0


def with_figures(text: str, lines: list[str], name: str) -> str:
    """Return the text of a page with `lines` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{name} has no place for the table"
    assert end, f"{name} has no end of the table"
    return before + "\n".join([BEGIN, *lines, END]) + after


Results = list[tuple[Job, dict[str, Any]]]


def _readme(tuned: Results, date: str) -> list[str]:
    lines = [
        "| Llama-3-8B, GitHub files; every policy at its own fastest layout | over the best static CP "
        "| the same under other prices | over Megatron dev's greedy | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {job.name} | {gain(one, best_static(one))} | {range_of(one)} | {gain(one, 'megatron-dev', named=False)} | "
        "modelled, no GPU |"
        for job, one in tuned
        if job.in_readme
    ]
    lines.append(f"| {MEASURED[0]} | {MEASURED[1]} | – | – | measured |")
    return [*lines, "", f"Modelled {date}, measured 2026-11-21."]


def _decide(tuned: Results, given: Results, date: str) -> list[str]:
    lines = [
        "| job | dynamic | best static | gain | under other prices | over megatron-dev | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {job.name} | {_setting(one, 'dynamic')} | {_setting(one, best_static(one))} | "
        f"{gain(one, best_static(one), named=False)} | {range_of(one)} | "
        f"{gain(one, 'megatron-dev', named=False)} | {one['verdict']['pays']} |"
        for job, one in tuned
    ]
    lines += ["", f"Run on {date}; Llama-3-8B on H100, everything modelled, no GPU yet. In the same order:", ""]
    lines += ["```text", *(f"dynamic-cp sweep {job.words}" for job in TUNED), "```", ""]
    lines += [
        "Where the layout is given, all policies run at that one. It may suit one of them better than another, so",
        "these are not gains over a job that was tuned without dynamic CP.",
        "",
        "| given layout | over the best static CP | over megatron-dev | verdict |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {job.name} | {gain(one, best_static(one))} | {gain(one, 'megatron-dev', named=False)} | "
        f"{one['verdict']['pays']} |"
        for job, one in given
    ]
    return [*lines, "", "```text", *(f"dynamic-cp simulate {job.words}" for job in GIVEN), "```"]


def _peers(tuned: Results, date: str) -> list[str]:
    lines = ["| job | over megatron-dev | over static | over balanced |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {job.name} | "
        + " | ".join(gain(one, name, named=False) for name in ("megatron-dev", "static", "balanced"))
        + " |"
        for job, one in tuned
    ]
    return [*lines, "", f"Modelled {date}, no GPU yet; every policy at its own fastest layout, 95% intervals."]


def _result(command: str, words: str) -> dict[str, Any]:
    start_s = time.perf_counter()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main([command, *words.split(), "--json", "-"])
    assert status == 0, words
    print(f"{time.perf_counter() - start_s:6.1f} s  dynamic-cp {command} {words}", flush=True)
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def best_static(result: dict[str, Any]) -> str:
    """Return the static policy that dynamic CP was judged against, the fastest one."""
    return min(("static", "balanced"), key=lambda name: result["speedup"][name]["ratio"])


def gain(result: dict[str, Any], baseline: str, *, named: bool = True) -> str:
    """Return the speed-up over a policy with its interval, such as `1.31x (1.27..1.35) over static CP 8`."""
    one = result["speedup"][baseline]
    text = f"{one['ratio']:.2f}x ({one['low']:.2f}..{one['high']:.2f})"
    if round(one["ratio"], 2) < 1:
        text = f"**{text}**"
    return f"{text} over {baseline} CP {_cp_size(result, baseline)}" if named else text


def range_of(result: dict[str, Any]) -> str:
    """Return the least and the largest gain under other prices, such as `1.00..1.17x`."""
    ratios = [one["ratio"] for one in result["other_prices"].values()]
    return f"{min(ratios):.2f}..{max(ratios):.2f}x"


def _cp_size(result: dict[str, Any], policy: str) -> int:
    one = result["policies"][policy]
    size: int = (one["best"] if "best" in one else one["setting"])["static_cp_size"]
    return size


def _setting(result: dict[str, Any], policy: str) -> str:
    one = result["policies"][policy]["best"]
    words = [f"TP {one['tp']}", f"PP {one['pp']}", *([f"VPP {one['vpp']}"] if one["vpp"] > 1 else [])]
    words += [f"{one['lanes']} lanes", *([f"CP {one['static_cp_size']}"] if policy != "dynamic" else [])]
    words += [] if one["recompute"] == "none" else [f"{one['recompute']} recomputation"]
    name = "" if policy == "dynamic" else f"{policy}, "
    return f"{one['iteration_s']:.3f} s ({name}{', '.join(words)})"


if __name__ == "__main__":
    sys.exit(main())
