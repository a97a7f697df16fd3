"""Layers of linear attention in the place of self-attention: gated delta nets (Qwen3-Next) and Mamba-2.

A layer has projections, a convolution and gates, shared out by heads over TP. Parameters and their names, also in
checkpoints, are those of megatron-core's GatedDeltaNet and MambaMixer, whose constructors ask for kernels of GPUs:
checkpoints go to them and come from them. What tokens do to each other is in `attention.linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron.dynamic_cp.attention.linear import thd
from megatron.dynamic_cp.attention.linear.portable import computed_again
from megatron.dynamic_cp.attention.packs import exact_dtype
from megatron.dynamic_cp.flags.linear_attention import linear_attention_of
from megatron.dynamic_cp.model.adapters import NAME, OUTER
from megatron.dynamic_cp.model.layer_parts import TorchNorm
from megatron.dynamic_cp.model.self_attention import check_groups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

Offsets = tuple[tuple[int, int, int], ...]
TOGETHER = "convolved"
"""Of a token's sections those together that are convolved."""
DECAY_RANGE = 1.0, 16.0
"""Of which decay rates are drawn, as in megatron-core."""
STEP_RANGE = 0.001, 0.1
"""Of which steps dt are drawn, by their logarithm; and the norm's epsilon: as in megatron-core, which has no flags."""
EPSILON = 1e-5


class Projections(NamedTuple):
    """Classes of a layer's matrices: megatron-core's, or TransformerEngine's, whose first one has the norm inside."""

    in_proj: type = ColumnParallelLinear
    out_proj: type = RowParallelLinear


LOCAL = Projections()


