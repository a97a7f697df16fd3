"""Times of the attention kernels on this device: by length, by pack, the steps of a ring, and by mask, as ratios.

    python -m benchmarks.attention_kernels                       # this device: a GPU if there is one, else the CPU
    python -m benchmarks.attention_kernels --device cpu --lengths 256,512 --pack-tokens 2048 --json cpu.json

Four tables. Rectangles: seconds and TFLOP/s of each kernel for a causal square of L tokens and the two halves that
other steps of a ring compute, forward and backward. Packs: the same tokens cut into more and more sequences, as a
multiple of a call for each. Rings: a causal sequence over cp lanes, emulated one after the
other without transfers, as a multiple of the same sequence on one lane divided by cp: what cutting costs in the kernels
alone. Masks: a sequence whose tokens see ranges of keys, time per pair of a token with a key that it sees over that of
the causal kernel; on a GPU FlexAttention beside it, which gives no log-sum-exp of parts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dynamic_cp.types import CAUSAL, FULL, parse_mask
from megatron.dynamic_cp.attention.kernels import cudnn as kernels_cudnn
from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.kernels.choice import KERNELS, Kernel, kernel_of
from megatron.dynamic_cp.attention.packs import Pack

STEPS = ("causal", "half_the_keys", "half_the_queries")


def main() -> None:
    """Measure what the command line says and print it."""
    args = _arguments()
    torch.set_num_threads(1)  # counts on a CPU only: there the clock is the process's own
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    bench = Bench(device, dtype, args.heads, args.kv_heads, args.head_dim, args.repeat)
    names = args.kernels or usable(device, dtype, args.head_dim)
    result: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "arguments": vars(args)}
    print(f"{result['device']}, torch {torch.__version__}, {args.dtype}, heads {args.heads}/{args.kv_heads}", end="")
    print(f" x {args.head_dim}, median of {args.repeat}")
    for name in names:
        kernel = KERNELS[name]
        rectangles = [bench.rectangle(kernel, step, length) for length in args.lengths for step in STEPS]
        packs = [bench.pack(kernel, args.pack_tokens // n, n) for n in args.pack_counts]
        rings = [bench.ring(kernel, max(args.lengths), cp_size) for cp_size in args.cp_sizes]
        masks = bench.masks(kernel, args.mask_length, args.masks)
        _print(name, rectangles, packs, rings, masks)
        result[name] = {"rectangles": rectangles, "packs": packs, "rings": rings, "masks": masks}
    if device.type == "cuda" and args.masks:
        result["flex"] = {"masks": bench.flex(args.mask_length, args.masks)}
        _print("flex", [], [], [], result["flex"]["masks"])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


class Bench:
    """Times kernels for one shape of heads."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, repeat: int
    ) -> None:
        self._device, self._dtype, self._repeat = device, dtype, repeat
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim

    def rectangle(self, kernel: Kernel, step: str, length: int) -> dict[str, Any]:
        """Return the times of one sequence of `length` local tokens in a step of the ring."""
        return {"step": step, "length": length, **self._times(kernel, self._pack(step, (length,)))}

    def pack(self, kernel: Kernel, length: int, number: int) -> dict[str, Any]:
        """Return the times of `number` sequences of `length` tokens, and as a multiple of one call for each."""
        together = self._times(kernel, self._pack("causal", (length,) * number))
        alone = self._times(kernel, self._pack("causal", (length,)))
        ratios = {f"{way}_over_separate": together[f"{way}_s"] / (number * alone[f"{way}_s"]) for way in WAYS}
        return {"length": length, "number": number, **together, **ratios}

    def ring(self, kernel: Kernel, length: int, cp_size: int) -> dict[str, Any]:
        """Return the times of a lane's kernel calls for a sequence of `length` tokens over `cp_size` lanes."""
        local = length // cp_size
        own, other = (self._times(kernel, self._pack(step, (local,))) for step in STEPS[:2])
        whole = self._times(kernel, self._pack("causal", (length,)))
        times = {f"{way}_s": own[f"{way}_s"] + (cp_size - 1) * other[f"{way}_s"] for way in WAYS}
        ratios = {f"{way}_over_share": times[f"{way}_s"] / (whole[f"{way}_s"] / cp_size) for way in WAYS}
        return {"length": length, "cp_size": cp_size, **times, **ratios}

    def masks(self, kernel: Kernel, length: int, texts: list[str]) -> list[dict[str, Any]]:
        """Return the times of one sequence by each mask, and per pair over those of the causal one."""
        if not texts:
            return []
        found = [{"mask": "causal", "kernel": kernel.name, **self._times(kernel, self._pack("causal", (length,)))}]
        for text in texts:
            pack = Pack.build((length,), device=self._device, key_ranges=parse_mask(text).key_ranges(length))
            used = kernel_of(pack, kernel, self._random(1, self._heads))
            found.append({"mask": text, "kernel": used.name, **self._times(used, pack)})
        return [_per_pair(row, found[0], length) for row in found]

    def flex(self, length: int, texts: list[str]) -> list[dict[str, Any]]:
        """Return the same of FlexAttention, compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        attend = torch.compile(flex_attention, dynamic=False)
        query = self._random(length, self._heads).transpose(0, 1)[None].requires_grad_()
        key, value = (self._random(length, self._kv_heads).transpose(0, 1)[None].requires_grad_() for _ in range(2))
        found = []
        for text in ["causal", *texts]:
            ranges = torch.from_numpy(parse_mask(text).key_ranges(length)).to(self._device)

            def sees(
                batch: torch.Tensor,
                head: torch.Tensor,
                row: torch.Tensor,
                column: torch.Tensor,
                ranges: torch.Tensor = ranges,
            ) -> torch.Tensor:
                first = (column >= ranges[row, 0]) & (column < ranges[row, 1])
                return first | ((column >= ranges[row, 2]) & (column < ranges[row, 3]))

            block_mask = create_block_mask(sees, None, None, length, length, device=str(self._device))

            def forward(block_mask: Any = block_mask) -> torch.Tensor:
                return attend(query, key, value, block_mask=block_mask, enable_gqa=True)

            out = forward()
            grad = torch.randn_like(out)

            def backward(out: torch.Tensor = out, grad: torch.Tensor = grad) -> Any:
                return torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)

            forward_s, backward_s = self._seconds(forward), self._seconds(backward)
            found.append({"mask": text, "kernel": "flex", "forward_s": forward_s, "backward_s": backward_s})
        return [_per_pair(row, found[0], length) for row in found]

    def _pack(self, step: str, lengths: tuple[int, ...]) -> Pack:
        halves = tuple(length // 2 for length in lengths)
        rows, columns = {STEPS[0]: (lengths, lengths), STEPS[1]: (lengths, halves), STEPS[2]: (halves, lengths)}[step]
        return Pack.build(rows, columns, mask=CAUSAL if step == "causal" else FULL, device=self._device)

    def _times(self, kernel: Kernel, pack: Pack) -> dict[str, float]:
        """Return forward_s, backward_s and the achieved TFLOP/s of both."""
        num_rows, num_columns = sum(pack.row_seqlens), sum(pack.column_seqlens)
        q, grad = (self._random(num_rows, self._heads) for _ in range(2))
        k, v = (self._random(num_columns, self._kv_heads) for _ in range(2))
        scale = self._head_dim**-0.5
        out, lse = kernel.forward(q, k, v, pack, scale)
        forward_s = self._seconds(lambda: kernel.forward(q, k, v, pack, scale))
        backward_s = self._seconds(lambda: kernel.backward(grad, q, k, v, out, lse, pack, scale))
        pairs = sum(rows * columns for rows, columns in zip(pack.row_seqlens, pack.column_seqlens, strict=True))
        if pack.host_ranges is not None:
            pairs = int((pack.host_ranges[:, 1::2] - pack.host_ranges[:, 0::2]).sum())
        flops = 4 * self._heads * self._head_dim * pairs / (2 if pack.causal else 1)
        return {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "forward_tflops": flops / forward_s / 1e12,
            "backward_tflops": 2.5 * flops / backward_s / 1e12,
        }

    def _random(self, num_tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, self._head_dim, device=self._device).to(self._dtype)

    def _seconds(self, function: Callable[[], Any]) -> float:
        """Return the median seconds of a call, of the device's own clock where it has one."""
        for _ in range(2):
            function()
        return statistics.median(self._once(function) for _ in range(self._repeat))

    def _once(self, function: Callable[[], Any]) -> float:
        if self._device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            function()
            ended.record()
            ended.synchronize()
            return began.elapsed_time(ended) / 1e3
        started = time.process_time()  # others may use the machine
        function()
        return time.process_time() - started


