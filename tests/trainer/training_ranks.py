"""Run the trainer on forked ranks, as a function that gives losses or as a command, and say what its words become."""

import contextlib
import io
import os
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from dynamic_cp.types import ModelShape
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.trainer import main
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.flags.settings import Settings
from megatron.trainer.loop import training
from megatron.trainer.reporting.log import StepRecord
from megatron.trainer.setup import model
from tests import patience
from tests.distributed.harness import run_ranks
from tests.trainer.commandline import SMALL, command_line, parsed
from tests.trainer.forked_planner import warm_up


def _train_one_rank(words: list[str]) -> dict[int, StepRecord]:
    os.environ["RANK"] = str(dist.get_rank())
    records: dict[int, StepRecord] = {}
    training.pretrain(parse_args(words, dist.get_world_size()), on_step=records.__setitem__)
    return records


def train(
    world_size: int, *extra: str, without: Collection[str] = (), timeout_s: float = 100.0
) -> dict[int, StepRecord]:
    """Return iteration -> record of a SMALL run, less the words `without`, on forked ranks that agree on every loss."""
    warm_up()
    words = [word for word in command_line(SMALL, *extra) if word not in without]
    by_rank = run_ranks(world_size, _train_one_rank, words, timeout_s=timeout_s)
    for records in by_rank:
        assert {i: r.loss for i, r in records.items()} == {i: r.loss for i, r in by_rank[0].items()}
    return by_rank[0]


def losses(records: dict[int, StepRecord]) -> list[float]:
    return [records[iteration].loss for iteration in sorted(records)]


VOCAB_SIZE = 264
"""Rows of the vocabulary."""


def config_of(flags: str | Settings, world_size: int = 4) -> TransformerConfig:
    """Return megatron-core's configuration for a command line with --dynamic-cp, or for what one was parsed to."""
    settings = parsed(flags, world_size) if isinstance(flags, str) else flags
    return model.transformer_config(settings.model, settings.planning, torch.device("cpu"))


def shape_of(flags: str, world_size: int = 4) -> ModelShape:
    """Return the model of a command line as the planner knows it."""
    return model_shape(parsed(flags, world_size).model, VOCAB_SIZE)


def identity_of(flags: str) -> dict[str, Any]:
    """Return what a checkpoint says of the model of a command line."""
    return derive.model_identity(parsed(flags).model, VOCAB_SIZE)


class Ended(NamedTuple):
    code: int
    stderr: str
    seconds: float

    @property
    def error(self) -> str:
        """What the one line of error says; a slow machine may have warned of a long wait before it."""
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error")]
        return line.partition(": ")[2]


def _command_on_one_rank(words: list[str]) -> Ended:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    started = patience.now_s()
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main.run(words)
    return Ended(code, stderr.getvalue(), patience.now_s() - started)


def run_command(world_size: int, *extra: str, timeout_s: float = 60.0) -> list[Ended]:
    """Return how a SMALL `pretrain_gpt.py` with these words ended, by rank."""
    warm_up()
    return run_ranks(world_size, _command_on_one_rank, command_line(SMALL, *extra), timeout_s=timeout_s)
