"""Every picture in every theme, width and corner case: what it says, that no text collides, that bytes repeat."""

import re
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from xml.etree import ElementTree

import pytest

from dynamic_cp.decide.report import drawing
from dynamic_cp.decide.report.cp_map import cp_map
from dynamic_cp.decide.report.curves import imbalance, knee, knee_points, length_histogram, length_shares, part_bars
from dynamic_cp.decide.report.drawing import MEDIUM_IN, NARROW_IN, WIDE_IN, inline_svg, look, png_bytes, save, svg_text
from dynamic_cp.decide.report.gantt import gantt
from dynamic_cp.decide.report.placed import lane_shares, placed_links, placed_shares
from dynamic_cp.decide.report.placed_tiles import lanes_of_color, placed_tiles
from dynamic_cp.decide.report.run import RunRecord
from dynamic_cp.decide.report.run_page import agreement, cp_sizes, losses, times
from dynamic_cp.decide.report.theme import CSS, DARK, LIGHT
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.placement.cuts import narrowed
from dynamic_cp.types import CAUSAL, Lambda, Topology
from dynamic_cp.types.placement import Lanes
from tests.unit.report.support import CASES, LENGTHS, placed, timelines
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, tiny_cost_model

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")

RECORDS = tuple(
    RunRecord(
        iteration=number, predicted_s=1.0 + 0.1 * (number % 7),
        measured_s=(9.0 if number == 1 else 1.1) + 0.1 * (number % 7), loss=10 / number,
        cp_histogram={1: 20 + number % 5, 4: 2, 16: number % 2}, tokens=1000,
    )
    for number in range(1, 31)
)  # fmt: skip
KNEE_POINTS = knee_points(TINY_MODEL, TINY_HARDWARE, tiny_cost_model(Topology(num_lanes=8)), (64, 256, 1024))


def of_timelines(case):
    both = timelines(case)
    return {
        "gantt": partial(gantt, both),
        "cp-map": partial(cp_map, [(name, one.plan) for name, one in both]),
        "imbalance": partial(imbalance, [(name, one.lane_busy_s) for name, one in both]),
    }


SMALL, LARGE = placed(4, (700, 300, 90, 20, 1), 160), placed(80, (40_000, 30_000), 400)

OTHERS = {
    "tiles": partial(placed_tiles, SMALL.bucket, CAUSAL),
    "links": partial(placed_links, SMALL.sent, SMALL.nodes),
    "shares": partial(placed_shares, SMALL.bucket, CAUSAL, SMALL.sent, SMALL.nodes),
    "tiles-many": partial(placed_tiles, LARGE.bucket, CAUSAL),
    "links-many": partial(placed_links, LARGE.sent, LARGE.nodes),
    "shares-many": partial(placed_shares, LARGE.bucket, CAUSAL, LARGE.sent, LARGE.nodes),
    "parts": partial(part_bars, [("dynamic CP", {"pack": 0.2, "passes": 1.1}), ("static CP", {"passes": 1.5})]),
    "lengths": partial(length_histogram, LENGTHS),
    "one-length": partial(length_histogram, [1]),
    "all-lengths": partial(length_histogram, [1 << power for power in range(22)]),
    "knee": partial(knee, KNEE_POINTS), "times": partial(times, RECORDS), "agreement": partial(agreement, RECORDS),
    "cp-sizes": partial(cp_sizes, RECORDS), "losses": partial(losses, RECORDS),
    "times-one": partial(times, RECORDS[:1]), "agreement-one": partial(agreement, RECORDS[:1]),
    "cp-sizes-one": partial(cp_sizes, RECORDS[:1]), "losses-one": partial(losses, RECORDS[:1]),
}  # fmt: skip
ALL = [(f"{case} {kind}", (case, kind)) for case in CASES for kind in ("gantt", "cp-map", "imbalance")]
ALL += [(name, (None, name)) for name in OTHERS]


WIDE = ("gantt", "times", "times-one", "tiles", "tiles-many")


def draw_of(case, kind):
    return of_timelines(case)[kind] if case else OTHERS[kind]


def texts(svg):
    return {
        "".join(text.itertext()).strip()
        for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }


def drawn_texts(figure, monkeypatch):
    """Return (text, box in pixels) of everything that is written; labels of ticks beyond an axis are not."""
    found = []

    def draw(text, renderer, *_, **__):
        if text.get_text().strip() and text.get_visible():
            found.append((text.get_text(), text.get_window_extent(renderer)))

    figure.canvas.draw()
    monkeypatch.setattr(matplotlib.text.Text, "draw", draw)
    monkeypatch.setattr(matplotlib.text.Annotation, "draw", draw)
    figure.canvas.draw()
    return found