class LinearAttentionLayer(MegatronModule):
    """In a transformer layer in the place of self-attention; a kind says which sections its projection has.

    Attributes:
        sizes: of this tensor-parallel rank.
        rows: section of the first projection -> its rows on this rank.
        channels: those sections that are convolved.
    """

    CONVOLVED: ClassVar[tuple[str, ...]]
    HAS_BIAS: ClassVar[bool]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        submodules: Projections = LOCAL,
        **_unused: Any,
    ) -> None:
        check_groups(pg_collection)
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        attention = linear_attention_of(config)
        assert attention is not None
        self.tp_size: int = self.tp_group.size()
        self.sizes = attention.of_rank(self.tp_size)
        self.rows = self._sections()
        self.channels = {name: self.rows[name] for name in self.CONVOLVED}
        # What is convolved follows each other: no copy of it is needed.
        others = [(name, rows) for name, rows in self.rows.items() if name not in self.channels]
        first = list(self.rows).index(self.CONVOLVED[0])
        self._parts = dict([*others[:first], (TOGETHER, sum(self.channels.values())), *others[first:]])
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            sum(self.rows.values()) * self.tp_size,
            config=config,
            init_method=self._draw_in_sections,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
        )
        self.conv1d = self._convolution()
        self.A_log = self._of_heads(lambda heads: torch.empty(heads).uniform_(*DECAY_RANGE).log())
        self.out_proj = submodules.out_proj(
            self.sizes.value_channels * self.tp_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )
        repeated = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.repeats_core, self.drops_normed = "core_attn" in repeated, "gdn_norm_out" in repeated

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_unused: Any,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **_also_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output [T, 1, hidden size], None); with sequence parallelism T is a share of the tokens."""
        params = DynamicPackedSeqParams.checked(packed_seq_params)
        projected, _ = self.in_proj(hidden_states)
        sections = dict(zip(self._parts, projected.squeeze(1).split(list(self._parts.values()), dim=-1), strict=True))
        if params.cp_group.size() > 1 and not self.repeats_core:
            # Lanes convolve what they exchange, and z alone would keep the whole projection.
            sections["z"] = sections["z"].contiguous()
        dropped = CheckpointWithoutOutput() if self.drops_normed and self.training else None
        found = self._attended(sections, params)
        if dropped is None:
            attended = self._gated(found, sections["z"])
        else:
            attended = dropped.checkpoint(self._gated, found, sections["z"])
        output: tuple[Tensor, Tensor | None] = self.out_proj(attended.unsqueeze(1))
        if dropped is not None:
            dropped.discard_output_and_register_recompute(output[0])
        return output

    def _sections(self) -> dict[str, int]:
        """Return the rows of each section of the first projection on this rank."""
        raise NotImplementedError

    def _attended(self, sections: Mapping[str, Tensor], params: DynamicPackedSeqParams) -> Tensor:
        """Return the output of the heads, [T, heads * value width]. Sections, [T, rows], that are convolved are one."""
        raise NotImplementedError

    def _gated(self, found: Tensor, z: Tensor) -> Tensor:
        """Return what heads found, [T, heads * value width], gated and normalized."""
        raise NotImplementedError

    def _core(self, attend: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Return `attend(*given)`, which backward computes again where core attention is recomputed."""
        if self.repeats_core and self.training:
            found: Tensor = tensor_parallel.checkpoint(attend, False, *given)
            return found
        return attend(*given)

    def _draw_in_sections(self, weight: Tensor) -> None:
        """Draw the first projection alike for any number of TP ranks, where they draw it as a whole: on the CPU.
        megatron-core cuts the whole by ranks, so that its rows come in that order: of each rank, of each section."""
        self.config.init_method(weight)
        if self.tp_size > 1 and len(weight) == sum(self.rows.values()) * self.tp_size:
            sections = weight.split([rows * self.tp_size for rows in self.rows.values()])
            shares = zip(*(section.chunk(self.tp_size) for section in sections), strict=True)
            with torch.no_grad():
                weight.copy_(torch.cat([part for of_rank in shares for part in of_rank]))

    def _of_heads(self, draw: Callable[[int], Tensor]) -> torch.nn.Parameter:
        """Return a parameter with a number for each head of this rank; drawn alike for any number of TP ranks."""
        values = draw(self.sizes.num_heads * self.tp_size).chunk(self.tp_size)[self.tp_group.rank()]
        return _shared_out(values.to(self.config.params_dtype))

    def _convolution(self) -> _OfChannels:
        """Return a convolution of each channel of this rank, as torch would draw it."""
        bound = 1 / math.sqrt(self.sizes.kernel_size)
        weights, biases = [], []
        for channels in self.channels.values():
            weight = torch.empty(channels * self.tp_size, 1, self.sizes.kernel_size).uniform_(-bound, bound)
            bias = torch.empty(channels * self.tp_size).uniform_(-bound, bound)
            for parts, whole in ((weights, weight), (biases, bias)):
                parts.append(whole.chunk(self.tp_size)[self.tp_group.rank()])
        dtype = self.config.params_dtype
        return _OfChannels(torch.cat(weights).to(dtype), torch.cat(biases).to(dtype) if self.HAS_BIAS else None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return its tensors as megatron-core names and cuts them: by heads, each section by itself."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        cuts = *sharded_offsets, (len(sharded_offsets), self.tp_group.rank(), self.tp_size)
        for name, sections in self._in_sections().items():
            state[prefix + name] = _cut_in_sections(state[prefix + name], sections, cuts)
        return state

    def _in_sections(self) -> dict[str, dict[str, int]]:
        """Return the parameters that are saved in sections, with the rows of these."""
        found = {"in_proj.weight": self.rows, "conv1d.weight": self.channels}
        if hasattr(self.in_proj, NAME):
            found[f"in_proj.{OUTER}"] = self.rows
        return found | ({"conv1d.bias": self.channels} if self.HAS_BIAS else {})


class _OfChannels(torch.nn.Module):
    """A weight, and a bias if there is one, of each channel of this rank, named as those of torch's modules."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = _shared_out(weight)
        self.bias = None if bias is None else _shared_out(bias)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return them cut by tensor parallelism."""
        return sharded_by_rows(self, prefix, sharded_offsets)


def sharded_by_rows(module: torch.nn.Module, prefix: str, sharded_offsets: Offsets) -> ShardedStateDict:
    """Return the parameters of a module, all of which TP ranks have rows of."""
    state = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


def _shared_out(values: Tensor) -> torch.nn.Parameter:
    """Return a parameter of which each tensor-parallel rank has rows."""
    parameter = torch.nn.Parameter(values.clone())
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def _cut_in_sections(whole: ShardedTensor, rows: Mapping[str, int], cuts: Offsets) -> ShardedTensorFactory:
    """Return the factory that saves and loads a matrix in sections, each cut by TP by itself, under its own name.

    Args:
        rows: section -> its rows on this rank.
        cuts: (axis, part, number of parts) of each axis that is cut, the last one that of the rows.
    """

    @torch.no_grad()
    def build(key: str, values: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None, "optimizers save whole tensors"
        parts = zip(rows, values.split(list(rows.values())), strict=True)
        more = {"replica_id": replica_id, "prepend_axis_num": len(cuts) - 1}
        return [ShardedTensor.from_rank_offsets(f"{key}.{name}", part, *cuts, **more) for name, part in parts]

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)


class DynamicCPGatedDelta(LinearAttentionLayer):
    """Of each token it projects queries and keys, values, gates z, and for each head how it changes the state."""

    CONVOLVED, HAS_BIAS = ("query", "key", "value"), False

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config, layer_number, pg_collection, **unused)
        self.dt_bias = self._of_heads(torch.ones)
        self.out_norm = TorchNorm(config, self.sizes.value_size, config.layernorm_epsilon)
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each TP rank has the gradient of its own heads, and their sum is wanted. megatron-core takes means of
            # what is marked so, and sums with sequence parallelism only.
            for parameter in self.out_norm.parameters():
                parameter.average_gradients_across_tp_domain = True
                parameter.register_hook(lambda gradient: gradient * self.tp_size)

    def _sections(self) -> dict[str, int]:
        keys, values = self.sizes.num_groups * self.sizes.key_size, self.sizes.value_channels
        heads = self.sizes.num_heads
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    def _attended(self, sections: Mapping[str, Tensor], params: DynamicPackedSeqParams) -> Tensor:
        alpha = sections["alpha"]
        exact = exact_dtype(alpha)
        decay = -self.A_log.to(exact).exp() * softplus(alpha.to(exact) + self.dt_bias)

        def attend(*given: Tensor) -> Tensor:
            return thd.gated_delta_net_thd(*given, params, self.sizes)

        convolved, beta = sections[TOGETHER], sections["beta"].sigmoid()
        return self._core(attend, convolved, beta, decay, self.conv1d.weight).flatten(1)

    def _gated(self, found: Tensor, z: Tensor) -> Tensor:
        config, exact = self.config, exact_dtype(found)
        if config.normalization != "RMSNorm":

            def compute(found: Tensor, z: Tensor) -> Tensor:
                by_head = self.out_norm(found.unflatten(1, (self.sizes.num_heads, -1)))
                return (by_head.flatten(1) * silu(z.to(exact))).to(found.dtype)

            return computed_again(compute, found, z)
        weight = (self.out_norm.weight.to(exact) + config.layernorm_zero_centered_gamma).repeat(self.sizes.num_heads)
        norm = thd.choose_linear_kernel(found.device, self.sizes).gated_norm
        return norm(found, z, weight, config.layernorm_epsilon, self.sizes.value_size, False)


