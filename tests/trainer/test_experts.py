"""Experts, and features of models together: checked at once, planned as built, trained, resumed, and logged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamic_cp.errors import CheckpointError, InvalidInputError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models import catalog
from dynamic_cp.types import PlanOptions, Problem
from megatron.dynamic_cp.flags.experts import DEFAULTS
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.dynamic_cp.model.layer_parts import quick_gelu
from megatron.trainer.checkpoints import checkpoint_files, loading
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import fusions, model
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.trainer.commandline import command_line, parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.test_model_flags import LATENT
from tests.trainer.test_model_flags import LATENT_YARN as YARN
from tests.trainer.training_ranks import VOCAB_SIZE, config_of, identity_of, losses, run_command, train

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
SIGMOID = (
    f"{EXPERTS} --moe-router-topk 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0,1]*2 "
    "--moe-shared-expert-intermediate-size 48 --moe-router-load-balancing-type seq_aux_loss"
)
EP, TP = "--expert-model-parallel-size", "--tensor-model-parallel-size"


def test_flags_reach_megatron_core_and_the_planner() -> None:
    settings = parsed(f"{SIGMOID} {EP} 2")
    config = config_of(settings)
    assert (config.num_moe_experts, config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (8, 2, 1)
    assert config.moe_layer_freq == [0, 1, 0, 1]
    assert (config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk) == (4, 4, 2)
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.1, "seq_aux_loss")
    assert settings.planning.topology.ep_size == 2
    assert not settings.planning.auto_places
    shape = model_shape(settings.model, 264)
    assert (shape.experts.num_experts, shape.experts.topk, shape.experts.shared_ffn_hidden_size) == (8, 4, 48)
    two = parsed(f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2")
    config = config_of(two)
    assert config.moe_aux_loss_coeff == [0.1, 0.2]
    assert config.moe_ffn_hidden_size == 32


def test_what_is_not_given_is_megatron_cores_default() -> None:
    """But for the dispatcher, of which there is one."""
    settings = parsed("--num-experts 8")
    plain = parsed("")
    of_experts = config_of(settings)
    dense = config_of(plain)
    for name in DEFAULTS.keys() - {"moe_ffn_hidden_size"}:
        assert getattr(of_experts, name) == getattr(dense, name), name
    assert of_experts.moe_ffn_hidden_size == of_experts.ffn_hidden_size


def test_a_checkpoint_of_other_experts_is_refused_in_both_directions() -> None:
    assert not [name for name in identity_of("") if name.startswith("moe_") or name == "num_experts"]
    assert identity_of(f"{SIGMOID} {EP} 4") == identity_of(SIGMOID)
    assert identity_of(f"{EXPERTS} --moe-layer-freq 2") == identity_of(f"{EXPERTS} --moe-layer-freq [1,0]*2")
    for other in ("", f"{EXPERTS} --moe-router-topk 3", f"{EXPERTS} --moe-layer-freq 2"):
        for own, saved in ((other, EXPERTS), (EXPERTS, other)):
            with pytest.raises(CheckpointError, match=r"model (num_experts|moe_.*) = "):
                loading._check_identity({"model": identity_of(own)}, {"model": identity_of(saved)}, "folder")


RUN = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 --num-layers 2 {SIGMOID} --moe-layer-freq 1 {EP} 2"
"""Two ranks that share experts; biases of experts move, so that a resumed run needs them."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        f"{EP} 4 --use-distributed-optimizer",
        f"{TP} 2 --sequence-parallel {EP} 1",
        f"--pipeline-model-parallel-size 2 {EP} 2 --use-distributed-optimizer",
    ],
)
def test_a_run_goes_on_with_experts_shared_otherwise(layout: str, resumed: Any) -> None:
    resumed(RUN, f"{layout} --dynamic-cp-verify full", on=4)


def test_experts_learn_nothing_from_evaluations() -> None:
    """Their biases would: they move by the tokens that are counted, and what moved them shows an iteration later."""
    words = f"{RUN} --train-iters 3 --lr-decay-iters 8 --global-batch-size 6"
    evaluated = train(2, words, "--eval-interval 1 --eval-iters 2")
    assert losses(evaluated) == losses(train(2, words))


