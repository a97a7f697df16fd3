"""The command line: what it prints and writes, and that bad input gives one line, status 2 and no file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.serialize import plan_from_dict
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CP_COMM_TYPES, DataParallel, Topology
from tests.unit.support import llama_on_h100

LENGTHS = [900, 12, 40, 7, 300, 64, 64, 1, 33, 250]


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return str(path)


def plan_arguments(lengths, *more):
    return ["plan", "--lengths", lengths, "--lanes", "4", "--max-tokens-per-rank", "256", "--hardware", "cpu", *more]


def test_plan_with_experts(lengths, capsys):
    """Lanes that share experts: the topology says so, more imbalance takes longer, less memory holds the experts."""
    hosts = "--set host_expert_forward=0s --set host_expert_backward=0s"
    job = f"--model mixtral-8x7b --hardware h100 --set hbm=2TB {hosts}"
    words = [*plan_arguments(lengths)[1:], *job.split()]
    alone, shared, uneven = (
        report_of(capsys, *words, *more) for more in ([], ["--ep", "4"], ["--ep", "4", "--expert-imbalance", "2"])
    )
    assert "ep_size" not in alone["plan"]["topology"]
    assert shared["plan"]["topology"]["ep_size"] == 4
    check_plan(plan_from_dict(shared["plan"]))
    assert shared["predicted_s"] < uneven["predicted_s"]
    assert shared["peak_bytes"] < 0.6 * alone["peak_bytes"]


def test_plan_cuts_a_long_grid_and_says_where_the_rest_is(lengths, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = [*plan_arguments(lengths), "--lanes", "2", "--global-batch-size", "100", "--max-tokens-per-rank", "2048"]
    assert cli.main(words) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 60
    assert sum(line.split(" ")[0].isdigit() and "|" in line for line in out.splitlines()) <= 8
    assert "--output FILE.json or --json - has all of it" in out


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


def report_of(capsys, *words):
    """Return what `plan --json -` says."""
    assert cli.main(["plan", *words, "--json", "-"]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    check_plan(plan_from_dict(report["plan"]))
    return report


def seqlens_of(report):
    samples = plan_from_dict(report["plan"]).samples
    return [sample.seqlen for sample in sorted(samples, key=lambda sample: sample.sample_id)]


GITHUB = ["--lengths", "github", "--global-batch-size", "40", "--lanes", "16", "--recompute", "full", "--tp", "2"]


def test_a_workload_is_drawn(capsys):
    limit = ["--max-tokens-per-rank", "8192"]
    for more, drawn in (
        ([], draw_lengths("github", 40, 0, 131072)),
        (["--seed", "5", "--max-seqlen", "3000"], draw_lengths("github", 40, 5, 3000)),
        (["--max-seqlen", "3000", "--overlong", "split"], draw_lengths("github", 40, 0, 3000, overlong="split")),
        (["--max-seqlen", "40"], draw_lengths("github", 40, 0, 40, min_seqlen=40)),
    ):
        report = report_of(capsys, *GITHUB, *limit, *more)
        assert seqlens_of(report) == drawn.tolist(), more
    formula = "lognormal:mean=100,sigma=1,max=400"
    assert (
        seqlens_of(report_of(capsys, *GITHUB, *limit, "--lengths", formula))
        == draw_lengths(formula, 40, 0, 131072).tolist()
    )


def test_auto_is_what_memory_holds(capsys):
    report = report_of(capsys, *GITHUB, "--max-tokens-per-rank", "auto", "--cp-comm-type", "auto")
    topology = Topology(num_lanes=16, tp_size=2, sequence_parallel=True)
    memory = MemoryModel(llama_on_h100(topology, recompute="full", cp_comm_types=CP_COMM_TYPES))
    plan = plan_from_dict(report["plan"])
    assert report["max_tokens_per_rank"] == plan.max_tokens_per_rank
    assert plan.max_tokens_per_rank == memory.max_tokens_per_rank(max(seqlens_of(report)))
    peaks = [stage.total_bytes for stage in memory.peak(plan)]
    assert report["peak_bytes"] == max(peaks) <= report["available_bytes"] == memory.available_bytes
    assert sum(report["peak_parts_bytes"].values()) == pytest.approx(report["peak_bytes"])
    words = [*GITHUB, "--max-tokens-per-rank", "auto", "--tp", "4"]
    whole = report_of(capsys, *words, "--no-distributed-optimizer")
    assert whole["max_tokens_per_rank"] < report_of(capsys, *words)["max_tokens_per_rank"]


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    output = tmp_path / "plan.json"
    words = ["plan", *GITHUB, "--max-tokens-per-rank", "131072", "--output", str(output), "--recompute", "none"]
    words += ["--lanes", "8"]
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dynamic-cp: error: the plan needs ")
    for part in (" GB on pipeline stage 0, 75.35 GB are available", "lower --max-tokens-per-rank"):
        assert part in err
    assert err.count("\n") == 1
    assert not output.exists()
    # A device whose memory is not known refuses nothing and says so.
    assert cli.main([*words, "--hardware", "cpu"]) == 0
    assert "GB of unknown on pipeline stage" in " ".join(capsys.readouterr().out.split())


def test_bound(capsys):
    words = [*GITHUB, "--max-tokens-per-rank", "8192", "--pp", "2"]
    report = report_of(capsys, *words, "--bound")
    plan = plan_from_dict(report["plan"])
    options = {"max_tokens_per_rank": 8192, "recompute": "full", "cp_comm_types": CP_COMM_TYPES}
    overlapped = DataParallel(overlap_grad_reduce=True, overlap_param_gather=True)
    cost_model = CostModel(replace(llama_on_h100(plan.topology, **options), data_parallel=overlapped))
    assert report["makespan_s"] == simulate(plan, cost_model).makespan_s
    assert report["predicted_s"] == pytest.approx(simulate(plan, cost_model).iteration_s)
    assert report["predicted_s"] > report["makespan_s"]
    assert report["lower_bound_s"] == lower_bound(plan.samples, cost_model).seconds
    assert report["time_over_bound"] == report["makespan_s"] / report["lower_bound_s"] >= 1
    without = report_of(capsys, *words)
    assert without == {name: value for name, value in report.items() if name in without}
    assert set(report) - set(without) == {"makespan_s", "lower_bound_s", "time_over_bound", "bound_is_proven"}


def test_the_remedy_names_what_is_not_done_yet(capsys):
    words = ["plan", *GITHUB[:4], "--lanes", "2", "--max-seqlen", "8192"]
    remedies = {}
    for more in ((), ("--recompute", "full"), ("--no-distributed-optimizer",), ("--max-tokens-per-rank", "65536")):
        assert cli.main([*words, *more]) == 2
        remedies[more] = capsys.readouterr().err
    for more, err in remedies.items():
        assert "a larger --tp or --pp" in err
        # The weights alone are too much.
        assert "recompute more" not in err
        assert "lower" not in err
        assert ("use the distributed optimizer" in err) == (more == ("--no-distributed-optimizer",))


def test_tp_overlap_is_of_the_plan_too(lengths, capsys):
    words = ["--lengths", lengths, "--gpus", "2", "--tp", "2", "--pp", "1", "--policy", "balanced"]
    words += ["--set", "hbm=2TB", "--recompute", "none", "--max-tokens-per-rank", "2048"]
    plain, overlapped = (report_of(capsys, *words, "--tp-overlap", jobs) for jobs in ("none", "static"))
    assert overlapped["predicted_s"] < plain["predicted_s"]
    assert overlapped["digest"] == plain["digest"]
