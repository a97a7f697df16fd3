"""Colours of pictures and pages: a light and a dark theme, and one of CSS names for pages that switch.

CP sizes up to 8 have cool colours, larger ones warm: with one rank per lane and 8 ranks per node, warm crosses nodes.
Within each half the lightness changes step by step, so that neighbours differ without colour vision (test_theme.py
simulates its three common losses). Policies have the colours of Okabe and Ito, "Color Universal Design" (2008).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

_FORWARD_STRENGTH = 0.55
"""Forward has this share of the colour of backward; the rest is background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours as #rrggbb.

    Attributes:
        band: behind the bars of a place, visible where it is idle.
        ink, muted, grid: text, text of less weight, lines behind the data.
        empty: a place that computes only padding.
        series: one per policy or curve.
        cp_sizes, cp_sizes_forward: [log2 of the CP size] -> colour of backward, of forward; the last is for all larger.
        cp_inks, cp_inks_forward: text on them.
        parts: of an iteration, in the order of `dynamic_cp.decide.comparison.parts.PART_LABELS`.
    """

    background: str
    band: str
    ink: str
    muted: str
    grid: str
    empty: str
    series: tuple[str, ...]
    cp_sizes: tuple[str, ...]
    cp_sizes_forward: tuple[str, ...]
    cp_inks: tuple[str, ...]
    cp_inks_forward: tuple[str, ...]
    parts: tuple[str, ...]

    def cp_color(self, cp_size: int, *, forward: bool = False) -> str:
        colors = self.cp_sizes_forward if forward else self.cp_sizes
        return colors[min(cp_size.bit_length() - 1, len(colors) - 1)]

    def series_color(self, index: int) -> str:
        """Return the colour of the policy or curve at `index`; colours repeat after the last."""
        return self.series[index % len(self.series)]

    @property
    def named_colors(self) -> dict[str, str]:
        """Name of the CSS variable -> colour."""
        named: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            name = field.name.replace("_", "-")
            if isinstance(value, str):
                named[f"--{name}"] = value
            else:
                named |= {f"--{name}-{index}": color for index, color in enumerate(value)}
        return named


def mix(color: str, other: str, strength: float) -> str:
    """Return `strength` parts of `color` and the rest of `other`, all #rrggbb."""
    both = [[int(one[index : index + 2], 16) for index in (1, 3, 5)] for one in (color, other)]
    return "#" + "".join(f"{round(strength * a + (1 - strength) * b):02x}" for a, b in zip(*both, strict=True))


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb, 0 .. 1 (WCAG 2.2)."""
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: str, other: str) -> float:
    """Return the contrast of two colours, 1 .. 21 (WCAG 2.2)."""
    darker, lighter = sorted((luminance(color), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _inks(colors: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(max(("#ffffff", "#10161c"), key=lambda ink: contrast(ink, color)) for color in colors)


def _theme(background: str, cp_sizes: tuple[str, ...], **colors: Any) -> Theme:
    forward = tuple(mix(color, background, _FORWARD_STRENGTH) for color in cp_sizes)
    return Theme(
        background=background,
        cp_sizes=cp_sizes,
        cp_sizes_forward=forward,
        cp_inks=_inks(cp_sizes),
        cp_inks_forward=_inks(forward),
        **colors,
    )


_LIGHT_PARTS = (
    "#1f5f9a", "#5b9bd0", "#3aa6a0", "#b4cfe4", "#f2b440", "#8a6d00",
    "#dd6f2a", "#b23a55", "#7a5fb0", "#5e1f4d", "#8894a0",
)  # fmt: skip
_DARK_PARTS = (
    "#4f9cdb", "#2f6796", "#3fae9f", "#a5cbe8", "#e6b84a", "#b39022",
    "#d97f2b", "#d9607c", "#9a84d6", "#a0508c", "#74818d",
)  # fmt: skip

LIGHT = _theme(
    background="#ffffff",
    band="#eef1f4",
    ink="#17212b",
    muted="#566473",
    grid="#dde3e8",
    empty="#aeb8c2",
    series=("#0072b2", "#d55e00", "#009e73", "#b0508a", "#8a6d00", "#3b8fc7", "#5a5a5a"),
    cp_sizes=("#9fc3e0", "#5b9bd0", "#2b6ca8", "#123f70", "#f2b440", "#dd6f2a", "#a8324f", "#571845"),
    parts=_LIGHT_PARTS,
)
DARK = _theme(
    background="#11171e",
    band="#1c252f",
    ink="#e8edf2",
    muted="#9dabb8",
    grid="#2b3743",
    empty="#4d5a67",
    series=("#56b4e9", "#f0883e", "#3ecf9f", "#d98bbd", "#e0c040", "#9ac9ec", "#b5b5b5"),
    cp_sizes=("#3f6d94", "#4f9cdb", "#8cc8f5", "#cfe6ff", "#8f5a12", "#d97f2b", "#ffa796", "#fff3a6"),
    parts=_DARK_PARTS,
)
THEMES = {"light": LIGHT, "dark": DARK}


def _stand_ins() -> Theme:
    """Return a theme of unique colours that no other theme has; `with_variables` replaces them by CSS variables."""
    names = iter(range(1, 1000))

    def unique() -> str:
        return f"#fe{next(names):04x}"

    colors: dict[str, Any] = {}
    for field in fields(Theme):
        value = getattr(LIGHT, field.name)
        colors[field.name] = unique() if isinstance(value, str) else tuple(unique() for _ in value)
    return Theme(**colors)


CSS = _stand_ins()
"""Draw with this theme, then call `with_variables`: the picture takes the colours of the page it stands in."""


def with_variables(svg: str) -> str:
    """Return an SVG that was drawn with `CSS`, its colours replaced by CSS variables."""
    name_of = {color: name for name, color in CSS.named_colors.items()}
    return re.sub(r"#fe[0-9a-f]{4}", lambda match: f"var({name_of[match[0]]})", svg)


def css_variables(theme: Theme) -> str:
    """Return the declarations of all colours of `theme`."""
    return " ".join(f"{name}: {color};" for name, color in theme.named_colors.items())
