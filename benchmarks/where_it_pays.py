"""Where dynamic CP pays, as a map: models x GPUs x lengths, every policy at its own fastest layout.

    python -m benchmarks.where_it_pays                # what is not planned yet, then table and picture; hours of a core
    python -m benchmarks.where_it_pays --only 70b     # cells whose command has one of these words
    python -m benchmarks.where_it_pays --again --only 70b

Each cell is one `dynamic-cp sweep`, whose command the cell names; static CP has the best packing there is at every CP
size. What a cell finds is kept in docs/where-it-pays.json, and a sweep that was ended in runs/where_it_pays: the same
command goes on from there. Plan cells again when planner or prices have changed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.planner.report import inserted, table
from dynamic_cp.decide import cli
from dynamic_cp.decide.report.drawing import (
    SMALL_PT,
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    frame_map,
    new_figure,
    save,
)
from dynamic_cp.decide.report.theme import THEMES, Theme, contrast
from tools.quoted_figures import gain, range_of, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEPT = DOCS / "where-it-pays.json"
FOLDER = DOCS.parent / "runs" / "where_it_pays"
MODELS = {
    "llama-3-8b": "--tp 1,2,4 --pp 1,2",
    "llama-3-70b": "--tp 4,8 --pp 1,2,4",
    "qwen3-next-80b-a3b": "--tp 2,4 --pp 1,2 --ep 8,16,32",
}
"""Model -> the sizes that a sweep tries, for all policies alike; everything else is searched."""
LENGTHS = {
    "code: short files, a few giants": "github",
    "rollouts: median 1.5k, at most 64k": "lognormal:median=1500,sigma=1.3,max=65536",
    "chats: a tenth of 8k to 64k": "sft_longalign",
    "long: 16k to 256k": "lognormal:median=65536,sigma=0.8,min=16384,max=262144",
}
SAMPLES = {64: 256, 512: 1024}
"""GPUs -> samples of a global batch; a quarter of them where lengths are long."""
VERDICTS = ("gains", "may pay", "does not pay", "loses")
"""The words of the command, the best first."""


class Cell(NamedTuple):
    """A job of the map: the name of its lengths, the model, and the number of GPUs."""

    lengths: str
    model: str
    gpus: int

    @property
    def words(self) -> str:
        """The command of the cell, without what only says how it is computed."""
        is_long = self.lengths.startswith("long")
        samples = SAMPLES[self.gpus] // (4 if is_long else 1)
        return (
            f"sweep --lengths {LENGTHS[self.lengths]} --model {self.model} {MODELS[self.model]} --gpus {self.gpus} "
            f"--global-batch-size {samples}{' --max-seqlen 262144' * is_long} --policy dynamic,balanced"
        )


CELLS = tuple(Cell(lengths, model, gpus) for gpus in SAMPLES for lengths in LENGTHS for model in MODELS)


class Found(NamedTuple):
    """What a sweep found of a cell, as the table says it, and when."""

    dynamic: str
    static: str
    gain: str
    under_other_prices: str
    verdict: str
    date: str


def read() -> dict[str, Found]:
    """Return command -> what it found, of the cells that are kept."""
    return {words: Found(**found) for words, found in json.loads(KEPT.read_text(encoding="utf-8")).items()}


def find(cell: Cell) -> Found:
    """Return what `dynamic-cp sweep --json` finds of the cell."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = FOLDER / (re.sub(r"[^\w.]+", "-", cell.words) + ".json")
    begin_s = time.perf_counter()
    print(f"dynamic-cp {cell.words}", file=sys.stderr, flush=True)
    if status := cli.main([*shlex.split(cell.words), "--resume", f"{done}l", "--json", str(done)]):
        raise SystemExit(status)
    print(f"{time.perf_counter() - begin_s:.0f} s", file=sys.stderr, flush=True)
    Path(f"{done}l").unlink(missing_ok=True)  # planned again, it is planned anew
    return found_of(json.loads(done.read_text(encoding="utf-8")))


def found_of(swept: dict[str, Any]) -> Found:
    """Return what the table says of a sweep."""
    settings = (_setting(swept["policies"][name]["best"]) for name in ("dynamic", "balanced"))
    said = gain(swept, "balanced", named=False), range_of(swept), verdict(swept)
    return Found(*settings, *said, str(datetime.date.today()))