@pytest.mark.by_day(*(f"{name}-True" for name in ("usual gantt", "tiles-many", "parts", "agreement", "knee")))
@pytest.mark.parametrize("is_narrow", [True, False])
@pytest.mark.parametrize(("case", "kind"), [one for _, one in ALL], ids=[name for name, _ in ALL])
def test_no_text_collides_or_leaves_the_picture(case, kind, is_narrow, monkeypatch):
    width_in = NARROW_IN if is_narrow else WIDE_IN if kind in WIDE else MEDIUM_IN
    with look(LIGHT):
        figure = draw_of(case, kind)(LIGHT, width_in=width_in)
        drawn = drawn_texts(figure, monkeypatch)
    assert len(drawn) >= 3
    page = figure.bbox
    for text, box in drawn:
        assert box.x0 >= -1, text
        assert box.x1 <= page.x1 + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= page.y1 + 1, text
    for (one, box), (other, second) in combinations(drawn, 2):
        wide = min(box.x1, second.x1) - max(box.x0, second.x0)
        high = min(box.y1, second.y1) - max(box.y0, second.y0)
        # Boxes have some air around letters.
        assert wide < 1 or high < 2, f"{one!r} and {other!r}"


@pytest.mark.by_day("usual gantt", "lengths")
@pytest.mark.parametrize(("case", "kind"), [one for _, one in ALL], ids=[name for name, _ in ALL])
def test_a_picture_is_small_well_formed_and_repeats(case, kind):
    def draw(theme):
        return draw_of(case, kind)(theme, width_in=NARROW_IN)

    svg = svg_text(draw, DARK)
    if case in (None, "usual"):
        assert svg == svg_text(draw, DARK)
    assert 2_000 < len(svg) < 400_000
    assert DARK.background in svg
    assert not re.search(r"nan|inf\b", svg)
    inline = inline_svg(draw, name="a-picture", label='A "picture" of <b>')
    assert 'aria-label="A &quot;picture&quot; of &lt;b&gt;"' in inline
    assert "var(--ink)" in inline
    assert "var(--background)" in inline
    assert not re.search(r"#fe[0-9a-f]{4}", inline)
    ids = re.findall(r'\bid="([^"]+)"', inline)
    assert len(ids) == len(set(ids)) > 5
    assert all(one.startswith("a-picture-") for one in ids)
    assert set(re.findall(r'href="#([^"]+)"', inline)) | set(re.findall(r"url\(#([^)]+)\)", inline)) <= set(ids)
    ElementTree.fromstring(inline)


def test_png_is_the_same_every_time_and_has_the_width_asked_for():
    draw = OTHERS["times"]
    png = png_bytes(draw, LIGHT)
    assert png == png_bytes(draw, LIGHT)
    assert png != png_bytes(draw, DARK)
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == round(WIDE_IN * 160)


def test_gantt_says_what_it_shows():
    said = texts(svg_text(partial(gantt, timelines("usual")), LIGHT))
    assert {"static", "dynamic", "stage", "idle", "0", "1"} <= said
    assert any(re.fullmatch(r"[1-9]\.\d\dx", text) for text in said), "the quantity of every table"
    for _, timeline in timelines("usual"):
        wanted = f"{timeline.plan.num_microbatches} micro-batches"
        assert any(wanted in text and "idle" in text for text in said)
    assert any("1 micro-batch ·" in text for text in texts(svg_text(partial(gantt, timelines("one")), LIGHT)))
    (axis,) = [text for text in said if text.startswith("time since")]
    assert re.search(r"\((s|ms|µs)\)", axis)


@pytest.mark.nightly
def test_gantt_of_many_lanes_shows_the_block_that_ends_last_and_says_so():
    both = timelines("4096-lanes")
    said = texts(svg_text(partial(gantt, both), LIGHT))
    shown = [re.search(r"lanes (\d+)–(\d+) of 4096", text) for text in said]
    shown = [match for match in shown if match]
    assert len(shown) >= 1
    assert all(int(match[2]) - int(match[1]) == 63 for match in shown)
    assert "128 or more" in said


