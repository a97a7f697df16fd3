"""Flags of pretrain_gpt.py for a setting."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from math import lcm
from typing import Any

from dynamic_cp.decide.comparison.settle import torchrun
from dynamic_cp.decide.config_json.architecture import Architecture, as_flags
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.stage_splits import flags_of
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS, Meaning
from dynamic_cp.models.table import flag_of
from dynamic_cp.types import (
    FP32_STATE,
    POOL_POLICIES,
    SHARDED,
    DataParallel,
    ModelShape,
    PlanOptions,
    StateDtypes,
)

_POLICY_FLAGS = {
    "dynamic": ("--dynamic-cp",),
    **{name: ("--dynamic-cp", f"--dynamic-cp-pool {use}") for name, use in POOL_POLICIES.items()},
    "balanced": ("--static-cp-policy balanced",),
    "static": (),
}
_VOCAB_MULTIPLE = 128
"""The trainer pads the vocabulary to a multiple of this unless it is told another."""


def why_not_trained(model: ModelShape, architecture: Architecture | None) -> str | None:
    """Return what of a model pretrain_gpt.py does not have, None where it trains it."""
    if not model.causal_attention:
        return "attention without a mask: this model is for planning"
    linear = model.linear_attention
    if linear is not None and not linear.has_delta_rule and not (model.layer_pattern and linear.kernel_size == 4):
        return "Mamba-2 is in patterns of layers alone, with a convolution of 4 tokens"
    if flags_of(model.pipeline_layers) is None:
        return f"no flags give stages the layers {[list(one) for one in model.pipeline_layers]}"
    return None if architecture is None or not architecture.not_trained else "; ".join(architecture.not_trained)


def launch_flags(
    setting: Setting,
    *,
    model: ModelShape,
    architecture: Architecture | None,
    hardware_name: str,
    max_seqlen: int,
    global_batch_size: int,
    options: PlanOptions | None = None,
    data_parallel: DataParallel = SHARDED,
    fp8: tuple[str | None, str | None] = (None, None),
) -> tuple[tuple[str, ...], ...]:
    """Return the flags, each with its value if it has one, in groups of one line: parallelism, dynamic CP, model. What
    is not here is the user's: data, tokenizer, learning rate, length of the run. `architecture` None: `assumed`;
    `options` are the planner's, None: those of the setting; `fp8`: --fp8-format and --fp8-recipe.
    UnsupportedFeatureError: what the trainer lacks of it."""
    if reason := why_not_trained(model, architecture):
        raise UnsupportedFeatureError(f"pretrain_gpt.py does not train this model: {reason}")
    flags = model_flags(model, architecture, tp_size=setting.topology.tp_size, max_seqlen=max_seqlen)
    words, of_norms = tuple(flags.values()), list(flags).index("normalization")
    return (
        _parallelism(setting, data_parallel),
        _planning(setting, hardware_name, options or setting.options()),
        _lengths(max_seqlen, global_batch_size, fp8, grouped=model.experts is not None and model.experts.grouped),
        _recompute(setting),
        words[:of_norms],
        words[of_norms:],
    )


def model_flags(
    model: ModelShape, architecture: Architecture | None, *, tp_size: int, max_seqlen: int = 0
) -> dict[str, str]:
    """Return name -> flag with its value if it has one, of the flags that decide the model, in the order of the table.
    TP pads the vocabulary, and --max-position-embeddings is at least `max_seqlen` of the run."""
    flags = as_flags(model, architecture)
    # What the weights were made for is no limit of RoPE, so a run may have longer samples.
    flags["max_position_embeddings"] = max(flags["max_position_embeddings"], max_seqlen)
    if model.vocab_size % lcm(_VOCAB_MULTIPLE, tp_size):
        flags["make_vocab_size_divisible_by"] = 1
    words = {name: _word(name, flags.get(name), means) for name, means in MEANINGS.items()}
    return {name: word for name, word in words.items() if word}


def _word(name: str, value: Any, means: Meaning) -> str:
    """Return a flag with its value, "" if that says what is so without it."""
    flag = flag_of(name)
    if value is False and means.usual is True:
        return flag.replace("--", "--no-", 1)
    if value is True and means.usual is not True:
        return flag
    if value in (None, "") or (not means.is_shown and value == (0 if means.usual is None else means.usual)):
        return ""
    text = str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
    return f"{flag} {shlex.quote(text)}"


def nodes_of(setting: Setting) -> tuple[int, int]:
    """Return (nodes of a job, ranks on each)."""
    topology = setting.topology
    per_node = min(topology.ranks_per_node, topology.world_size)
    return topology.world_size // per_node, per_node


def launcher(setting: Setting) -> str:
    """Return the torchrun words before the script."""
    return torchrun(*nodes_of(setting))


Flags = tuple[str, ...]


def _given(*flags: tuple[str, Any]) -> Flags:
    """Return the flags with their values, without those whose value is None or False; True: a flag without a value."""
    return tuple(
        name if value is True else f"{name} {value}"
        for name, value in flags
        if value is not None and value is not False
    )


def _parallelism(setting: Setting, data_parallel: DataParallel) -> Flags:
    topology = setting.topology
    return (
        f"--tensor-model-parallel-size {topology.tp_size}",
        f"--pipeline-model-parallel-size {topology.pp_size}",
        *((flags_of(setting.pipeline_layers) or ()) if topology.pp_size > 1 else ()),
        *_given(
            ("--num-virtual-stages-per-pipeline-rank", topology.vp_size > 1 and topology.vp_size),
            ("--expert-model-parallel-size", topology.ep_size > 1 and topology.ep_size),
            ("--sequence-parallel", topology.sequence_parallel),
            ("--use-distributed-optimizer", data_parallel.distributed_optimizer),
            ("--overlap-grad-reduce", data_parallel.overlap_grad_reduce),
            ("--overlap-param-gather", data_parallel.overlap_param_gather),
            *_dtypes(data_parallel.state),
        ),
    )


def _dtypes(state: StateDtypes) -> Iterator[tuple[str, Any]]:
    """Yield the flags of dtypes that are not the usual ones, and their values."""
    for name, value in asdict(state).items():
        if value != getattr(FP32_STATE, name):
            yield f"--{name.replace('_', '-')}", value


def _planning(setting: Setting, hardware_name: str, options: PlanOptions) -> Flags:
    search, states = options.search, options.state_exchange
    return _POLICY_FLAGS[setting.policy] + _given(
        ("--context-parallel-size", setting.static_cp_size),
        ("--max-dynamic-cp-size", setting.max_cp_size),
        ("--max-seqlen-per-dp-cp-rank", setting.max_tokens_per_rank),
        ("--loss-chunk-tokens", setting.loss_chunk_tokens or None),
        ("--cp-comm-type", setting.cp_comm_type),
        ("--dynamic-cp-state-exchange", states != "auto" and states),
        ("--dynamic-cp-hardware", shlex.quote(hardware_name)),
        ("--dynamic-cp-search", search != "fast" and search),
    )


def _lengths(max_seqlen: int, global_batch_size: int, fp8: tuple[str | None, str | None], *, grouped: bool) -> Flags:
    given = (f"--seq-length {max_seqlen}", f"--global-batch-size {global_batch_size}", "--bf16")
    return (*given, *_given(("--fp8-format", fp8[0]), ("--fp8-recipe", fp8[1]), ("--moe-grouped-gemm", grouped)))


def _recompute(setting: Setting) -> Flags:
    if setting.recompute == "full":
        method, number = setting.recompute_layers
        return "--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {number}"
    return ("--recompute-granularity selective",) if setting.recompute == "selective" else ()
