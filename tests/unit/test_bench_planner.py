"""`make bench-planner`: it runs, its JSON is whole, its tables are up to date."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.blocks import __main__ as command
from benchmarks.blocks import ablations, compared, ours, steps
from benchmarks.blocks.baselines import baselines
from benchmarks.blocks.rings import Ring, chunked, ring_seconds
from benchmarks.blocks.setting import H100_NODES, PAPER_NODES, Setting, masked
from benchmarks.planner import h100
from benchmarks.planner.__main__ import DOCS, SECTIONS, main
from benchmarks.planner.frozen import frozen_cases, frozen_problem, lengths_of
from benchmarks.planner.report import Row
from dynamic_cp.pricing.table import price
from dynamic_cp.types import CausalBlockwise, Lambda
from tests.unit.support import assert_has_places


@pytest.mark.nightly
def test_quick_run(tmp_path):
    pytest.importorskip("pulp", reason="the FlexSP peer needs it")
    main(["--quick", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "planner.json").read_text())
    assert set(found) == set(SECTIONS)
    for section in SECTIONS:
        assert set(found[section]["measured"]) == {"date", "cpu", "cores", "versions"}

    rows = found["frozen"]["cases"]
    assert [row["pp"] for row in rows] == [4, 1] or [row["pp"] for row in rows] == [1, 4]
    for row in rows:
        assert row["bound_s"] <= min(row["fast_s"], row["thorough_s"])
        others = [row[f"{name}_s"] for name in ("static", "balanced", "megatron_dev", "megatron_0161")]
        assert max(row["fast_s"], row["thorough_s"]) <= min(seconds for seconds in others if seconds)
        assert row["fast_ms"] > 0
    assert len(found["frozen"]["tiny"]) == 3
    assert {"figure", "goal", "reached", "unit", "is_met"} == set(found["frozen"]["goals"][0])

    (row,) = found["h100"]["cases"]
    assert row["bound_s"] <= row["fast_s"] <= min(row[f"{name}_s"] for name in ("static", "balanced", "megatron_dev"))
    assert row["busy"] + row["pipeline_bubble"] + row["cp_wait"] + row["dp_wait"] == pytest.approx(1)
    assert row["pipeline_bubble"] > 0

    rows = found["exchanges"]["cases"]
    assert [row["heads"] for row in rows] == ["MHA", "GQA"]
    for row in rows:
        assert row["all_bound_s"] <= min(row["all_s"], row["all_thorough_s"]) <= row["ring_s"]
    (row,) = found["exchanges"]["chosen"]
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["all_s"] < row["ring_s"]

    rows = found["published"]["cases"]
    assert len(rows) == 2
    for row in rows:
        others = [row[f"{name}_tflops"] for name in ("static", "balanced", "megatron-dev")]
        assert max(others) <= row["dynamic_tflops"] < 990, "more than the device's peak"

    for row in found["growth"]["curves"]:
        assert all(milliseconds > 0 for _, _, milliseconds in row["points"])
    (row,) = found["compared"]["cases"]
    assert row["bound_s"] <= min(row["fast_s"], row["wlb_s"], row["flexsp_s"])

    document = (tmp_path / "figures" / "planner.md").read_text()
    assert "| case | seeds |" in document
    assert document.count("Measured 20") == len(SECTIONS)


def test_lengths_of_all_frozen_cases():
    cases = frozen_cases()
    assert len(cases) == 49
    for case in cases:
        lengths = lengths_of(case)  # checks the sum
        assert len(lengths) == case["num_samples"]
        assert 64 <= lengths.min() <= lengths.max() <= case["max_seqlen"]


@pytest.mark.nightly
def test_the_tables_are_those_of_todays_planner():
    """Plans depend on nothing but their inputs: one that plans otherwise shows in seconds; times are not compared."""
    recorded = json.loads((DOCS / "planner.json").read_text(encoding="utf-8"))
    fast_s = {f"{row['case']} seed {row['seed']}": row["fast_s"] for row in recorded["frozen"]["cases"]}
    fast_s |= {row["name"]: row["fast_s"] for row in recorded["h100"]["cases"]}
    problems = {
        f"{case['case']} seed 0": frozen_problem(case["case"], case, lengths_of(case))
        for case in frozen_cases()
        if case["seed"] == 0
    }
    problems |= {setting.name: h100.problem_of(setting) for setting in h100.SETTINGS}
    stale = []
    for name, problem in problems.items():
        if len(problem.seqlens) <= 2048:
            now_s = problem.seconds(problem.planned().plan)
            if not math.isclose(now_s, fast_s.get(name, math.inf), rel_tol=1e-6):
                stale.append(f"{name}: {fast_s.get(name)} -> {now_s} s")
    assert len(problems) > 50
    assert not stale, "docs/figures/planner.md is older than the planner, run `make bench-planner`: " + "; ".join(stale)


ONE_NODE = Setting(num_nodes=1, node_lanes=4, num_tokens=65536)


@pytest.mark.parametrize(("inner", "exchange"), [(1, "p2p"), (2, "a2a+p2p"), (4, "a2a")])
def test_a_long_causal_sample_takes_as_long_as_the_planner_says(inner: int, exchange: str) -> None:
    samples = masked([65536], "causal")
    ring = Ring(4 // inner, inner)
    found = ring_seconds(chunked(samples, ring.size, zigzag=True), ring, ONE_NODE)
    row = ONE_NODE.cost_model.row_of(4, 0, exchange, None if inner == 4 else inner)
    assert row is not None
    terms = ONE_NODE.cost_model.table.terms
    expected = [price(terms, row, direction, 65536.0, 65536.0**2) for direction in range(2)]
    assert found == pytest.approx(expected, rel=0.005)


def test_rings_move_all_keys_and_compute_what_the_mask_allows() -> None:
    dense, window = (masked([131072], rule) for rule in ("causal", "lambda:64,4096"))
    ring = Ring(64)
    of_dense, of_window = (chunked(samples, 64, zigzag=True) for samples in (dense, window))
    assert of_dense.lane_tokens == of_window.lane_tokens == 131072 // 64
    assert of_window.squared_tokens.sum() < 0.2 * of_dense.squared_tokens.sum()
    assert sum(ring_seconds(of_window, ring, H100_NODES)) > 0.9 * sum(ring_seconds(of_dense, ring, H100_NODES))
    # The last chunks of a causal sample see most.
    plain = chunked(dense, 64, zigzag=False)
    even, uneven = (
        max(sum(tiles.squared_tokens[tiles.queries == lane]) for lane in range(64)) for tiles in (of_dense, plain)
    )
    assert uneven > 1.8 * even


def test_double_rings_pass_on_every_key_once_and_hide_slow_links() -> None:
    for ring in (Ring(8), Ring(8, window=2), Ring(8, window=4)):
        assert all(sorted(row) == list(range(8)) for row in ring.steps.tolist())
        assert all(sorted(column) == list(range(8)) for column in ring.steps.T.tolist())
    samples = masked([131072], "causal")
    single, double = (
        sum(ring_seconds(chunked(samples, 64, zigzag=True), ring, H100_NODES))
        for ring in (Ring(64), Ring(64, window=8))
    )
    assert double < 0.8 * single


def test_links_that_a_node_shares() -> None:
    assert [PAPER_NODES.across_bytes_per_s(lanes) for lanes in (1, 4, 8)] == [1e10, 1e10, 5e9]
    assert [H100_NODES.across_bytes_per_s(lanes) for lanes in (1, 8)] == [4e10, 4e10]


@pytest.fixture(scope="module")
def cells() -> list[Row]:
    return [compared.measure_cell(cell, command.QUICK, 1) for cell in command.QUICK_CELLS]


@pytest.fixture(scope="module")
def step() -> Row:
    return steps.measure_case(command.QUICK_LAYOUT, "github_bal", "shared_question:4x0.2")


@pytest.mark.nightly
def test_shapes(cells: list[Row]) -> None:
    """Figures of small cells are in the order that they must have, and placed attention gains where keys are unread."""
    rows = cells
    assert [row["mask"] for row in rows] == list(compared.MASKS)
    for row in rows:
        others = [row[name] for name in compared.NAMES if name != "blocks"]
        assert row["best"] == min(others) > 0
        assert row["double ring"] <= row["TransformerEngine"] <= row["zigzag ring"]
        assert row["repeated KV heads"] <= row["double ring"]
        assert row["auto"] <= row["blocks"]
        assert 0 <= row["exposed"] < row["blocks"]
    (sample,) = samples = masked([16384], "lambda:64,512")
    assert isinstance(sample.mask, Lambda)
    best_ms = min(baselines(samples, command.QUICK).values())
    assert best_ms > 1.5 * ours.price(ours.chosen(samples, command.QUICK), command.QUICK).milliseconds


def test_ablations() -> None:
    dense, sparse = (
        ablations.measured(mask, command.QUICK, 1) for mask in ("causal_blockwise:256,8", "causal_blockwise:256,1")
    )
    assert isinstance(masked([4096], sparse["mask"])[0].mask, CausalBlockwise)
    assert sparse["density"] < dense["density"] < 1
    assert sparse["multicast_mb"] <= dense["multicast_mb"] <= dense["direct_mb"]
    coarse = ablations.measured("causal_blockwise:256,8", command.QUICK, 1, block_size=4096)
    assert coarse["work_imbalance"] > dense["work_imbalance"]


def test_fewer_candidates_take_less_planning_and_find_no_better() -> None:
    greedy, *_, everything = ablations.measured_candidates("causal_blockwise:256,2", command.QUICK, 1)
    assert everything["ratio"] == 1.0 <= greedy["ratio"]
    assert greedy["cpu_s"] < everything["cpu_s"]


@pytest.mark.nightly
def test_whole_steps(step: Row) -> None:
    assert step["with_s"] <= min(step["without_s"], step["separate_s"])
    assert steps.problem_of(command.QUICK_LAYOUT).topology.num_lanes == 32
    assert f"{step['without_s'] / step['with_s']:.2f}" in steps.markdown([step])
    pieces = steps.separate(masked([1000], "shared_question:4x0.2"))
    assert [piece.seqlen for piece in pieces] == [400] * 4


@pytest.mark.nightly
def test_the_page_has_a_place_for_every_table(cells: list[Row], step: Row, tmp_path: Path) -> None:
    tables = command.compared_tables(cells, cells)
    tables |= command.ablation_tables(ablations.measure(command.QUICK, 1, compared.MASKS[:1]))
    tables |= command.step_tables([step])
    windows = steps.measure_windows(steps.WINDOWS[2], "github_bal", command.QUICK_LAYOUT)
    assert windows["with_s"] <= windows["without_s"]
    tables |= command.window_tables([windows])
    command.write(tmp_path, tables)
    assert_has_places(tmp_path / "figures" / "attention.md", tables)
    assert tables["blocks-cells"].count("\n") == 1 + len(cells)
