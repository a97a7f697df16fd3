"""Checkpoints where megatron-core finds a fused Adam (TransformerEngine's or apex's): it counts steps by group.

The one here has the interface of TransformerEngine 2.11's, `pytorch/optimizers/fused_adam.py`, and computes on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer

from megatron.dynamic_cp.repairs import optimizer_checkpoint
from megatron.trainer.checkpoints import checkpoint_files
from tests.distributed.harness import run_ranks
from tests.trainer.commandline import command_line
from tests.trainer.training_ranks import _train_one_rank

WORDS = "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --lr-warmup-iters 0 --num-layers 1 --num-workers 0"
SHARDED = "--use-distributed-optimizer"
ITERATIONS, SAVED = 4, 2


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps `step` in its groups and takes states of its own names only."""

    STATES = ("exp_avg", "exp_avg_sq", "master_param")

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: Any,
        eps: float,
        adam_w_mode: bool,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        for saved, param in zip(ids, params, strict=True):
            if saved not in state_dict["state"]:
                continue
            self.state[param] = {}
            for name, value in state_dict["state"][saved].items():
                if name not in self.STATES:
                    raise KeyError(name)
                self.state[param][name] = torch.empty(param.shape).copy_(value.float())

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {name: torch.zeros_like(param) for name in self.STATES[:2]}
                param.mul_(1 - group["lr"] * group["weight_decay"])
                first = state["exp_avg"].mul_(one).add_(param.grad, alpha=1 - one) / (1 - one ** group["step"])
                second = state["exp_avg_sq"].mul_(two).addcmul_(param.grad, param.grad, value=1 - two)
                param.sub_(group["lr"] * first / ((second / (1 - two ** group["step"])).sqrt() + group["eps"]))


def train_on_this_rank(words: list[str], fused: bool) -> dict[int, float]:
    if fused:
        core_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        core_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
        optimizer_checkpoint.HAVE_APEX_OR_TE = True
        # Writing into float32 shards, views of leaves, needs no_grad: ours is to be enough, whatever megatron-core has.
        sharded = distrib_optimizer.DistributedOptimizer
        load = sharded.load_parameter_state_from_fully_reshardable
        sharded.load_parameter_state_from_fully_reshardable = load.__wrapped__
    return {iteration: record.loss for iteration, record in _train_one_rank(words).items()}


def train(*extra: str, fused: bool = True) -> dict[int, float]:
    """Return iteration -> loss, on two ranks if the optimizer is shared among them."""
    words = command_line(WORDS, f"--train-iters {ITERATIONS}", *extra)
    return run_ranks(1 + (SHARDED in words), train_on_this_rank, words, fused, timeout_s=100)[0]


@pytest.mark.by_day("--use-distributed-optimizer")
@pytest.mark.parametrize("kind", ["", "--bf16", SHARDED])
def test_a_resumed_run_counts_on(tmp_path: Path, kind: str) -> None:
    """With a count that began anew the updates would be several times as large."""
    whole = train(kind, f"--save {tmp_path} --save-interval {SAVED}")
    assert sorted(whole) == [1, 2, 3, 4]
    (tmp_path / checkpoint_files.TRACKER).write_text(str(SAVED))
    folder = checkpoint_files.latest(str(tmp_path))
    assert folder is not None
    groups = _groups(dist_checkpointing.load_common_state_dict(str(folder)))
    assert groups
    assert {group["step"] for group in groups} == {SAVED}, "Megatron-LM with a fused Adam looks for it there"
    rest = {3: whole[3], 4: whole[4]}
    assert train(kind, f"--load {tmp_path}") == rest
    if kind == "":
        assert train(f"--load {tmp_path}", fused=False) == pytest.approx(rest, rel=1e-6), "with torch's AdamW"


def _groups(common: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that a checkpoint's common values have, wherever."""
    if isinstance(common, dict):
        own = common.get("param_groups", [])
        return [*own, *(group for value in common.values() if isinstance(value, dict) for group in _groups(value))]
    return []
