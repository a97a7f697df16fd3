"""Pages in headless Chromium, where one is installed: nothing is blocked or overflows, colours follow the reader."""

import html
import io
import json
import re
import shutil
import subprocess

import pytest

from dynamic_cp.decide.report.comparison_page import render_report
from dynamic_cp.decide.report.run_page import render_run_report
from dynamic_cp.decide.report.theme import DARK, LIGHT
from tests.unit.report.support import comparison
from tests.unit.report.test_pictures import RECORDS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="none of chromium, chromium-browser, google-chrome is installed"),
    pytest.mark.timeout(120),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--enable-logging=stderr", "--disable-extensions", "--disable-background-networking",
)  # fmt: skip
# Headless windows are at least 500 pixels wide; a frame can be a phone.
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe style="border:0;width:{width}px;height:3000px"
srcdoc="{page}"></iframe><script>
onload = () => {{
  const inner = document.querySelector("iframe").contentWindow, page = inner.document;
  const seen = selector => [...page.querySelectorAll(selector)].filter(e => e.checkVisibility());
  const leaves = e => !e.closest("svg") && e.getBoundingClientRect().right > inner.innerWidth + 1;
  document.body.dataset.probe = JSON.stringify({{
    inner: inner.innerWidth,
    scroll: page.documentElement.scrollWidth,
    out: seen("body *").filter(leaves).map(e => e.outerHTML.slice(0, 90)),
    texts: seen("svg text").length,
    low: seen("svg text").filter(e => e.getBoundingClientRect().height < 8).map(e => e.textContent),
  }});
}}
</script></body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    long = "dynamic-cp report --lengths /a/very/long/path/" + "x" * 120 + " --output report.html"
    texts = {
        "comparison": render_report(comparison(), command=long, inputs={"lengths": "y" * 200, "seed": 0}),
        "run": render_run_report(RECORDS, command=long, inputs={"run": "z" * 200}),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        for width in (390, 1200):
            page = html.escape(text.replace("<details>", "<details open>"))
            (folder / f"{name}-{width}.html").write_text(FRAME.format(width=width, page=page), encoding="utf-8")
    return folder


def browse(tmp_path, page, *flags):
    command = (BROWSER, *FLAGS, f"--user-data-dir={tmp_path}/profile", *flags, page.as_uri())
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def color_of(rgb):
    return "#" + "".join(f"{value:02x}" for value in rgb)


@pytest.mark.parametrize("name", ["comparison", "run"])
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_overflows_on_a_phone_or_a_desktop(pages, tmp_path, name, width):
    result = browse(tmp_path, pages / f"{name}-{width}.html", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search(r'data-probe="([^"]*)"', result.stdout)[1]))
    assert found["inner"] == width
    assert found["out"] == []
    assert found["scroll"] <= width
    assert found["texts"] > 50
    assert found["low"] == [], "below 8 pixels nothing can be read"


@pytest.mark.parametrize("name", ["comparison", "run"])
@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
def test_the_page_is_drawn_in_the_readers_colours_and_nothing_is_blocked(pages, tmp_path, name, scheme, theme):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    shot = tmp_path / "shot.png"
    flags = [f"--screenshot={shot}", "--window-size=1200,2400"]
    flags += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    result = browse(tmp_path, pages / f"{name}.html", *flags)
    assert "Refused to" not in result.stderr
    assert "Content Security Policy" not in result.stderr
    picture = image.open(io.BytesIO(shot.read_bytes())).convert("RGB")
    assert picture.size == (1200, 2400)
    colors = {color_of(rgb) for _, rgb in picture.getcolors(maxcolors=1 << 20)}
    assert color_of(picture.getpixel((2, 2))) == theme.background
    other = DARK if theme is LIGHT else LIGHT
    assert theme.ink in colors
    assert theme.band in colors
    assert theme.series[0] in colors or theme.cp_sizes[0] in colors
    assert other.band not in colors


def test_a_page_prints_on_a_few_sheets(pages, tmp_path):
    paper = tmp_path / "page.pdf"
    dark = "--blink-settings=preferredColorScheme=0"
    browse(tmp_path, pages / "comparison.html", f"--print-to-pdf={paper}", "--no-pdf-header-footer", dark)
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert 10_000 < len(content) < 3_000_000
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
