"""The fit finds the coefficients that made the seconds, says how far off it is, and refuses what it cannot use."""

import json
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.decide.calibration import Calibration, Measurement, Measurements, Setup, calibrate
from dynamic_cp.decide.calibration.fit import buckets_s, fit_seconds
from dynamic_cp.decide.calibration.measurements import SECTIONS, FitError, Point
from dynamic_cp.decide.calibration.picture import save_picture
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.catalog import hardware_as_dict, load_hardware
from dynamic_cp.pricing.linear_prices import BACKWARD_OVER_FORWARD
from dynamic_cp.types import Hardware, LinearAttention, ModelShape, PlanOptions, Sample, Topology

MODEL = ModelShape(
    num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, num_query_groups=4, kv_channels=64,
    vocab_size=32000, gated_linear_unit=True,
)  # fmt: skip
SETUP = Setup(
    device="a synthetic device", torch_version="0", model=MODEL, tp_size=2, element_bytes=2, num_ranks=4,
    ranks_per_node=4, max_tokens=16384, quick=False, date="2026-11-21",
)  # fmt: skip
TRUTH = replace(
    load_hardware("h100"), linear_flops_per_s=2.5e14, linear_extra_tokens=0.0, linear_backward_over_forward=1.9,
    attention_flops_per_s=3.0e14, attention_extra_tokens=300.0, attention_full_flops_per_s=4.0e14,
    attention_full_extra_tokens=150.0, attention_backward_flops_per_s=2.2e14, attention_backward_extra_tokens=500.0,
    attention_full_backward_flops_per_s=2.9e14, attention_full_backward_extra_tokens=250.0,
    ring_step_overhead_s_per_layer=3e-5, host_forward_s_per_layer=0.0, host_backward_s_per_layer=0.0,
    host_ring_step_s_per_layer=0.0, host_message_s_per_layer=0.0, forward_overhead_s_per_layer=9e-5,
    backward_overhead_s_per_layer=1.6e-4, overhead_s_per_bucket_stage=4e-4, exchange_latency_s_per_layer=2.5e-4,
    bandwidth_in_node_bytes_per_s=1.2e11, p2p_bandwidth_bytes_per_s=6e10,
    collective_bandwidth_in_node_bytes_per_s=2e11, head_flops_per_s=4e14, memory_bandwidth_bytes_per_s=1.5e12,
)  # fmt: skip
SLOW_HOST = replace(
    TRUTH, host_forward_s_per_layer=4e-4, host_backward_s_per_layer=6e-4, host_ring_step_s_per_layer=1.4e-4
)
"""Launches layers of up to some thousand tokens more slowly than the device computes them."""
LENGTHS = tuple(1 << k for k in range(8, 15))
SHARE_OF_ATTENTION = 0.3
"""Of the overhead of a layer: attention is called alone as well."""