class DynamicCPMamba(LinearAttentionLayer):
    """Of each token it projects gates z, values x, keys B, queries C, and for each head the step by which it decays."""

    CONVOLVED, HAS_BIAS = ("x", "B", "C"), True

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config, layer_number, pg_collection, **unused)
        self.dt_bias = self._of_heads(_drawn_steps)
        self.D = self._of_heads(torch.ones)
        self.norm = _OfChannels(torch.ones(self.sizes.value_channels, dtype=config.params_dtype), None)

    def _sections(self) -> dict[str, int]:
        keys, values = self.sizes.num_groups * self.sizes.key_size, self.sizes.value_channels
        return {"z": values, "x": values, "B": keys, "C": keys, "dt": self.sizes.num_heads}

    def _attended(self, sections: Mapping[str, Tensor], params: DynamicPackedSeqParams) -> Tensor:
        convolved = sections[TOGETHER]
        exact = exact_dtype(convolved)
        steps = softplus(sections["dt"].to(exact) + self.dt_bias.to(exact))

        def attend(*given: Tensor) -> Tensor:
            return thd.mamba2_thd(*given, params, self.sizes)

        conv = self.conv1d
        return self._core(attend, convolved, steps, self.A_log, self.D, conv.weight, conv.bias).flatten(1)

    def _gated(self, found: Tensor, z: Tensor) -> Tensor:
        norm = thd.choose_linear_kernel(found.device, self.sizes).gated_norm
        return norm(found, z, self.norm.weight, EPSILON, found.shape[1] // self.sizes.num_groups, True)


def _drawn_steps(heads: int) -> Tensor:
    """Return the biases of steps [heads], of which softplus makes steps between those of STEP_RANGE."""
    low, high = map(math.log, STEP_RANGE)
    steps = torch.exp(torch.empty(heads).uniform_(low, high)).clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))
