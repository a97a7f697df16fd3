"""Checkpoints with TransformerEngine's fused Adam, over its own Python: it counts steps by group."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer

from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.dynamic_cp.repairs import patches
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.setup import layers
from tests.distributed.harness import run_ranks
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.trainer.commandline import command_line
from tests.trainer.training_ranks import _train_one_rank

WORDS = "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --lr-warmup-iters 0 --num-layers 1 --num-workers 0"
SHARDED = "--use-distributed-optimizer"
ITERATIONS, SAVED = 4, 2


def take_fused_adam() -> None:
    """Have megatron-core find TransformerEngine's, which is loaded, as if it had been when it was imported."""
    core_optimizer.Adam = distrib_optimizer.Adam = importlib.import_module(
        "transformer_engine.pytorch.optimizers"
    ).FusedAdam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    patches.HAVE_APEX_OR_TE = True


def train_on_this_rank(words: list[str], fused: bool) -> dict[int, float]:
    if fused:
        take_fused_adam()
        layers.choose = lambda *_needs, **_more: LayerChoice(impl="local", reason="test")
        # Writing into float32 shards, views of leaves, needs no_grad: ours is to be enough, whatever megatron-core has.
        sharded = distrib_optimizer.DistributedOptimizer
        load = sharded.load_parameter_state_from_fully_reshardable
        sharded.load_parameter_state_from_fully_reshardable = load.__wrapped__
    return {iteration: record.loss for iteration, record in _train_one_rank(words).items()}


def train(*extra: str, fused: bool = True) -> dict[int, float]:
    """Return iteration -> loss, on two ranks if the optimizer is shared among them."""
    words = command_line(WORDS, f"--train-iters {ITERATIONS}", *extra)
    run = functools.partial(run_ranks_with, PINNED) if fused else run_ranks
    return run(1 + (SHARDED in words), train_on_this_rank, words, fused, timeout_s=100)[0]


@pytest.mark.nightly
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


AWARE = f"--bf16 {SHARDED} --use-precision-aware-optimizer"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtypes", "most"),
    [
        ("", 1e-5),  # ties of bfloat16 are rounded otherwise
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 1e-3),
        ("--main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16", 1e-3),
    ],
)
def test_states_in_lower_precision_train_and_resume(tmp_path: Path, dtypes: str, most: float) -> None:
    """Losses are those of states in float32, within the rounding of the dtypes; resumed to the bit."""
    plain = train(f"--bf16 {SHARDED}")
    whole = train(AWARE, dtypes, f"--save {tmp_path} --save-interval {SAVED}")
    assert whole == pytest.approx(plain, rel=most, abs=0)
    (tmp_path / checkpoint_files.TRACKER).write_text(str(SAVED))
    rest = {3: whole[3], 4: whole[4]}
    assert train(AWARE, dtypes, f"--load {tmp_path}") == rest
    assert train(f"--bf16 {SHARDED} --load {tmp_path}") == pytest.approx(rest, rel=most), "weights, and not halves"


def _groups(common: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that a checkpoint's common values have, wherever."""
    if isinstance(common, dict):
        own = common.get("param_groups", [])
        return [*own, *(group for value in common.values() if isinstance(value, dict) for group in _groups(value))]
    return []