def synthetic(truth: Hardware, noise: float, seed: int, setup: Setup = SETUP) -> Measurements:
    """Return what a device with the coefficients `truth` would measure, each number with relative normal noise."""
    random = np.random.default_rng(seed)
    shard = setup.shard
    sections: dict[str, list[Measurement]] = {name: [] for name in SECTIONS}

    def add(section: str, forward_s: float, backward_s: float = 0.0, **about: object) -> None:
        spread = np.exp(noise * random.standard_normal(2))
        row = Measurement(section=section, forward_s=forward_s * spread[0], backward_s=backward_s * spread[1], **about)
        sections[section].append(row)

    hosts = truth.host_forward_s_per_layer, truth.host_backward_s_per_layer
    step_s = truth.host_ring_step_s_per_layer - 40e-6
    host_s = {
        "linear": [(1 - SHARE_OF_ATTENTION) * one for one in hosts],
        "causal": [SHARE_OF_ATTENTION * one for one in hosts],
        "full": [step_s, step_s],
    }

    def add_layer(section: str, forward_s: float, backward_s: float, seqlens: tuple[int, ...]) -> None:
        """A part lasts as long as its device or its host takes."""
        add(section, max(forward_s, host_s[section][0]), max(backward_s, host_s[section][1]), seqlens=seqlens)

    if hosts[0]:
        add("host", *hosts, seqlens=(16,), kind="layer")
        add("host", *host_s["linear"], seqlens=(16,), kind="linear")
        for cp_size in (1, 2, 4, 8):
            seconds = [one + (cp_size - 1) * step_s for one in host_s["causal"]]
            add("host", *seconds, seqlens=(16,), kind="attention", cp_size=cp_size)
    overheads = truth.forward_overhead_s_per_layer, truth.backward_overhead_s_per_layer
    flops = 2.0 * shard.query_size
    for tokens in LENGTHS:
        linear_s = 2 * shard.linear_weights_per_layer * tokens / truth.linear_flops_per_s
        alone = [(1 - SHARE_OF_ATTENTION) * one for one in overheads]
        add_layer("linear", alone[0] + linear_s, alone[1] + truth.linear_backward_over_forward * linear_s, (tokens,))
        for seqlens in ((tokens,), (tokens // 4,) * 4):
            seconds = [SHARE_OF_ATTENTION * one for one in overheads]
            seconds[0] += sum(
                flops * n * (n + truth.attention_extra_tokens) / truth.attention_flops_per_s for n in seqlens
            )
            seconds[1] += sum(
                2.5 * flops * n * (n + truth.attention_backward_extra_tokens) / truth.attention_backward_flops_per_s
                for n in seqlens
            )
            add_layer("causal", *seconds, seqlens)
        step = flops * tokens * (tokens + truth.attention_full_extra_tokens) / truth.attention_full_flops_per_s
        back = tokens * (tokens + truth.attention_full_backward_extra_tokens)
        back *= 2.5 * flops / truth.attention_full_backward_flops_per_s
        launch = truth.ring_step_overhead_s_per_layer
        add_layer("full", launch + step, 2 * launch + back, (tokens,))
        if setup.linear_attention is not None:
            states_s = tokens * setup.linear_attention.core_flops / truth.linear_attention_flops_per_s
            add("linear_attention", 3e-5 + states_s, 6e-5 + BACKWARD_OVER_FORWARD * states_s, seqlens=(tokens,))
        head = 2 * shard.hidden_size * shard.vocab_size / truth.head_flops_per_s
        memory = 1 / truth.memory_bandwidth_bytes_per_s
        width, rows, ratio = shard.hidden_size * memory, shard.vocab_size * memory, truth.linear_backward_over_forward
        for kind, both in (
            ("head", (head + 22 * rows, ratio * head + 14 * rows)),
            ("embedding", (4 * width, 10 * width)),
        ):
            add("edges", *(1e-5 + tokens * one for one in both), seqlens=(tokens,), kind=kind)
    for num_bytes in (1 << 12, 1 << 20, 1 << 24, 1 << 28):
        for kind, bytes_per_s in (
            ("ring_shift", truth.bandwidth_in_node_bytes_per_s),
            ("hop", truth.p2p_bandwidth_bytes_per_s),
            ("all_reduce", truth.collective_bandwidth_in_node_bytes_per_s / 1.5),
        ):
            add("links", 2e-5 + num_bytes / bytes_per_s, kind=kind, num_bytes=num_bytes, cp_size=4)
    packs = [(cp, (16 * cp,)) for cp in (1, 2, 4)]
    rows = [Measurement(section="buckets", seqlens=seqlens, cp_size=cp, forward_s=1.0) for cp, seqlens in packs]
    packs = [(1, tuple(8 * int(n) for n in random.integers(8, 800, size=3))) for _ in range(10)]
    rows += [Measurement(section="packs", seqlens=seqlens, forward_s=1.0) for _, seqlens in packs]
    packs = [(cp, tuple(8 * int(n) for n in random.integers(8, 800, size=4))) for cp in (1, 2, 4) * 8]
    rows += [Measurement(section="held_out", seqlens=seqlens, cp_size=cp, forward_s=1.0) for cp, seqlens in packs]
    # The same seconds as the planner's: what is under test is whether the coefficients come back.
    for one, seconds in zip(rows, buckets_s(truth, setup, rows).tolist(), strict=True):
        add(one.section, seconds, seqlens=one.seqlens, cp_size=one.cp_size)
    return Measurements(setup=setup, sections={name: tuple(found) for name, found in sections.items() if found})


def replace_sections(measured: Measurements, **sections: tuple[Measurement, ...]) -> Measurements:
    return Measurements(setup=measured.setup, sections={**measured.sections, **sections})


def slower(measured: Measurements, factor: float, *sections: str) -> Measurements:
    """Return the same with seconds of some sections that are `factor` times as long."""
    rows = {name: (replace(one, forward_s=factor * one.forward_s) for one in measured.of(name)) for name in sections}
    return replace_sections(measured, **{name: tuple(found) for name, found in rows.items()})


def held_out(found: Calibration) -> FitError:
    error = found.error("held_out")
    assert error is not None
    return error


BASE = load_hardware("a100-80gb")


@cache
def fitted(noise: float, seed: int = 0) -> Calibration:
    return calibrate(BASE, synthetic(TRUTH, noise, seed), name="fitted")


RATES = [
    "linear_flops_per_s", "linear_backward_over_forward", "attention_flops_per_s", "attention_full_flops_per_s",
    "attention_backward_flops_per_s", "attention_full_backward_flops_per_s", "bandwidth_in_node_bytes_per_s",
    "p2p_bandwidth_bytes_per_s", "collective_bandwidth_in_node_bytes_per_s",
]  # fmt: skip
EXTRA_TOKENS = [
    "attention_extra_tokens",
    "attention_full_extra_tokens",
    "attention_backward_extra_tokens",
    "attention_full_backward_extra_tokens",
]
"""With noise other terms can stand for them: the seconds are what counts then, and the error says how near they are."""
CONSTANTS = [
    "ring_step_overhead_s_per_layer", "forward_overhead_s_per_layer", "backward_overhead_s_per_layer",
    "overhead_s_per_bucket_stage", "exchange_latency_s_per_layer", "head_flops_per_s", "memory_bandwidth_bytes_per_s",
]  # fmt: skip


def test_without_noise_every_coefficient_comes_back() -> None:
    found = fitted(0.0)
    for name in RATES + EXTRA_TOKENS + CONSTANTS:
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUTH, name), rel=5e-3), name
    assert {error.name for error in found.errors} >= {"linear", "causal", "full", "edges", "buckets", "held_out"}
    assert max(error.p95 for error in found.errors) < 0.005


