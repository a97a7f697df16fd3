"""Planned micro-batches for a transformers causal or masked LM, and for accelerate.

    use_dynamic_cp(model)                                     # its attention becomes ours
    lanes = lanes_of(accelerator, problem_of(model.config, num_lanes, options))
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: each rank gets whole global batches
    for step in lanes.agreed(DataLoader(..., collate_fn=PlannedCollator(lanes.problem, lanes.lane))):
        result = train_step(lanes, model, step, causal_lm_loss, backward=accelerator.backward)

accelerate's rules for context parallelism hold: labels are shifted before sharding, and losses are weighted by tokens
over all ranks. Its `cp_size` is something else: torch's context_parallel, with one degree, for unpacked sequences. An
encoder (BERT, ModernBERT with full layers) attends to its whole sequence, and takes `masked_lm_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dynamic_cp.decide.config_json.hugging_face import model_shape
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import PlanOptions, Problem, Topology, Tree
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.integrations.outside.collator import IGNORED
from megatron.integrations.outside.lanes import Lanes
from megatron.integrations.outside.models import (
    Trial,
    first_position,
    linear_layers_of,
    shift_positions,
    use_linear_layers,
)
from megatron.integrations.outside.step import scaled_dot_product_attention

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "dynamic_cp"
"""Name of our attention among those of transformers."""

_OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")
_ROPE_BY_BATCH = ("dynamic", "longrope")


def problem_of(
    config: PretrainedConfig, num_lanes: int, options: PlanOptions, *, hardware: str = "h100", ranks_per_node: int = 8
) -> Problem:
    """Return the planning problem of a transformers model; UnsupportedFeatureError for a model_type of unknown shape.
    `hardware` is a bundled name or the path of a hardware file."""
    return Problem(
        topology=Topology(num_lanes=num_lanes, ranks_per_node=ranks_per_node),
        model=model_shape("the model's config", config.to_dict()),
        hardware=load_hardware(hardware),
        options=options,
    )


def use_dynamic_cp(model: PreTrainedModel) -> None:
    """Give a causal or masked LM our attention, for packed micro-batches only; before it is wrapped. Raises
    UnsupportedFeatureError: attention dropout, layers with neither full nor linear attention, RoPE that depends on the
    longest position of a batch, attention that is not from transformers' interface; or as `linear_layers_of` and
    `first_position`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    for name in ("attention_dropout", "attention_probs_dropout_prob"):
        if dropout := getattr(config, name, 0.0):
            raise UnsupportedFeatureError(
                f"the model has {name} {dropout}, our attention only 0: set config.{name} = 0.0"
            )
    layers = set(getattr(config, "layer_types", None) or ())
    if others := layers - {"full_attention", "linear_attention", "mlp", "moe"}:
        windows = " --window-size" * ("sliding_attention" in others)
        raise UnsupportedFeatureError(
            f"the model has layers of type {', '.join(sorted(others))}, ours are full_attention and linear_attention: "
            f"train it with Megatron's layers (dynamic-cp weights, pretrain_gpt.py{windows}), or use another model"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = (rope, *(entry for entry in rope.values() if isinstance(entry, dict)))  # for each type, or for all
    rope_type = next((one for entry in of_layers if (one := entry.get("rope_type")) in _ROPE_BY_BATCH), None)
    if rope_type is not None:
        raise UnsupportedFeatureError(
            f"the model has RoPE of type {rope_type!r}, whose angles depend on the longest position of a batch, and a "
            "lane holds a part of it only: use default, linear, llama3 or yarn"
        )
    linear = linear_layers_of(model)
    AttentionInterface.register(ATTENTION, attention_forward)
    # Without an entry of its own transformers would drop a caller's attention_mask without a word.
    AttentionMaskInterface.register(ATTENTION, no_mask)
    model.set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise UnsupportedFeatureError(
            f"{type(model).__name__} keeps its attention {config._attn_implementation!r}, {ATTENTION!r} is needed: it "
            "does not take attention from transformers' AttentionInterface; use another model"
        )
    use_linear_layers(linear)
    if first := first_position(model):
        model.register_forward_pre_hook(shift_positions(first), with_kwargs=True)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool | None = None,
    packed_seq_params: DynamicPackedSeqParams | Trial | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ([1, T, heads, dim], None): attention as transformers calls it.

    Args:
        query: [1, heads, T, dim]; key, value: [1, kv_heads, T, dim].
        packed_seq_params: of the micro-batch; transformers hands on what `model(...)` was called with.

    Raises InvalidInputError: the model was called without packed_seq_params. Raises UnsupportedFeatureError: see
    `scaled_dot_product_attention`; or a window, sinks, a cap or a bias."""
    if packed_seq_params is None:
        raise InvalidInputError(
            f"{ATTENTION!r} attention got 0 packed_seq_params, 1 is needed: call the model with model_inputs(batch) of "
            "a planned micro-batch, or set_attn_implementation('sdpa') for anything else, such as generate()"
        )
    for name in _OTHER_ATTENTION:
        if others.get(name) is not None:
            raise UnsupportedFeatureError(
                f"attention with {name} is not supported for packed micro-batches: train a model that has it with "
                "Megatron's layers, if these have it (docs/flags.md), or use another model"
            )
    if isinstance(packed_seq_params, Trial):
        packed_seq_params.attend(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        packed_seq_params=packed_seq_params,
    )
    return out.transpose(1, 2), None


def no_mask(*_sizes: Any, attention_mask: Tensor | None = None, **_others: Any) -> None:
    """Make no mask, where transformers asks for one: packed_seq_params has the boundaries of documents. Raise
    UnsupportedFeatureError if the model was called with an attention_mask."""
    if attention_mask is not None:
        raise UnsupportedFeatureError(
            f"the model was called with an attention_mask of shape {tuple(attention_mask.shape)}, packed micro-batches "
            "have none: leave it out; padding has no loss and documents do not see each other"
        )


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return an LM's arguments for a micro-batch; labels of a causal one are shifted already, -100 without a loss."""
    labels = torch.where(batch["loss_mask"] > 0, batch["labels"], IGNORED)
    return {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "labels": labels,
        "shift_labels": labels,
        "packed_seq_params": batch["packed_seq_params"],
        "use_cache": False,
    }


def causal_lm_loss(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the sum of the losses of the lane's tokens by the model's own loss function, for `train_step`. With trees
    of turns it is cross-entropy, because tokens that branches share count several times."""
    params: DynamicPackedSeqParams = batch["packed_seq_params"]
    samples = params.masked_samples if params.placed is None else params.placed.samples
    if any(isinstance(sample.mask, Tree) for sample in samples or ()):
        return (_cross_entropy(model, batch, "none") * batch["loss_mask"].flatten()).sum()
    return model(**model_inputs(batch), num_items_in_batch=1).loss


def masked_lm_loss(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the same for a masked LM, by cross-entropy, because some models' own losses are means only."""
    return _cross_entropy(model, batch, "sum")


def _cross_entropy(model: torch.nn.Module, batch: dict[str, Any], reduction: str) -> Tensor:
    inputs = model_inputs(batch)
    labels = inputs.pop("labels")
    del inputs["shift_labels"]
    logits = model(**inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def lanes_of(accelerator: Accelerator, problem: Problem, *, timeout_s: float = 600.0) -> Lanes:
    """Return the lanes of an accelerate job: all its processes. Collective. UnsupportedFeatureError: parallelism that
    takes ranks from the plan, or gradient accumulation, which the plan's micro-batches are."""
    config = accelerator.parallelism_config
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(config, name, 1) or 1
        if size > 1:
            raise UnsupportedFeatureError(
                f"ParallelismConfig({name}={size}) on {accelerator.num_processes} processes cannot be combined with "
                f"planned micro-batches: accelerate would shard a batch at the one degree {size}, without masking "
                f"documents; leave {name} at 1, a plan chooses the CP size of each micro-batch among all processes"
            )
    if accelerator.gradient_accumulation_steps != 1:
        raise UnsupportedFeatureError(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, 1 is needed: a step already "
            "has the micro-batches of its plan; raise the global batch size instead"
        )
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("lanes",))
    return Lanes.build(mesh, problem, timeout_s=timeout_s)