WAYS = ("forward", "backward")


def usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the kernels that can be used, and say why the others cannot."""
    names = ["cpu"] if device.type == "cpu" else []
    for name, module in (("flash", kernels_flash), ("cudnn", kernels_cudnn)):
        obstacle = module.why_not(device, dtype, head_dim)
        if obstacle is None:
            names.append(name)
        else:
            print(f"{name}: {obstacle}")
    return [*names, "portable"]


def device_name(device: torch.device) -> str:
    """Return the device's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), 1 thread"


def _per_pair(row: dict[str, Any], causal: dict[str, Any], length: int) -> dict[str, Any]:
    """Return `row` with its pairs, causal = 1, and its times for a pair, causal = 1."""
    pairs = parse_mask(row["mask"]).num_pairs(length) / CAUSAL.num_pairs(length)
    ratios = {f"{way}_per_pair": row[f"{way}_s"] / causal[f"{way}_s"] / pairs for way in WAYS}
    return {"length": length, "pairs": pairs, **row, **ratios}


def _print(
    name: str,
    rectangles: list[dict[str, Any]],
    packs: list[dict[str, Any]],
    rings: list[dict[str, Any]],
    masks: list[dict[str, Any]],
) -> None:
    print(f"\n{name}\n{'length':>8} {'step':<17} {'forward ms':>11} {'TFLOP/s':>8} {'backward ms':>12} {'TFLOP/s':>8}")
    for row in rectangles:
        print(
            f"{row['length']:>8} {row['step']:<17} {1e3 * row['forward_s']:>11.3f} {row['forward_tflops']:>8.2f} "
            f"{1e3 * row['backward_s']:>12.3f} {row['backward_tflops']:>8.2f}"
        )
    print(f"{'pack':>8} {'':<17} {'forward ms':>11} {'/ apart':>8} {'backward ms':>12} {'/ apart':>8}")
    for row in packs:
        print(
            f"{row['number']:>4} x {row['length']:<19} {1e3 * row['forward_s']:>11.3f} "
            f"{row['forward_over_separate']:>8.2f} {1e3 * row['backward_s']:>12.3f} "
            f"{row['backward_over_separate']:>8.2f}"
        )
    print(f"{'ring':>8} {'':<17} {'forward ms':>11} {'/ share':>8} {'backward ms':>12} {'/ share':>8}")
    for row in rings:
        print(
            f"{row['length']:>8} {'over cp ' + str(row['cp_size']):<17} {1e3 * row['forward_s']:>11.3f} "
            f"{row['forward_over_share']:>8.2f} {1e3 * row['backward_s']:>12.3f} {row['backward_over_share']:>8.2f}"
        )

    print(f"{'mask':<26} {'pairs':>6} {'forward ms':>11} {'/ pair':>8} {'backward ms':>12} {'/ pair':>8}")
    for row in masks:
        print(
            f"{row['mask']:<26} {row['pairs']:>6.3f} {1e3 * row['forward_s']:>11.3f} {row['forward_per_pair']:>8.2f} "
            f"{1e3 * row['backward_s']:>12.3f} {row['backward_per_pair']:>8.2f}  {row['kernel']}"
        )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.device_count() > 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="default: all that can be used here")
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--head-dim", type=int, default=128 if on_gpu else 64)
    parser.add_argument("--lengths", type=_numbers, default=[512, 2048, 8192, 32768] if on_gpu else [256, 1024])
    parser.add_argument("--pack-tokens", type=int, default=32768 if on_gpu else 2048, help="tokens of each pack")
    parser.add_argument("--pack-counts", type=_numbers, default=[1, 4, 16, 64], help="sequences of a pack")
    parser.add_argument("--cp-sizes", type=_numbers, default=[2, 4, 8])
    masks = ["causal", "lambda:64,4096", "lambda:64,1024", "causal_blockwise:256,2"]
    parser.add_argument("--masks", nargs="*", default=masks if on_gpu else [], help="as ranges of keys, see dynamic-cp")
    parser.add_argument("--mask-length", type=int, default=32768 if on_gpu else 16384, help="tokens of that sequence")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
