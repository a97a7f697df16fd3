"""TransformerEngine's modules have an `_extra_state` for quantization, empty in fp32 and bf16: never asked of a file.

So weights saved with TransformerEngine's layers load into local ones, and the other way round. They are saved as
megatron-core does, for programs that ask for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.model.adapters import INNER, OUTER

_EXTRA = re.compile(r"_extra_state\d*$")
"""With a number where it is of one of the experts that are one module."""


def without_extra_states(sharded: Any) -> Any:
    """Return a (nested) sharded state dict without extra states."""
    if not isinstance(sharded, dict):
        return sharded
    return {
        key: without_extra_states(value) for key, value in sharded.items() if not _EXTRA.search(str(key).split("/")[0])
    }


def without_adapters(sharded: Any) -> Any:
    """Return a (nested) sharded state dict without the weights of adapters."""
    if not isinstance(sharded, dict):
        return sharded
    return {key: without_adapters(value) for key, value in sharded.items() if not _is_of_adapter(str(key))}


def _is_of_adapter(key: str) -> bool:
    return key.endswith((INNER, OUTER))


def load_weights(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load all weights of `module`; extra states stay as they are, and adapters where a file has none.

    Raises:
        CheckpointError: a weight is missing, or there is one more.
    """
    keys = module.load_state_dict(state_dict, strict=False)
    asked = any(map(_is_of_adapter, state_dict))
    missing = [key for key in keys.missing_keys if not _EXTRA.search(key) and (asked or not _is_of_adapter(key))]
    unexpected = [key for key in keys.unexpected_keys if not _EXTRA.search(key)]
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} weights of the model ({', '.join(missing[:3]) or 'none'}) and has "
            f"{len(unexpected)} that it has not ({', '.join(unexpected[:3]) or 'none'}): use the same model"
        )
