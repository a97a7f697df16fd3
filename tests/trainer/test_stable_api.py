"""What docs/api.md calls stable is there, and calls that fitted it fit it still."""

from pathlib import Path

import pytest

from tools.stable_api import FILE, breaks, found_of, render, stable_names

ROOT = Path(__file__).parents[2]


def by_name(text: str) -> dict[str, str]:
    return {line.partition("(")[0]: line for line in text.splitlines()}


def test_nothing_of_it_went_and_calls_fit() -> None:
    before, now = by_name(FILE.read_text(encoding="utf-8")), by_name(render())
    assert len(before) > 45
    broken = {name: breaks(line, now[name]) if name in now else "it went" for name, line in before.items()}
    assert {name: why for name, why in broken.items() if why} == {}
    assert list(now) == list(before), "python -m tools.stable_api"


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ("f(a, b=)", "f(a, b=, c=, *, d=)", ""), ("f(a, *, b)", "f(a, *, b=)", ""), ("f(a)", "f()", "a went"),
        ("f(a)", "f(a, b)", "b must be given"), ("f(a=)", "f(a)", "a lost its default"),
        ("f(a, b)", "f(b, a)", "['a', 'b'] are in other places"), ("f(a)", "f(*, a)", "['a'] are in other places"),
        ("f(*, a, b)", "f(*, b, a)", ""), ("f(*args, a=, **others)", "f(*args, a=, b=, **others)", ""),
    ],
)  # fmt: skip
def test_what_breaks_a_call(before: str, now: str, why: str) -> None:
    assert breaks(before, now) == why


def test_the_page_lists_it() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    section = page.split("\n## Stable\n")[1].split("\n## ")[0]
    for module, name in stable_names():
        assert f"`{name}`" in section, name
        assert f"`{module}`" in section, module
        assert found_of(module, name) is not None
