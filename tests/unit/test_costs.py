"""Names in tests/costs.json are names of tests and fixtures: one that was renamed would be quick for ever."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_name_is_a_test() -> None:
    costs_s = json.loads((ROOT / "tests" / "costs.json").read_text())
    assert len(costs_s) > 100
    for name, cost_s in costs_s.items():
        path, function = name.split("::")
        where = ROOT / path
        text = (where / "conftest.py" if where.is_dir() else where).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, flags=re.MULTILINE), f"{name}: `make costs` writes the file anew"
        assert cost_s > 0
