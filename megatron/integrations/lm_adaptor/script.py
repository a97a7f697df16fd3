"""What takes the places of functions of the script: they give its forward step the plan's micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

_NO_SEQUENCES = torch.zeros(1, 1, dtype=torch.int32)
_ANY_LENGTH = torch.zeros(1, dtype=torch.int32)


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the next micro-batch in the order of Megatron-LM's get_batch of six values."""
    batch = next(data_iterator)
    return (
        batch["tokens"],
        batch["labels"],
        batch["loss_mask"],
        None,
        batch["position_ids"],
        batch["packed_seq_params"],
    )


def get_batch_of_fields(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the next micro-batch in the order of Megatron-LM's get_batch of ten fields.

    The forward step only hands the fields of packing to PackedSeqParams. The micro-batch's own travel as its CP group.
    With one boundary nothing is summed up for Megatron-LM's FLOPs, which are ours.
    """
    batch = next(data_iterator)
    return (
        None,  # attention_mask
        _NO_SEQUENCES,  # cu_seqlens
        None,  # cu_seqlens_padded
        batch["packed_seq_params"],  # hybrid_cp_group
        batch["labels"],
        None,  # local_cp_size
        batch["loss_mask"],
        _ANY_LENGTH,  # max_seqlen
        batch["position_ids"],
        batch["tokens"],
    )


def take_packed_seq_params(*, cp_group: DynamicPackedSeqParams, **_fields: Any) -> DynamicPackedSeqParams:
    """Return the micro-batch's parameters; takes the place of a class that would make others of the fields."""
    return cp_group
