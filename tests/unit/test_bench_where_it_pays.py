"""The map of where dynamic CP pays: what it takes from a sweep."""

import json
from pathlib import Path

from benchmarks.where_it_pays import CELLS, found_of, read, table_of


def test_a_cell_says_what_its_sweep_says() -> None:
    swept = json.loads((Path(__file__).parents[1] / "golden/command/sweep.json").read_text(encoding="utf-8"))
    swept["speedup"]["balanced"] |= {"ratio": 1.2, "low": 1.1, "high": 1.3}
    others = [one["ratio"] for one in swept["other_prices"].values()]
    *_, line = table_of({CELLS[0].words: found_of(swept)}).splitlines()
    assert f"| 1.20x (1.10..1.30) | {min(others):.2f}..{max(others):.2f}x | " in line
    assert line.rstrip(" |").rpartition("| ")[2] in swept["verdict"]["headline"]


def test_what_is_kept_are_cells_of_the_map() -> None:
    assert read().keys() <= {cell.words for cell in CELLS}
