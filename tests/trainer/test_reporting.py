"""What a run writes for others: a torch.profiler trace names what ran, Weights & Biases gets TensorBoard's figures."""

import json
from collections import Counter
from pathlib import Path

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.serialize import plan_from_dict
from dynamic_cp.types import Bucket
from megatron.trainer.flags import validation
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.reporting.profiling import trace_path
from tests.trainer.commandline import command_line
from tests.trainer.test_training import DYNAMIC
from tests.trainer.training_ranks import losses, run_command, train

NUM_LAYERS = 2
RING = f"{DYNAMIC} --cp-comm-type p2p --num-workers 1"
PROFILE = "--train-iters 4 --lr-decay-iters 8 --profile --use-pytorch-profiler"


def _spans(path: Path) -> list[dict]:
    """Return the user's ranges of a trace, by start."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])


def _inside(spans: list[dict], outer: dict, name: str) -> list[dict]:
    """Return the spans whose name begins with `name` within `outer`."""
    end = outer["ts"] + outer["dur"]
    return [s for s in spans if s["name"].startswith(name) and outer["ts"] <= s["ts"] and s["ts"] + s["dur"] <= end]


def _buckets_of_lane(folder: Path, iteration: int, lane: int) -> list[Bucket]:
    for line in (folder / "plans.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["key"] == f"dynamic_cp/plan/train/{iteration}":
            buckets = plan_from_dict(record["plan"]).buckets
            return [b for b in buckets if b.first_lane <= lane < b.first_lane + b.cp_size]
    raise AssertionError(f"iteration {iteration} is not in the dump")


@pytest.mark.nightly
def test_the_trace_names_what_ran(tmp_path, uninterrupted):
    words = f"{PROFILE} --profile-dir {tmp_path}/traces --profile-step-start 1 --profile-step-end 3 --profile-ranks 0 3"
    found = losses(train(4, RING, words, f"--dynamic-cp-dump {tmp_path}/dump"))
    assert found == uninterrupted(RING)[:4]
    paths = sorted((tmp_path / "traces").iterdir())
    assert paths == [trace_path(f"{tmp_path}/traces", rank, 2, 3) for rank in (0, 3)]
    cp_sizes = set()
    for rank, path in zip((0, 3), paths, strict=True):
        spans = _spans(path)
        iterations = [s for s in spans if s["name"].startswith("iteration ")]
        assert [s["name"] for s in iterations] == ["iteration 2", "iteration 3"]
        for number, outer in zip((2, 3), iterations, strict=True):
            buckets = _buckets_of_lane(tmp_path / "dump", number, rank)
            for name in ("waiting for the plan", "waiting for packed samples", "sums over the job", "optimizer"):
                assert len(_inside(spans, outer, name)) == 1, name
            assert len(_inside(spans, outer, "backward pass")) == len(buckets)
            micro_batches = _inside(spans, outer, f"step {number}, micro-batch ")
            assert [s["name"] for s in micro_batches] == [
                f"step {number}, micro-batch {index}, lanes {b.first_lane}..{b.first_lane + b.cp_size - 1}"
                for index, b in enumerate(buckets)
            ]
            for micro_batch, bucket in zip(micro_batches, buckets, strict=True):
                (forward,) = _inside(spans, micro_batch, "forward, ")
                assert forward["name"].startswith(f"forward, cp {bucket.cp_size} p2p, ")
                steps = Counter(s["name"] for s in _inside(spans, forward, "ring step "))
                size = bucket.cp_size
                assert steps == {f"ring step {step} of {size}": NUM_LAYERS for step in range(1, size + 1)}
                cp_sizes.add(size)
            backward = [
                s for outer_pass in _inside(spans, outer, "backward pass") for s in _inside(spans, outer_pass, "")
            ]
            layers = Counter(s["name"].rpartition(",")[0] for s in backward if s["name"].startswith("attention back"))
            by_size = Counter(b.cp_size for b in buckets)
            assert layers == {f"attention backward, cp {size} p2p": n * NUM_LAYERS for size, n in by_size.items()}
            rings = sum(1 for s in backward if s["name"].startswith("ring step ") and s["name"].endswith(", backward"))
            assert rings == NUM_LAYERS * sum(b.cp_size for b in buckets)
    assert len(cp_sizes) > 1, "one CP size only: nothing was distinguished"


@pytest.mark.nightly
def test_without_the_flag_others_are_refused_and_a_run_that_ends_early_is_written(tmp_path, capfd):
    words = f"--train-iters 2 --lr-decay-iters 8 --profile-dir {tmp_path}/traces --profile-step-start 1"
    with pytest.raises(InvalidInputError, match="--profile-step-start 1 has no effect alone: add --profile"):
        parse_args(command_line("--dynamic-cp --mock-data", words), 1)
    train(1, "--dynamic-cp --mock-data", words, "--profile --use-pytorch-profiler")
    (path,) = (tmp_path / "traces").iterdir()
    assert path == trace_path(f"{tmp_path}/traces", 0, 2, 2)
    assert f"wrote the profile {path}" in capfd.readouterr().out
    assert len([s for s in _spans(path) if s["name"] == "packing"]) == 1


def test_nvtx_ranges_on_a_cpu_are_refused():
    (ended,) = run_command(1, DYNAMIC.replace("48", "128"), "--profile --profile-step-start 1")
    assert ended.code == 2
    assert "add --use-pytorch-profiler" in ended.stderr


PACKAGE = """
import json, os

