"""HTML pages: well-formed, self-contained, escaped, small, and true to the comparison or run they show."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from dynamic_cp.decide.comparison import verdict_of
from dynamic_cp.decide.report.comparison_page import _typeset, render_report
from dynamic_cp.decide.report.drawing import format_s
from dynamic_cp.decide.report.run_page import render_run_report
from dynamic_cp.decide.report.theme import DARK, LIGHT
from dynamic_cp.errors import InvalidInputError
from tests.unit.report.support import comparison
from tests.unit.report.test_pictures import RECORDS

pytest.importorskip("jinja2", reason="jinja2 is not installed")

COMMAND = "dynamic-cp report --lengths 'my <list>.txt' --lanes 8 --output report.html"
VOID = {"meta", "br", "img", "hr", "link", "input", "source"}


class Page(HTMLParser):
    """Reads a page, and notes what a browser would have to repair."""

    def __init__(self, text):
        super().__init__()
        self.open, self.errors, self.counts, self.attributes, self.ids = [], [], Counter(), [], Counter()
        self.texts, self.headings, self.cells = [], [], []
        self.feed(text)
        self.close()
        if self.open:
            self.errors.append(f"not closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        self.counts[tag] += 1
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.errors.append(f"attributes twice: {tag} {names}")
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.errors.append(f"</{tag}> closes {self.open[-3:]}")
        else:
            self.open.pop()

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())
            if self.open and re.fullmatch(r"h\d", self.open[-1]):
                self.headings.append((int(self.open[-1][1]), data.strip()))


def of_comparison(one):
    return render_report(one, command="c", inputs={})


def of_hostile_names():
    hostile = replace(comparison(), model_name='<b>bold</b> & "quoted"')
    return render_report(hostile, command=COMMAND, inputs={"lengths": "<script>x</script>", "seed": 0})


PAGES = {
    "comparison": of_hostile_names,
    "one policy": lambda: of_comparison(comparison(1, "m", ("static",))),
    "placed": lambda: of_comparison(comparison(1, "m", ("dynamic", "balanced"), "blocks")),
    "run": lambda: render_run_report(RECORDS, command=COMMAND, inputs={"run": "<i>runs</i>"}),
    "one iteration": lambda: render_run_report(RECORDS[:1]),
}


@cache
def page_of(name):
    """Return a page that several tests read."""
    return PAGES[name]()


@pytest.mark.by_day("comparison", "run")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_small(name):
    text = page_of(name)
    page = Page(text)
    assert page.errors == []
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<html lang=") == text.count("<h1>") == text.count("<main>") == 1
    assert max(page.ids.values()) == 1, page.ids.most_common(3)
    assert 20_000 < len(text.encode()) < 2_000_000
    assert page.counts["svg"] >= 4


@pytest.mark.by_day("run")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_and_runs_nothing(name):
    text = page_of(name)
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object", "base", "form"} & set(page.counts)
    targets = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "action")]
    assert all(value.startswith("#") for value in targets)
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    policy = next(value for tag, name, value in page.attributes if value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_what_the_user_named_is_escaped():
    text = page_of("comparison")
    assert "<b>" not in text
    assert "<script" not in text
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; &#34;quoted&#34;" in text
    shown = "".join(Page(text).texts)
    assert "<script>x</script>" in shown
    assert "<i>" not in page_of("run")


@pytest.mark.parametrize("name", ["comparison", "run"])
def test_the_command_can_be_copied(name):
    code = re.search(r"<code>(.*)</code>", page_of(name))[1]
    assert unescape(re.sub(r"</?span>", "", code)) == COMMAND


@pytest.mark.by_day("comparison", "run")
@pytest.mark.parametrize("name", PAGES)
def test_colours_follow_the_reader_and_paper_is_light(name):
    text = page_of(name)
    starts = (":root { color-scheme: light dark", "(prefers-color-scheme: dark)", "@media print { :root")
    light, dark, paper = (text.index(start) for start in starts)
    assert light < dark < paper
    for theme, start in ((LIGHT, light), (DARK, dark), (LIGHT, paper)):
        rules = text[start : text.index("}", start + 60)]
        for variable, color in theme.named_colors.items():
            assert f"{variable}: {color};" in rules
    # Pictures have no colours of their own.
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert not re.search(r"(fill|stroke): #(?!000000)[0-9a-f]{6}", svg)
        assert "var(--ink)" in svg
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) - {"--at"} <= set(LIGHT.named_colors)


@pytest.mark.by_day("comparison", "run")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_aloud(name):
    page = Page(page_of(name))
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    images = Counter(tag for tag, name, value in page.attributes if (name, value) == ("role", "img"))
    labels = [value for tag, name, value in page.attributes if name == "aria-label"]
    assert images["svg"] == page.counts["svg"]
    assert all(len(label) > 5 for label in labels)
    assert len(labels) >= sum(images.values())
    headers = Counter(tag for tag, name, _ in page.attributes if name == "scope")
    assert headers["th"] == page.counts["th"] > 0


def test_the_verdict_stands_first_and_the_figures_are_the_comparisons():
    one = comparison()
    verdict = verdict_of(one)
    page = Page(page_of("comparison"))
    shown = " ".join(page.texts)
    headline, reason = _typeset(verdict.headline), _typeset(verdict.reason)
    assert headline[1:] in shown
    assert reason in shown
    assert re.search(r"\d×", headline)
    assert not re.search(r"\dx|\.\.\d| -> ", headline + reason)
    assert shown.index(headline[1:]) < shown.index("Policies side by side")
    assert [title for level, title in page.headings if level == 2] == [
        "Policies side by side", "Where the time goes", "The plans", "Memory", "Distance to the lower bound",
        "Batch by batch", "Reproduce",
    ]  # fmt: skip
    for policy in one.policies:
        assert format_s(policy.iteration_s) in shown
        for batch in policy.batches:
            assert format_s(batch.iteration_s) in shown
            assert batch.planned.reason in shown
    for speedup in one.speedups:
        assert f"{speedup.ratio:.2f}×" in shown
        assert f"{speedup.low:.2f}–{speedup.high:.2f}" in shown


@pytest.mark.nightly
def test_placed_attention_has_a_section_of_its_own():
    (outcome,) = comparison(1, "m", ("dynamic", "balanced"), "blocks").policies[0].batches
    page = Page(page_of("placed"))
    assert (2, "Placed attention") in page.headings
    assert not any("Placed attention" in text for text in Page(page_of("comparison")).texts)
    rows = {
        (f"{len(bucket.placement.homes)} homes", f"{len(bucket.placement.tiles)} tiles")
        for bucket in outcome.planned.plan.buckets
        if bucket.placement
    }
    assert len(rows) >= 2
    (note,) = [text for text in page.texts if text.startswith("Micro-batch")]
    assert sum(homes in note and tiles in note for homes, tiles in rows) == 1
    assert any("inside nodes" in text for text in page.texts)


def test_stacked_bars_add_up():
    text = page_of("comparison")
    bars = re.findall(r'<div class="bar" role="img" aria-label="(\w+)[^"]*" style="width: ([\d.]+)%">(.*?)</div>', text)
    stacked = [
        (name, float(width), re.findall(r"flex: ([\d.]+) 0 0", parts)) for name, width, parts in bars if " 0 0" in parts
    ]
    assert [name for name, _, _ in stacked] == ["dynamic", "static", "balanced"]
    slowest = max(one.iteration_s for one in comparison().policies)
    for (_, width, shares), policy in zip(stacked, comparison().policies, strict=True):
        assert sum(map(float, shares)) == pytest.approx(1, abs=1e-3)
        assert width == pytest.approx(100 * policy.iteration_s / slowest, abs=0.01)


def needing_too_much(one, name):
    """Return a comparison in which this policy needs 3 of 2 GB, and the others 1."""
    policies = [
        replace(
            policy,
            available_bytes=2e9,
            batches=tuple(replace(batch, peak_bytes=3e9 if policy.policy == name else 1e9) for batch in policy.batches),
        )
        for policy in one.policies
    ]
    return replace(one, policies=tuple(policies))


@pytest.mark.nightly
def test_a_policy_that_needs_too_much_memory_is_marked():
    text = of_comparison(needing_too_much(comparison(), "static"))
    assert text.count("too much") == 1
    assert "3.0 GB" in text
    assert "--at: 66.67%" in text
    assert "does not say how much memory" not in text


@pytest.mark.nightly
def test_a_dynamic_plan_that_does_not_fit_is_no_success():
    page = Page(of_comparison(needing_too_much(comparison(1, "m", ("dynamic", "static")), "dynamic")))
    assert "The dynamic plan does not fit: 3.0 of 2.0 GB at limit 256" in " ".join(page.texts)
    assert ("section", "class", "verdict no") in page.attributes


@pytest.mark.nightly
def test_a_pool_has_a_row_and_the_picture_of_its_ticks():
    one = comparison(1, "m", ("dynamic", "pool"))
    ours, pool = one.policies
    pool = replace(pool, batches=tuple(replace(batch, note="no <plan>") for batch in pool.batches))
    page = Page(of_comparison(replace(one, policies=(ours, pool))))
    assert page.errors == []
    assert "pool: no <plan>" in page.texts
    only = Page(of_comparison(replace(one, policies=(pool,))))
    assert only.errors == []
    assert only.counts["svg"] == 2, "its ticks on a wide page and on a phone"
    assert (2, "Where the time goes") in page.headings
    assert (2, "Where the time goes") not in only.headings


@pytest.mark.nightly
def test_a_run_that_is_as_predicted_says_so_and_one_that_is_not_too():
    close = tuple(replace(one, measured_s=one.predicted_s * 1.02) for one in RECORDS)
    text = " ".join(Page(render_run_report(close)).texts)
    assert "Iterations take 1.02× the predicted time: the cost model fits this device." in text
    assert "Over 29 iterations together" in text
    assert "The first one is left out: it loads and compiles." in text
    slow_start = (replace(RECORDS[0], measured_s=100.0), replace(RECORDS[1], measured_s=RECORDS[1].predicted_s))
    text = " ".join(Page(render_run_report(slow_start)).texts)
    assert "Iterations take 1.00× the predicted time" in text
    assert "Over 1 iteration together" in text
    twice = tuple(replace(one, measured_s=one.predicted_s * 2, exposed_s=0.02) for one in RECORDS)
    text = " ".join(Page(render_run_report(twice)).texts)
    assert "Iterations take 2× the predicted time, longer than" in text
    assert "nearly the same for all" in text
    assert "waited for the planner 0.77% of the time" in text
    mixed = tuple(replace(one, measured_s=one.predicted_s * (1 + one.iteration % 3)) for one in RECORDS)
    assert "calibrate the hardware file" in " ".join(Page(render_run_report(mixed)).texts)


@pytest.mark.nightly
def test_a_long_run_shows_some_of_its_iterations():
    records = tuple(replace(RECORDS[0], iteration=number) for number in range(1, 1001))
    text = render_run_report(records)
    assert "1 in 10 of 1000 iterations" in text
    assert text.count('role="rowheader"') == 100
    assert len(text.encode()) < 2_000_000


def test_a_run_without_records_is_refused():
    with pytest.raises(InvalidInputError, match="0 iterations are given"):
        render_run_report([])