def test_linear_attention_has_a_rate_of_its_own() -> None:
    """Measured are its states alone; layers and whole packs are those of a model without any."""
    sizes = LinearAttention(kind="gated_delta_net", num_heads=16, num_groups=8, key_size=64, value_size=64)
    setup = replace(SETUP, model=replace(MODEL, linear_attention=sizes, linear_attention_freq=4))
    assert setup.shard == SETUP.shard
    truth = replace(TRUTH, linear_attention_flops_per_s=7e13)
    found = calibrate(BASE, synthetic(truth, 0.0, 0, setup), name="fitted")
    assert found.hardware.linear_attention_flops_per_s == pytest.approx(7e13, rel=5e-3)
    assert "gated_delta_net, samples of 256 to 16384" in found.hardware.source["linear_attention_flops_per_s"]
    without = replace(found.hardware, linear_attention_flops_per_s=BASE.linear_attention_flops_per_s)
    assert without == replace(fitted(0.0).hardware, source=without.source)


def test_what_waits_for_the_host_says_nothing_of_the_device() -> None:
    """Taken for the device's time, it would be a constant of every layer, and hide in a rate that is too high."""
    measured = synthetic(SLOW_HOST, 0.0, 0)
    found = calibrate(BASE, measured, name="fitted")
    host = [
        field.name
        for field in fields(Hardware)
        if (name := field.name).startswith("host_") and "message" not in name and "expert" not in name
    ]
    assert len(host) == 3
    for name in [*host, "linear_flops_per_s", "attention_flops_per_s"]:
        assert getattr(found.hardware, name) == pytest.approx(getattr(SLOW_HOST, name), rel=5e-3), name
    assert found.hardware.forward_overhead_s_per_layer == pytest.approx(9e-5, rel=0.05)
    assert found.error("held_out").median < 0.01
    blind = replace_sections(measured, host=())
    mistaken = calibrate(BASE, blind, name="fitted").hardware
    assert mistaken.forward_overhead_s_per_layer > 2 * 9e-5


def test_a_loss_that_moves_more_bytes_than_are_counted_makes_no_fast_head() -> None:
    truth = replace(TRUTH, head_flops_per_s=20e14, memory_bandwidth_bytes_per_s=1.4e12)
    found = calibrate(BASE, synthetic(truth, 0.0, 0), name="fitted")
    assert found.hardware.head_flops_per_s == pytest.approx(1.65 * found.hardware.linear_flops_per_s, rel=1e-3)
    assert 0.5e12 < found.hardware.memory_bandwidth_bytes_per_s < 4e12
    error = found.error("edges")
    assert error is not None
    assert error.median < 0.15
    assert any("LM head" in note for note in found.notes)


