"""Low-rank adapters (LoRA) on megatron-core's parallel linear layers: y = W x + B A x * alpha / rank, W frozen.

    column   A [rank, in] on every TP rank, B [out / TP, rank]: A x is the same on all, its gradient a sum over them
    row      A [rank, in / TP], B [out, rank] on every TP rank: A x is a sum over them

With sequence parallelism each TP rank applies the whole weight (A in a column, B in a row) to its own tokens, so
megatron-core sums that weight's gradients over TP ranks, as those of norms. TP ranks send only `rank` channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from dynamic_cp.types import Adapters

NAME = "adapter"
INNER, OUTER = f"{NAME}.linear_in.weight", f"{NAME}.linear_out.weight"
"""Names of A and B in a checkpoint, behind the name of their layer."""


class Adapter(nn.Module):
    """A and B beside a linear layer, as one of its TP ranks holds them."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, adapters: Adapters) -> None:
        super().__init__()
        self._scale, self._group = adapters.scale, layer.tp_group
        self._splits_outputs = isinstance(layer, ColumnParallelLinear)
        self._sequence_parallel = layer.sequence_parallel
        weight = layer.weight
        kept = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.linear_in = nn.utils.skip_init(nn.Linear, weight.shape[1], adapters.rank, **kept)
        self.linear_out = nn.utils.skip_init(nn.Linear, adapters.rank, weight.shape[0], **kept)
        nn.init.zeros_(self.linear_out.weight)
        self._initialize_inner(layer.input_size)
        split, whole = self.linear_in, self.linear_out
        if self._splits_outputs:
            split, whole = whole, split
        set_tensor_model_parallel_attributes(split.weight, True, 0 if self._splits_outputs else 1, 1)
        whole.weight.sequence_parallel = self._sequence_parallel  # type: ignore[assignment]

    @torch.no_grad()
    def _initialize_inner(self, input_size: int) -> None:
        """Draw A as a whole on every TP rank, so that a run starts the same at any TP size."""
        weight = self.linear_in.weight
        whole = torch.empty(weight.shape[0], input_size, device=weight.device)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        share = weight.shape[1]
        first = 0 if self._splits_outputs else self._group.rank() * share
        weight.copy_(whole[:, first : first + share])

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the layer's output with the adapter's part, added by the product itself; x is the layer's input."""
        inner = self.linear_in(x)
        if self._splits_outputs and self._sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self._group)
        elif self._splits_outputs:
            inner = copy_to_tensor_model_parallel_region(inner, group=self._group)
        elif self._sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self._group)
        inner = (inner * self._scale).flatten(0, -2)  # narrower than the output
        return torch.addmm(output.flatten(0, -2), inner, self.linear_out.weight.t()).view_as(output)

    def sharded(self, layer: Any, prefix: str, offsets: Any, metadata: dict[str, Any], *, in_halves: bool) -> Any:
        """Return A and B as megatron-core saves them; `in_halves`: the layer's outputs are gates and values."""
        axes = {OUTER: 0} if self._splits_outputs else {INNER: 1}
        state = self.state_dict(prefix=f"{NAME}.", keep_vars=True)
        found = make_sharded_tensors_for_checkpoint(
            state, prefix, axes, offsets, tp_group=layer.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        if in_halves:
            outer = f"{prefix}{OUTER}"
            found[outer] = apply_swiglu_sharded_factory(
                found[outer], offsets, metadata.get("singleton_local_shards", False)
            )
        return found


class _Adapted:
    adapter: Adapter
    in_halves: bool

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return self.adapter(input_, output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        more = self.adapter.sharded(self, prefix, sharded_offsets, metadata, in_halves=self.in_halves)
        return {**state, **more}


class AdaptedColumnParallelLinear(_Adapted, ColumnParallelLinear):
    """megatron-core's layer with an adapter."""


class AdaptedRowParallelLinear(_Adapted, RowParallelLinear):
    """megatron-core's layer with an adapter."""


_WITH_ADAPTER = {ColumnParallelLinear: AdaptedColumnParallelLinear, RowParallelLinear: AdaptedRowParallelLinear}


def train_adapters_only(chunk: Any, adapters: Adapters) -> None:
    """Give the layers of a model chunk adapters and freeze all else. Layers change their class, whichever spec built
    them: weights, names and places in a checkpoint stay. The embedding's output requires a gradient, because
    recomputation repeats nothing without one."""
    chunk.requires_grad_(False)
    chunk.config.moe_router_bias_update_rate = 0.0  # biases of experts are no adapters
    for path, layer in list(chunk.named_modules()):
        name = path.rpartition(".")[2]
        if name in adapters.modules and type(layer) in _WITH_ADAPTER:
            layer.__class__ = _WITH_ADAPTER[type(layer)]
            layer.adapter = Adapter(layer, adapters)
            layer.in_halves = name == "linear_fc1" and chunk.config.gated_linear_unit
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(lambda _module, _inputs, embedded: embedded.requires_grad_())
