"""`dynamic-cp profile` and `first-day` on gloo ranks: they measure, fit, write what the planner takes, and go on."""

import contextlib
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model, plan_global_batch
from dynamic_cp.decide import cli
from dynamic_cp.decide.calibration.measurements import EXCHANGES, SECTIONS, Measurement, Setup
from dynamic_cp.decide.first_day.day import PARTS
from dynamic_cp.types import ModelShape
from megatron.dynamic_cp.attention.thd import attention_thd
from tests.distributed.harness import params_of, run_ranks

MODEL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 128, "gated_linear_unit": True, "linear_attention_freq": 2,
    "linear_attention": {"kind": "mamba2", "num_heads": 4, "num_groups": 2, "key_size": 16, "value_size": 16},
}  # fmt: skip


def words_for(folder: Path, *more: str) -> list[str]:
    (folder / "model.json").write_text(json.dumps(MODEL))
    files = ["--model", str(folder / "model.json"), "--hardware", "cpu", "--output", str(folder / "out.json")]
    return ["profile", *files, "--quick", "--device", "cpu", "--max-tokens", "512", *more]


def setup_of(num_ranks: int) -> Setup:
    return Setup(
        device="", torch_version="", model=ModelShape(**MODEL), tp_size=1, element_bytes=4, num_ranks=num_ranks,
        ranks_per_node=num_ranks, max_tokens=512, quick=True, date="",
    )  # fmt: skip


