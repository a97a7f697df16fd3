"""Low-rank adapters as flags say them, and what they are not trained together with; no torch here."""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.table import flag_of
from dynamic_cp.types import Adapters
from dynamic_cp.types.data_parallel import ADAPTED, OF_LINEAR, OF_MLP
from megatron.dynamic_cp.flags import linear_attention
from megatron.dynamic_cp.flags.exclusions import ADAPTERS, refuse_pairs
from megatron.dynamic_cp.flags.experts import num_experts

_MORE = ("lora_alpha", "lora_target_modules")


def adapters_of(flags: Any) -> Adapters | None:
    """Return what flags say of adapters; None: all weights are trained.

    Args:
        flags: of this trainer, of a checkout or in a checkpoint.
    """
    rank = getattr(flags, "lora_rank", None)
    if rank is None:
        return None
    alpha, modules = (getattr(flags, name) for name in _MORE)
    absent = set() if linear_attention.is_on(flags) else set(OF_LINEAR)
    absent |= set(OF_MLP) if modules is None and num_experts(flags) else set()
    chosen = tuple(name for name in ADAPTED if name not in absent and (modules is None or name in modules))
    return Adapters(rank=rank, alpha=float(rank if alpha is None else alpha), modules=chosen)


def check_adapters(flags: Any) -> None:
    """Refuse what was not checked together with adapters.

    Raises:
        InvalidInputError: numbers of adapters, and there are none; or layers that the model does not have.
        UnsupportedFeatureError: another feature, which the message names.
    """
    if flags.lora_rank is None:
        given = [flag_of(name) for name in _MORE if getattr(flags, name) is not None]
        if given:
            raise InvalidInputError(f"{given[0]} is for adapters: add {ADAPTERS}, or leave it out")
        return
    missing = [name for name in flags.lora_target_modules or () if name in OF_LINEAR]
    if missing and not linear_attention.is_on(flags):
        raise InvalidInputError(
            f"--lora-target-modules {missing[0]} is of layers with linear attention, which this model does not have: "
            "leave it out"
        )
    refuse_pairs(ADAPTERS, flags, value=flags.lora_rank)


def identity_of(flags: Any) -> dict[str, Any]:
    """Return the part of a run's identity that two runs with adapters must share, of JSON values; {} without."""
    found = adapters_of(flags)
    if found is None:
        return {}
    return {"adapters": {"rank": found.rank, "alpha": found.alpha, "modules": list(found.modules)}}
