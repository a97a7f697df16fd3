"""The command line: what it prints and writes, and that bad input gives one line, status 2 and no file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dynamic_cp import cli
from dynamic_cp.serialize import digest, loads, parse_plan, plan_from_dict

LENGTHS = [900, 12, 40, 7, 300, 64, 64, 1, 33, 250]


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return str(path)


def plan_arguments(lengths, *more):
    return ["plan", "--lengths", lengths, "--lanes", "4", "--max-tokens-per-rank", "256", "--hardware", "cpu", *more]


def test_plan_prints_a_plan_and_figures(lengths, capsys):
    assert cli.main(plan_arguments(lengths)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line for line in out.splitlines() if line.startswith("plan v") or line.split(" ")[0].isdigit()]
    plan = parse_plan("\n".join(rows))
    assert sorted(sample.seqlen for sample in plan.samples) == sorted(LENGTHS)
    figures = dict(line.split(": ", 1) for line in out.splitlines()[len(rows) :])
    assert float(figures["predicted_s"]) > 0
    assert int(figures["num_microbatches"]) == plan.num_microbatches
    assert 0 <= float(figures["padding_fraction"]) < 1
    assert figures["reason"]
    assert figures["digest"] == digest(plan)


def test_output_is_judged_by_check(lengths, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert cli.main(plan_arguments(lengths, "--output", str(output), "--pp", "2", "--tp", "2")) == 0
    capsys.readouterr()
    assert cli.main(["check", str(output), "--lengths", lengths]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("legal: ")
    assert digest(loads(output.read_text())) in out
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["lengths.txt", "plan.json"]


def test_check_refuses_an_illegal_plan(lengths, tmp_path, capsys):
    output = tmp_path / "plan.json"
    cli.main(plan_arguments(lengths, "--output", str(output)))
    data = json.loads(output.read_text())
    data["max_tokens_per_rank"] = 100
    output.write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.main(["check", str(output)]) == 2
    out, err = capsys.readouterr()
    assert "^^" in out
    assert err.startswith("dynamic-cp: error: illegal plan: micro-batch ")
    assert err.count("\n") == 1


def test_json_to_a_file_and_to_stdout(lengths, tmp_path, capsys):
    assert cli.main(plan_arguments(lengths, "--json", "-", "--policy", "static")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] == "static"
    assert plan_from_dict(report["plan"]).num_microbatches == report["num_microbatches"]
    assert set(report["cp_histogram"]) == {"4"}
    cli.main(plan_arguments(lengths, "--json", str(tmp_path / "r.json"), "--policy", "static"))
    assert json.loads((tmp_path / "r.json").read_text()) == report


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--lengths", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["--lanes", "2"], "sample 0 has 900 tokens"),
        (["--lanes", "0"], "num_lanes is 0"),
        (["--max-tokens-per-rank", "0"], "max_tokens_per_rank is 0"),
        (["--model", "gpt"], "none of the bundled models"),
        (["--hardware", "abacus"], "none of the bundled hardware"),
        (["--vpp", "2"], "pp_size is 1"),
        (["--static-cp-size", "3"], "--static-cp-size 3 does not divide --lanes 4"),
    ],
)
def test_bad_input(lengths, tmp_path, capsys, change, says):
    output = tmp_path / "plan.json"
    assert cli.main(plan_arguments(lengths, "--output", str(output), *change)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dynamic-cp: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not output.exists()


def test_an_unwritable_output_leaves_nothing(lengths, tmp_path, capsys):
    assert cli.main(plan_arguments(lengths, "--output", str(tmp_path / "no" / "plan.json"))) == 2
    assert "cannot write" in capsys.readouterr().err
    target = tmp_path / "folder"
    target.mkdir()
    assert cli.main(plan_arguments(lengths, "--output", str(target))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "lengths.txt"]


def test_check_of_a_file_that_is_no_plan(lengths, capsys):
    assert cli.main(["check", "/nowhere.json"]) == 2
    assert cli.main(["check", lengths]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_installed_command_and_usage_errors(lengths):
    command = [sys.executable, "-m", "dynamic_cp.cli"]
    result = subprocess.run([*command, "plan"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    result = subprocess.run(
        [*command, *plan_arguments(lengths, "--json", "-")], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(result.stdout)["predicted_s"] > 0