def run_command(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(words)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.nightly
def test_two_ranks_measure_fit_and_go_on(tmp_path: Path) -> None:
    for status, _, err in run_ranks(2, run_command, words_for(tmp_path, "--plot", str(tmp_path / "fit.svg"))):
        assert status == 0, err
    measured = json.loads((tmp_path / "out.json.measured.json").read_text())
    assert list(measured["sections"]) == list(SECTIONS)
    rows = [row for found in measured["sections"].values() for row in found]
    assert min(row["forward_s"] for row in rows) > 0
    for section in ("linear", "causal", "full", "ring", "linear_attention", "edges"):
        assert min(row["backward_s"] for row in measured["sections"][section]) > 0, section
    assert {row["kind"] for row in measured["sections"]["links"]} == set(EXCHANGES)
    assert {row["cp_size"] for row in measured["sections"]["held_out"]} == {1, 2}
    assert b"<svg" in (tmp_path / "fit.svg").read_bytes()
    hardware = load_hardware(tmp_path / "out.json")
    assert "2 ranks at once" in hardware.source["bandwidth_in_node_bytes_per_s"]
    assert "2 ranks at once" in hardware.source["attention_full_backward_flops_per_s"]
    assert "mamba2, samples of 64 to 512 tokens" in hardware.source["linear_attention_flops_per_s"]
    assert "2 ranks at once" not in hardware.source["bandwidth_across_nodes_bytes_per_s"]
    plan = plan_global_batch(
        [Sample(sample_id=index, seqlen=100 + 50 * index) for index in range(6)], topology=Topology(num_lanes=2),
        model=load_model(tmp_path / "model.json"), hardware=hardware,
        options=PlanOptions(max_tokens_per_rank=512, bytes_per_element=4, cp_comm_types=("p2p",)),
    )  # fmt: skip
    assert plan.predicted_s > 0
    # A measurement that is cut off goes on with what is missing, and measures nothing twice.
    for name in ("buckets", "packs", "held_out"):
        del measured["sections"][name]
    (tmp_path / "out.json.measured.json").write_text(json.dumps(measured))
    results = run_ranks(2, run_command, words_for(tmp_path, "--resume"))
    again = json.loads((tmp_path / "out.json.measured.json").read_text())
    assert [status for status, _, _ in results] == [0, 0]
    resumed = "resumed: linear, causal, full, ring, linear_attention, host, edges, links measured on"
    assert resumed in " ".join(results[0][1].split())
    assert list(again["sections"]) == list(SECTIONS)
    for name in measured["sections"]:
        assert again["sections"][name] == measured["sections"][name]
    # What does not predict other packs is said, and where that is asked for an error; the file is there all the same.
    for row in again["sections"]["held_out"]:
        row["forward_s"], row["backward_s"] = 4 * row["forward_s"], 4 * row["backward_s"]
    (tmp_path / "out.json.measured.json").write_text(json.dumps(again))
    (tmp_path / "out.json").unlink()
    results = run_ranks(2, run_command, words_for(tmp_path, "--resume", "--strict"))
    assert [status for status, _, _ in results] == [3, 3]
    assert results[0][2].startswith("dynamic-cp: warning: held-out packs are predicted with a median error of ")
    assert ", above 10%: measure again" in results[0][2]
    assert [err.count("\n") for _, _, err in results] == [1, 0]
    assert load_hardware(tmp_path / "out.json").name == "out"
    # Another job does not go on with them.
    results = run_ranks(1, run_command, words_for(tmp_path, "--resume"))
    assert results[0][0] == 2
    assert "was measured with num_ranks 2, this is 1: leave --resume out" in results[0][2]


def _emulated_ring() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (an emulated ring's output, that of real attention) where both must be the same."""
    import torch.distributed as dist

    from megatron.decide.calibration.sections import emulated, no_transfers

    def params(seqlen: int) -> Any:
        return params_of((seqlen,), torch.arange(seqlen), dist.group.WORLD, cp_comm_type="p2p")

    torch.manual_seed(0)
    query, key, value = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    with no_transfers():
        first = attention_thd(query, key, value, emulated(params(16), 2, 0), 0.25)
    # Place 0 of two: all rows see their own past, the second half of them also all keys "of the later lane": the same.
    own = attention_thd(query, key, value, params(8), 0.25)
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(2, 1)) * 0.25
    past = torch.ones(8, 8).tril().log()
    both = torch.cat((scores + past, scores + torch.zeros(8, 8)), dim=2)[:, 4:].softmax(-1)
    late = torch.einsum("hts,shd->thd", both, torch.cat((value, value)).repeat_interleave(2, 1))
    return first, torch.cat((own[:4], late))


def _timed_hops() -> tuple[list[float], float]:
    """Return (seconds of hops whose sender and receiver take 10 ms, the mean over ranks of what each measures)."""
    import torch.distributed as dist

    from megatron.decide.calibration.device import Place
    from megatron.decide.calibration.sections import link_probes
    from megatron.decide.calibration.timing import Probe, Timer

    size, device = dist.get_world_size(), torch.device("cpu")
    place = Place(device=device, name="", rank=dist.get_rank(), num_ranks=size, ranks_per_node=size)
    timer = Timer(device=device, window_s=0.01, num_windows=1, alone=False)

    def slow(transfer: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.01)
            transfer(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patched:
        for name in ("send", "recv"):
            patched.setattr(dist, name, slow(getattr(dist, name)))
        hops = [one for one in link_probes(place, setup_of(size)) if one.row.kind == "hop"]
        row = Measurement(section="links", forward_s=0.0)
        slept = Probe(row=row, forward=lambda: time.sleep(0.02 * dist.get_rank()), num_calls=2, waits=True)
        *found, mean = timer.measure([*hops, slept])
    return [one.forward_s for one in found], mean.forward_s


def _on_uneven_nodes(words: list[str]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", str(2 - dist.get_rank()))
        return run_command(words)


def test_nodes_with_unequal_ranks_are_refused_by_all(tmp_path: Path) -> None:
    """They would try the links of different pairs, and wait for each other."""
    for status, _, err in run_ranks(2, _on_uneven_nodes, words_for(tmp_path)):
        assert status == 2
        assert "ranks of a node that are measured" in err
    assert not (tmp_path / "out.json").exists()


def test_a_rank_without_a_partner_does_not_count_as_a_fast_hop() -> None:
    for hops, mean in run_ranks(3, _timed_hops):
        assert len(hops) == 3
        assert min(hops) >= 0.01
        assert mean >= 0.02


def _timed_sleeps() -> tuple[float, float]:
    """Return the seconds of what sleeps on rank 1 in 2 windows of 3: as a part, and as a whole micro-batch."""
    from megatron.decide.calibration.timing import Probe, Timer

    timer = Timer(device=torch.device("cpu"), window_s=0.01, num_windows=3, alone=False)
    row = Measurement(section="packs", forward_s=0.0)

    def probe(as_in_a_step: bool) -> Probe:
        nap_s = 0.05 * dist.get_rank()
        naps = iter((0.0, 0.0, nap_s, nap_s))  # the first call warms up
        return Probe(row=row, forward=lambda: time.sleep(next(naps)), num_calls=1, as_in_a_step=as_in_a_step)

    part, whole = timer.measure([probe(as_in_a_step=False), probe(as_in_a_step=True)])
    return part.forward_s, whole.forward_s


def test_whole_micro_batches_take_what_steps_take_and_parts_what_they_compute() -> None:
    for part, whole in run_ranks(2, _timed_sleeps):
        assert part < 0.04
        assert whole >= 0.05


def test_an_emulated_ring_computes_what_its_place_would() -> None:
    ((first, expected),) = run_ranks(1, _emulated_ring)
    assert torch.allclose(first, expected, atol=1e-5)


@pytest.mark.by_day("--devicecuda", "--devicetpu", "--max")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--device", "cuda"], "--device cuda needs a GPU"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--max-tokens", "100"], "--max-tokens is 100, at least 512 are needed"),
        (["--tp", "3"], "--tp 3 does not suit --model"),
        (["--model", "llama-2-70b"], "GB are free on"),
        (["--model", "nothing"], "none of the bundled models"),
        (["--hardware", "nothing"], "none of the bundled hardware"),
        (["--output", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
        (["--plot", "fit.pdf"], "--plot fit.pdf ends in .pdf, use .svg or .png"),
        (["--resume"], "leave --resume out"),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, more: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if more[0] == "--device" and more[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ((status, out, err),) = run_ranks(1, _refused, words_for(tmp_path, *more))
    assert status == 2
    assert not out
    assert message in err
    assert err.startswith("dynamic-cp: error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def _refused(words: list[str]) -> Any:
    from megatron.decide.calibration import bench

    # Whatever this machine has: a model of 70 billion weights does not fit.
    bench.free_bytes = lambda device: 8_000_000_000
    return run_command(words)


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
from dynamic_cp.decide import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_without_torch_there_is_one_clear_line(tmp_path: Path) -> None:
    for words, status in ((words_for(tmp_path), 2), (["profile", "--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, done.stderr
        if status:
            needs = "profile needs torch and megatron-core (No module named 'torch')"
            assert done.stderr == f"dynamic-cp: error: {needs}: pip install 'megatron-dynamic-cp[train]'\n"
        else:
            assert "--max-tokens" in done.stdout


DENSE = {name: value for name, value in MODEL.items() if not name.startswith("linear_attention")}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_first_day_goes_through_and_goes_on(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "an.other.job")
    (tmp_path / "model.json").write_text(json.dumps(DENSE))
    files = ["--model", str(tmp_path / "model.json"), "--output", str(tmp_path / "day"), "--timeout", "2"]
    words = ["first-day", *files, "--ranks", str(num_ranks), "--max-tokens", "512", "--quick"]
    assert cli.main(words) == 0, capsys.readouterr().out
    page = (tmp_path / "day" / "report.md").read_text()
    for name, what in PARTS.items():
        assert re.search(rf"\| {name} \| {what} \| ok \| \d+ \|", page)
    seconds, factor = r"[\d.]+\sm?s \| [\d.]+\sm?s \| [\d.]+ \|", r"[\d.]+ times \| [\d.]+ times \| [\d.]+ \|"
    assert re.search(rf"\| a step with static CP {num_ranks} \| {seconds}", page)
    assert re.search(rf"\| a step with dynamic CP \| {seconds}", page)
    assert re.search(rf"\| dynamic CP is faster \| {factor}", page)
    assert len(re.findall(r"\| cores that other processes took from \S+ CP.* \| 0% \| \d+% \|  \|", page)) == 2
    assert "](calibration.svg)" in page
    assert '<svg role="img"' in (tmp_path / "day" / "report.html").read_text()
    assert not re.search(r"\| 0 (FLOP|bytes)/s \|", page)
    errors = re.findall(r"\| (\S+ ?\S*) \| (on one lane alone|with \S+ over 2 lanes) \| (\S+) \| 0.02 \|", page)
    assert max(float(error) for _, _, error in errors) < 1e-6
    assert len([where for _, where, _ in errors if "over 2" in where]) == 3 * (num_ranks - 1)
    assert {"cpu", "portable", "local layers"} == {what for what, _, _ in errors}
    assert re.search(r"\| held_out \| check \| \d+ \|", page)
    assert re.search(r"\| linear_flops_per_s \| \S+ GFLOP/s \| \S+ GFLOP/s \|", page)
    assert load_hardware(tmp_path / "day" / "hardware.json").source["linear_flops_per_s"].startswith("measured by")
    capsys.readouterr()
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [line.split()[0] for line in lines if line.endswith(", before")] == list(PARTS)


def _exchanges(folder: Path) -> tuple[int, Any]:
    from megatron.decide.calibration import attention

    (folder / "model.json").write_text(json.dumps(DENSE))
    words = ["exchanges", "--model", str(folder / "model.json"), "--output", str(folder / "rows.json")]
    sys.argv[1:] = [*words, "--device", "cpu"]
    return attention.main(), json.loads((folder / "rows.json").read_text())


def test_attention_of_local_layers_is_compared_with_each_exchange(tmp_path: Path) -> None:
    for status, rows in run_ranks(2, _exchanges, tmp_path):
        assert status == 0
        assert {row["what"] for row in rows} == {"local layers"}
        assert {"with p2p over 2 lanes", "with all_gather over 2 lanes"} <= {row["where"] for row in rows}
        assert max(row["error"] for row in rows) < 1e-6


def _compare_wrongly(folder: Path) -> tuple[int, Any]:
    from megatron.decide.calibration import attention
    from megatron.dynamic_cp.groups.attention_check import NAMES, Compared

    def wrong(*_: Any) -> Iterator[Compared]:
        yield Compared("p2p", 2, dict.fromkeys(NAMES, math.nan), 0.02)

    attention.compare_attention = wrong
    return _exchanges(folder)


def test_attention_that_is_wrong_is_told_and_written_down(tmp_path: Path) -> None:
    ((status, rows),) = run_ranks(1, _compare_wrongly, tmp_path)
    assert status == 2
    (row,) = rows
    assert (row["what"], row["where"], row["is_wrong"]) == ("local layers", "with p2p over 2 lanes", True)
    assert row["why"].startswith("output and gradient of the queries and")
    assert "error" not in row