def test_gantt_bars_are_where_the_timeline_has_them():
    ((_, _), (_, timeline)) = timelines("usual")
    with look(CSS):
        figure = gantt([("dynamic", timeline)], CSS)
    (panel,) = figure.axes
    edges = set()
    for patch in panel.patches:
        if patch.get_zorder() == 2:
            edges |= {round(float(x), 6) for x, _ in patch.get_path().vertices}
    factor = 1e3 if timeline.makespan_s < 1 else 1
    spans = timeline.spans
    assert len(spans) > 20
    for span in spans:
        assert round(span.start_ns / 1e9 * factor, 6) in edges
        assert round(span.end_ns / 1e9 * factor, 6) in edges


def test_gantt_colours_groups_by_their_size_and_padding_grey():
    both = timelines("mostly-empty")
    svg = svg_text(partial(gantt, both), LIGHT)
    for _, timeline in both:
        for size in timeline.plan.cp_histogram:
            assert LIGHT.cp_color(size) in svg
            assert LIGHT.cp_color(size, forward=True) in svg
    assert LIGHT.empty in svg
    assert "only padding" in texts(svg)
    assert LIGHT.empty not in svg_text(partial(gantt, timelines("one")), LIGHT)


@pytest.mark.nightly
def test_cp_map_reduces_large_plans_and_says_so():
    said = texts(svg_text(of_timelines("4096-lanes")["cp-map"], LIGHT))
    assert "lane (rows of 64)" in said
    said = texts(svg_text(of_timelines("many-micro-batches")["cp-map"], LIGHT))
    assert any(re.fullmatch(r"micro-batch \(each column the largest of \d+\)", text) for text in said)
    assert "lane" in said


def test_cp_map_leaves_out_micro_batches_of_padding_and_says_so():
    (_, timeline) = timelines("usual")[1]
    plan = timeline.plan
    buckets = [[replace(one, samples=()) for one in row.buckets] for row in plan.micro_batches]
    padding = replace(plan.micro_batches[0], buckets=tuple(buckets[0]))
    rows = (*plan.micro_batches[:1], padding, *plan.micro_batches[1:])
    with_padding = replace(plan, micro_batches=rows)
    assert with_padding.num_microbatches == plan.num_microbatches + 1 >= 3
    with look(LIGHT):
        figures = [cp_map([("dynamic", one)], LIGHT) for one in (plan, with_padding)]
    before, after = (figure.axes[0] for figure in figures)
    assert before.get_xlim() == after.get_xlim() == (0, plan.num_microbatches)
    assert before.get_xlabel() == "micro-batch"
    assert after.get_xlabel() == "micro-batch (without 1 of padding)"
    shown = [int(label.get_text()) for label in after.get_xticklabels()]
    assert 1 not in shown
    assert shown[-1] == int(before.get_xticklabels()[-1].get_text()) + 1  # the numbers are those of the plan


def test_a_picture_can_show_the_page_behind_it():
    draw, filled = OTHERS["parts"], f"fill: {DARK.background}"
    assert filled in svg_text(draw, DARK)
    assert filled not in svg_text(draw, DARK, transparent=True)
    assert png_bytes(draw, DARK, transparent=True) != png_bytes(draw, DARK)


def test_length_histogram_has_units_and_shares():
    said = texts(svg_text(OTHERS["lengths"], LIGHT))
    assert {"samples (16)", "sequence length (tokens)", "512", "1k"} <= said
    assert any(text.startswith("tokens (2.") for text in said)
    assert any(text.startswith("attention work (ΣS²") for text in said)


def test_buckets_hold_their_upper_bound():
    import numpy as np

    edges, (samples, tokens, squares) = length_shares(np.array([1, 2, 3, 4, 5, 64, 65]))
    assert edges.tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
    assert (7 * samples).round().tolist() == [2, 2, 1, 0, 0, 1, 1]
    assert tokens[-1] == pytest.approx(65 / 144)
    assert squares.sum() == pytest.approx(1)
    assert length_shares(np.array([1]))[0].tolist() == [1, 2]