def _setting(best: dict[str, Any]) -> str:
    sizes = [f"{name.upper()} {best[name]}" for name in ("tp", "pp", "vpp", "ep") if best[name] > 1]
    sizes += [f"CP {best['static_cp_size']}"] * bool(best["static_cp_size"])
    recomputed = [] if best["recompute"] == "none" else [best["recompute_method"] or best["recompute"]]
    return f"{best['iteration_s']:.3f} s ({', '.join(sizes + recomputed) or 'TP 1'})"


def table_of(found: Mapping[str, Found]) -> str:
    """Return a Markdown table, a row for each cell that is kept."""
    rows = [(*cell, *found[cell.words][:-1]) for cell in CELLS if cell.words in found]
    header = "lengths | model | GPUs | dynamic | best static | gain | under other prices | verdict"
    return table(header, rows, left=8)


def picture(found: Mapping[str, Found], theme: Theme) -> Figure:
    """Return the map: a panel for each number of GPUs, a row for each kind of lengths, a column for each model."""
    figure = new_figure(WIDE_IN, 0.52 * len(LENGTHS) + 1.2)
    colors = dict(zip(VERDICTS, (theme.series[2], theme.series[0], theme.band, theme.series[1]), strict=True))
    for panel, gpus in zip(figure.subplots(1, len(SAMPLES), sharey=True), SAMPLES, strict=True):
        panel.set_title(f"{gpus} H100, {SAMPLES[gpus]} samples", fontweight="bold")
        frame_map(panel, last_x=len(MODELS), last_y=len(LENGTHS))
        panel.set_xticks([at + 0.5 for at in range(len(MODELS))], [name.replace("next-", "next-\n") for name in MODELS])
        panel.set_yticks([at + 0.5 for at in range(len(LENGTHS))], [name.replace(", ", ",\n", 1) for name in LENGTHS])
        for (row, lengths), (column, model) in product(enumerate(LENGTHS), enumerate(MODELS)):
            color, text = theme.background, "not planned"
            if one := found.get(Cell(lengths, model, gpus).words):
                color = colors[one.verdict]
                text = f"{one.gain.split()[0]}\n{one.under_other_prices.rstrip('x')}"
            place = Rectangle(column, column + 1, row, row + 1)
            add_rectangles(panel, [place], color, edgecolor=theme.background, linewidth=2)
            ink = max((theme.ink, theme.background), key=lambda ink, color=color: contrast(ink, color))
            panel.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=SMALL_PT - 1, color=ink)
    add_legend(figure, list(colors.items()), width_in=WIDE_IN, title="dynamic CP; below: the gain under other prices")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Find the cells that are asked for, and put them into the docs; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", default=[""], help="cells with one of these in the command"
    )
    parser.add_argument("--again", action="store_true", help="plan what is kept again")
    given = parser.parse_args(argv)
    found = read()
    for cell in CELLS:
        if any(word in cell.words for word in given.only) and (given.again or cell.words not in found):
            found[cell.words] = find(cell)
            KEPT.write_text(json.dumps({words: one._asdict() for words, one in found.items()}, indent=1) + "\n")
    write(found)
    return 0


def write(found: Mapping[str, Found]) -> None:
    """Put the table into decide.md, and the picture beside it."""
    rest = len(CELLS) - len(found)
    missing = f"; {rest} cells are not planned yet" if rest else ""
    dates = " and ".join(sorted({one.date for one in found.values()}))
    said = f"Modelled on {dates}, four batches each{missing}."
    commands = [f"dynamic-cp {cell.words}" for cell in CELLS if cell.words in found]
    lines = [table_of(found), "", said, "", "```text", *commands, "```"]
    page = DOCS / "how-to" / "decide.md"
    text = inserted(page.read_text(encoding="utf-8"), {"where-it-pays": "\n".join(lines)})
    page.write_text(text, encoding="utf-8")
    for name, theme in THEMES.items():
        save(DOCS / "images" / f"where-it-pays-{name}.svg", partial(picture, found), theme, transparent=True)


if __name__ == "__main__":
    sys.exit(main())
