"""Features of models together: what is built is what is planned for, and a saved run goes on with another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models import catalog
from dynamic_cp.types import PlanOptions, Problem
from megatron.dynamic_cp.model.layer_parts import quick_gelu
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import fusions, model
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.trainer.commandline import command_line, parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.test_experts import EP, EXPERTS, SIGMOID, TP
from tests.trainer.test_latent_attention import LATENT, YARN
from tests.trainer.training_ranks import losses, train

DEEPSEEK = f"{LATENT} {YARN} {SIGMOID} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
PP2 = "--pipeline-model-parallel-size 2"
VOCAB_SIZE = 264


def count_weights(flags: str, world_size: int) -> tuple[int, int]:
    """Return the weights of this rank but those of routed experts, and theirs."""
    settings = parsed(flags, world_size)
    topology = settings.planning.topology
    initialize_model_parallel(topology.tp_size, topology.pp_size, None, topology.ep_size)
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    routed = others = 0
    for chunk in model.build_chunks(settings.model, config, VOCAB_SIZE, "local"):
        for name, parameter in chunk.named_parameters():
            if ".local_experts." in name:
                routed += parameter.numel()
            else:
                others += parameter.numel()
    return others, routed


@pytest.mark.parametrize("layout", [f"{EP} 2", f"{PP2} {EP} 2 --moe-layer-freq [0]+[1]*3"])
def test_the_planner_knows_the_weights_that_are_built(layout: str) -> None:
    flags, world_size = f"{DEEPSEEK} {layout} --untie-embeddings-and-output-weights", 4
    settings = parsed(flags, world_size)
    topology = settings.planning.topology
    shape = derive.model_shape(settings.model, VOCAB_SIZE)
    memory = MemoryModel(
        Problem(
            topology=topology,
            model=shape,
            hardware=catalog.load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",)),
        )
    )
    stages = range(topology.pp_size)
    planned = [memory.num_weights(stage) for stage in stages], [memory.num_expert_weights(stage) for stage in stages]
    built = run_ranks(world_size, count_weights, flags, world_size)
    # Stages are planned with the mean of their layers; ranks of a stage are neighbours.
    of_stages = built[:: world_size // topology.pp_size]
    assert sum(planned[0]) == sum(others for others, _ in of_stages)
    assert sum(planned[1]) == sum(routed for _, routed in of_stages) > 0
    if topology.pp_size == 1:
        assert shape.num_parameters == planned[0][0] + topology.ep_size * planned[1][0]


RUN = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 {DEEPSEEK} --num-layers 2 --moe-layer-freq [0,1]"
RUN += " --global-batch-size 6"


def test_a_resumed_run_is_that_of_another_layout(uninterrupted: Any, saved_by: Any, tmp_path: Path) -> None:
    """Experts on two lanes, then on two stages of two; the first has none, the module's router is told as the last."""
    words = f"{RUN} {EP} 2"
    other = f"{PP2} {EP} 2 --use-distributed-optimizer --save {tmp_path} --save-interval {SAVED}"
    resumed = train(4, RUN, other, TO_LAST, f"--load {saved_by(words, 2)}")
    assert losses(resumed) == pytest.approx(uninterrupted(words, 2)[SAVED:], rel=1e-5)
    routing = resumed[SAVED + 1].routing
    assert sorted(routing.layers) == [2, 3]
    assert all(layer.imbalance > 1 and layer.aux_loss > 0.5 for layer in routing.layers.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        f"{EP} 4 --use-distributed-optimizer",
        f"{TP} 2 --sequence-parallel {EP} 2",
        f"{PP2} {EP} 2",
        f"{PP2} {EP} 2 --use-distributed-optimizer",
    ],
)
def test_a_run_goes_on_on_four_ranks(layout: str, uninterrupted: Any, saved_by: Any) -> None:
    words = f"{RUN} {PP2} --use-distributed-optimizer"
    resumed = train(4, RUN, layout, TO_LAST, f"--load {saved_by(words, 2)} --dynamic-cp-verify full")
    assert losses(resumed) == pytest.approx(uninterrupted(words, 2)[SAVED:], rel=1e-5)


OSS = (
    f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 {EXPERTS} --moe-router-topk 4 --quick-geglu "
    "--activation-func-clamp-value 7 --glu-linear-offset 1 --softmax-type learnable --window-size 31,0 "
    "--window-attn-skip-freq 2 --position-embedding-type yarn --rotary-scaling-factor 4 "
    "--no-yarn-correction-range-round-to-int"
)
NOT_OSS = ("--swiglu", "--disable-bias-linear")


def oss(flags: str = "") -> Any:
    return parse_args([word for word in command_line(f"{OSS} {flags}") if word not in NOT_OSS], 4)


def test_flags_of_gpt_oss_reach_megatron_core() -> None:
    settings = oss()
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert config.activation_func is quick_gelu
    assert (config.gated_linear_unit, config.activation_func_clamp_value, config.glu_linear_offset) == (True, 7.0, 1.0)
    assert (config.add_bias_linear, config.softmax_type, config.window_size) == (True, "learnable", (31, 0))
    shape = derive.model_shape(settings.model, VOCAB_SIZE)
    assert (shape.gated_linear_unit, shape.num_windowed_layers) == (True, 2)
    identity = derive.model_identity(settings.model, VOCAB_SIZE)
    assert (identity["glu_linear_offset"], identity["activation_func_clamp_value"]) == (1.0, 7.0)
    assert "quick_geglu" not in derive.model_identity(parsed("", 4).model, VOCAB_SIZE)
    assert fusions._decide(settings.model, torch.device("cpu")).activation is False
    for asked in ("--bias-swiglu-fusion", "--bias-gelu-fusion"):
        with pytest.raises(InvalidInputError, match=f"{asked} is not for this model, which has --quick-geglu"):
            oss(asked)


@pytest.mark.nightly
def test_gpt_oss_goes_on_with_experts_shared_otherwise(tmp_path: Path) -> None:
    """Its experts' biases among what is saved; on two lanes, then on two stages."""
    first = train(2, OSS, f"{EP} 2 {TO_LAST} --save {tmp_path} --save-interval {SAVED}", without=NOT_OSS)
    (tmp_path / checkpoint_files.TRACKER).write_text(f"{SAVED}\n")
    resumed = train(2, OSS, f"{PP2} {TO_LAST} --load {tmp_path}", without=NOT_OSS)
    assert losses(resumed) == pytest.approx(losses(first)[SAVED:], rel=1e-5)


@pytest.mark.nightly
def test_placed_attention_learns_the_same_with_experts() -> None:
    """As the ring does; no loss counts the tokens of a sample."""
    words = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 {SIGMOID} --moe-aux-loss-coeff 0"
    ring, placed = (
        losses(train(2, words, f"--moe-layer-freq 1 --train-iters 3 --cp-comm-type {exchange}"))
        for exchange in ("p2p", "blocks")
    )
    assert placed == pytest.approx(ring, rel=1e-5)