def test_tiles_are_drawn_where_they_are_in_the_color_of_their_lane():
    with look(LIGHT):
        figure = placed_tiles(SMALL.bucket, CAUSAL, LIGHT)
        assert len(figure.axes) == 2 * 3
    placement, (sample,) = SMALL.bucket.placement, [one for one in SMALL.bucket.samples if one.seqlen == 700]
    homes, (by_lane, *_, by_division, _, _) = placement.homes, figure.axes
    assert len(figure.axes) == 6
    wanted = {0: set(), 1: set()}
    for queries, keys, lane, division in placement.tiles.tolist():
        if homes[queries, 0] == 0:
            corner = homes[keys, 1], homes[queries, 1], homes[keys, 2], homes[queries, 2]
            wanted[0].add((*map(int, corner), LIGHT.cp_sizes[lane]))
            wanted[1].add((*map(int, corner), 0.25 if division == 0 else 1.0))
    assert len(wanted[0]) == 15
    for panel, name in ((by_lane, 0), (by_division, 1)):
        drawn = set()
        strips = {}
        for patch in panel.patches:
            color = matplotlib.colors.to_hex(patch.get_facecolor())
            rectangles = patch.get_path().vertices.reshape(-1, 5, 2)
            for corners in rectangles.tolist():
                (left, top), _, (right, bottom), *_ = corners
                if left < 0 or top < 0:
                    strips.setdefault(color, set()).add((left < 0, max(left, top, 0.0), max(right, bottom)))
                    continue
                drawn.add((left, top, right, bottom, patch.get_alpha() if name else color))
                # Only what the mask allows is seen.
                assert patch.get_clip_path() is not None
        assert drawn == wanted[name]
        # Lanes 0 to 3, then 0 again: who holds which rows, and which columns.
        assert strips[LIGHT.cp_sizes[1]] == {(True, 160.0, 320.0), (False, 160.0, 320.0)}
        assert len(strips[LIGHT.cp_sizes[0]]) == 4
    assert sample.seqlen == by_lane.get_xlim()[1]


def test_many_tiles_and_lanes_are_grouped_and_the_picture_says_so():
    assert [lanes_of_color(number, 8) for number in (2, 8, 9, 16, 17, 64, 80)] == [1, 1, 2, 2, 4, 8, 16]
    svg = svg_text(OTHERS["tiles-many"], LIGHT)
    assert {"0–15", "64–79", "sample 0 · 40.0k tokens"} <= texts(svg)
    assert len(LARGE.bucket.placement.tiles) > 4000
    assert len(svg) < 120_000
    said = texts(svg_text(OTHERS["links-many"], LIGHT))
    assert {"to lane (cells of 3)", "to node (cells of 2)"} <= said
    assert "lane (bars of 2, the largest)" in texts(svg_text(OTHERS["shares-many"], LIGHT))


def test_lanes_hold_compute_and_send_what_the_placement_says():
    tokens, pairs, sent = lane_shares(SMALL.bucket, CAUSAL, SMALL.sent, SMALL.nodes).values()
    assert tokens.sum() == sum(sample.seqlen for sample in SMALL.bucket.samples) == 1111
    allowed = sum((one.mask or CAUSAL).num_pairs(one.seqlen) for one in SMALL.bucket.samples)
    assert allowed <= pairs.sum() < 3 * allowed
    assert sent.sum() == SMALL.sent.num_bytes.sum() > 0
    said = texts(svg_text(OTHERS["shares"], LIGHT))
    assert f"tokens held: mean 278, max/mean {tokens.max() / tokens.mean():.2f}" in said
    between = SMALL.sent.between(SMALL.nodes)
    largest = max(between[0, 1], between[1, 0])
    assert f"from node to node: largest {drawing.format_bytes(largest)}" in texts(svg_text(OTHERS["links"], LIGHT))


def test_pairs_are_the_mean_over_layers_with_and_without_a_window():
    window = Lambda(2, 100)
    placement = SMALL.bucket.placement
    mixed = replace(SMALL.bucket, placement=replace(placement, layer_masks=(CAUSAL, window)))
    alone = replace(SMALL.bucket, placement=narrowed(placement, SMALL.bucket.samples, window, Lanes(4, 0, 4)))
    args = SMALL.sent, SMALL.nodes
    full, some = lane_shares(SMALL.bucket, CAUSAL, *args), lane_shares(mixed, CAUSAL, *args, (0.75, window))
    of_window = lane_shares(alone, window, *args)["pairs computed"]
    assert 0 < of_window.sum() < 0.7 * full["pairs computed"].sum()
    assert some["pairs computed"] == pytest.approx(0.25 * full["pairs computed"] + 0.75 * of_window)
    assert some["tokens held"].tolist() == full["tokens held"].tolist()


def test_bytes_have_units():
    assert [drawing.format_bytes(number) for number in (950, 12_345, 2.5e9)] == [
        "950\u00a0B", "12.3\u00a0kB", "2.50\u00a0GB"
    ]  # fmt: skip


