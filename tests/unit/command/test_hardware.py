"""`dynamic-cp hardware`, and --set in every command that takes --hardware."""

from __future__ import annotations

import json
import shlex
from typing import Any

import click
import pytest

from dynamic_cp import load_hardware
from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.app import group
from tests.unit.command.test_bad_input import DRAWN, FILES, LENGTHS

SLOW_NETWORK = ["--set", "bandwidth_across_nodes=1GB/s"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_changed_file_says_what_was_changed(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cloud.json"
    words = ["hardware", "h100", *SLOW_NETWORK, "--set", "hbm=96 GB", "--name", "cloud", "--output", str(path)]
    assert printed(capsys, *words) == ""
    found = load_hardware(path)
    assert (found.name, found.bandwidth_across_nodes_bytes_per_s, found.hbm_bytes) == ("cloud", 1e9, 96e9)
    assert found.source["hbm_bytes"] == "hbm=96 GB, set by hand; h100 has 84.9 GB"
    assert path.read_text() == printed(capsys, "hardware", str(path))


def test_every_command_with_hardware_has_set() -> None:
    context = click.Context(group)
    options = {
        name: {one for parameter in command.params for one in parameter.opts}
        for name in group.list_commands(context)
        if (command := group.get_command(context, name)) is not None
    }
    with_hardware = {name for name, known in options.items() if "--hardware" in known}
    assert with_hardware == {"plan", "simulate", "sweep", "trace", "report", "profile", "first-day"}
    assert [name for name in with_hardware if "--set" not in options[name]] == []


def figures_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(printed(capsys, *words, "--json", "-"))


def test_a_slower_network_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FILES, "--ranks-per-node", "2", "--max-tokens-per-rank", "8192"]
    plan = ["plan", *LENGTHS, "--lanes", "4", *words]
    fast, slow = (figures_of(capsys, *plan, *more) for more in ([], SLOW_NETWORK))
    assert slow["predicted_s"] > 1.01 * fast["predicted_s"]
    simulate = ["simulate", *DRAWN, "--lanes", "4", "--batches", "1", "--policy", "balanced", *words]
    found = figures_of(capsys, *simulate, *SLOW_NETWORK)
    assert found["inputs"]["hardware"] == "round (bandwidth_across_nodes=1GB/s)"
    assert (
        found["policies"]["balanced"]["mean"]["iteration_s"]
        > figures_of(capsys, *simulate)["policies"]["balanced"]["mean"]["iteration_s"]
    )


def test_the_recommended_command_trains_with_what_was_set(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    out = printed(
        capsys, "sweep", *DRAWN, "--gpus", "4", *FILES, "--jobs", "1", "--tp", "1", "--pp", "1", "--batches", "1",
        "--recompute", "none", *SLOW_NETWORK,
    )  # fmt: skip
    assert "bandwidth_across_nodes=1GB/s" in out.splitlines()[0] + out.splitlines()[1]
    (line,) = [line for line in out.splitlines() if line.startswith("dynamic-cp hardware ")]
    assert "--dynamic-cp-hardware hardware.json" in out
    assert cli.main(shlex.split(line)[1:]) == 0
    assert load_hardware("./hardware.json").bandwidth_across_nodes_bytes_per_s == 1e9
