"""Features of models together: what is built is what is planned for, and a saved run goes on with another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models import catalog
from dynamic_cp.types import PlanOptions
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import model
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.trainer.commandline import command_line
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.test_experts import EP, SIGMOID, TP
from tests.trainer.test_latent_attention import LATENT, YARN
from tests.trainer.training_ranks import losses, train

DEEPSEEK = f"{LATENT} {YARN} {SIGMOID} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
PP2 = "--pipeline-model-parallel-size 2"
VOCAB_SIZE = 264


def parsed(flags: str, world_size: int) -> Any:
    return parse_args(command_line(f"--dynamic-cp {flags}"), world_size)


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
    memory = MemoryModel(shape, catalog.load_hardware("h100"), topology, PlanOptions(max_tokens_per_rank=64))
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


def test_a_resumed_run_is_that_of_another_layout(uninterrupted: Any, saved_by: Any, tmp_path: Path) -> None:
    """Experts on two lanes, then two stages of which the first has none; the module's router is told as the last."""
    words = f"{RUN} {EP} 2"
    other = f"{PP2} --use-distributed-optimizer --save {tmp_path} --save-interval {SAVED}"
    resumed = train(2, RUN, other, TO_LAST, f"--load {saved_by(words, 2)}")
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
