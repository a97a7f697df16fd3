"""Model FLOPs of a step from true sequence lengths: padding is not work."""

from __future__ import annotations

from dynamic_cp.types import ModelShape


def training_flops(model: ModelShape, seqlen_sum: int, seqlen_squared_sum: int) -> float:
    """Return the FLOPs of forward and backward of sequences with these sums of S and S^2, recomputation not counted.

    A weight costs 2 FLOPs per token; causal attention of one layer 2 * query width * S^2 (scores and values, half the
    square each); backward is twice the forward.
    Source: Narayanan et al. (arXiv 2104.04473), appendix, with the causal half and grouped KV heads.
    """
    per_token = 2 * (model.num_layers * model.linear_weights_per_layer + model.hidden_size * model.vocab_size)
    per_token_squared = 2 * model.num_layers * model.query_size
    return 3.0 * (per_token * seqlen_sum + per_token_squared * seqlen_squared_sum)
