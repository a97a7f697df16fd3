"""Where dynamic CP pays, as a map: models x GPUs x lengths, every policy at its own fastest layout.

    python -m benchmarks.where_it_pays                # what is not planned yet, then the table; an hour of one core
    python -m benchmarks.where_it_pays --only 70b     # cells whose command has one of these words
    python -m benchmarks.where_it_pays --docs         # what is kept into docs/how-to/decide.md and its picture

Each cell is one `dynamic-cp sweep`, whose command the cell names; static CP has the best packing there is at every CP
size. What a cell finds is kept in runs/where_it_pays, also of a cell that was ended: the same command goes on from
there. Remove the folder when planner or prices have changed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
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
Swept = dict[str, Any]
"""What `dynamic-cp sweep --json` wrote."""


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


def kept(cell: Cell) -> Path:
    """Return where the figures of a cell are kept; the name ends in .json, that of its unfinished search in .jsonl."""
    return FOLDER / (re.sub(r"[^\w.]+", "-", cell.words) + ".json")


def find(cell: Cell) -> Swept:
    """Return what `dynamic-cp sweep --json` wrote of the cell; a cell without a file is swept first."""
    done = kept(cell)
    if not done.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        begin_s = time.perf_counter()
        words = [*shlex.split(cell.words), "--resume", f"{done}l", "--json", f"{done}.part"]
        print(f"dynamic-cp {cell.words}", file=sys.stderr, flush=True)
        if status := cli.main(words):
            raise SystemExit(status)
        Path(f"{done}.part").rename(done)
        print(f"{time.perf_counter() - begin_s:.0f} s", file=sys.stderr, flush=True)
    swept: Swept = json.loads(done.read_text(encoding="utf-8"))
    return swept


def _setting(best: dict[str, Any]) -> str:
    sizes = [f"{name.upper()} {best[name]}" for name in ("tp", "pp", "vpp", "ep") if best[name] > 1]
    sizes += [f"CP {best['static_cp_size']}"] * bool(best["static_cp_size"])
    recomputed = [] if best["recompute"] == "none" else [best["recompute_method"] or best["recompute"]]
    return f"{best['iteration_s']:.3f} s ({', '.join(sizes + recomputed) or 'TP 1'})"


def table_of(cells: Sequence[tuple[Cell, Swept]]) -> str:
    """Return a Markdown table, a row for each cell."""
    rows = [
        (
            *cell,
            *(_setting(swept["policies"][name]["best"]) for name in ("dynamic", "balanced")),
            gain(swept, "balanced", named=False),
            range_of(swept),
            verdict(swept),
        )
        for cell, swept in cells
    ]
    header = "lengths | model | GPUs | dynamic | best static | gain | under other prices | verdict"
    return table(header, rows, left=8)


def picture(cells: Sequence[tuple[Cell, Swept]], theme: Theme) -> Figure:
    """Return the map: a panel for each number of GPUs, a row for each kind of lengths, a column for each model."""
    figure = new_figure(WIDE_IN, 0.52 * len(LENGTHS) + 1.2)
    colors = dict(zip(VERDICTS, (theme.series[2], theme.series[0], theme.band, theme.series[1]), strict=True))
    found = dict(cells)
    for panel, gpus in zip(figure.subplots(1, len(SAMPLES), sharey=True), SAMPLES, strict=True):
        panel.set_title(f"{gpus} H100, {SAMPLES[gpus]} samples", fontweight="bold")
        frame_map(panel, last_x=len(MODELS), last_y=len(LENGTHS))
        panel.set_xticks([at + 0.5 for at in range(len(MODELS))], [name.replace("next-", "next-\n") for name in MODELS])
        panel.set_yticks([at + 0.5 for at in range(len(LENGTHS))], [name.replace(", ", ",\n", 1) for name in LENGTHS])
        for (row, lengths), (column, model) in product(enumerate(LENGTHS), enumerate(MODELS)):
            color, text = theme.background, "not planned"
            if swept := found.get(Cell(lengths, model, gpus)):
                color = colors[verdict(swept)]
                text = f"{swept['speedup']['balanced']['ratio']:.2f}x\n{range_of(swept).rstrip('x')}"
            place = Rectangle(column, column + 1, row, row + 1)
            add_rectangles(panel, [place], color, edgecolor=theme.background, linewidth=2)
            ink = max((theme.ink, theme.background), key=lambda ink, color=color: contrast(ink, color))
            panel.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=SMALL_PT - 1, color=ink)
    add_legend(figure, list(colors.items()), width_in=WIDE_IN, title="dynamic CP; below: the gain under other prices")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Find the cells that are asked for and print their table; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", default=[""], help="cells with one of these in the command"
    )
    parser.add_argument("--docs", action="store_true", help="plan nothing, put what is there into the docs")
    given = parser.parse_args(argv)
    if given.docs:
        write([(cell, find(cell)) for cell in CELLS if kept(cell).exists()])
        return 0
    cells = [cell for cell in CELLS if any(word in cell.words for word in given.only)]
    print(table_of([(cell, find(cell)) for cell in cells]))
    return 0


def write(cells: Sequence[tuple[Cell, Swept]]) -> None:
    """Put the table into decide.md, and the picture beside it."""
    rest = len(CELLS) - len(cells)
    missing = f"; {rest} cells are not planned yet" if rest else ""
    said = f"Modelled on {datetime.date.today()}, four batches each{missing}."
    commands = [f"dynamic-cp {cell.words}" for cell, _ in cells]
    lines = [table_of(cells), "", said, "", "```text", *commands, "```"]
    page = DOCS / "how-to" / "decide.md"
    text = inserted(page.read_text(encoding="utf-8"), {"where-it-pays": "\n".join(lines)})
    page.write_text(text, encoding="utf-8")
    for name, theme in THEMES.items():
        save(DOCS / "images" / f"where-it-pays-{name}.svg", partial(picture, cells), theme, transparent=True)


if __name__ == "__main__":
    sys.exit(main())
