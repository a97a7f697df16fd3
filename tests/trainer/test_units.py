"""Schedule by samples, log line, backend choice, exit codes and signals."""

import math
import os
import re
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch

from dynamic_cp.errors import CheckpointError, InvalidInputError
from dynamic_cp.plans.lane_plan import PlanFacts
from megatron.dynamic_cp.agreement import verify
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds, for_chunk
from megatron.trainer.ending import exits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop import training
from megatron.trainer.reporting.log import Interval, RunSummary, StepRecord, iteration_line, validation_line
from megatron.trainer.setup.initialize import check_device_queues, choose_backend, choose_precision, device_of
from megatron.trainer.setup.model import build_scheduler
from tests.trainer.commandline import command_line


def _learning_rates(global_batch_size: int, *flags: str) -> dict[int, float]:
    """Return consumed samples -> learning rate over a run."""
    settings = parse_args(command_line(*flags, f"--global-batch-size {global_batch_size}"), 4)
    optimizer = SimpleNamespace(param_groups=[{"lr": None, "weight_decay": None}])
    scheduler = build_scheduler(settings.optimizer, optimizer)
    rates = {0: optimizer.param_groups[0]["lr"]}
    for iteration in range(settings.training.train_iters):
        scheduler.step(increment=global_batch_size)
        rates[(iteration + 1) * global_batch_size] = optimizer.param_groups[0]["lr"]
    return rates


def test_learning_rate_is_a_function_of_samples(monkeypatch):
    monkeypatch.setattr("tests.trainer.commandline.TRAINING", "--lr 1e-3 --lr-decay-style cosine --seed 7")
    flags = "--lr-warmup-samples 24 --lr-decay-samples 96 --train-samples 96"
    small, large = _learning_rates(4, flags), _learning_rates(12, flags)
    shared = small.keys() & large.keys()
    assert len(shared) == 9
    assert all(small[samples] == large[samples] for samples in shared)
    assert large[0] == 0
    assert large[12] == pytest.approx(5e-4)
    assert large[24] == pytest.approx(1e-3)
    assert large[60] == pytest.approx(5e-4)
    assert large[96] == pytest.approx(0)


def _record(**changes) -> StepRecord:
    of_plan = {
        "digest": "", "policy": "dynamic", "num_microbatches": 4, "predicted_s": 0.4, "imbalance": 1.05, "reason": "",
        "num_samples": 128, "seqlen_sum": 10_000, "seqlen_squared_sum": 0, "cp_histogram": {1: 10, 4: 1},
        "padding_fraction": 0.012, "rank_token_multiple": 1, "planner_s": 0.003,
    }  # fmt: skip
    of_plan |= {name: changes.pop(name) for name in PlanFacts.__dataclass_fields__.keys() & changes.keys()}
    values = {
        "loss": 5.0, "grad_norm": 1.25, "learning_rate": 1e-3, "elapsed_s": 0.5, "wait_s": 0.0004, "flops": 4e12,
        "exchanged_bytes": 2_000_000,
    }  # fmt: skip
    return StepRecord(plan=PlanFacts(**of_plan), **{**values, **changes})


