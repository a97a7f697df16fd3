"""Small plans and timelines stay as reviewed; `python -m tools.regenerate_goldens` rewrites them."""

from __future__ import annotations

import pytest

from tools.regenerate_goldens import CASES, FOLDER, TIMELINES, render, render_timeline

GIVEN_PLANS = sorted(TIMELINES.glob("*.txt"))


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    assert render(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_golden_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.txt")} - {"api"} == set(CASES)


@pytest.mark.parametrize("path", GIVEN_PLANS, ids=lambda path: path.stem)
def test_timeline_of_a_given_plan(path):
    assert render_timeline(path.read_text()) == path.read_text()


def test_all_given_plans_are_there():
    assert len(GIVEN_PLANS) == 3
