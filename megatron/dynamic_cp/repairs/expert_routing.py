"""Route tokens to experts where TransformerEngine is not installed, and padding to none.

megatron-core 0.16.1 asks whether TransformerEngine's matrix product is None, but without it there is no such name:
NameError in the first forward pass. Later releases set it to None.

Since 0.17 its dispatcher takes for granted that each token has as many experts as the router chooses. Our routers send
padding to none, and the number of what is sent is then another than the sizes that lanes tell each other: RuntimeError.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron.dynamic_cp.repairs import releases


def install() -> None:
    """Repair router and dispatcher in this process; does nothing where both are right, or when called again."""
    if not (releases.PRODUCT_IS_NONE.here or moe_utils.HAVE_TE):
        moe_utils.te_general_gemm = None
    preprocess = MoEAlltoAllTokenDispatcher.preprocess
    if releases.TOKENS_ROUTED_ALIKE.here and not hasattr(preprocess, "__wrapped__"):
        MoEAlltoAllTokenDispatcher.preprocess = _counting(preprocess)


def _counting(preprocess: Any) -> Any:
    @functools.wraps(preprocess)
    def counting(self: Any, routing_map: Tensor) -> Any:
        found = preprocess(self, routing_map)
        self.num_out_tokens = routing_map.sum()
        # On a GPU the host waits for the sizes that lanes tell each other as it is; it then waits earlier, for both.
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return found

    return counting
