"""TransformerEngine's layers or local ones: chosen once, the same on all ranks."""

from __future__ import annotations

import argparse
import hashlib

import torch

from megatron.dynamic_cp.attention.te_support import LayerChoice, choose_layers, installed_version
from megatron.dynamic_cp.verify import agree


def choose(args: argparse.Namespace, device: torch.device) -> LayerChoice:
    """Return the layers of this run and fill in what follows in `args`; collective.

    Raises:
        DynamicCPError: they cannot be used, or ranks have other versions of TransformerEngine; the same on every rank.
    """

    def on_this_rank() -> LayerChoice:
        version, why_missing = installed_version()
        return choose_layers(
            args.transformer_impl,
            args.cp_comm_type,
            on_cuda=device.type == "cuda",
            bf16=args.bf16,
            head_dim=args.kv_channels,
            version=version,
            why_missing=why_missing,
        )

    choice = agree(
        on_this_rank,
        lambda chosen: hashlib.sha256(repr(chosen).encode()).hexdigest(),
        what="the version of TransformerEngine",
        device=device,
    )
    args.transformer_impl = choice.impl
    args.cp_comm_types_left_out = choice.left_out
    return choice
