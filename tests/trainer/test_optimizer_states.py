"""Gradients and optimizer states in lower precision, TransformerEngine's fused Adam: planned, kept and resumed."""

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer

from dynamic_cp.memory.memory_model import MemoryModel, StageMemory
from dynamic_cp.models import catalog
from dynamic_cp.pricing.edges import ddp_bucket_size
from dynamic_cp.types import Problem, StateDtypes
from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.dynamic_cp.repairs import patches
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import layers, model
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.trainer.commandline import command_line
from tests.trainer.conftest import LAST, SAVED
from tests.trainer.training_ranks import _train_one_rank, train

IN_16_BITS = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 256 --bf16"
IN_BF16 = "--grad-reduce-in-bf16"
SHARDED = "--use-distributed-optimizer"
AWARE = f"{SHARDED} --use-precision-aware-optimizer"
VOCAB_SIZE = 264
STATES = ("exp_avg", "exp_avg_sq", "master_param")


def test_flags_are_those_of_the_plans() -> None:
    flags = "--main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"
    planning = parse_args(command_line(f"{IN_16_BITS} {AWARE} {flags}"), 4).planning
    state = StateDtypes(
        use_precision_aware_optimizer=True, main_grads_dtype="bf16", main_params_dtype="fp16", exp_avg_dtype="fp8",
        exp_avg_sq_dtype="bf16",
    )  # fmt: skip
    assert planning.data_parallel.state == state


def test_the_precision_aware_optimizer_needs_transformer_engine_on_a_device() -> None:
    says = (
        "--use-precision-aware-optimizer steps by TransformerEngine's FusedAdam: TransformerEngine needs CUDA devices"
    )
    with pytest.raises(RankError, match=says):
        train(1, IN_16_BITS, AWARE)


def kept_bytes(words: list[str], world_size: int) -> list[float]:
    """Return the bytes of weights, gradients, optimizer state and copies of gradients of all ranks, after a step."""
    settings = parse_args(words, world_size)
    initialize_model_parallel()
    cpu = torch.device("cpu")
    config = model.transformer_config(settings.model, settings.planning, cpu)
    chunks = model.build_chunks(settings.model, config, VOCAB_SIZE, "local")
    wrapped = model.wrap_chunks(settings, config, chunks, ddp_bucket_size(world_size, 1), cpu)
    optimizer: Any = model.build_optimizer(settings, config, wrapped)
    parameters = list(wrapped[0].parameters())
    for parameter in parameters:
        parameter.main_grad.fill_(1.0)
    optimizer.step()

    def count(tensors: Any) -> float:
        return sum(one.numel() * one.element_size() for one in tensors)

    gradients = [parameter.main_grad for parameter in parameters]
    masters = [one for group in optimizer.optimizer.param_groups for one in group["params"]]
    states = [
        state[name] for state in optimizer.optimizer.state.values() for name in STATES if state.get(name) is not None
    ]
    if settings.planning.data_parallel.state.use_precision_aware_optimizer:
        copies, masters = [], []  # the optimizer steps the weights themselves, by gradients where they are
    else:
        copies = [one.grad for one in masters if one.grad.untyped_storage().nbytes() <= one.grad.nbytes]
    found = torch.tensor([count(part) for part in (parameters, gradients, [*masters, *states], copies)])
    dist.all_reduce(found)
    return found.tolist()


def kept_with_fused_adam(words: list[str], world_size: int) -> list[float]:
    """As `kept_bytes`, with TransformerEngine's."""
    take_fused_adam()
    return kept_bytes(words, world_size)


def planned_bytes(words: list[str], world_size: int) -> StageMemory:
    settings = parse_args(words, world_size)
    planning = settings.planning
    hardware = replace(catalog.load_hardware("cpu"), communicator_bytes_per_group=0)
    problem = Problem(
        topology=planning.topology, model=model_shape(settings.model, VOCAB_SIZE), hardware=hardware,
        options=planning.options(64), data_parallel=planning.data_parallel,
    )  # fmt: skip
    return MemoryModel(problem).peak_at(0)[0]


