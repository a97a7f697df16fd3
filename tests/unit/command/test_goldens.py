"""What the command prints stays as reviewed; `python -m tools.command_goldens` rewrites it."""

from __future__ import annotations

import json

import pytest

from tools.command_goldens import COMMANDS, FOLDER, WIDTHS, json_file, render, render_json, surface, text_file


@pytest.mark.by_day("lengths-80", "lengths_listed-160", "plan_placed-160", "simulate_pipeline-160", "sweep-80")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_text(name, width):
    text = render(name, width)
    assert text == (FOLDER / text_file(name, width)).read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= (width if name != "sweep" else max(width, 100))


@pytest.mark.by_day("plan_placed", "simulate_placed")
@pytest.mark.parametrize("name", COMMANDS)
def test_json(name):
    text = render_json(name)
    assert text == (FOLDER / json_file(name)).read_text(encoding="utf-8")
    assert json.loads(text)["schema_version"] == (2 if name == "sweep" else 1)


def test_all_commands_and_options():
    assert surface() == (FOLDER / "surface.txt").read_text(encoding="utf-8")


def test_no_golden_is_left_over():
    known = {"surface.txt"} | {json_file(name) for name in COMMANDS}
    known |= {text_file(name, width) for name in COMMANDS for width in WIDTHS}
    assert {path.name for path in FOLDER.glob("*.*")} == known
