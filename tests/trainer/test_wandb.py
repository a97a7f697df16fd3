"""Weights & Biases gets what TensorBoard gets, from rank 0 only. A package of that name writes down what it is told."""

from __future__ import annotations

import json

import pytest

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.flags import validation
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line
from tests.trainer.test_training import DYNAMIC
from tests.trainer.training_ranks import run_command, train

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


def test_the_files_go_below_save_by_default(told):
    settings = parse_args(command_line(DYNAMIC, "--wandb-project proj --wandb-exp-name exp --save there"), 4)
    assert settings.logging.wandb_save_dir == "there/wandb"
