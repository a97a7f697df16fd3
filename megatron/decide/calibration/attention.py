"""How far attention is from float64 on this device: each kernel alone, or exchanges between torchrun's ranks.

    torchrun --local-addr localhost --nproc-per-node 8 -m megatron.decide.calibration.attention exchanges \\
        --model llama-3-8b --output FILE

Two parts of `dynamic-cp first-day`, which shows the file. Placed attention and latents are left to the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from math import isfinite
from textwrap import shorten

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from dynamic_cp.decide.files import write_json
from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_model
from dynamic_cp.types import CP_COMM_TYPES, ModelShape, Topology
from megatron.decide.calibration.device import Place, set_up
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_all_ranks
from megatron.dynamic_cp.attention.kernels.choice import BACKENDS, TOLERANCE, check_kernel, choose_kernel, ranged_kernel
from megatron.dynamic_cp.attention.te.support import installed_version, missing_exchanges
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.groups.attention_check import compare_attention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

_TIMEOUT_S = 120.0
_SHOWN = 200
"""Characters of a kernel's error message."""
_CHUNK_TOKENS = (1, 33, 261)
"""As in `attention_check`: the shortest sequence, one next to a power of two, one of several kernel blocks."""
Row = dict[str, str | float]
"""Keys: `what` was compared and `where`, its largest `error` in norm, what is `allowed`, `why` it is wrong."""


def main() -> int:
    """Compare, write the rows and return the exit status: 2 after one line on stderr if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kernels", "exchanges"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=1, help="a rank has 1/N of the heads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    try:
        place, model = set_up(options.device), load_model(options.model)
        config = _config(model, options.tp, place.device)
        rows = list(kernel_rows(config, place)) if options.part == "kernels" else exchange_rows(config, place)
        if place.rank == 0:
            write_json(options.output, rows)
        if wrong := [f"{row['what']} {row['where']}: {row['why']}" for row in rows if row.get("is_wrong")]:
            raise UnsupportedFeatureError("; ".join(wrong))
    except DynamicCPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def kernel_rows(config: TransformerConfig, place: Place) -> Iterator[Row]:
    """Yield rows of each kernel: alone against float64, and the steps of a ring against matrix products."""
    of_tensors = place.device, config.params_dtype, config.kv_channels
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_query_groups, "head_dim": config.kv_channels}
    kernels = [ranged_kernel(*of_tensors)] if place.device.type == "cuda" else []
    for backend in BACKENDS:
        try:
            kernel = choose_kernel(backend, *of_tensors)
        except UnsupportedFeatureError as error:
            yield {"what": f"--attention-backend {backend}", "where": "", "allowed": TOLERANCE, "why": str(error)}
            continue
        if kernel not in kernels:
            kernels.append(kernel)
            config.attention_backend = AttnBackend[backend]
            yield from _compared(_local(config), kernel.name, place, _groups(place))
    for kernel in kernels:
        row: Row = {"what": kernel.name, "where": "in the steps of a ring", "allowed": TOLERANCE}
        try:
            row["error"] = check_kernel(kernel, place.device, config.params_dtype, **heads)
        except (UnsupportedFeatureError, RuntimeError) as error:  # a page with this row tells more than a traceback
            row |= {"why": shorten(str(error), _SHOWN, placeholder=" ..."), "is_wrong": True}
        if row.get("error") != 0:  # 0: a kernel that check_kernel does not compare (portable, CPU)
            yield row


def exchange_rows(config: TransformerConfig, place: Place) -> list[Row]:
    """Return a row for each exchange of each group size, the worst of all ranks. Collective."""
    groups = _groups(place)

    def of_this_lane() -> list[Row]:
        rows = list(_compared(_local(config), "local layers", place, groups))
        if place.device.type == "cuda" and installed_version()[0] is not None:
            from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

            attention = TransformerEngineAttention(config, 1, AttnMaskType.causal, "self")
            missing = missing_exchanges(CP_COMM_TYPES, str(installed_version()[0]), attention._kernel)
            rows += _compared(attention, attention.implementation, place, groups, missing)
        return rows

    own = run_on_all_ranks(of_this_lane, place.device)
    worst: dict[tuple[str, str], Row] = {}
    for row in chain.from_iterable(map(json.loads, _texts_of_ranks(json.dumps(own), place))):
        other = worst.setdefault((str(row["what"]), str(row["where"])), row)
        if _badness(row) > _badness(other):
            worst[str(row["what"]), str(row["where"])] = row
    return list(worst.values())


def _texts_of_ranks(text: str, place: Place) -> list[str]:
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(collective_device())
    length = torch.tensor(len(own), device=own.device)
    lengths = [torch.zeros_like(length) for _ in range(place.num_ranks)]
    dist.all_gather(lengths, length)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=own.device)
    padded[: len(own)] = own
    texts = [torch.zeros_like(padded) for _ in range(place.num_ranks)]
    dist.all_gather(texts, padded)
    return [bytes(found[:size].tolist()).decode() for found, size in zip(texts, lengths, strict=True)]


def _badness(row: Row) -> tuple[bool, bool, float]:
    """Return a sort key for rows of the same comparison: wrong ones are worst, then those without a finite error."""
    return bool(row.get("is_wrong")), "error" not in row, float(row.get("error", 0))


def _compared(
    attention: torch.nn.Module, what: str, place: Place, groups: DynamicCPGroups, missing: tuple[str, ...] = ()
) -> Iterator[Row]:
    exchanges = [exchange for exchange in CP_COMM_TYPES if exchange not in missing]
    for one in compare_attention(attention, groups, exchanges, place.device, _CHUNK_TOKENS):
        row: Row = {"what": what, "where": one.where, "allowed": one.allowed}
        if all(map(isfinite, one.errors.values())):
            row["error"] = max(one.errors.values())
        if one.wrong:
            row |= {"why": f"{' and '.join(one.wrong)} off by more than is allowed", "is_wrong": True}
        yield row


def _groups(place: Place) -> DynamicCPGroups:
    topology = Topology(num_lanes=place.num_ranks, ranks_per_node=place.ranks_per_node)
    return DynamicCPGroups.build(topology, timeout_s=_TIMEOUT_S, exchanges=CP_COMM_TYPES, inner_sizes=(2, 4))


def _local(config: TransformerConfig) -> torch.nn.Module:
    return TorchTHDAttention(config, 1, AttnMaskType.causal, "self")


def _config(model: ModelShape, tp_size: int, device: torch.device) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads // tp_size,
        num_query_groups=max(1, model.num_query_groups // tp_size),
        kv_channels=model.kv_channels,
        params_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        bf16=device.type == "cuda",
        attention_dropout=0.0,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