def test_the_log_has_the_routers(capfd: Any) -> None:
    ended = run_command(1, f"--dynamic-cp --mock-data --num-layers 2 {EXPERTS} --train-iters 1 --lr-warmup-iters 0")
    assert [rank.code for rank in ended] == [0], ended[0].stderr
    line = next(line for line in capfd.readouterr().out.splitlines() if "iteration        1/" in line)
    found = re.search(r"load_balancing_loss: (\S+) \| z_loss: (\S+) \|.* \| imbalance of experts: (\S+) \|", line)
    assert found is not None, line
    aux, z, imbalance = map(float, found.groups())
    # A new router is nearly even: log(8)^2 of equal logits.
    assert 0.9 < aux < 1.3
    assert 4.0 < z < 5.0
    assert 1.0 < imbalance < 4.0


def test_what_only_other_layers_have_is_refused_before_the_model_is_built() -> None:
    (ended,) = run_command(1, f"--dynamic-cp --mock-data {EXPERTS} --moe-grouped-gemm")
    assert ended.code == 2
    assert ended.error == (
        "--moe-grouped-gemm is for TransformerEngine's layers, the layers of this run are local: leave it out"
    )


DEEPSEEK = f"{LATENT} {YARN} {SIGMOID} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
PP2 = "--pipeline-model-parallel-size 2"


def count_weights(flags: str, world_size: int) -> tuple[int, int]:
    """Return the weights of this rank but those of routed experts, and theirs."""
    settings = parsed(flags, world_size)
    topology = settings.planning.topology
    initialize_model_parallel(topology.tp_size, topology.pp_size, None, topology.ep_size)
    config = config_of(settings)
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
    shape = model_shape(settings.model, VOCAB_SIZE)
    memory = MemoryModel(
        Problem(
            topology=topology, model=shape, hardware=catalog.load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",)),
        )
    )  # fmt: skip
    stages = range(topology.pp_size)
    planned = [memory.num_weights(stage) for stage in stages], [memory.num_expert_weights(stage) for stage in stages]
    built = run_ranks(world_size, count_weights, flags, world_size)
    # Stages are planned with the mean of their layers; ranks of a stage are neighbours.
    of_stages = built[:: world_size // topology.pp_size]
    assert sum(planned[0]) == sum(others for others, _ in of_stages)
    assert sum(planned[1]) == sum(routed for _, routed in of_stages) > 0
    if topology.pp_size == 1:
        assert shape.num_parameters == planned[0][0] + topology.ep_size * planned[1][0]


DEEPSEEK_RUN = (
    f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 {DEEPSEEK} --num-layers 2 --moe-layer-freq [0,1]"
)
DEEPSEEK_RUN += " --global-batch-size 6"


def test_a_resumed_run_is_that_of_another_layout(resumed: Any, tmp_path: Path) -> None:
    """Experts on two lanes, then on two stages of two; the first has none, the module's router is told as the last."""
    other = f"{PP2} {EP} 2 --use-distributed-optimizer --save {tmp_path} --save-interval {SAVED}"
    routing = resumed(f"{DEEPSEEK_RUN} {EP} 2", other, on=4, base=DEEPSEEK_RUN)[SAVED + 1].routing
    assert sorted(routing.layers) == [2, 3]
    assert all(layer.imbalance > 1 and layer.aux_loss > 0.5 for layer in routing.layers.values())


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
    config = config_of(settings)
    assert config.activation_func is quick_gelu
    assert (config.gated_linear_unit, config.activation_func_clamp_value, config.glu_linear_offset) == (True, 7.0, 1.0)
    assert (config.add_bias_linear, config.softmax_type, config.window_size) == (True, "learnable", (31, 0))
    shape = model_shape(settings.model, VOCAB_SIZE)
    assert (shape.gated_linear_unit, shape.num_windowed_layers) == (True, 2)
    identity = derive.model_identity(settings.model, VOCAB_SIZE)
    assert (identity["glu_linear_offset"], identity["activation_func_clamp_value"]) == (1.0, 7.0)
    assert "quick_geglu" not in identity_of("")
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