@pytest.mark.by_day("0")
@pytest.mark.parametrize("seed", range(4))
def test_with_noise_rates_come_back_nearly(seed: int) -> None:
    found = fitted(0.03, seed)
    for name in RATES:
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUTH, name), rel=0.12), name
    for name in CONSTANTS:
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUTH, name), rel=0.6), name
    error = held_out(found)
    assert error.num_points == 24
    assert not error.fitted
    assert 0.005 < error.median < 0.05


def test_a_calibration_says_when_it_does_not_predict() -> None:
    assert fitted(0.02).why_not_good() is None
    wrong = calibrate(BASE, slower(synthetic(TRUTH, 0.02, 0), 3, "held_out"), name="x")
    assert f"a median error of {held_out(wrong).median:.1%}, above 10%" in (wrong.why_not_good() or "")


def test_held_out_rows_are_not_fitted() -> None:
    found = calibrate(BASE, slower(synthetic(TRUTH, 0.0, 0), 2, "held_out"), name="fitted")
    assert found.hardware == fitted(0.0).hardware
    error = held_out(found)
    assert error.median == pytest.approx(0.5, abs=0.01)
    assert error.predicted_over_measured == pytest.approx(0.5, abs=0.01)


def test_whole_packs_weigh_the_parts() -> None:
    """A device on which everything takes a quarter longer in a step than alone."""
    measured = slower(synthetic(TRUTH, 0.0, 0), 1.25, "buckets", "packs", "held_out")
    found = calibrate(load_hardware("h100"), measured, name="x")
    for name in ("linear_flops_per_s", "attention_flops_per_s", "attention_full_backward_flops_per_s"):
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUTH, name) / 1.25, rel=0.05), name
        assert "by whole packs" in found.hardware.source[name]
    alone = calibrate(load_hardware("h100"), replace_sections(measured, packs=()), name="x")
    assert held_out(found).median < 0.03 < 0.1 < held_out(alone).median


def test_errors_are_the_median_and_95th_percentile_of_relative_errors() -> None:
    row = Measurement(section="linear", forward_s=1.0)
    points = [
        Point(measurement=row, direction="both", measured_s=2.0, predicted_s=2.0 + off)
        for off in (0.0, 0.2, -0.4, 0.6, 2.0)
    ]
    error = FitError.of("linear", points, fitted=True)
    assert error.median == pytest.approx(0.2)
    assert error.p95 == pytest.approx(np.percentile([0.0, 0.1, 0.2, 0.3, 1.0], 95))
    assert error.predicted_over_measured == pytest.approx(12.4 / 10)


@settings(max_examples=30)
@given(
    constant=st.floats(1e-6, 1e-2), slope=st.floats(1e-9, 1e-5), square=st.sampled_from([0.0, 1e-10, 1e-8]),
    outlier=st.integers(0, 11),
)  # fmt: skip
def test_least_squares_finds_sums_beside_an_outlier(constant: float, slope: float, square: float, outlier: int) -> None:
    x = np.array([2.0**k for k in range(4, 16)])
    columns = np.stack([np.ones_like(x), x, x * x], axis=1)
    seconds = columns @ [constant, slope, square]
    clean = fit_seconds(columns, seconds)
    assert np.allclose(columns @ clean, seconds, rtol=1e-6)
    assert (clean >= 0).all()
    seconds[outlier] *= 3
    rest = np.arange(len(x)) != outlier
    relative = np.abs(columns @ fit_seconds(columns, seconds) - seconds)[rest] / seconds[rest]
    assert np.median(relative) < 0.05


def test_one_rank_keeps_links_and_says_so() -> None:
    measured = synthetic(TRUTH, 0.0, 0)
    measured.setup = replace(SETUP, num_ranks=1, ranks_per_node=1)
    alone = tuple(one for one in measured.of("buckets") if one.cp_size == 1)
    found = calibrate(BASE, replace_sections(measured, links=(), buckets=alone, held_out=()), name="x")
    for name in ("bandwidth_in_node_bytes_per_s", "exchange_latency_s_per_layer", "p2p_bandwidth_bytes_per_s"):
        assert getattr(found.hardware, name) == getattr(BASE, name)
        assert found.hardware.source[name] == BASE.source[name]
        assert name not in found.changed
    assert any("torchrun" in why for why in found.kept.values())


