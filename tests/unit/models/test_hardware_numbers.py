"""Hardware files that build on another, numbers with units, and numbers that are off by a unit."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models import catalog
from dynamic_cp.models.hardware_numbers import KIND_OF, parse_number, short_names
from dynamic_cp.types import Hardware

NUMBERS = [field.name for field in fields(Hardware) if field.name not in ("name", "source")]
NIC = "bandwidth_across_nodes_bytes_per_s"
H100 = catalog.load_hardware("h100")


def file(folder: Path, data: Any, name: str = "mine.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_every_number_has_a_unit_and_bundled_ones_are_plausible() -> None:
    assert set(KIND_OF) == set(NUMBERS)
    assert set(short_names().values()) == set(NUMBERS), "no short name stands for two"
    for name in catalog.hardware_names():
        hardware = catalog.load_hardware(name)
        for number in NUMBERS:
            value = getattr(hardware, number)
            if value:
                assert 3 * KIND_OF[number].least <= value <= KIND_OF[number].most, (name, number)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("bandwidth_across_nodes_bytes_per_s", "12.5GB/s", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", " 12.5 GB/s ", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", "100Gb/s", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", "100 Gbit/s", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", "400Gbps", 50e9),
        ("bandwidth_across_nodes_bytes_per_s", "1GiB/s", 2**30),
        ("bandwidth_across_nodes_bytes_per_s", "12500000000 bytes/s", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", "1.25e10B/s", 12.5e9),
        ("bandwidth_across_nodes_bytes_per_s", "1.25e10", 12.5e9), ("peak_flops_per_s", "989TFLOP/s", 989e12),
        ("peak_flops_per_s", "989 TFLOPS", 989e12), ("peak_flops_per_s", "0.989PFLOP/s", 989e12),
        ("exchange_latency_s_per_layer", "15us", 15e-6), ("exchange_latency_s_per_layer", "15 µs", 15e-6),
        ("exchange_latency_s_per_layer", "0.015ms", 15e-6), ("hbm_bytes", "80GB", 80e9),
        ("hbm_bytes", "80 GiB", 80 * 2**30), ("hbm_bytes", "0", 0), ("linear_extra_tokens", "256", 256),
        ("linear_extra_tokens", "256 tokens", 256), ("recompute_overhead_credit", "0.5", 0.5),
    ],
)  # fmt: skip
def test_units(name: str, text: str, value: float) -> None:
    assert parse_number("here", name, text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (NIC, "12.5", r"is 12.5 bytes/s, plausible are 1 MB/s to 1 PB/s: if 12.5 GB/s is meant"),
        (NIC, "12.5 GB", "is '12.5 GB', it must be a number with a unit of bytes/s, such as 12.5GB/s"),
        ("bandwidth_across_nodes_bytes_per_s", "12.5 gb/s", "is in 'gb/s': write Gb/s for bits or GB/s for bytes"),
        ("bandwidth_across_nodes_bytes_per_s", "fast", "is 'fast', it must be a number"),
        ("bandwidth_across_nodes_bytes_per_s", "", "is '', it must be a number"),
        ("bandwidth_across_nodes_bytes_per_s", "-5GB/s", "it must be a number >= 0"),
        ("bandwidth_across_nodes_bytes_per_s", "nan", "it must be a number >= 0"),
        ("bandwidth_across_nodes_bytes_per_s", "1e400", "it must be a number >= 0"),
        ("bandwidth_across_nodes_bytes_per_s", "12.5 PB/s", "plausible are"),
        ("peak_flops_per_s", "989", r"is 989 FLOP/s, plausible are 100 MFLOP/s to 1 EFLOP/s: if 989 TFLOP/s is meant"),
        ("peak_flops_per_s", "989GB/s", "a unit of FLOP/s, such as 989TFLOP/s"),
        ("hbm_bytes", "80", r"is 80 bytes, plausible are 1 MB to .*80 GB"),
        ("hbm_bytes", "80000", r"is 80000 bytes, plausible are"),
        ("exchange_latency_s_per_layer", "15", r"is 15 s, plausible are .* to 1 s.*15 us"),
        ("recompute_overhead_credit", "50", r"is 50, plausible are 0 to 1"),
        ("linear_extra_tokens", "5GB", "is '5GB', it must be a number"),
    ],
)
def test_numbers_that_are_off(name: str, text: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as at:
        parse_number("mine.json", name, text)
    assert str(at.value).startswith("mine.json: ")
    assert "\n" not in str(at.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bandwidth_in_node_bytes_per_s", 12.5), ("linear_flops_per_s", 613), ("hbm_bytes", 80), ("hbm_bytes", 80e18)],
)
def test_a_file_with_a_number_off_by_a_unit_is_refused(tmp_path: Path, name: str, value: float) -> None:
    data = catalog.hardware_as_dict(H100) | {name: {"value": value, "source": "a datasheet"}}
    with pytest.raises(InvalidInputError, match=rf"mine\.json: {name} is .*, plausible are"):
        catalog.load_hardware(file(tmp_path, data))


def test_a_file_may_state_units(tmp_path: Path) -> None:
    data = catalog.hardware_as_dict(H100) | {"hbm_bytes": {"value": "141 GB", "source": "a datasheet"}}
    assert catalog.load_hardware(file(tmp_path, data)).hbm_bytes == 141e9


def test_a_file_with_a_base_states_what_differs(tmp_path: Path) -> None:
    change = {"bandwidth_across_nodes_bytes_per_s": {"value": "12.5 GB/s", "source": "one 100 Gb/s NIC per GPU"}}
    first = catalog.load_hardware(file(tmp_path, {"base": "h100", **change}))
    assert first.name == "mine"
    assert replace(first, name="h100", bandwidth_across_nodes_bytes_per_s=40e9, source=H100.source) == H100
    assert first.bandwidth_across_nodes_bytes_per_s == 12.5e9
    assert first.source == H100.source | {"bandwidth_across_nodes_bytes_per_s": "one 100 Gb/s NIC per GPU"}
    # A base may be a file beside this one, wherever the reader stands.
    data = {"name": "more", "base": "mine.json", "hbm_bytes": {"value": 96e9, "source": "x"}}
    expected = replace(first, name="more", hbm_bytes=96e9, source=first.source | {"hbm_bytes": "x"})
    assert catalog.load_hardware(file(tmp_path, data, "b.json")) == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"base": "h1000"}, r"mine.json: its base: 'h1000' is none of the bundled hardware .did you mean 'h100'"),
        ({"base": "none.json"}, r"mine.json: its base: cannot read .*none.json"),
        ({"base": "mine.json"}, r"mine.json: its base: .*mine.json is its own base"),
        ({"base": 3}, r"base is 3, a text is needed"),
        (
            {"base": "h100", "bandwith_in_node_bytes_per_s": {}},
            r"unknown entries bandwith_in_node_bytes_per_s .did you",
        ),
        ({"base": "h100", "hbm_bytes": 80e9}, 'must be {"value": number'),
    ],
)
def test_bases_that_are_none(tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        catalog.load_hardware(file(tmp_path, data))


def test_settings_change_numbers_and_say_so() -> None:
    changed = catalog.load_hardware("h100", ("bandwidth_across_nodes=12.5GB/s", "hbm_bytes=96GB"))
    assert (changed.bandwidth_across_nodes_bytes_per_s, changed.hbm_bytes) == (12.5e9, 96e9)
    assert changed.name == "h100 (bandwidth_across_nodes=12.5GB/s, hbm_bytes=96GB)"
    assert changed.source["hbm_bytes"] == "hbm_bytes=96GB, set by hand; h100 has 84.9 GB"
    others = [name for name in NUMBERS if name not in ("bandwidth_across_nodes_bytes_per_s", "hbm_bytes")]
    assert all(getattr(changed, name) == getattr(H100, name) for name in others)
    assert catalog.load_hardware("h100", ("peak=900TFLOP/s",)).peak_flops_per_s == 9e14
    assert catalog.load_hardware("h100") == catalog.load_hardware("h100", ())


SHORT = "bandwidth_across_nodes"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (SHORT, f"--set {SHORT}: give NAME=VALUE, such as {SHORT}=12.5"),
        ("bandwith_across_nodes=1GB/s", "--set bandwith_across_nodes=1GB/s: .*did you mean 'bandwidth_across_nodes'"),
        ("bandwidth_across_nodes=12.5", "--set bandwidth_across_nodes=12.5: .*a number with a unit of bytes/s"),
        ("bandwidth_across_nodes_bytes_per_s=12.5", "is 12.5 bytes/s, plausible are"),
        ("bandwidth_across_nodes=0GB/s", "it must be > 0"),
        ("name=x", "is no number of a hardware file"),
        ("=5", "give NAME=VALUE"),
    ],
)
def test_settings_that_are_none(setting: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        catalog.load_hardware("h100", (setting,))


def test_a_written_file_comes_back(tmp_path: Path) -> None:
    for name in catalog.hardware_names():
        hardware = catalog.load_hardware(name)
        assert asdict(catalog.load_hardware(file(tmp_path, catalog.hardware_as_dict(hardware)))) == asdict(hardware)