def test_iteration_line_is_read_by_megatron_parsers():
    interval = Interval(records=(_record(), _record(loss=3.0, elapsed_s=1.5)), world_size=4)
    line = iteration_line(interval, iteration=6, train_iters=100, consumed_samples=768)
    assert "other processes" not in line, "not known on GPUs"
    # The patterns that log parsers of Megatron-LM runs use.
    found = {
        name: re.search(pattern, line)
        for name, pattern in {
            "iteration": r"iteration\s+(\d+)/\s*(\d+)", "samples": r"consumed samples:\s+(\d+)",
            "ms": r"elapsed time per iteration \(ms\): ([\d.]+)",
            "tflops": r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)", "lr": r"learning rate: ([\d.E+-]+)",
            "batch": r"global batch size:\s+(\d+)", "loss": r"lm loss: ([\d.E+-]+)", "norm": r"grad norm: ([\d.]+)",
        }.items()
    }  # fmt: skip
    assert all(found.values()), found
    assert found["iteration"].groups() == ("6", "100")
    assert float(found["ms"][1]) == 1000
    assert float(found["tflops"][1]) == 1.0
    assert float(found["loss"][1]) == 4.0
    assert line.startswith(" [")
    assert (
        "cp1×20 cp4×2 | tokens: 10000 | padding: 1.2% | predicted time (ms): 400.0 | measured/predicted: 2.500" in line
    )
    assert "planner (ms): 3.0 | waited for it (ms): 0.4" in line
    assert "tokens/s: 10000 |" in line
    assert "\n" not in line
    interval = Interval(records=(_record(share_of_others=0.5), _record(share_of_others=0.1)), world_size=4)
    line = iteration_line(interval, iteration=6, train_iters=100, consumed_samples=768)
    assert "| other processes: 30.0% | planner (ms)" in line


def test_validation_line():
    assert (
        "validation loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00"
        in validation_line("validation", 7, 2.0)
    )


