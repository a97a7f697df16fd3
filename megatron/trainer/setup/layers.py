"""Chooses TransformerEngine's layers or local ones, the same on all ranks."""

from __future__ import annotations

import hashlib
import logging
import os

import torch

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.agreement.verify import agree
from megatron.dynamic_cp.attention.te.support import (
    Capability,
    LayerChoice,
    choose_layers,
    installed_flash_attn,
    installed_version,
    release_of,
    why_not_installed,
)
from megatron.dynamic_cp.flags.shape import LayerNeeds

logger = logging.getLogger(__name__)

BATCHED_RING = "NVTE_BATCH_MHA_P2P_COMM"
"""TransformerEngine reads it in each forward and backward pass."""


def compute_capability(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def batch_the_ring() -> None:
    """Let TransformerEngine's ring use the group's connections, which start-up warms, unless the user chose otherwise.
    Without it, rings of more than two lanes send one by one, on a connection per pair that is made at its first use."""
    value = os.environ.setdefault(BATCHED_RING, "1")
    if value == "0":
        logger.info("%s=0: rings of more than 2 lanes connect each pair when it is first used, in a step", BATCHED_RING)
    else:
        logger.info("%s=%s: TransformerEngine's rings use the connections of their groups", BATCHED_RING, value)


def choose(needs: LayerNeeds, device: torch.device, *, fused_adam: bool = False) -> LayerChoice:
    """Choose this run's layers and set up the environment for them; `fused_adam` is --use-precision-aware-optimizer.
    DynamicCPError on every rank if layers or optimizer cannot be used, or ranks differ in TransformerEngine.
    Collective."""

    def on_this_rank() -> LayerChoice:
        version, why_missing = installed_version()
        capability, flash_attn = compute_capability(device), None
        if fused_adam and (obstacle := why_not_installed(capability, version, why_missing)):
            raise UnsupportedFeatureError(
                f"--use-precision-aware-optimizer steps by TransformerEngine's FusedAdam: {obstacle}; change that, or "
                "leave it out"
            )
        if capability is not None and version is not None:
            flash_attn = installed_flash_attn(capability, release_of(version))
        return choose_layers(
            needs, capability=capability, flash_attn=flash_attn, version=version, why_missing=why_missing
        )

    choice = agree(
        on_this_rank,
        lambda chosen: hashlib.sha256(repr(chosen).encode()).hexdigest(),
        what="the version of TransformerEngine, or its kernels",
        device=device,
    )
    if choice.impl == "transformer_engine":
        batch_the_ring()
    return choice
