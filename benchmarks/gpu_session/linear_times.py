"""Milliseconds of one layer of linear attention (what tokens do to each other; no projections), beside their price.

    python -m benchmarks.gpu_session.linear_times --output times.json [--seconds 160] [--tokens 8192] [--device cpu]

Alone, by heads and by states, as one lane of 2, 4, 8: collectives take nothing and bring what lies in memory; kernels,
copies and launches are real. The price is that of the same hardware file without links.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.linear_prices import StageLinearAttention
from dynamic_cp.types import IN_NODE, LinearAttention, ModelShape, PlanOptions, Problem, StateExchange, Topology
from megatron.dynamic_cp.attention.linear import kernels, thd
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

LAYERS = {
    "qwen3-next": LinearAttention(kind="gated_delta_net", num_heads=32, num_groups=16, key_size=128, value_size=128),
    "nemotron-3-nano": LinearAttention(kind="mamba2", num_heads=64, num_groups=8, key_size=128, value_size=64),
}
WAYS: tuple[tuple[StateExchange, int], ...] = (
    ("heads", 1), ("heads", 4), ("states", 4), ("heads", 8), ("states", 8), ("heads", 2), ("states", 2),
)  # fmt: skip


class Lane(NamedTuple):
    """In the place of a process group: nothing travels."""

    num_lanes: int

    def size(self) -> int:
        return self.num_lanes

    def rank(self) -> int:
        return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=160.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hardware", default="h200")
    o = parser.parse_args(words)
    ends, rows, device = time.monotonic() + o.seconds, list[dict[str, Any]](), torch.device(o.device)
    kernel = kernels.FLA if device.type == "cuda" else kernels.PORTABLE
    with (
        mock.patch.object(thd, "choose_linear_kernel", return_value=kernel),
        mock.patch.object(dist, "all_to_all_single"),
    ):
        for name, published in LAYERS.items():
            small = {"num_heads": 4, "num_groups": 4, "key_size": 16, "value_size": 16}
            sizes = published if device.type == "cuda" else replace(published, **small)
            for way, cp_size in WAYS:
                if time.monotonic() > ends:
                    print(f"out of time before {name} by {way} over {cp_size}", flush=True)
                    continue
                try:
                    row = measured(sizes, way, cp_size, o.tokens, o.samples, device)
                except Exception as error:  # what one way cannot do the others still show
                    rows.append(
                        {
                            "model": name,
                            "way": way,
                            "cp_size": cp_size,
                            "error": f"{type(error).__name__}: {error}"[:300],
                        }
                    )
                    print(rows[-1], flush=True)
                    continue
                row |= {"model": name, "way": way, "cp_size": cp_size, **priced(sizes, way, cp_size, o)}
                rows.append(row)
                print(
                    {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                    flush=True,
                )
    o.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 2 if any("error" in row for row in rows) else 0


def measured(
    sizes: LinearAttention, way: StateExchange, cp_size: int, tokens: int, samples: int, device: torch.device
) -> dict[str, Any]:
    """Return milliseconds forward and backward, of the host for both, and of the first two calls."""
    unit = 2 * cp_size
    padded = [tokens * cp_size // samples // unit * unit] * samples
    padded[-1] += tokens * cp_size - sum(padded)
    lane: Any = Lane(cp_size)
    params = DynamicPackedSeqParams.build(
        padded, torch.zeros(tokens, dtype=torch.int64, device=device), lane, label="timed", stats=ExchangeStats(),
        state_exchange=way,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=of, requires_grad=True)

    channels, heads, exact = sizes.convolved_channels, sizes.num_heads, torch.float32
    x, weight = random(tokens, channels), random(channels, 1, sizes.kernel_size)
    gates = [random(tokens, heads, of=exact).sigmoid().detach().requires_grad_() for _ in range(2)]
    of_heads = random(heads, of=exact), random(heads)

    def layer() -> Tensor:
        if sizes.has_delta_rule:
            return thd.gated_delta_net_thd(x, gates[0], -gates[1], weight, params, sizes)
        return thd.mamba2_thd(x, gates[0], *of_heads, weight, random(channels), params, sizes)

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began, times = finish(), []
    for turn in range(7 if device.type == "cuda" else 3):
        start = finish()
        out = layer()
        middle = finish() if turn % 2 else time.perf_counter()  # every other turn forward is waited for
        out.backward(torch.ones_like(out))
        host = time.perf_counter()
        times.append((middle - start, finish() - middle, host - start))
        if turn == 1:
            first_s = times[0][0] + times[0][1] + times[1][0] + times[1][1]
    waited, others = times[3::2] or times[1::2], times[2::2]
    forward, backward = (sorted(column)[len(waited) // 2] for column in list(zip(*waited, strict=True))[:2])
    host_s = sorted(one[2] for one in others)[len(others) // 2]
    found = {"forward_ms": 1e3 * forward, "backward_ms": 1e3 * backward, "host_ms": 1e3 * host_s, "first_s": first_s}
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    assert finish() > began
    return found


def priced(sizes: LinearAttention, way: StateExchange, cp_size: int, o: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds that the cost model has for it without what is sent."""
    model = ModelShape(
        num_layers=3, hidden_size=64, ffn_hidden_size=64, num_attention_heads=1, num_query_groups=1, kv_channels=64,
        vocab_size=8, linear_attention=sizes, layer_pattern="G*-" if sizes.has_delta_rule else "M*-",
    )  # fmt: skip
    hardware = replace(
        load_hardware(o.hardware), bandwidth_in_node_bytes_per_s=1e18, bandwidth_across_nodes_bytes_per_s=1e18,
        exchange_latency_s_per_layer=0.0,
    )  # fmt: skip
    options = PlanOptions(max_tokens_per_rank=o.tokens, cp_comm_types=("p2p",))
    problem = Problem(topology=Topology(num_lanes=8), model=model, hardware=hardware, options=options)
    stage = StageLinearAttention(model.stages(1)[0], sizes, problem)
    ways = {"states": stage.by_states, "heads": stage.by_heads}
    both = ways[way](cp_size, IN_NODE) if cp_size > 1 else stage.alone()
    forward, backward = (one.linear.per_token * o.tokens * cp_size + one.per_sample * o.samples for one in both)
    return {"priced_forward_ms": 1e3 * forward, "priced_backward_ms": 1e3 * backward}


if __name__ == "__main__":
    raise SystemExit(main())
