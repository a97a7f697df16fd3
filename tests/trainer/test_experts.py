"""Experts on the command line: checked at once, trained and resumed on any sharing of them, and logged."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.flags.experts import CHOICES, DEFAULTS
from megatron.trainer.checkpoints import loading
from megatron.trainer.flags import derive
from megatron.trainer.setup import model
from tests.trainer.commandline import parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, run_command, train

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
SIGMOID = (
    f"{EXPERTS} --moe-router-topk 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0,1]*2 "
    "--moe-shared-expert-intermediate-size 48 --moe-router-load-balancing-type seq_aux_loss"
)
EP, TP = "--expert-model-parallel-size", "--tensor-model-parallel-size"


def test_flags_reach_megatron_core_and_the_planner() -> None:
    settings = parsed(f"{SIGMOID} {EP} 2")
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert (config.num_moe_experts, config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (8, 2, 1)
    assert config.moe_layer_freq == [0, 1, 0, 1]
    assert (config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk) == (4, 4, 2)
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.1, "seq_aux_loss")
    assert settings.planning.topology.ep_size == 2
    assert not settings.planning.auto_places
    shape = derive.model_shape(settings.model, 264)
    assert (shape.experts.num_experts, shape.experts.topk, shape.experts.shared_ffn_hidden_size) == (8, 4, 48)
    two = parsed(f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2")
    config = model.transformer_config(two.model, two.planning, torch.device("cpu"))
    assert config.moe_aux_loss_coeff == [0.1, 0.2]
    assert config.moe_ffn_hidden_size == 32


def test_what_is_not_given_is_megatron_cores_default() -> None:
    """But for the dispatcher, of which there is one."""
    settings = parsed("--num-experts 8")
    plain = parsed("")
    of_experts = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    dense = model.transformer_config(plain.model, plain.planning, torch.device("cpu"))
    for name in DEFAULTS.keys() - {"moe_ffn_hidden_size"}:
        assert getattr(of_experts, name) == getattr(dense, name), name
    assert of_experts.moe_ffn_hidden_size == of_experts.ffn_hidden_size


def identity(flags: str) -> dict[str, Any]:
    return derive.model_identity(parsed(flags).model, 264)


def test_a_checkpoint_of_other_experts_is_refused_in_both_directions() -> None:
    assert not CHOICES & identity("").keys()
    assert identity(f"{SIGMOID} {EP} 4") == identity(SIGMOID)
    assert identity(f"{EXPERTS} --moe-layer-freq 2") == identity(f"{EXPERTS} --moe-layer-freq [1,0]*2")
    for other in ("", f"{EXPERTS} --moe-router-topk 3", f"{EXPERTS} --moe-layer-freq 2"):
        for own, saved in ((other, EXPERTS), (EXPERTS, other)):
            with pytest.raises(CheckpointError, match=r"model (num_experts|moe_.*) = "):
                loading._check_identity({"model": identity(own)}, {"model": identity(saved)}, "folder")


RUN = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 --num-layers 2 {SIGMOID} --moe-layer-freq 1 {EP} 2"
"""Two ranks that share experts; biases of experts move, so that a resumed run needs them."""


@pytest.mark.nightly
def test_a_resumed_run_repeats_the_uninterrupted_one(uninterrupted: Any, saved_by: Any) -> None:
    resumed = train(2, RUN, TO_LAST, f"--load {saved_by(RUN, 2)}")
    assert sorted(resumed) == [SAVED + 1, SAVED + 2]
    assert losses(resumed) == uninterrupted(RUN, 2)[SAVED:]
    routing = resumed[SAVED + 1].routing
    assert sorted(routing.layers) == [1, 2]
    assert all(
        0.5 < layer.aux_loss < 4 and layer.z_loss > 0 and layer.imbalance > 1 for layer in routing.layers.values()
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        f"{EP} 4 --use-distributed-optimizer",
        f"{TP} 2 --sequence-parallel {EP} 1",
        f"--pipeline-model-parallel-size 2 {EP} 2 --use-distributed-optimizer",
    ],
)
def test_a_run_goes_on_with_experts_shared_otherwise(layout: str, uninterrupted: Any, saved_by: Any) -> None:
    resumed = train(4, RUN, TO_LAST, layout, f"--load {saved_by(RUN, 2)} --dynamic-cp-verify full")
    assert losses(resumed) == pytest.approx(uninterrupted(RUN, 2)[SAVED:], rel=1e-5)


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
