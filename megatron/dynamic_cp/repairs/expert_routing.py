"""Route tokens to experts where TransformerEngine is not installed.

megatron-core 0.16.1 asks whether TransformerEngine's matrix product is None, but without it there is no such name:
NameError in the first forward pass. Later releases set it to None.
"""

from __future__ import annotations

from megatron.core.transformer.moe import moe_utils

from megatron.dynamic_cp.repairs import releases


def install() -> None:
    """Repair the router's product in this process; does nothing with TransformerEngine or when called again."""
    if not (releases.PRODUCT_IS_NONE.here or moe_utils.HAVE_TE):
        moe_utils.te_general_gemm = None