def test_a_hardware_file_comes_back_with_its_sources_and_plans(tmp_path) -> None:
    from dynamic_cp import plan_global_batch

    found = fitted(0.02)
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(hardware_as_dict(found.hardware)))
    loaded = load_hardware(path)
    assert loaded == replace(found.hardware, source=loaded.source)
    assert len(found.changed) > 15
    for name in found.changed:
        assert loaded.source[name].startswith("measured by dynamic-cp profile on a synthetic device, 4 ranks at once")
        assert "2026-11-21" in loaded.source[name]
    assert "dynamic-cp profile on" not in loaded.source["hbm_bytes"]
    planned = plan_global_batch(
        [Sample(sample_id=index, seqlen=900 * (index + 1)) for index in range(8)], topology=Topology(num_lanes=4),
        model=MODEL, hardware=loaded, options=PlanOptions(max_tokens_per_rank=8192, cp_comm_types=("p2p",)),
    )  # fmt: skip
    assert planned.predicted_s > 0


def test_measurements_come_back_and_belong_to_one_setup(tmp_path) -> None:
    measured = synthetic(TRUTH, 0.02, 1)
    path = tmp_path / "some.measured.json"
    path.write_text(measured.to_json())
    loaded = Measurements.load(path, replace(SETUP, date="2027-01-01"))
    assert loaded.sections == measured.sections
    assert loaded.setup == SETUP
    for change in ({"tp_size": 1}, {"device": "another"}, {"model": replace(MODEL, hidden_size=512)}, {"num_ranks": 8}):
        (name,) = change
        with pytest.raises(InvalidInputError, match=rf"measured with {name} .*leave --resume out"):
            Measurements.load(path, replace(SETUP, **change))


@pytest.mark.parametrize("text", ["", "{}", '{"setup": {}, "sections": {}}', "[1]", '{"setup": 3}'])
def test_a_file_that_holds_no_measurements_is_refused(tmp_path, text) -> None:
    path = tmp_path / "some.measured.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="not a file of measurements"):
        Measurements.load(path, SETUP)
    with pytest.raises(InvalidInputError, match=r"cannot read .*leave --resume out"):
        Measurements.load(tmp_path / "nowhere.json", SETUP)


def test_seconds_that_do_not_grow_are_refused() -> None:
    measured = synthetic(TRUTH, 0.0, 0)
    flat = tuple(replace(one, forward_s=1e-3, backward_s=1e-3) for one in measured.of("linear"))
    with pytest.raises(InvalidInputError, match="took equally long: raise --max-tokens"):
        calibrate(TRUTH, replace_sections(measured, linear=flat), name="x")
    with pytest.raises(InvalidInputError, match="0 rows of section linear"):
        calibrate(TRUTH, Measurements(setup=SETUP), name="x")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_seconds_that_cannot_be_true_are_refused(section, seconds) -> None:
    """A clock that did not tick, or a file that someone edited."""
    measured = synthetic(SLOW_HOST, 0.0, 0)
    if section in ("ring", "linear_attention"):
        one = Measurement(section=section, seqlens=(512,), cp_size=2, forward_s=1e-3, backward_s=2e-3)
        measured.sections[section] = (one, one)
    first, *rest = measured.sections[section]
    measured.sections[section] = (replace(first, forward_s=seconds), *rest)
    with pytest.raises(InvalidInputError, match=f"a row of section {section} took {seconds} s forward"):
        calibrate(TRUTH, measured, name="x")
    if section in ("linear", "causal", "full", "edges"):
        measured.sections[section] = (replace(first, backward_s=seconds), *rest)
        with pytest.raises(InvalidInputError, match=f"and {seconds} s backward"):
            calibrate(TRUTH, measured, name="x")


def test_layers_of_one_length_have_no_rate() -> None:
    measured = synthetic(TRUTH, 0.0, 0)
    for section in ("linear", "causal", "full"):
        one = measured.sections[section][-1]
        with pytest.raises(InvalidInputError, match=f"section {section} .*of 1 length"):
            calibrate(TRUTH, replace_sections(measured, **{section: (one,) * 5}), name="x")


@pytest.mark.by_day("svg")
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path, ending) -> None:
    path = tmp_path / f"fit.{ending}"
    save_picture(str(path), SETUP, fitted(0.02))
    content = path.read_bytes()
    assert len(content) > 5000
    if ending == "svg":
        assert b"Layer without attention" in content
        assert b"mathdefault" not in content
