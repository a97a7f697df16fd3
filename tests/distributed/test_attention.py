"""Attention of a pack in zigzag shards, by every exchange, against a naive softmax over each whole sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, Topology
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels.choice import CPU, KERNELS
from megatron.dynamic_cp.attention.mechanisms import ring
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats, packed_shard_positions
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, params_of, run_ranks
from tests.distributed.naive_attention import (
    DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    Exact,
    assert_all_close,
    assert_close,
    exact_samples,
    naive,
    random_qkv,
)
from tests.distributed.parity import samples_of


@dataclass(frozen=True)
class Case:
    """A pack over `cp_size` lanes."""

    cp_size: int
    padded_seqlens: tuple[int, ...]
    exchange: str = "p2p"
    dtype: torch.dtype = torch.float32
    kv_heads: int = KV_HEADS
    heads: int = HEADS
    inner: int = 2  # of a2a+p2p
    kernel: str = CPU.name
    kv_sent: int = 0  # KV heads that each lane gets; 0: not compared

    @property
    def inner_cp_size(self) -> int:
        return {"a2a": self.cp_size, "a2a+p2p": self.inner}.get(self.exchange, 1)

    @property
    def num_tokens(self) -> int:
        return sum(self.padded_seqlens)


@dataclass(frozen=True)
class Shard:
    """What one rank computed, and for which tokens of the pack."""

    tokens: Tensor
    out: Tensor
    grads: tuple[Tensor, ...]
    forward_bytes: int
    backward_bytes: int
    handed_over_bytes: int


def tokens_of_rank(case: Case, rank: int) -> Tensor:
    local = [seqlen // case.cp_size for seqlen in case.padded_seqlens]
    starts = torch.tensor((0, *case.padded_seqlens[:-1])).cumsum(0).repeat_interleave(torch.tensor(local))
    return starts + torch.from_numpy(packed_shard_positions(case.padded_seqlens, case.cp_size, rank))


def inputs_of(case: Case) -> list[Tensor]:
    """Return q, k, v and output gradient of the whole pack, float64, exactly representable in the case's dtype."""
    return [x.to(case.dtype).double() for x in random_qkv(case.num_tokens, case.num_tokens, case.kv_heads, case.heads)]


