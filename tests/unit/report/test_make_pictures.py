"""The tool that draws the pictures of README and docs."""

from __future__ import annotations

import pytest

from tools import make_pictures

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.slow
def test_all_pictures_are_drawn_in_both_themes(tmp_path, capsys):
    assert make_pictures.main(["--output", str(tmp_path)]) == 0
    names = {one.name for one in tmp_path.iterdir()}
    pictures = ("overview", "cp-sizes", "lengths", "imbalance", "knee")
    assert names == {f"{name}-{theme}.svg" for name in pictures for theme in ("light", "dark")} | {
        "overview-light.png",
        "overview-dark.png",
    }
    assert all(4_000 < one.stat().st_size < 120_000 for one in tmp_path.iterdir())
    assert "12 files in" in capsys.readouterr().out


def test_the_pictures_of_the_documentation_exist():
    for name in ("overview", "cp-sizes", "lengths", "imbalance", "knee"):
        for theme in ("light", "dark"):
            assert (make_pictures.IMAGES / f"{name}-{theme}.svg").read_text(encoding="utf-8").startswith("<?xml")
