"""Self-attention whose rotary embedding follows the micro-batch's own CP group, without touching megatron-core's.

Positions known since the pack was built select the angles once per micro-batch, from one table that grows to the
longest sequence seen; every layer rotates with two multiplications. megatron-core 0.16.1 rotates packs by its static
group, in a Python loop over sequences with host syncs in every layer, and keeps tables for the last 32 (longest
sequence, group) pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import ROTARY
from dynamic_cp.plans.padding import round_up
from megatron.dynamic_cp.flags.attention import concentration, windows_of
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

_TABLE_STEP_TOKENS = 4096
_GROUPS = ("tp", "cp", "pp", "ep", "expt_tp")


class OneRotaryTable(torch.nn.Module):
    """Stands in for a model's RotaryEmbedding `rotary`: one table for all micro-batches, of any length and group."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary
        self.table: Tensor | None = None
        self.concentration: float | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return the longest padded sequence of the micro-batch in tokens."""
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **_unused: Any) -> Tensor | tuple[Tensor, float]:
        """Return the angles of at least `max_seq_len` positions, float32 [positions, 1, 1, rotary dim]; with YaRN also
        its concentration, which GPTModel expects and drops: layers have it from their configuration."""
        if self.table is None or len(self.table) < max_seq_len:
            found = self.rotary.get_emb(round_up(max_seq_len, _TABLE_STEP_TOKENS))
            self.table, self.concentration = found if isinstance(found, tuple) else (found, None)
        return self.table if self.concentration is None else (self.table, self.concentration)


def use_one_rotary_table(model: torch.nn.Module) -> None:
    """Give a GPTModel its `OneRotaryTable`, and its layers with a window theirs, where these have a base of their own.
    Does nothing without RoPE, or where each layer has its own."""
    if getattr(model, "position_embedding_type", None) not in ROTARY or not hasattr(model, "rotary_pos_emb"):
        return
    rotary = model.rotary_pos_emb
    model.rotary_pos_emb = OneRotaryTable(rotary)
    base = getattr(model.config, "window_rotary_base", None)
    if base is None:
        return
    windows, config = windows_of(model.config), model.config
    table = OneRotaryTable(
        RotaryEmbedding(
            config.kv_channels,
            model.rotary_percent,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=base,
            use_cpu_initialization=config.use_cpu_initialization,
        )
    )
    for layer in model.decoder.layers:
        if windows.of_layer(layer.layer_number) is not None:
            vars(layer.self_attention)["window_rotary"] = table  # no part of any one layer


def rotary_cos_sin(
    frequencies: Tensor,
    params: DynamicPackedSeqParams,
    dtype: torch.dtype,
    concentration: float = 1.0,
    called: str = "rotation",
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the local tokens, each [T, 1, 1, rotary dim]; computed by the first layer that asks.

    Args:
        frequencies: megatron-core's table of angles, float32 [longest sequence, 1, 1, rotary dim].
        concentration: factor of what is rotated, of all layers (`flags.attention.concentration`).
        called: name of the table, which several layers share.
    """
    return params.cache.once(called, lambda: cos_sin_at(frequencies, params.positions, dtype, concentration))


def cos_sin_at(
    frequencies: Tensor, positions: Tensor | None, dtype: torch.dtype, concentration: float
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at `positions`, each [T, 1, 1, rotary dim]."""
    angles = frequencies.index_select(0, positions)
    return (angles.cos() * concentration).to(dtype), (angles.sin() * concentration).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return x [T, 1, heads, dim] with its first `rotary dim` channels rotated; the rest passes."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)


def check_groups(given: ProcessGroupCollection | None) -> None:
    """Check the groups that a layer is built with, if it is given any. CP groups, plans and some of megatron-core's
    code follow megatron-core's own groups, whatever a model was given: masks of padding, recomputed activations and
    cross-attention would silently be those of other ranks. Raises UnsupportedFeatureError: one of them has other
    ranks than megatron-core's."""
    if given is None:
        return
    own = ProcessGroupCollection.use_mpu_process_groups([name for name in _GROUPS if hasattr(given, name)])
    for name in _GROUPS:
        group, expected = getattr(given, name, None), getattr(own, name, None)
        if group is None or group is expected:
            continue
        ranks = _ranks_of(group)
        if ranks != _ranks_of(expected):
            raise UnsupportedFeatureError(
                f"the model's pg_collection.{name} has the ranks {ranks}, megatron-core's own group of this rank "
                f"{_ranks_of(expected)}: leave pg_collection out, or initialize_model_parallel with the layout of the "
                "model"
            )


def _ranks_of(group: Any) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


class DynamicCPSelfAttention(SelfAttention):
    """megatron-core's SelfAttention; only where and how RoPE is applied differs, and that no gate is compiled."""

    _rotary: tuple[Tensor, Tensor] | None = None
    window_rotary: OneRotaryTable | None = None
    """Set where the layer has a window and rotates by a base of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_groups(kwargs.get("pg_collection"))
        super().__init__(*args, **kwargs)
        unrotated = self.config.no_rope_freq
        assert not isinstance(unrotated, int), "a configuration has a list"
        self._rotates = not (unrotated and unrotated[self.layer_number - 1])
        self._concentration = concentration(self.config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See SelfAttention.forward; `rotary_pos_emb` is the whole frequency table, not this shard's part."""
        params = DynamicPackedSeqParams.checked(packed_seq_params)
        if rotary_pos_emb is not None and self._rotates:
            self._rotary = self._angles(rotary_pos_emb, params, hidden_states.dtype)
        try:
            return super().forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotary = None

    def _angles(self, table: Tensor, params: DynamicPackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.window_rotary is None:
            return rotary_cos_sin(table, params, dtype, self._concentration)
        own = self.window_rotary(len(table))
        return rotary_cos_sin(own, params, dtype, self._concentration, called="rotation in windows")

    def queries_keys_values(
        self, hidden_states: Tensor, rotary_pos_emb: Tensor | None, params: DynamicPackedSeqParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, [T, heads, dim] each, and the gate of the output, if any; arguments as of
        `forward`."""
        if rotary_pos_emb is not None and self._rotates:
            self._rotary = self._angles(rotary_pos_emb, params, hidden_states.dtype)
        try:
            has_gate = self.config.attention_output_gate
            *found, last = self.get_query_key_value_tensors(hidden_states, None, output_gate=has_gate)
        finally:
            self._rotary = None
        query, key, value = (one.squeeze(1) for one in (found if has_gate else (*found, last)))
        return query, key, value, last if has_gate else None

    def projected(self, context: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layer's attention and its bias, from the context [T, 1, heads * dim]."""
        output, bias = self.linear_proj(context if gate is None else self._apply_output_gate(context, gate))
        return output, bias

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return query, key, value (and gate) with query and key rotated."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotary is not None:
            cos, sin = self._rotary
            interleaved = self.config.rotary_interleaved
            query = rotate(query, cos, sin, interleaved=interleaved)
            key = rotate(key, cos, sin, interleaved=interleaved)
        return query, key, *rest

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the context x [T, 1, heads * dim] times the sigmoid of its gate, which is as large.

        DEVIATION: megatron-core's is compiled. Reason: as of `layer_parts.TorchL2Norm`. Recovery: none.
        """
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)
