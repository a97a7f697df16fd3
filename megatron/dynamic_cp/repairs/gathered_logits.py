"""Take the loss of logits that tensor-parallel ranks have gathered (`parallel_output=False`, `runtime_gather_output`).

megatron-core 0.16.1 to 0.19.2 takes the last dimension of any logits for a share of the vocabulary: with TP ranks the
loss of gathered ones is too large by log(TP), and their gradients lack the label.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import scatter_to_tensor_model_parallel_region
from torch import Tensor


def install() -> None:
    """Repair the loss of all models in this process; does nothing when called again."""
    compute = LanguageModule.compute_language_model_loss
    if hasattr(compute, "__wrapped__"):
        return

    @functools.wraps(compute)
    def of_own_share(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        tp_size = self.tp_group.size()
        own_words = getattr(getattr(self, "output_layer", None), "output_size_per_partition", None)
        if tp_size > 1 and own_words is not None and logits.shape[-1] == own_words * tp_size:
            # A copy: losses are computed in the place of logits, and the share of a single token is a view.
            logits = scatter_to_tensor_model_parallel_region(logits, group=self.tp_group).clone()
        return compute(self, labels, logits)

    LanguageModule.compute_language_model_loss = of_own_share
