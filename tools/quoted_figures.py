"""Runs the comparisons that README and docs/how-to/decide.md quote, and writes their tables anew.

python -m tools.quoted_figures

Modelled figures follow from the planner and the cost model: run this when one of them has changed. Measured ones come
from `make bench` (docs/measured.md) and are typed here. The date is that of the run.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dynamic_cp import cli

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin quoted figures: `python -m tools.quoted_figures` -->", "<!-- end quoted figures -->"


class Job(NamedTuple):
    """A comparison: what the pages call it, and the words of `dynamic-cp simulate`."""

    name: str
    words: str
    in_readme: bool = True


JOBS = (
    Job(
        "32 H100: 32 lanes, full recomputation, 256 samples of at most 64k tokens, 4 batches (the picture)",
        "--lengths github --global-batch-size 256 --max-seqlen 65536 --lanes 32 --recompute full --batches 4",
    ),
    Job(
        "64 H100: 16 lanes × TP 2 × PP 2, 256 samples, 8 batches",
        "--lengths github --global-batch-size 256 --lanes 16 --tp 2 --pp 2",
    ),
    Job(
        "128 H100: 64 lanes × TP 2, full recomputation, 2048 samples, 8 batches",
        "--lengths github --global-batch-size 2048 --lanes 64 --tp 2 --recompute full",
        in_readme=False,
    ),
    Job(
        "512 H100: 32 lanes × TP 2 × PP 8, full recomputation, 1024 samples, 4 batches",
        "--lengths github --global-batch-size 1024 --lanes 32 --tp 2 --pp 8 --recompute full --batches 4",
    ),
    Job(
        "8 H100: 8 lanes, 256 samples of at most 8k tokens, 8 batches",
        "--lengths github --max-seqlen 8192 --global-batch-size 256 --lanes 8",
        in_readme=False,
    ),
    Job(
        "32 H100: 16 lanes × TP 2, full recomputation, 256 samples of `sft_longalign`, 8 batches",
        "--lengths sft_longalign --global-batch-size 256 --lanes 16 --tp 2 --recompute full",
    ),
)
MEASURED = (
    ("4 CPU ranks: lengths of chats, small GPT", "1.47x", "1.58x"),
    ("4 CPU ranks: lengths of documents, small GPT", "1.09x", "1.13x"),
    ("4 CPU ranks: nearly all samples equally long, small GPT (noise)", "1.04x", "1.02x"),
)


def main() -> int:
    """Write the tables; return 0."""
    results = [(job, _simulate(job.words)) for job in JOBS]
    date = datetime.date.today().isoformat()
    readme = ["| Llama-3-8B, GitHub files | over balanced static CP | over Megatron's packing | |", "|---|---|---|---|"]
    readme += [
        f"| {job.name} | {_gain(one, 'balanced')} | {_gain(one, 'static')} | modelled |"
        for job, one in results
        if job.in_readme
    ]
    readme += [f"| {name} | {balanced} | {static} | measured |" for name, balanced, static in MEASURED]
    readme += ["", f"Modelled {date}, measured 2026-11-21."]
    decide = ["| job | over balanced | over static | verdict |", "| --- | --- | --- | --- |"]
    decide += [
        f"| {job.name} | {_gain(one, 'balanced')} | {_gain(one, 'static')} | {one['verdict']['pays']} |"
        for job, one in results
    ]
    decide += ["", f"Run on {date}; Llama-3-8B on H100, everything predicted. In the same order:", "", "```text"]
    decide += [*(f"dynamic-cp simulate {job.words}" for job in JOBS), "```"]
    for path, lines in ((ROOT / "README.md", readme), (ROOT / "docs/how-to/decide.md", decide)):
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        assert begin, f"{path} has no place for the table"
        assert end, f"{path} has no end of the table"
        new = before + "\n".join([BEGIN, *lines, END]) + after
        path.write_text(new, encoding="utf-8")
    return 0


def _simulate(words: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["simulate", *words.split(), "--policy", "dynamic,static,balanced", "--json", "-"])
    assert status == 0, words
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def _gain(result: dict[str, Any], baseline: str) -> str:
    one = result["speedup"][baseline]
    text = f"{one['ratio']:.2f}x ({one['low']:.2f}..{one['high']:.2f})"
    return f"**{text}**" if one["ratio"] < 0.995 else text


if __name__ == "__main__":
    sys.exit(main())
