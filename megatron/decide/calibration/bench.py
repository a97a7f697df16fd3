"""What every section needs: the setup, the timer, the model, and inputs of any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamic_cp.decide.calibration.measurements import Measurement, Setup
from dynamic_cp.types import largest_power_of_two
from megatron.decide.calibration.device import Place
from megatron.decide.calibration.model import SmallGPT
from megatron.decide.calibration.timing import Probe, Timer
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

_SHORTEST = {"cuda": 256, "cpu": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that a section needs."""

    setup: Setup
    place: Place
    timer: Timer
    gpt: SmallGPT
    groups: DynamicCPGroups
    tell: Callable[[str], None]

    def measure(self, probes: Sequence[Probe]) -> list[Measurement]:
        """Return the rows of `probes` with their seconds. Collective."""
        return self.timer.measure(probes, self.tell)

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self.place.device

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.setup.shard.kv_channels**-0.5)

    def params(self, seqlens: Sequence[int]) -> DynamicPackedSeqParams:
        """Return the parameters of a pack on this rank alone."""
        positions = torch.cat([torch.arange(seqlen, device=self.device) for seqlen in seqlens])
        alone = self.groups.group(self.groups.lane, 1)
        return DynamicPackedSeqParams.build(
            tuple(seqlens), positions, alone, label="calibration", stats=ExchangeStats()
        )

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        """Return normal numbers in the type of activations."""
        return torch.randn(shape, device=self.device, dtype=self.gpt.dtype).requires_grad_(grad)

    def query_key_value(self, tokens: int, *, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs of core attention."""
        shard = self.setup.shard
        heads = (shard.num_attention_heads, shard.num_query_groups, shard.num_query_groups)
        query, key, value = (self.random(tokens, number, shard.kv_channels, grad=grad) for number in heads)
        return query, key, value

    def lengths(self) -> list[int]:
        """Return powers of two from a short sequence to the longest, every second one with --quick."""
        longest = largest_power_of_two(self.setup.max_tokens)
        shortest = min(_SHORTEST[self.device.type], longest // 8)
        found = [longest]
        while found[-1] // 2 >= shortest:
            found.append(found[-1] // (4 if self.setup.quick and found[-1] // 4 >= shortest else 2))
        return found[::-1]
