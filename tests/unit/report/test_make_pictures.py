"""The tool that draws the pictures of README and docs."""

import re
from dataclasses import replace

import pytest

from tools import make_pictures

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

PICTURES = ("overview", "overview-narrow", "cp-sizes", "lengths", "imbalance", "knee")


@pytest.mark.nightly
def test_all_pictures_are_drawn_in_both_themes(tmp_path, capsys, monkeypatch):
    few = replace(make_pictures.SPACE, tp_sizes=(2,), pp_sizes=(1,), recompute=("none",), exchanges=(("p2p",),))
    monkeypatch.setattr(make_pictures, "SPACE", few)
    assert make_pictures.main(["--output", str(tmp_path)]) == 0
    names = {one.name for one in tmp_path.iterdir()}
    pictures = PICTURES
    assert names == {f"{name}-{theme}.svg" for name in pictures for theme in ("light", "dark")} | {
        "overview-light.png",
        "overview-dark.png",
    }
    assert all(4_000 < one.stat().st_size < 120_000 for one in tmp_path.iterdir())
    assert "14 files in" in capsys.readouterr().out


def test_the_pictures_of_the_documentation_exist():
    for name in PICTURES:
        for theme in ("light", "dark"):
            text = (make_pictures.IMAGES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
            assert text.startswith("<?xml")
            ground = re.search(r'<g id="patch_1">\s*<path[^>]*style="fill: ([^;"]+)', text)
            assert ground[1] == "none"  # pages are not as light or dark as the theme


def test_the_overview_can_be_read_on_a_phone():
    """At 390 pixels, less the margins of a page, its text has at least 9 pixels."""
    text = (make_pictures.IMAGES / "overview-narrow-light.svg").read_text(encoding="utf-8")
    width_pt = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', text)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:[a-z0-9]+ )*([\d.]+)px", text)]
    assert len(sizes) > 5
    numbers_in_bars = 6.5
    assert min(size for size in sizes if size != numbers_in_bars) * (390 - 32) / width_pt >= 9
    assert "(max-width: 500px)" in (make_pictures.IMAGES.parents[1] / "README.md").read_text(encoding="utf-8")
