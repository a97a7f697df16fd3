"""What all HTML pages share: the template, the colours, and pictures in two widths that take the page's colours. A page
is one file that runs and loads nothing. It is light or dark as the reader's system is, and light on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dynamic_cp import __version__
from dynamic_cp.decide.report.drawing import NARROW_IN, format_s, inline_svg
from dynamic_cp.decide.report.theme import DARK, LIGHT, Theme, css_variables
from dynamic_cp.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_TEMPLATES = Path(__file__).parent / "templates"


class Draw(Protocol):
    """Draws a picture in any theme and width."""

    def __call__(self, theme: Theme, *, width_in: float) -> Figure:
        """Return the figure."""


class Picture(NamedTuple):
    """A picture on a page: for wide screens and paper, and for phones."""

    title: str
    caption: str
    wide: Markup
    narrow: Markup


def picture(draw: Draw, *, name: str, title: str, caption: str, width_in: float) -> Picture:
    """Return `draw` as inline SVG in `width_in` inches and in a phone's width; `name`: unique, letters and hyphens."""
    from markupsafe import Markup

    def drawn(at_in: float, suffix: str) -> Markup:
        figure: Callable[[Theme], Figure] = lambda theme: draw(theme, width_in=at_in)  # noqa: E731
        # inline_svg escapes; matplotlib escapes what it draws.
        return Markup(inline_svg(figure, name=f"{name}-{suffix}", label=f"{title}. {caption}"))

    return Picture(title, caption, drawn(width_in, "wide"), drawn(NARROW_IN, "narrow"))


def render(template: str, *, title: str, facts: str, command: str, inputs: Mapping[str, Any], **view: Any) -> str:
    """Return the page of `template`, all but pictures and styles escaped; UnsupportedFeatureError: no jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"HTML pages need jinja2 ({error}): install the extra, pip install 'megatron-dynamic-cp[report]'"
        ) from error
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=format_s,
        gb=lambda num_bytes: f"{num_bytes / 1e9:.1f} GB",
        percent=lambda share, digits: f"{100 * share:.{digits}f}%",
    )
    return environment.get_template(template).render(
        title=title,
        facts=facts,
        command=command,
        version=__version__,
        inputs=[(name, _readable(value)) for name, value in inputs.items()],
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        style=Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8")),
        **view,
    )


def _readable(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_readable(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_readable(inner) for inner in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else str(value)
