"""Rotary embedding of a shard: positions known since the pack was built select the angles once per micro-batch.

megatron-core 0.16.1 rotates packed sequences with its static group, in a Python loop over sequences with host syncs in
every layer, and keeps a table of angles for each of the last 32 (longest sequence, group) pairs. Here one table grows
to the longest sequence seen, and every layer rotates with two multiplications.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from dynamic_cp.plans.padding import round_up
from megatron.dynamic_cp.flags.positions import ROTARY
from megatron.dynamic_cp.flags.windows import windows_of
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

_TABLE_STEP_TOKENS = 4096


class OneRotaryTable(torch.nn.Module):
    """Stands in for a model's RotaryEmbedding: one table for all micro-batches, of any length and group.

    Args:
        rotary: megatron-core's module, which computes the angles.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary
        self.table: Tensor | None = None
        self.concentration: float | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return the longest padded sequence of the micro-batch in tokens."""
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **_unused: Any) -> Tensor | tuple[Tensor, float]:
        """Return the angles of at least `max_seq_len` positions, float32 [positions, 1, 1, rotary dim].

        YaRN: and its concentration, which GPTModel expects, and drops: layers have it from their configuration.
        """
        if self.table is None or len(self.table) < max_seq_len:
            found = self.rotary.get_emb(round_up(max_seq_len, _TABLE_STEP_TOKENS))
            self.table, self.concentration = found if isinstance(found, tuple) else (found, None)
        return self.table if self.concentration is None else (self.table, self.concentration)


def use_one_rotary_table(model: torch.nn.Module) -> None:
    """Give a GPTModel its `OneRotaryTable`, and its layers with a window theirs, where these have a base of their own.

    Does nothing when it has no RoPE, or each layer its own.
    """
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
        concentration: factor of what is rotated, of all layers (`positions.concentration`).
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
