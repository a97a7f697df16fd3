"""Build multi-latent attention where TransformerEngine is not installed.

megatron-core 0.16.1 takes its own wrappers of TransformerEngine's layers for the layers: their module can be imported
without it, and holds None in their place. `isinstance(..., None)` is then a TypeError in the first layer.
"""

from __future__ import annotations

from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention


def install() -> None:
    """Repair `MultiLatentAttention` in this process; does nothing with TransformerEngine or when called again."""
    if not transformer_engine.HAVE_TE:
        multi_latent_attention.HAVE_TE = False