def test_imbalance_says_max_over_mean():
    said = texts(svg_text(partial(imbalance, [("uneven", [3.0, 1.0, 2.0]), ("even", [2.0] * 3)]), LIGHT))
    assert "uneven: busiest 3.00\u00a0s, mean 2.00\u00a0s, max/mean 1.50" in said
    assert "even: busiest 2.00\u00a0s, mean 2.00\u00a0s, max/mean 1.00" in said
    assert "busy time of a lane (s)" in said


def test_bars_of_parts_end_where_their_sum_is():
    draw = OTHERS["parts"]
    assert {"dynamic CP", "pack", "passes", "time (s)", "1.30\u00a0s", "1.50\u00a0s"} <= texts(svg_text(draw, LIGHT))
    with look(LIGHT):
        bars = draw(LIGHT).axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 0.2), (0.2, pytest.approx(1.1)), (0, 1.5)]


def test_imbalance_of_idle_lanes_is_drawn():
    assert "max/mean 1.00" in svg_text(partial(imbalance, [("idle", [0.0, 0.0])]), LIGHT)


def test_knee_points_are_the_cost_models():
    cost_model = tiny_cost_model(Topology(num_lanes=8))
    by_place = {(point.seqlen, point.cp_size): point for point in KNEE_POINTS}
    assert len(by_place) == 3 * 4
    cost = cost_model.cost(4, 0, 1024, 1024**2)
    assert by_place[1024, 4].seconds == pytest.approx(
        cost.forward_s + cost.backward_s + cost.embedding_forward_s + cost.embedding_backward_s
        + cost.head_forward_s + cost.head_backward_s
    )  # fmt: skip
    assert all(0 < point.mfu < 1 for point in KNEE_POINTS)
    assert [by_place[1024, cp].fits for cp in (1, 2, 4, 8)] == [False, False, True, True]
    # Short samples waste large groups.
    assert by_place[64, 1].mfu > 2 * by_place[64, 8].mfu


def test_ticks_keep_the_digits_that_tell_them_apart():
    records = [replace(one, loss=6.27 - 1e-4 * one.iteration) for one in RECORDS]
    ticks = [text for text in texts(svg_text(partial(losses, records), LIGHT)) if text.startswith("6.2")]
    assert len(ticks) > 3, "a set: equal labels would be one"
    assert all(len(tick) > len("6.27") for tick in ticks)
    assert "1" in texts(svg_text(OTHERS["losses-one"], LIGHT)), "iterations are whole"


def test_save_refuses_other_formats_and_places(tmp_path):
    with pytest.raises(InvalidInputError, match=r"ends in \.pdf, pictures end in \.png or \.svg"):
        save(tmp_path / "picture.pdf", OTHERS["losses"], LIGHT)
    with pytest.raises(InvalidInputError, match=r"cannot write .*choose a writable place"):
        save(tmp_path / "no" / "picture.svg", OTHERS["losses"], LIGHT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draw", [partial(length_histogram, []), partial(times, []), partial(cp_sizes, [])])
def test_nothing_to_draw_is_an_error_that_says_so(draw):
    with pytest.raises(InvalidInputError, match="at least 1"):
        svg_text(draw, LIGHT)


def test_settings_of_the_caller_are_untouched_and_do_not_matter():
    before = dict(matplotlib.rcParams)
    plain = svg_text(OTHERS["losses"], LIGHT)
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert svg_text(OTHERS["losses"], LIGHT) == plain


def test_dollar_signs_are_no_formulas():
    svg = svg_text(partial(imbalance, [("a$_b$", [1.0])]), LIGHT)
    assert "a$_b$: busiest" in svg


def test_a_missing_matplotlib_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedFeatureError, match=r"pictures need matplotlib.*\[report\]"):
        svg_text(OTHERS["losses"], LIGHT)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (85.02, "85.0"), (999.6, "1.00k"), (12_045, "12.0k"), (4.56e6, "4.56M"), (7e15, "7.00P")],
)
def test_counts_have_three_digits(value, text):
    assert drawing.format_count(value) == text


@pytest.mark.parametrize(("tokens", "text"), [(1, "1"), (512, "512"), (8192, "8k"), (1 << 20, "1M"), (3000, "3000")])
def test_tokens_are_counted_as_people_do(tokens, text):
    assert drawing.format_tokens(tokens) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.8, "1.80 s"), (0.0456, "45.6 ms"), (7.8e-6, "7.80 µs"), (0.9996, "1000 ms"), (1234.5, "1234 s"), (0, "0 s")],
)
def test_seconds_have_three_digits(seconds, text):
    assert drawing.format_s(seconds) == text.replace(" ", "\u00a0"), "no line break parts a number from its unit"
