"""Small plans and timelines stay as reviewed; `python tools/regenerate_goldens.py` rewrites them."""

from __future__ import annotations

import pytest

from tools.regenerate_goldens import CASES, FOLDER, render


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    assert render(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_golden_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
