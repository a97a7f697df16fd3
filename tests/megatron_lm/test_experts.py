"""Experts of a checkout: its validated flags are checked, and its log has the losses of our routers."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.flags.experts import DEFAULTS
from megatron.dynamic_cp.step.routing import LayerRouting, Routing
from megatron.lm_adaptor import flags, step_log
from megatron.trainer.flags.validation import planning_settings
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.megatron_lm.test_flags import parse
from tests.trainer.test_experts import parsed

SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 16,
    "padded_vocab_size": 128,
    "swiglu": True,
    "untie_embeddings_and_output_weights": False,
}
"""Of a small dense model, as a checkout has validated them."""


def validated(**values: Any) -> Namespace:
    """Return arguments as Megatron-LM validates them: what is shared out as tensors are is said with a number."""
    args = parse("--dynamic-cp")
    theirs = {**DEFAULTS, "num_layers": 2, "add_bias_linear": False, "tensor_model_parallel_size": 1}
    theirs |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False}
    theirs |= {"group_query_attention": False, "num_attention_heads": 4}
    positions = {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": None}
    positions |= {"use_rope_scaling": False, "no_rope_freq": None}
    return Namespace(**{**vars(args), **theirs, **positions, **values})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_experts": 6, "expert_model_parallel_size": 4}, "--num-experts 6 is not a multiple of --expert-model-pa"),
        (
            {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            "--expert-tensor-parallel-size 2 is not supported: experts are shared out whole; give 1",
        ),
        (
            {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "it would depend on what is packed together",
        ),
        (
            {"num_experts": 4, "add_bias_linear": True, "swiglu": True, "bias_swiglu_fusion": True},
            "--num-experts with biases and --bias-swiglu-fusion is not supported",
        ),
        ({"num_experts": 4, "moe_permute_fusion": True}, "--moe-permute-fusion .* padding is never sent to experts"),
    ],
)
def test_validated_flags_are_checked(values: dict[str, Any], says: str) -> None:
    flags.refuse_loaded(validated())
    flags.refuse_loaded(validated(num_experts=4))
    with pytest.raises(DynamicCPError, match=says):
        flags.refuse_loaded(validated(**values))


def test_a_checkouts_experts_are_planned() -> None:
    arguments = parsed("--num-experts 8 --expert-model-parallel-size 2").arguments
    settings = planning_settings(Namespace(**arguments), auto_places=False)
    assert settings.topology.ep_size == 2


def logged_losses(num_micro_batches: int) -> dict[str, float]:
    """Return what Megatron-LM would log on a rank of two lanes: it divides by the micro-batches of its own count."""
    initialize_model_parallel()
    config = SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss", num_layers=3)
    router = SimpleNamespace(layer_number=2, number_in_model=2, config=config, weight=torch.zeros(1))
    routing = Routing(
        layers={2: LayerRouting(aux_loss=1.25, z_loss=4.5, imbalance=2.0)}, has_aux_loss=True, has_z_loss=True
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_log, "routers", lambda chunks: [router])
        step_log.tell_tracker(routing, [], num_micro_batches)
    totals: dict[str, Any] = {}
    names = ["seq_load_balancing_loss", "z_loss"]
    if step_log.differences.TRACKER_OF_ROUTERS.here:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        report = get_moe_metrics_tracker().report
    else:
        report = moe_utils.track_moe_metrics
    report(
        loss_scale=1 / num_micro_batches,
        iteration=1,
        total_loss_dict=totals,
        force_initialize=True,
        track_names=names,
        num_layers=3,
        moe_layer_freq=[0, 1, 0],
    )
    return {name: float(value) for name, value in totals.items()}


def test_the_log_of_a_checkout_has_the_means_over_tokens() -> None:
    for logged in run_ranks(2, logged_losses, 5):
        assert logged == pytest.approx({"seq_load_balancing_loss": 1.25, "z_loss": 4.5})
