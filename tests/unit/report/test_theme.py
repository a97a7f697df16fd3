"""Colours: told apart without colour vision, and text that can be read on what is behind it."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide.report.theme import CSS, DARK, LIGHT, THEMES, contrast, css_variables, with_variables

SITE = Path(__file__).parents[3] / "docs" / "site.css"
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]
    ],
}  # fmt: skip


def seen(color, vision):
    """Return CIE L*a*b* (D65) of #rrggbb as such eyes see it."""
    rgb = np.array([int(color[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz / [0.95047, 1.0, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one, other, vision):
    return float(np.linalg.norm(seen(one, vision) - seen(other, vision)))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES)
def test_cp_sizes_are_told_apart(theme, vision):
    colors = THEMES[theme].cp_sizes
    distances = [difference(one, other, vision) for one, other in combinations(colors, 2)]
    assert len(distances) == 28
    # 2.3 is what one can just see.
    assert min(distances) > 15


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES)
def test_the_first_policies_are_told_apart(theme, vision):
    pairs = list(combinations(THEMES[theme].series[:4], 2))
    assert len(pairs) == 6
    assert min(difference(one, other, vision) for one, other in pairs) > 11


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_has_contrast(theme):
    for behind in (theme.background, theme.band):
        assert contrast(theme.ink, behind) > 7
        assert contrast(theme.muted, behind) > 4.5
    for color, ink in zip(theme.cp_sizes + theme.cp_sizes_forward, theme.cp_inks + theme.cp_inks_forward, strict=True):
        assert contrast(color, ink) > 4.4
    # Curves in the dark; in the light the pale ones have an edge.
    assert min(contrast(color, DARK.background) for color in (*DARK.cp_sizes, *DARK.series)) > 3
    assert f'"slate"] {{ --md-default-bg-color: {DARK.background}; }}' in SITE.read_text(encoding="utf-8")
    # Orange words warn.
    assert contrast(theme.series[1], theme.background) > 3.5


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_bars_stand_out_from_idle_time(theme):
    for color in (*theme.cp_sizes, theme.empty):
        assert difference(color, theme.band, "usual") > 15


def test_each_part_of_an_iteration_has_a_colour():
    from dynamic_cp.decide.comparison.parts import PART_LABELS

    for theme in (LIGHT, DARK):
        assert len(set(theme.parts)) == len(theme.parts) == len(PART_LABELS)


def test_cp_sizes_beyond_the_palette_take_its_last_colour():
    assert LIGHT.cp_color(1) == LIGHT.cp_sizes[0]
    assert LIGHT.cp_color(64) == LIGHT.cp_sizes[6]
    assert LIGHT.cp_color(4096, forward=True) == LIGHT.cp_sizes_forward[-1]


def test_stand_ins_become_variables_that_both_themes_declare():
    colors = CSS.named_colors
    assert len(set(colors.values())) == len(colors) > 30
    text = with_variables(" ".join(colors.values()))
    assert text == " ".join(f"var({name})" for name in colors)
    for theme in (LIGHT, DARK):
        assert all(f"{name}: #" in css_variables(theme) for name in colors)
