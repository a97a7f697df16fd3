"""What some families do to what parts of a model put out: a norm, or a factor. Pure functions of flags; no torch here.

--sandwich-norm           attention and MLP: a norm each (GLM-4)
--residual-multiplier     attention and MLP, before they are added to the residual (Granite)
--embedding-multiplier    the embedding        --logits-scaling    logits, which are divided by it
--softmax-scale           scores of attention, in the place of 1 / sqrt(width of a head)
"""

from __future__ import annotations

from typing import Any

from megatron.dynamic_cp.flags.exclusions import OUTPUTS, refuse_pairs
from megatron.dynamic_cp.flags.table import flag_of

_OFF = {
    "sandwich_norm": False,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "softmax_scale": None,
}
"""Name -> its value where it changes nothing."""
CHOICES = frozenset(_OFF)
"""All names that `choices` may return."""


def choices(flags: Any) -> dict[str, Any]:
    """Return what is changed: name -> JSON value; {} where nothing is, and of a checkout, which has no such flags."""
    return {name: value for name, off in _OFF.items() if (value := getattr(flags, name, off)) not in (off, None)}


def first_flag(flags: Any) -> str | None:
    """Return the first flag that changes something, with its value; None: nothing is changed."""
    return next((_said(name, value) for name, value in choices(flags).items()), None)


def check_outputs(flags: Any) -> None:
    """Refuse what was not checked together with them.

    Raises:
        UnsupportedFeatureError: another feature, which the message names.
    """
    for name, value in choices(flags).items():
        refuse_pairs(OUTPUTS, flags, called=_said(name, value))


def _said(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
