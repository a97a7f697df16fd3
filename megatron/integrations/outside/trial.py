"""Tries a transformers model on a few tokens: does it take its positions from us, and each token by itself?

What a model makes of a token before attention depends on its position, and on what the class derives by itself where
it is called without one: RoBERTa counts from the padding token's id + 1, BART by the length of the row, ESM scales a
row by its masked tokens, MobileBERT puts neighbours together. A name does not tell. So the model is run up to its first
attention, with two documents of a few tokens alone, and with both in one pack: queries, keys and values must be equal.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.hugging_face import MODEL_TYPES

_DOCUMENTS = ((5, 7, 6), (9, 5, 8, 6))
"""Token ids. In a pack the last token of the first has another neighbour than alone, and each of the second another
distance to the row's begin."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference of queries, keys and values, as a share of the largest; 0.03 in narrower types."""


class FirstAttention(Exception):
    """Ends a trial with what its first attention got: q, k and v of [1, heads, T, dim]."""

    def __init__(self, *qkv: Tensor) -> None:
        super().__init__()
        self.qkv = qkv


class Trial:
    """Stands in for packed_seq_params, so that attention and linear attention know that they are tried."""

    num_linear_layers = 0

    def attend_linearly(self, hidden_states: Tensor) -> Tensor:
        """Return nothing found: linear attention knows no positions, and what it is given is seen further on."""
        self.num_linear_layers += 1
        return torch.zeros_like(hidden_states)

    def attend(self, *qkv: Tensor) -> NoReturn:
        """End the trial."""
        raise FirstAttention(*qkv)


def first_position(model: torch.nn.Module) -> int:
    """Return the position_ids that the model gives the first token of a document by itself.

    Args:
        model: with our attention in it, and without a wrapper. Where its weights are on the meta device it cannot be
            tried, and only families whose shape is known are taken.

    Raises:
        UnsupportedFeatureError: tokens of a pack differ from those of documents alone, whatever the positions are.
    """
    name, config = type(model).__name__, model.config
    weights = next(model.parameters())
    if weights.is_meta:
        if config.model_type in MODEL_TYPES:
            return 0
        raise UnsupportedFeatureError(
            f"the model {name} is on the meta device, where its positions cannot be looked at: load its weights first, "
            "or use a model of another family"
        )
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        size, mask = config.get_text_config().vocab_size, getattr(config, "mask_token_id", None)
        documents = [torch.tensor([one], device=weights.device) % size for one in _DOCUMENTS]
        if mask is not None and mask < size:
            documents[0][0, 1] = mask
        alone = [_qkv(model, input_ids=one) for one in documents]
        wanted = [torch.cat(pair, dim=-2) for pair in zip(*alone, strict=True)]
        for first in dict.fromkeys((0, (getattr(config, "pad_token_id", None) or 0) + 1)):
            positions = [torch.arange(one.shape[1], device=one.device)[None] + first for one in documents]
            found = _qkv(model, input_ids=torch.cat(documents, 1), position_ids=torch.cat(positions, 1))
            if all(_are_equal(*pair) for pair in zip(found, wanted, strict=True)):
                return first
    finally:
        for module in was_training:
            module.training = True
    raise UnsupportedFeatureError(
        f"the model {name} makes of a token in a pack something else than of the same token in a document alone: it "
        f"derives from its input what packs of {len(_DOCUMENTS)} documents cannot show (positions that it counts by "
        "itself, neighbours, shares of masked tokens); use another model"
    )


def _qkv(model: torch.nn.Module, **inputs: Tensor) -> tuple[Tensor, ...]:
    name, trial = type(model).__name__, Trial()
    try:
        with torch.no_grad():
            model(**inputs, packed_seq_params=trial, use_cache=False)
    except FirstAttention as attention:
        return attention.qkv
    except Exception as error:  # of any code of transformers
        raise UnsupportedFeatureError(
            f"the model {name}, called with {' and '.join(inputs)} of {inputs['input_ids'].shape[1]} tokens, ends with "
            f"{type(error).__name__} ({error}): use another model"
        ) from error
    if trial.num_linear_layers:
        return ()
    raise UnsupportedFeatureError(
        f"the model {name} called 0 attentions, at least 1 is needed: its tokens meet in another way; use another model"
    )


def _are_equal(found: Tensor, wanted: Tensor) -> bool:
    most = _ROUNDING.get(found.dtype, 0.03)
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= most * wanted.abs().max())


def shift_positions(first: int) -> Any:
    """Return a hook before the forward pass that adds `first` to position_ids, which count from 0."""

    def hook(_module: torch.nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = given.get("position_ids")
        return args, given if positions is None else {**given, "position_ids": positions + first}

    return hook