@pytest.mark.by_day("sharded, in bf16")
@pytest.mark.parametrize(
    "flags", ["", IN_BF16, SHARDED, f"{SHARDED} {IN_BF16}"], ids=["plain", "in bf16", "sharded", "sharded, in bf16"]
)
def test_what_is_kept_is_what_is_planned_to_the_byte(flags: str) -> None:
    words = command_line(f"{IN_16_BITS} {flags} --untie-embeddings-and-output-weights")
    kept, planned = run_ranks(2, kept_bytes, words, 2)[0], planned_bytes(words, 2)
    assert kept == [2 * one for one in (*planned[:3], planned.step_bytes)]
    assert (planned.step_bytes > 0) == (IN_BF16 in flags)
    assert planned.gradients_bytes == planned.weights_bytes * (1 if IN_BF16 in flags else 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtypes", "gradient", "state"),
    [
        ("", 4, 2 + 8),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 4, 2 + 4),
        ("--main-grads-dtype bf16 --exp-avg-dtype fp16 --exp-avg-sq-dtype bf16", 2, 2 + 4),
        ("--main-params-dtype fp16", 4, 2 + 8),
    ],
)
def test_what_fused_adam_keeps_is_what_is_planned_to_the_byte(dtypes: str, gradient: int, state: int) -> None:
    words = command_line(f"{IN_16_BITS} {AWARE} {dtypes} --untie-embeddings-and-output-weights")
    kept, planned = run_ranks_with(PINNED, 2, kept_with_fused_adam, words, 2)[0], planned_bytes(words, 2)
    assert kept == [2 * one for one in (*planned[:3], planned.step_bytes)]
    assert kept[1] == kept[0] / 2 * gradient
    assert kept[2] == kept[0] / 4 * state


@pytest.mark.nightly
@pytest.mark.parametrize("more", ["", f"{SHARDED} --overlap-grad-reduce"])
def test_gradients_in_bf16_train_and_resume(uninterrupted: Any, resumed: Any, more: str) -> None:
    """Within 1e-3 of fp32 gradients, which are not the same; resumed to the bit."""
    words = f"{IN_16_BITS} {more} {IN_BF16}"
    expected = uninterrupted(words, 2)
    plain = uninterrupted(f"{IN_16_BITS} {more}", 2)
    assert expected == pytest.approx(plain, rel=1e-3)
    assert expected != plain
    resumed(words, rel=0.0, abs=0.0)


FUSED_WORDS = (
    "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --lr-warmup-iters 0 --num-layers 1 --num-workers 0"
)


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


def train_fused(*extra: str, fused: bool = True) -> dict[int, float]:
    """Return iteration -> loss, on two ranks if the optimizer is shared among them."""
    words = command_line(FUSED_WORDS, f"--train-iters {LAST}", *extra)
    run = functools.partial(run_ranks_with, PINNED) if fused else run_ranks
    return run(1 + (SHARDED in words), train_on_this_rank, words, fused, timeout_s=100)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["", "--bf16", SHARDED])
def test_a_resumed_run_counts_on(tmp_path: Path, kind: str) -> None:
    """With a count that began anew the updates would be several times as large."""
    whole = train_fused(kind, f"--save {tmp_path} --save-interval {SAVED}")
    assert sorted(whole) == [1, 2, 3, 4]
    (tmp_path / checkpoint_files.TRACKER).write_text(str(SAVED))
    folder = checkpoint_files.latest(str(tmp_path))
    assert folder is not None
    groups = _groups(dist_checkpointing.load_common_state_dict(str(folder)))
    assert groups
    assert {group["step"] for group in groups} == {SAVED}, "Megatron-LM with a fused Adam looks for it there"
    rest = {3: whole[3], 4: whole[4]}
    assert train_fused(kind, f"--load {tmp_path}") == rest
    if kind == "":
        assert train_fused(f"--load {tmp_path}", fused=False) == pytest.approx(rest, rel=1e-6), "with torch's AdamW"


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
    plain = train_fused(f"--bf16 {SHARDED}")
    whole = train_fused("--bf16", AWARE, dtypes, f"--save {tmp_path} --save-interval {SAVED}")
    assert whole == pytest.approx(plain, rel=most, abs=0)
    (tmp_path / checkpoint_files.TRACKER).write_text(str(SAVED))
    rest = {3: whole[3], 4: whole[4]}
    assert train_fused("--bf16", AWARE, dtypes, f"--load {tmp_path}") == rest
    assert train_fused(f"--bf16 {SHARDED} --load {tmp_path}") == pytest.approx(rest, rel=most), (
        "weights, and not halves"
    )


def _groups(common: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that a checkpoint's common values have, wherever."""
    if isinstance(common, dict):
        own = common.get("param_groups", [])
        return [*own, *(group for value in common.values() if isinstance(value, dict) for group in _groups(value))]
    return []
