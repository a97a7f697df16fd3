"""Bundled files load and state their sources; malformed ones are named."""

from __future__ import annotations

import json

import pytest

from dynamic_cp import catalog
from dynamic_cp.errors import DynamicCPError, InvalidInputError
from tests.unit.planner.support import CASES

DATA = CASES.parents[1] / "dynamic_cp" / "data"


def test_every_number_of_every_hardware_has_a_source():
    assert {"h100", "a100-80gb", "cpu"} <= set(catalog.hardware_names())
    for name in catalog.hardware_names():
        hardware = catalog.load_hardware(name)
        assert hardware.name == name
        numbers = json.loads((DATA / "hardware" / f"{name}.json").read_text()).keys() - {"name"}
        assert set(hardware.source) == numbers
        assert len(numbers) == 16, "a file states every coefficient, also those that have a default"
        assert hardware.linear_flops_per_s <= hardware.peak_flops_per_s


def test_models():
    llama = catalog.load_model("llama-3-8b")
    # 32 layers, embedding and head make the 8.03e9 parameters of the model card, but for the norms.
    assert llama.num_layers * llama.linear_weights_per_layer + 2 * llama.vocab_size * llama.hidden_size == 8_029_995_008
    llama = catalog.load_model("llama-2-13b")
    assert llama.linear_weights_per_layer == 317_194_240
    assert all(catalog.load_model(name).source for name in catalog.model_names())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match="'h1000' is none of the bundled hardware: use a100-80gb, cpu, h100"):
        catalog.load_hardware("h1000")
    with pytest.raises(InvalidInputError, match="llama-2-13b, llama-3-8b"):
        catalog.load_model("gpt")


def test_a_path_loads(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text((DATA / "hardware" / "cpu.json").read_text().replace('"name": "cpu"', '"name": "mine"'))
    assert catalog.load_hardware(path).name == "mine"
    assert catalog.load_hardware(str(path)) == catalog.load_hardware(path)


def broken(kind, change):
    name = {"hardware": "cpu", "models": "llama-3-8b"}[kind]
    data = json.loads((DATA / kind / f"{name}.json").read_text())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("hardware", "", "is not JSON"),
        ("hardware", "[1]", "holds a JSON list"),
        ("hardware", broken("hardware", lambda d: d.pop("peak_flops_per_s")), "lacks peak_flops_per_s"),
        ("hardware", broken("hardware", lambda d: d.update(colour="red")), "unknown entries colour"),
        ("hardware", broken("hardware", lambda d: d.update(name=3)), "name is 3"),
        ("hardware", broken("hardware", lambda d: d.update(peak_flops_per_s=1e9)), "must be {.value.: number"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value="1")), "'1', it must be a number"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value=True)), "it must be a number"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value=-1)), "number >= 0"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value=0)), "must be > 0"),
        ("hardware", broken("hardware", lambda d: d["linear_extra_tokens"].update(value=float("nan"))), "number >= 0"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(source=" ")), "has no source"),
        ("models", "{", "is not JSON"),
        ("models", broken("models", lambda d: d.pop("num_layers")), "lacks num_layers"),
        ("models", broken("models", lambda d: d.update(num_layers=32.0)), "num_layers is 32.0"),
        ("models", broken("models", lambda d: d.update(num_layers=True)), "num_layers is True"),
        ("models", broken("models", lambda d: d.update(num_layers=0)), "num_layers is 0"),
        ("models", broken("models", lambda d: d.update(experts=8)), "unknown entries experts"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, kind, text, says):
    path = tmp_path / "broken.json"
    path.write_text(text)
    load = catalog.load_hardware if kind == "hardware" else catalog.load_model
    with pytest.raises(DynamicCPError, match=says):
        load(path)


def test_an_unreadable_file(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read"):
        catalog.load_hardware(tmp_path / "missing.json")
    with pytest.raises(InvalidInputError, match="cannot read"):
        catalog.load_model(f"{tmp_path}/")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        catalog.load_model(tmp_path / "binary.json")