def test_device_queues_are_checked_against_the_largest_cp_size(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    for tp_size, max_cp_size in ((1, 2), (2, 1)):
        with pytest.raises(InvalidInputError, match="CUDA_DEVICE_MAX_CONNECTIONS is 8, 1 is needed"):
            check_device_queues(tp_size, max_cp_size)
    check_device_queues(1, 1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_device_queues(2, 8)


def test_cpu_is_never_a_silent_fallback():
    assert choose_backend(None, num_devices=0, built_for_device=False) == "gloo"
    assert choose_backend("gloo", num_devices=0, built_for_device=True) == "gloo"
    assert choose_backend(None, num_devices=8, built_for_device=True) == "nccl"
    for requested in (None, "nccl"):
        with pytest.raises(InvalidInputError, match="--distributed-backend gloo"):
            choose_backend(requested, num_devices=0, built_for_device=True)
    with pytest.raises(InvalidInputError):
        choose_backend("nccl", num_devices=0, built_for_device=False)


def test_more_ranks_on_a_node_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_of(1, num_devices=2) == torch.device("cuda", 1)
    with pytest.raises(InvalidInputError, match=r"rank 2 of this node has no GPU, torch sees 2.*0,1.*at most 2 ranks"):
        device_of(2, num_devices=2)


def test_float32_is_not_tf32():
    """An image's environment may ask torch for TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1); a run in float32 does not."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    try:
        for bf16, kept in ((False, False), (True, True)):
            matmul.allow_tf32 = True
            choose_precision(bf16=bf16)
            assert matmul.allow_tf32 is kept
    finally:
        matmul.allow_tf32 = before


def _raise(error: BaseException):
    raise error


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: _raise(CheckpointError("two words")), 2, "error: two words\n"),
        (lambda: _raise(RuntimeError("boom")), 1, "rank 0 failed (starting up):\nTraceback"),
    ],
)
def test_exit_codes(capsys, monkeypatch, outcome, code, said):
    monkeypatch.setenv("RANK", "0")
    assert exits.exit_code_of(outcome) == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("error", [CheckpointError("two words"), RuntimeError("boom")])
def test_what_torchrun_prints_ends_with_the_error(tmp_path, monkeypatch, error):
    """It makes a traceback of its own and a summary, from what a failing rank leaves in a file."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = str(tmp_path / "error.json")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    code = exits.exit_code_of(lambda: _raise(error))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=path)
    *_, said, border = str(ChildFailedError("pretrain_gpt.py", {0: failure})).splitlines()
    assert set(border) == {"="}
    assert said.endswith({1: "rank 0 failed: RuntimeError('boom')", 2: "error: two words"}[code])


@pytest.mark.parametrize("number", exits.EXIT_SIGNALS)
def test_the_first_signal_is_remembered_and_repeated_ones_are_ignored(number):
    before = [signal.getsignal(each) for each in exits.EXIT_SIGNALS]
    with exits.exit_signals() as signals:
        assert signals.received is None
        for sent in (number, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            assert signal.getsignal(sent) != signal.SIG_DFL, sent.name  # or it would end this process
            os.kill(os.getpid(), sent)
            assert signals.received == number.name
    assert [signal.getsignal(each) for each in exits.EXIT_SIGNALS] == before


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background and had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("first", exits.EXIT_SIGNALS)
def test_a_sigint_after_the_first_signal_ends_at_once(first):
    with exits.exit_signals() as signals:
        os.kill(os.getpid(), first)
        assert signals.received == first.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signalled_rank_waits_for_rank_0_only_a_little_longer(monkeypatch):
    limits = []
    monkeypatch.setattr(verify, "stop_waiting_after", limits.append)
    with exits.exit_signals():
        assert limits == []
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert limits == [exits.GIVE_UP_S]
    assert limits == [exits.GIVE_UP_S, math.inf]


def test_a_failing_rank_that_is_asked_to_end_has_little_time(monkeypatch):
    limits = []
    monkeypatch.setattr(signal, "alarm", limits.append)
    monkeypatch.setattr(exits, "_distributed", lambda: "a job")
    for first, then in ((exits.fail, exits.ask_to_end), (exits.ask_to_end, exits.fail)):
        monkeypatch.setattr(exits, "_is_failing", False)
        monkeypatch.setattr(exits, "is_asked_to_end", False)
        first()
        then()
    assert limits == [exits.TIME_TO_SPEAK_S] * 2


def test_evaluation_records_no_gradients_and_training_goes_on_after_an_error():
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))

    def evaluate_and_fail():
        with training._evaluating([chunk]):
            assert not chunk.training
            assert not chunk(torch.ones(1, 2)).requires_grad
            raise CheckpointError("stop")

    with pytest.raises(CheckpointError):
        evaluate_and_fail()
    assert chunk.training
    assert chunk(torch.ones(1, 2)).requires_grad


def test_a_chunk_holds_no_micro_batch_that_it_has_handed_out() -> None:
    batches = [{"packed_seq_params": torch.zeros(1)} for _ in range(3)]
    alive = [weakref.ref(batch["packed_seq_params"]) for batch in batches]
    chunk = for_chunk(batches, ChunkNeeds(tokens=True, labels=False))
    del batches
    for number in range(3):
        handed = next(chunk)
        assert [here() is not None for here in alive] == [place >= number for place in range(3)]
        del handed
        assert alive[number]() is None


SUMMED = {
    "seqlen_sum": 900, "planner_s": 0.01, "wait_s": 0.005, "cp_histogram": {1: 3, 2: 1}, "padding_fraction": 0.1,
    "exchanged_bytes": 500_000,
}  # fmt: skip


def test_the_first_iteration_counts_but_is_not_timed():
    summary = RunSummary()
    assert summary.describe() == ""
    for elapsed_s in (60.0, 0.5, 0.5):
        summary.add(_record(**SUMMED, elapsed_s=elapsed_s))
    said = summary.describe()
    assert "summary of 3 iterations, 2700 tokens, 10.0% padding" in said
    assert "buckets by CP size: 1: 75%, 2: 25%; 1.5 MB exchanged" in said
    assert "500.0 ms per iteration, 1800 tokens/s, measured/predicted 1.250" in said
    assert "planner 10.0 ms per iteration beside the steps, waited for plans and samples 5.00 ms (1.00%)" in said
    assert "static plan" not in said


def test_what_other_processes_took_is_a_mean_over_time():
    summary = RunSummary()
    for elapsed_s, share in ((60.0, 0.9), (1.0, 0.5), (3.0, 0.1)):
        summary.add(_record(**SUMMED, elapsed_s=elapsed_s, share_of_others=share))
    assert "(without the first iteration); other processes took 20.0% of the cores" in summary.describe()


def test_fallbacks_are_counted():
    summary = RunSummary()
    summary.add(_record(fallback="it failed"))
    assert "1 iterations ran the static plan" in summary.describe()
    assert "per iteration" not in summary.describe()
