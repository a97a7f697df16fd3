"""Every place of a run where the host waits for the device: why, and what it is told in a run on fake tensors.

One dictionary for start-up and one for a step; a wait anywhere else fails the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fake_cuda.tensors import Answer


def _agreed(variables: Mapping[str, Any]) -> list[int]:
    """Return that all ranks have this one's digest and no error."""
    assert variables["error"] is None, variables["error"]
    return [0, variables["prefix"], -variables["prefix"]]


def _sums(variables: Mapping[str, Any]) -> list[float]:
    """Return a loss of 2 over one token; nobody stops or writes, and CPU time is not counted."""
    return [2.0, 1.0, float(variables["exchanged_bytes"]), 0.0, 0.0, 0.0]


AGREE = Answer(why="all ranks learn whether one failed before anything of the step is sent", value=_agreed)

IN_A_STEP = {
    "megatron.dynamic_cp.agreement.verify:agree": AGREE,
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": Answer(
        why="megatron-core asks whether there are tokens before it divides gradients by their number", value=lambda _: 1
    ),
    "megatron.dynamic_cp.step.schedule:sum_over_job": Answer(
        why="the loss of the log line, and whether a rank stops", value=_sums
    ),
    "megatron.core.utils:local_multi_tensor_l2_norm": Answer(
        why="megatron-core's norm of each gradient without TransformerEngine or Apex, parameter by parameter",
        value=lambda _: 1.0,
    ),
    "megatron.core.optimizer.clip_grads:get_grad_norm_fp32": Answer(
        why="the norm of all gradients: what they are clipped by, and the log line", value=lambda _: 1.0
    ),
}

NOW_AND_THEN = {
    "megatron.dynamic_cp.step.bucket_times:gather": Answer(
        why="--dynamic-cp-refine: the times of all ranks, every so many steps",
        value=lambda variables: (
            variables["mine"] if "gathered" in variables else [len(variables["mine"]), -len(variables["mine"])]
        ),
    )
}

BEFORE_A_PASS = {
    "megatron.dynamic_cp.agreement.verify:agree": AGREE,
    "megatron.integrations.post_training.losses:count_tokens": Answer(why="whether a loss mask is no whole number"),
    "megatron.integrations.post_training.losses:of": Answer(
        why="the tokens and responses that a mean is over", value=lambda variables: len(variables["counts"])
    ),
}
"""Of a training pass of post-training."""

AT_START = {
    "megatron.dynamic_cp.agreement.verify:agree": AGREE,
    "megatron.dynamic_cp.attention.kernels.choice:_inputs": Answer(why="inputs of the kernels' check"),
    "megatron.dynamic_cp.attention.kernels.choice:<listcomp>": Answer(why="inputs of the kernels' check"),
    "megatron.dynamic_cp.attention.kernels.choice:_error": Answer(
        why="each result of the kernel is compared with the portable one's", value=lambda _: 0.004
    ),
    "megatron.dynamic_cp.attention.linear.kernels:random": Answer(why="inputs of the kernels' check"),
    "megatron.dynamic_cp.attention.linear.kernels:check_linear_kernel": Answer(
        why="each result of the kernel is compared with the portable one's", value=lambda _: 0.004
    ),
    "megatron.dynamic_cp.groups.first_exchange:_check": Answer(
        why="what the first exchanges of a group brought", value=lambda variables: variables["expected"]
    ),
    "megatron.dynamic_cp.packed_seq_params:build": Answer(why="boundaries of warm-up packs"),
    "megatron.trainer.setup.model:wrap_chunks": Answer(why="norms are made on the CPU"),
    "megatron.core.optimizer:_get_param_groups": Answer(why="megatron-core compares the kinds of parameters of ranks"),
    "megatron.core.optimizer.optimizer:__init__": Answer(why="megatron-core's flag of an overflow"),
}
