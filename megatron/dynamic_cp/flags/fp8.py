"""Matrix products in FP8 as Megatron-LM's flags say them: what plans must know of them, and what they do not go with.

Pure functions of flags and configurations, without torch and megatron-core. TransformerEngine's layers compute in FP8,
and need the rows of a product in multiples that depend on the recipe. So the tokens of a rank are padded to that many,
times TP with sequence parallelism (`Topology.token_alignment`), which gathers the rows in FP8, too. Attention, norms,
embedding and LM head stay in bfloat16.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import FP8_ALIGNMENTS as ALIGNMENTS
from dynamic_cp.models.flags import FP8_BLOCK as BLOCK
from dynamic_cp.models.flags import FP8_FORMATS
from megatron.dynamic_cp.flags import exclusions

logger = logging.getLogger(__name__)

FLAG, RECIPE_FLAG = exclusions.FP8, "--fp8-recipe"
GATHERS_ANYTHING_SINCE = (2, 14)
"""Release of TransformerEngine from which on `blockwise` gathers in bfloat16 what is no whole blocks of rows and
channels for each tensor-parallel rank, and warns (`distributed.py`); before, layers assert it
(`Float8BlockQuantizer.is_quantizable`). Products alone need 16: `CanonicalizeGemmInput`."""
CAPABILITIES = MappingProxyType({"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "delayed": (8, 9)})
"""Recipe -> oldest compute capability. Source, also of `_lacking`: TransformerEngine 2.9 to 2.20, `check_*_support`."""
DEFAULT_RECIPE = "delayed"
"""As in Megatron-LM."""


def is_on(config: Any) -> bool:
    """Return whether flags or a configuration ask for FP8."""
    return getattr(config, "fp8", None) is not None


def recipe_of(config: Any) -> str | None:
    """Return the recipe by which products are scaled, None without FP8."""
    if not is_on(config):
        return None
    recipe = getattr(config, "fp8_recipe", None) or DEFAULT_RECIPE
    return str(getattr(recipe, "value", recipe))


def token_alignment(config: Any) -> int:
    """Return what a rank's tokens, with sequence parallelism each share of them, are a multiple of; 1 without FP8."""
    recipe = recipe_of(config)
    if recipe is None:
        return 1
    return BLOCK if recipe == "blockwise" and gathers(config) else ALIGNMENTS[recipe]


def gathers(config: Any) -> bool:
    """Return whether sequence parallelism gathers what a product takes."""
    return bool(config.sequence_parallel and config.tensor_model_parallel_size > 1)


def complete_fp8(flags: Any) -> None:
    """Fill in the recipe, and warn of one that follows the packing; do nothing without FP8. Raises InvalidInputError: a
    recipe for nothing, or FP8 without bfloat16. Raises UnsupportedFeatureError: FP8 in local layers."""
    if not is_on(flags):
        if flags.fp8_recipe is not None:
            raise InvalidInputError(
                f"{RECIPE_FLAG} {flags.fp8_recipe} says how products in FP8 are scaled: add {FLAG} "
                f"{' or '.join(FP8_FORMATS)}, or leave it out"
            )
        return
    flags.fp8_recipe = flags.fp8_recipe or DEFAULT_RECIPE
    if not flags.bf16:
        raise InvalidInputError(f"{FLAG} {flags.fp8} keeps everything but matrix products in bfloat16: add --bf16")
    if flags.transformer_impl == "local":
        raise UnsupportedFeatureError(
            f"{FLAG} {flags.fp8} with --transformer-impl local is not supported: only TransformerEngine's layers "
            "compute in FP8; leave one of them out"
        )
    if flags.fp8_recipe == "delayed":
        logger.warning(
            "%s delayed: scales follow the largest values of the packs before, so they depend on how samples were "
            "packed, all lanes wait for each other in every forward pass, and a resumed run begins with none; "
            "tensorwise, blockwise and mxfp8 scale by what is multiplied",
            RECIPE_FLAG,
        )


def check_fp8(config: Any) -> None:
    """Raise UnsupportedFeatureError for an unknown recipe, and for what was not checked together with FP8."""
    recipe = recipe_of(config)
    if recipe is None:
        return
    if recipe not in ALIGNMENTS:
        raise UnsupportedFeatureError(
            f"{RECIPE_FLAG} {recipe} is not supported: nobody knows how many tokens it needs; use one of "
            f"{', '.join(ALIGNMENTS)}"
        )
    exclusions.refuse_pairs(FLAG, config)


def why_not_gathered(recipe: str, hidden_size: int, release: tuple[int, int]) -> str | None:
    """Return why sequence parallelism cannot gather what a recipe scales in a release of TransformerEngine, or None."""
    if recipe != "blockwise" or hidden_size % BLOCK == 0 or release >= GATHERS_ANYTHING_SINCE:
        return None
    return (
        f"{RECIPE_FLAG} blockwise with --sequence-parallel needs a --hidden-size that is a multiple of {BLOCK} in "
        f"TransformerEngine {release[0]}.{release[1]}, it is {hidden_size}: leave --sequence-parallel out, use "
        f"{RECIPE_FLAG} tensorwise, or TransformerEngine {GATHERS_ANYTHING_SINCE[0]}.{GATHERS_ANYTHING_SINCE[1]}"
    )


def why_no_device(recipe: str, capability: tuple[int, int], cuda: str | None) -> str | None:
    """Return why a device of a compute capability (major, minor) cannot compute by a recipe with this CUDA (None: any),
    None if it can."""
    lacks = {name: lacking for name in CAPABILITIES if (lacking := _lacking(name, capability, cuda))}
    if recipe not in lacks:
        return None
    others = [name for name in CAPABILITIES if name not in lacks]
    instead = f"use {RECIPE_FLAG} {' or '.join(others)}" if others else f"leave {FLAG} out"
    return f"{RECIPE_FLAG} {recipe} needs {lacks[recipe]}: {instead}"


def _lacking(recipe: str, capability: tuple[int, int], cuda: str | None) -> str:
    (major, minor), up_to = CAPABILITIES[recipe], " to 11.0" * (recipe == "mxfp8")
    if capability < (major, minor) or (up_to and capability >= (12, 0)):
        return f"compute capability {major}.{minor}{up_to}, this device has {capability[0]}.{capability[1]}"
    if recipe == "blockwise" and cuda is not None and [*map(int, cuda.split("."))] < [12, 9]:
        return f"CUDA 12.9, this torch has {cuda} (docs/GPU.md#versions)"
    return ""
