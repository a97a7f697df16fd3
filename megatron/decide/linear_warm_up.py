"""Before the first step of a hybrid on a GPU: tunes and compiles flash-linear-attention's programs, alike on all ranks.

Triton times some 100 configurations for each number of heads, width of keys and values and number of channels that it
meets: minutes for each CP size. Inside a step, ranks of other buckets would wait in NCCL; and each rank would choose by
its own clock, so that no run repeats another to the bit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamic_cp.types import STATE_EXCHANGES, LinearAttention, ModelShape, PlanOptions, StateExchange
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.attention.linear.kernels import choose_linear_kernel
from megatron.dynamic_cp.attention.linear.portable import PORTABLE
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

ROWS_OF_A_BUCKET = 65536
"""Vectors in a bucket of the norm's programs, which know each number of buckets (NB) as a shape of its own."""
LANE_TOKENS = 1024, 1026
"""Programs are compiled for numbers that 16 divides, and for others."""


def warm_up(
    groups: DynamicCPGroups,
    model: ModelShape,
    options: PlanOptions,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Run each program of a model's layers of linear attention that plans with these options may meet; return a line
    for the log, "" where there is none to tune. Collective over the job; each loop calls it before its first step.
    """
    if model.linear_attention is None:
        return ""
    sizes, way = model.linear_attention.of_rank(tp_size), options.state_exchange
    if choose_linear_kernel(device, sizes) is PORTABLE:
        return ""
    ways, began = STATE_EXCHANGES if way == "auto" else (way,), time.perf_counter()
    number = LinearWarmUp(sizes, dtype, device).run(groups, ways, options.max_tokens_per_rank)
    return f"warm-up: {number} packs of linear attention in {time.perf_counter() - began:.1f} s"


class LinearWarmUp:
    """Packs of zeros through a layer of linear attention. `sizes` are those of a tensor-parallel rank."""

    def __init__(self, sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self._dtype, self._device = sizes, dtype, device

    def run(self, groups: DynamicCPGroups, ways: Sequence[StateExchange], max_tokens: int) -> int:
        """Run packs of each group of this lane, in each way, forward and backward; return their number. Collective in
        each group; then over the job, where ranks agree on what they chose. `max_tokens` are those of a rank.
        """
        number = 0
        for first, size in sorted(groups.groups, key=lambda block: block[1]):
            for way in ways if size > 1 else ways[:1]:
                for tokens in LANE_TOKENS:
                    params = DynamicPackedSeqParams.build(
                        (tokens * size,),
                        torch.zeros(tokens, dtype=torch.int64, device=self._device),
                        groups.group(first, size),
                        label=f"start-up (warm-up of linear attention by {way} over {size} lanes)",
                        stats=ExchangeStats(),
                        state_exchange=way,
                    )
                    self._attend(params, tokens)
                    number += 1
        agree_on_choices(self._device)
        if self.sizes.has_delta_rule:
            self._normalize(max(size for _, size in groups.groups), max_tokens)
        return number

    def _zeros(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*shape, dtype=of or self._dtype, device=self._device, requires_grad=True)

    def _attend(self, params: DynamicPackedSeqParams, tokens: int) -> None:
        sizes, exact = self.sizes, torch.promote_types(self._dtype, torch.float32)
        x, gate = self._zeros(tokens, sizes.convolved_channels), self._zeros(tokens, sizes.num_heads, of=exact)
        weight = self._zeros(sizes.convolved_channels, 1, sizes.kernel_size)
        if sizes.has_delta_rule:
            out = gated_delta_net_thd(x, gate, gate, weight, params, sizes)
        else:
            of_heads = self._zeros(sizes.num_heads)
            out = mamba2_thd(x, gate, of_heads, of_heads, weight, self._zeros(len(weight)), params, sizes)
        torch.autograd.grad(out, x, torch.ones_like(out))

    def _normalize(self, num_lanes: int, max_tokens: int) -> None:
        """Normalize as many vectors as a lane may have, by the configuration of few: alone, or by heads of all tokens
        of its bucket for its groups.
        """
        sizes, normalize = self.sizes, choose_linear_kernel(self._device, self.sizes).normalize
        shares = (n * len(sizes.groups_of_lane(lane, n)) for n in range(1, num_lanes + 1) for lane in range(n))
        tuners = [tuner for _, tuner in tuned_programs() if "NB" in tuner.keys]
        for number in range(1, -(-2 * max_tokens * max(shares) // ROWS_OF_A_BUCKET) + 1):
            for tuner in tuners:
                place = tuner.keys.index("NB")
                for key, config in list(tuner.cache.items()):
                    tuner.cache.setdefault((*key[:place], number, *key[place + 1 :]), config)
            x = self._zeros(number * ROWS_OF_A_BUCKET, sizes.key_size)
            torch.autograd.grad(normalize(x), x, torch.ones_like(x))


def agree_on_choices(device: torch.device) -> int:
    """Have all ranks take what the first of them chose, for each program and shape; return how many choices of this
    rank were others. Collective over the job.
    """
    own = {f"{name} {list(key)}": (tuner, key) for name, tuner in tuned_programs() for key in tuner.cache}
    mine = {
        text: tuner.configs.index(tuner.cache[key])
        for text, (tuner, key) in own.items()
        if tuner.cache[key] in tuner.configs
    }
    agreed: dict[str, int] = {}
    for message in all_gather_bytes(json.dumps(mine).encode(), device):
        agreed = json.loads(message) | agreed
    for text in mine:
        tuner, key = own[text]
        tuner.cache[key] = tuner.configs[agreed[text]]
    return sum(agreed[text] != index for text, index in mine.items())


def tuned_programs() -> Iterator[tuple[str, Any]]:
    """Yield the programs of flash-linear-attention that Triton tunes, each once, by module and name."""
    seen: set[int] = set()
    for module in [name for name in sorted(sys.modules) if name.partition(".")[0] == "fla"]:
        for name, program in sorted(vars(sys.modules[module]).items()):
            while hasattr(program, "fn") and not _is_tuner(program):
                program = program.fn  # behind heuristics
            if _is_tuner(program) and id(program) not in seen:
                seen.add(id(program))
                yield f"{module}.{name}", program


def _is_tuner(program: Any) -> bool:
    return any(cls.__name__ == "Autotuner" for cls in type(program).__mro__)
