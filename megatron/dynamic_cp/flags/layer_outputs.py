"""What some families do to what parts of a model put out: a norm, or a factor. Pure functions of flags; no torch here.

--sandwich-norm           attention and MLP: a norm each (GLM-4)
--residual-multiplier     attention and MLP, before they are added to the residual (Granite)
--embedding-multiplier    the embedding        --logits-scaling    logits, which are divided by it
--softmax-scale           scores of attention, in the place of 1 / sqrt(width of a head)
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.models.table import flag_of
from megatron.dynamic_cp.flags.exclusions import OUTPUTS, refuse_pairs

_NAMES = ("sandwich_norm", "residual_multiplier", "embedding_multiplier", "logits_scaling", "softmax_scale")


def choices(flags: Any) -> dict[str, Any]:
    """Return what is changed: name -> JSON value; {} where nothing is, and of a checkout, which has no such flags."""
    said = {name: getattr(flags, name, None) for name in _NAMES}
    return {name: value for name, value in said.items() if value not in (None, False, MEANINGS[name].usual)}


def check_outputs(flags: Any) -> None:
    """Refuse what was not checked together with them.

    Raises:
        UnsupportedFeatureError: another feature, which the message names.
    """
    for name, value in choices(flags).items():
        refuse_pairs(OUTPUTS, flags, called=_said(name, value))


def _said(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