def count_sent_bytes(sent: list[int]) -> None:
    """Record what is handed to torch.distributed: cp - 1 of cp parts by a ring; an all-to-all keeps one of them."""
    batch, gather, scatter = dist.batch_isend_irecv, dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    all_to_all = dist.all_to_all_single

    def counting_batch(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    def counting_gather(output, x, group):
        sent.append(output.nbytes - x.nbytes)
        return gather(output, x, group=group)

    def counting_scatter(output, x, group):
        sent.append(x.nbytes - output.nbytes)
        return scatter(output, x, group=group)

    def counting_all_to_all(output, x, group):
        sent.append(x.nbytes - x.nbytes // dist.get_world_size(group))
        return all_to_all(output, x, group=group)

    dist.batch_isend_irecv, dist.all_gather_into_tensor = counting_batch, counting_gather
    dist.reduce_scatter_tensor, dist.all_to_all_single = counting_scatter, counting_all_to_all


def start(*cases: Case) -> Callable[[Case], Shard]:
    """Return what runs forward and backward of a case on this rank's shard; all cases are of as many lanes."""
    initialize_model_parallel()
    exchanges, inner_sizes = ({getattr(case, name) for case in cases} for name in ("exchange", "inner"))
    topology = Topology(num_lanes=cases[0].cp_size)
    groups = DynamicCPGroups.build(topology, timeout_s=30, exchanges=sorted(exchanges), inner_sizes=sorted(inner_sizes))
    sent: list[int] = []
    count_sent_bytes(sent)

    def attend(case: Case) -> Shard:
        sent.clear()
        tokens = tokens_of_rank(case, groups.lane)
        stats = ExchangeStats()
        group, levels = groups.group(0, case.cp_size), groups.levels(0, case.cp_size, case.inner_cp_size)
        params = params_of(case.padded_seqlens, tokens, group, cp_comm_type=case.exchange, levels=levels, stats=stats)
        *inputs, grad = (x[tokens].to(case.dtype) for x in inputs_of(case))
        inputs = [x.requires_grad_() for x in inputs]
        out = Attention.apply(*inputs, params, SCALE, KERNELS[case.kernel])
        forward_bytes = stats.bytes_sent
        grads = torch.autograd.grad(out, inputs, grad)
        return Shard(tokens, out.detach(), grads, forward_bytes, stats.bytes_sent - forward_bytes, sum(sent))

    return attend


def attend_all(cases: Sequence[Case], prepare: Callable[[], None] | None = None) -> list[Shard]:
    attend = start(*cases)
    if prepare is not None:
        prepare()
    return [attend(case) for case in cases]


def whole_reference(case: Case) -> list[Exact]:
    """Return out and the gradients of q, k, v, each sequence by itself."""
    out, _, *grads = exact_samples(inputs_of(case), samples_of(*case.padded_seqlens))
    return [out, *grads]


def whole_of(shards: Sequence[Shard]) -> list[Tensor]:
    """Return out and the gradients of q, k, v of the whole pack; each token comes from one rank."""
    tokens = torch.cat([shard.tokens for shard in shards])
    assert torch.equal(tokens.sort().values, torch.arange(len(tokens)))
    parts = zip(*((shard.out, *shard.grads) for shard in shards), strict=True)
    return [torch.cat(of_shards)[tokens.argsort()] for of_shards in parts]


def whole_result(case: Case, prepare: Callable[[], None] | None = None) -> list[Tensor]:
    """Return out and the gradients of q, k, v of the whole pack, from ranks that `prepare` changes."""
    return whole_of([shard for (shard,) in run_ranks(case.cp_size, attend_all, [case], prepare, timeout_s=60)])


CASES = {
    "alone": Case(1, (1, 7, 40)), "ring2_shards_of_two_tokens": Case(2, (4, 4, 4)),
    "ring2": Case(2, (4, 60, 8), kv_sent=2), "ring4": Case(4, (8, 128, 16), kv_sent=2),
    "ring4_one_kv_head": Case(4, (32, 8), kv_heads=1), "ring4_multi_head": Case(4, (32, 8), kv_heads=HEADS),
    "all_gather2_shards_of_two_tokens": Case(2, (4, 4, 4), "all_gather"),
    "all_gather2": Case(2, (4, 60, 8), "all_gather", kv_sent=2),
    "all_gather4": Case(4, (8, 128, 16), "all_gather", kv_sent=2),
    "all_gather4_one_kv_head": Case(4, (32, 8), "all_gather", kv_heads=1),
    "a2a2_shards_of_two_tokens": Case(2, (4, 4, 4), "a2a", kv_sent=1),
    "a2a4_two_lanes_a_kv_head": Case(4, (8, 128, 16), "a2a", kv_sent=1),
    "a2a4_one_kv_head": Case(4, (32, 8), "a2a", kv_heads=1),
    "a2a4_multi_head": Case(4, (32, 8), "a2a", kv_heads=HEADS),
    "a2a4_two_kv_heads_a_lane": Case(4, (8, 48), "a2a", kv_heads=8, heads=8, kv_sent=2),
    "a2a4_three_kv_heads": Case(4, (32, 8), "a2a", kv_heads=3, heads=12),
    "a2a2_kv_head_across_the_cut": Case(2, (32, 8), "a2a", kv_heads=3, heads=6),
    "two_levels4": Case(4, (8, 128, 16), "a2a+p2p", kv_sent=1),
    "two_levels4_one_kv_head": Case(4, (32, 8), "a2a+p2p", kv_heads=1),
    "two_levels8_of_2": Case(8, (16, 32), "a2a+p2p"),
    "two_levels8_of_4": Case(8, (16, 96), "a2a+p2p", inner=4, kv_sent=1),
}  # fmt: skip


@lru_cache
def shards_of(cp_size: int) -> dict[str, tuple[Shard, ...]]:
    """Return the shards of all cases of so many lanes, in one job."""
    cases = {name: case for name, case in CASES.items() if case.cp_size == cp_size}
    ranks = run_ranks(cp_size, attend_all, [*cases.values()], timeout_s=60)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


IN_EIGHT = [name for name, case in CASES.items() if case.cp_size == 8]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in IN_EIGHT else []) for name in CASES]
)
def test_group_equals_the_whole_sequence(name: str) -> None:
    """What a lane counts as sent is what it hands to torch.distributed: over n lanes n - 1 shares."""
    case, shards = CASES[name], shards_of(CASES[name].cp_size)[name]
    assert_all_close(whole_of(shards), whole_reference(case))
    assert all(shard.handed_over_bytes == shard.forward_bytes + shard.backward_bytes for shard in shards)
    if case.kv_sent:
        inner = case.inner_cp_size
        head_bytes = case.num_tokens // case.cp_size * DIM * 4
        exchanged = (inner - 1) * (2 * case.heads // inner + 2 * case.kv_sent) * head_bytes
        turned = (case.cp_size // inner - 1) * 2 * case.kv_sent * inner * head_bytes
        # Backward the ring turns keys and values and their gradients, the heads change places as often as forward.
        expected = exchanged + turned, exchanged + 2 * turned
        assert [(shard.forward_bytes, shard.backward_bytes) for shard in shards] == [expected] * case.cp_size


def limit_receive_buffers() -> None:
    """Let a rank fail that makes new room for keys or gradients at each of the 3 steps of a ring of 4."""
    made: list[Tensor] = []

    class Watched(ring.RingShift):
        def __init__(self, tensor: Tensor, *args: Any) -> None:
            super().__init__(tensor, *args)
            addresses = [one.data_ptr() for one in made]
            assert self._received.data_ptr() != self._sent.data_ptr()
            if self._received.data_ptr() not in addresses:
                made.append(self._received)  # and kept, so that nobody else gets its place
            assert len(made) <= 5, "two forward, two backward and one for gradients are enough"

    ring.RingShift = Watched


def test_a_ring_receives_in_the_same_buffers_again() -> None:
    """NCCL's transfers keep their tensors from being reused until the device is done: one a step piles up."""
    case = Case(4, (16, 32))
    assert_all_close(whole_result(case, limit_receive_buffers), whole_reference(case))


def use_small_blocks() -> None:
    kernels_portable.BLOCK_TOKENS = 64


@pytest.mark.by_day("a2a+p2p")
@pytest.mark.parametrize(
    "case",
    [Case(2, (4, 5 * 64 + 4), kernel="portable"), Case(4, (8, 5 * 64 + 8), "a2a+p2p", kernel="portable")],
    ids=["p2p", "a2a+p2p"],
)
def test_portable_tiles_equal_the_whole_sequence(case: Case) -> None:
    """What a CUDA device computes in float32."""
    assert_all_close(whole_result(case, use_small_blocks), whole_reference(case))


@pytest.mark.by_day("a2a+p2p")
@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
def test_bf16_is_merged_in_float32(exchange: str) -> None:
    """Rounding the exact result to bf16 costs 1.6e-3; gradients that are merged in bf16 are off by more than 7e-3."""
    case = Case(4, (256, 8), exchange, dtype=torch.bfloat16)
    actual, expected = whole_result(case), whole_reference(case)
    assert all(x.dtype == torch.bfloat16 for x in actual)
    pairs = zip(actual, expected, strict=True)
    out_error, *grad_errors = [((x.double() - wanted.value).norm() / wanted.value.norm()).item() for x, wanted in pairs]
    assert out_error < 2.4e-3
    assert max(grad_errors) < 6e-3


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result


def largest_tensors(cases: Sequence[Case]) -> list[tuple[int, int, int]]:
    """Return the elements of the largest tensor of our attention, of the naive one's forward and of its backward."""
    use_small_blocks()
    attend, found = start(*cases), []
    for case in cases:
        with LargestTensor() as ours:
            attend(case)
        q, k, v, _ = (x[: case.num_tokens // case.cp_size].clone().requires_grad_() for x in inputs_of(case))
        with LargestTensor() as forward:
            out, _ = naive(q, k, v, causal=True)
        with LargestTensor() as backward:
            out.sum().backward()
        found.append((ours.num_elements, forward.num_elements, backward.num_elements))
    return found


@pytest.mark.by_day("2")
@pytest.mark.parametrize("cp_size", [1, 2])
def test_no_square_of_the_sequence_is_built(cp_size: int) -> None:
    cases = [Case(cp_size, (1024,), kernel=kernel) for kernel in ("cpu", "portable")]
    square = (1024 // cp_size) ** 2
    for of_rank in run_ranks(cp_size, largest_tensors, cases, timeout_s=60):
        for ours, forward, backward in of_rank:
            assert min(forward, backward) >= square, "the recorder misses the square of the naive attention"
            # The largest of ours are this test's own inputs, the random values of the whole pack.
            assert 1024 * HEADS * DIM <= ours < square / 4


# The module that megatron-core builds.


def core_attention(mask: AttnMaskType = AttnMaskType.causal, **config: Any) -> TorchTHDAttention:
    config = reference.transformer_config(reference.LLAMA, **config)
    return TorchTHDAttention(config, layer_number=1, attn_mask_type=mask, attention_type="self")


def run_module() -> list[Tensor]:
    initialize_model_parallel()
    group = DynamicCPGroups.build(Topology(num_lanes=1), timeout_s=30, exchanges=("p2p",)).group(0, 1)
    q, k, v, _ = (x.float() for x in random_qkv(8, 8))
    attention, found = core_attention(kv_channels=DIM), []
    for exchange in CP_COMM_TYPES:
        params = params_of((3, 5), torch.arange(8), group, cp_comm_type=exchange)
        found.append(attention(q, k, v, packed_seq_params=params))
    with pytest.raises(TypeError, match="DynamicPackedSeqParams needed, got NoneType"):
        attention(q, k, v, packed_seq_params=None)
    return found


def test_module_on_one_lane_takes_odd_lengths_and_needs_our_packed_seq_params() -> None:
    (of_exchanges,) = run_ranks(1, run_module, timeout_s=60)
    expected, *_ = exact_samples(random_qkv(8, 8), samples_of(3, 5))
    for out in of_exchanges:
        assert out.shape == (8, 1, HEADS * DIM), "megatron-core expects [T, 1, heads * dim]"
        assert_close(out.view(8, HEADS, DIM), expected)


def test_module_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"--attention-dropout 0\.1"):
        core_attention(attention_dropout=0.1)
    with pytest.raises(UnsupportedFeatureError, match="only causal"):
        core_attention(AttnMaskType.padding)