class Error(Exception):
    pass

class Run:
    def __init__(self, options):
        self.say("init", options)
    def say(self, what, value):
        with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
            file.write(json.dumps([what, os.environ["RANK"], value], default=str) + "\\n")
    def log(self, scalars, step):
        self.say("log", [step, scalars])
    def finish(self):
        self.say("finish", None)

def init(**options):
    if os.environ.get("FAKE_WANDB_ERROR"):
        raise Error("nobody is logged in")
    assert os.path.isdir(options["dir"])
    return Run(options)
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Install the package; what it was told: () -> list of [what, rank, value]."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(PACKAGE)
    log = tmp_path / "told"
    monkeypatch.setenv("FAKE_WANDB_LOG", str(log))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.nightly
def test_wandb_gets_what_tensorboard_gets(tmp_path, told):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = f"{DYNAMIC.replace('48', '64')} --train-iters 4 --split 60,30,10 --eval-interval 2 --eval-iters 1"
    wandb = "--wandb-project proj --wandb-exp-name exp --wandb-entity us"
    train(2, words, wandb, f"--tensorboard-dir {tmp_path}/tb --wandb-save-dir {tmp_path}/files --log-interval 2")
    said = told()
    assert {rank for _, rank, _ in said} == {"0"}
    assert [what for what, _, _ in said][:: len(said) - 1] == ["init", "finish"]
    options = said[0][2]
    expected = {"project": "proj", "name": "exp", "entity": "us", "dir": f"{tmp_path}/files"}
    assert {name: options[name] for name in expected} == expected
    assert options["config"]["global_batch_size"] == 12
    logged = {(name, step): value for _, _, (step, scalars) in said[1:-1] for name, value in scalars.items()}
    events = EventAccumulator(f"{tmp_path}/tb")
    events.Reload()
    written = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    assert {"lm loss", "lm loss validation", "lm loss test", "dynamic-cp/imbalance"} <= {name for name, _ in written}
    assert logged == pytest.approx(written, rel=1e-6)


def test_what_wandb_refuses_ends_all_ranks_alike(tmp_path, told, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB_ERROR", "1")
    words = f"{DYNAMIC.replace('48', '64')} --wandb-project proj --wandb-exp-name exp --wandb-save-dir {tmp_path}"
    ended = run_command(2, words)
    assert [end.code for end in ended] == [2, 2]
    assert len({end.error for end in ended}) == 1
    for part in ("--wandb-project proj", "nobody is logged in", "WANDB_MODE=offline"):
        assert part in ended[0].stderr
    assert told() == []
    settings = parse_args(command_line(DYNAMIC, "--wandb-project proj --wandb-exp-name exp --save there"), 4)
    assert settings.logging.wandb_save_dir == "there/wandb"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--wandb-exp-name exp --save there", "needs the package wandb"),
        ("--save there", "needs --wandb-exp-name"),
        ("--wandb-exp-name exp", "give one of the two"),
    ],
)
def test_wandb_flags_that_lack_something_are_refused(request, monkeypatch, words, said):
    if "package" in said:
        monkeypatch.setattr(validation, "find_spec", lambda _name: None)
    else:
        request.getfixturevalue("told")
    with pytest.raises(InvalidInputError, match=said):
        parse_args(command_line(DYNAMIC, "--wandb-project proj", words), 4)
