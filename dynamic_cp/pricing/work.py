"""How much work samples are: their lengths as arrays, squared tokens, and the FLOPs of a batch.

FLOPs follow from the sums of S and S^2: of true lengths for what was achieved, of padded ones for what was run. S^2
counts by density (`ModelShape.squared_tokens`). A weight costs 2 FLOPs per token; causal attention of one layer 2 *
query width * S^2 (scores and values, half the square each), without a mask twice that; backward is twice the forward.
Throughput counts neither padding nor recomputation, which are work for the device but no achievement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.plans.padding import micro_batch_padded_tokens, padded_of
from dynamic_cp.types import Hardware, ModelShape, Plan, Recompute, Sample


class Lengths(NamedTuple):
    """Samples in descending order of length: all that packers and bounds know of them.

    Attributes:
        seqlens: [sample] tokens.
        densities: [sample] attention work over that without windows and masks of its own (`ModelShape.density`); None:
            all 1. A bucket's attention price is that of the sum of density * padded length^2.
    """

    seqlens: Ints
    densities: Floats | None

    @property
    def squares(self) -> Floats:
        """[sample] tokens squared, times the density: a measure of attention work."""
        squares: Floats = self.seqlens.astype(np.float64) ** 2
        return squares if self.densities is None else self.densities * squares

    @property
    def density_range(self) -> tuple[float, float]:
        """(least, largest) density."""
        return (1.0, 1.0) if self.densities is None else (float(self.densities.min()), float(self.densities.max()))

    def take(self, samples: Ints) -> Lengths:
        return Lengths(self.seqlens[samples], None if self.densities is None else self.densities[samples])


@compiled
def density_of(densities: Floats | None, sample: int) -> float:
    if densities is None:
        return 1.0
    return densities[sample]  # type: ignore[no-any-return]


@compiled
def grows_with_length(densities: Floats | None) -> bool:
    """Return whether a longer sample is surely more work."""
    return densities is None


def lengths_of(samples: Sequence[Sample], model: ModelShape) -> Lengths:
    """Return `samples`, the longest first, as arrays."""
    seqlens = np.fromiter((sample.seqlen for sample in samples), np.int64, len(samples))
    return Lengths(seqlens, densities_of(samples, model))


def densities_of(samples: Sequence[Sample], model: ModelShape) -> Floats | None:
    """Return [sample] -> its density; None: all 1."""
    if not model.num_windowed_layers and all(sample.mask is None for sample in samples):
        return None
    return np.fromiter((model.density(sample) for sample in samples), np.float64, len(samples))


def squared_tokens(samples: Sequence[Sample], padded: Sequence[int], model: ModelShape) -> float:
    """Return the attention work of samples at their `padded` lengths (without samples, of one), in squared tokens. It
    is summed in the order of packers (`packing.padded`), so that both prices agree to the last digit."""
    total = 0.0
    for tokens, density in zip(padded, [model.density(sample) for sample in samples] or [1.0], strict=True):
        total += density * tokens * tokens
    return total


class BatchFlops(NamedTuple):
    """FLOPs of a global batch on all ranks together."""

    forward: float
    backward: float
    recompute: float

    @property
    def model_flops(self) -> float:
        """Forward and backward: what tflops and MFU count."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> float:
        """What the devices compute, recomputation included."""
        return self.forward + self.backward + self.recompute


def batch_flops(
    model: ModelShape,
    seqlen_sum: int,
    seqlen_squared_sum: float,
    recompute: Recompute = "none",
    recomputed_share: float = 1.0,
) -> BatchFlops:
    """Return the FLOPs of sequences with these sums of S and S^2; those of linear attention are of its chunked form.

    Full recomputation repeats the forward pass of the layers, selective that of attention, neither the head;
    `recomputed_share` is the share of layers that do. Embedding, norms and activations are not counted, as usual.
    Source: Narayanan et al. (arXiv 2104.04473), appendix, with the causal half and grouped KV heads.
    """
    (stage,) = model.stages(1)
    layers = 2.0 * stage.sum(lambda layer: layer.linear_weights) * seqlen_sum
    attention = stage.sum(lambda layer: layer.attention_flops_per_token2) * seqlen_squared_sum
    if model.linear_attention is not None:
        attention += stage.linear_attention.num_layers * model.linear_attention.core_flops * seqlen_sum
    head = 2.0 * model.num_heads * model.hidden_size * model.vocab_size * seqlen_sum
    forward = layers + attention + head
    repeated = {"none": 0.0, "selective": attention, "full": layers + attention}[recompute]
    return BatchFlops(forward, 2 * forward, recomputed_share * repeated)


def length_sums(samples: Iterable[Sample], model: ModelShape) -> tuple[int, float]:
    """Return (sum of S, sum of S^2)."""
    samples = tuple(samples)
    return sum(sample.seqlen for sample in samples), sum(model.squared_tokens(sample) for sample in samples)


def plan_flops(
    model: ModelShape, plan: Plan, recompute: Recompute = "none", recomputed_share: float = 1.0
) -> tuple[BatchFlops, BatchFlops]:
    """Return (true, padded) FLOPs of `plan`; empty places count as padding."""
    multiple = plan.topology.rank_token_multiple
    tokens = sum(micro_batch_padded_tokens(micro_batch, multiple) for micro_batch in plan.micro_batches)
    squares = sum(squared_tokens(bucket.samples, padded_of(bucket, multiple), model) for bucket in plan.buckets)
    true = length_sums(plan.samples, model)
    again = recompute, recomputed_share
    return batch_flops(model, *true, *again), batch_flops(model, tokens, squares, *again)


def tflops_per_rank(model_flops: float, iteration_s: float, world_size: int) -> float:
    return model_flops / iteration_s / world_size / 1e12


def mfu(model_flops: float, iteration_s: float, world_size: int, hardware: Hardware) -> float:
    """Return the model FLOPs utilisation: model FLOPs over the devices' peak. Source: Chowdhery et al. 2022 (PaLM,
    arXiv 2204.02311), appendix B."""
    return model_flops / iteration_s / world_size / hardware.peak_flops_per_s
