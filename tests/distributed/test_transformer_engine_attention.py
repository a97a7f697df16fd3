"""Attention over TransformerEngine's own Python of several versions: each exchange, mixed CP sizes, against float64.

One module attends to micro-batches of changing groups and exchanges, then their backward passes run, last first, as in
a pipeline. What a CPU does not show is counted: bytes that are sent, and where the host would wait for the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, FULL, CpCommType, Sample, Topology
from megatron.dynamic_cp.attention.te.support import LACKS_MASKS, missing_exchanges, provider, why_no_masks
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.layout.sharding import packed_shard_positions
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.real_transformer_engine import counts, extension
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import NEWEST, PINNED, VERSIONS
from tests.gpu import judge
from tests.gpu.judge import error_in_norm, exact

HEADS, HEAD_DIM = 8, 16
KV_HEADS = (1, 2, 8)
EXACT = 1e-6
WITHOUT_ALL_GATHER: tuple[CpCommType, ...] = ("p2p", "a2a", "a2a+p2p")
UNSET = (None, None, None, "p2p")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A micro-batch: the exchange, over how many lanes, and lengths in steps of 2 * cp, each short by some tokens."""

    exchange: CpCommType
    cp_size: int
    steps: tuple[int, ...]
    short_by: tuple[int, ...]

    @property
    def inner_cp_size(self) -> int:
        return {"a2a": self.cp_size, "a2a+p2p": 2}.get(self.exchange, 1)

    @property
    def padded(self) -> tuple[int, ...]:
        step = 2 * self.cp_size if self.cp_size > 1 else 1
        return tuple(steps * step for steps in self.steps)

    @property
    def valid(self) -> tuple[int, ...]:
        return tuple(length - less for length, less in zip(self.padded, self.short_by, strict=True))


ONE: dict[str, Any] = {"steps": (9,), "short_by": (1,)}
PACK: dict[str, Any] = {"steps": (5, 1, 12, 3, 1), "short_by": (1, 1, 0, 1, 0)}
WHOLE: dict[str, Any] = {"steps": (2, 8), "short_by": (0, 0)}
"""One sequence with padding at its end; a pack with padding between; a pack without any."""


def cases(exchanges: tuple[CpCommType, ...], num_lanes: int) -> Iterator[Case]:
    """Yield micro-batches so that sizes and exchanges change from one to the next."""
    for number, exchange in enumerate(exchanges * 2):
        shape = (ONE, PACK, WHOLE)[number % 3]
        for cp_size in (num_lanes, num_lanes // 2, 1, num_lanes):
            if cp_size > 1 and not (exchange == "a2a+p2p" and cp_size == 2):
                yield Case(exchange=exchange, cp_size=cp_size, **shape)
        yield Case(exchange="p2p", cp_size=1, steps=(7, 30, 1), short_by=(0, 0, 0))
    yield Case(exchange="p2p", cp_size=1, steps=(1,), short_by=(0,))


class MicroBatch:
    """A case on one rank: what it gave, and what it had to give."""

    def __init__(self, case: Case, kv_heads: int, groups: DynamicCPGroups, seed: int) -> None:
        self.case, first = case, groups.lane - groups.lane % case.cp_size
        generator = torch.Generator().manual_seed(1000 * seed + first)
        shapes = [(sum(case.padded), heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
        self.whole = [torch.randn(shape, generator=generator) for shape in shapes]
        self.is_valid = torch.cat(
            [torch.arange(padded) < valid for padded, valid in zip(case.padded, case.valid, strict=True)]
        )
        self.whole[3][~self.is_valid] = 0  # padding has no loss
        starts = torch.tensor((0, *case.padded[:-1])).cumsum(0)
        starts = starts.repeat_interleave(torch.tensor([length // case.cp_size for length in case.padded]))
        self.rows = starts + torch.from_numpy(packed_shard_positions(case.padded, case.cp_size, groups.lane - first))
        self.params = DynamicPackedSeqParams.build(
            case.padded,
            torch.zeros(len(self.rows), dtype=torch.int64),
            groups.group(first, case.cp_size),
            cp_comm_type=case.exchange,
            levels=groups.levels(first, case.cp_size, case.inner_cp_size if case.cp_size > 1 else 1),
            label=f"{case.exchange} over {case.cp_size}",
            seqlens=case.valid,
            stats=ExchangeStats(),
        )

    def forward(self, attention: torch.nn.Module) -> None:
        self.qkv = [x[self.rows].clone().requires_grad_() for x in self.whole[:3]]
        query, key, value = self.qkv
        of_projection = torch.cat((value, value), dim=1)[:, : value.shape[1]]  # columns, as of a layer
        out = attention(query, key, of_projection, None, packed_seq_params=self.params)
        self.out = out.view(len(self.rows), HEADS, HEAD_DIM)

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, self.qkv, self.whole[3][self.rows])

    def error(self) -> float:
        """Return by how much of its norm the output or a gradient is off; of valid tokens."""
        expected, _ = exact(self.whole, self.case.padded, self.case.padded, causal=True)
        mine = self.is_valid[self.rows]
        pairs = zip([self.out.detach(), *self.grads], expected, strict=True)
        errors = [error_in_norm(x[mine], y[self.rows][mine], 1e-2) for x, y in pairs]
        assert len(errors) == 4
        return max(errors) if all(error == error for error in errors) else float("nan")


def attention_of(kv_heads: int, **more: Any) -> torch.nn.Module:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    shape = {"num_attention_heads": HEADS, "num_query_groups": kv_heads, "kv_channels": HEAD_DIM}
    config = reference.transformer_config(reference.LLAMA, hidden_size=HEADS * HEAD_DIM, **shape, **more)
    return TransformerEngineAttention(config, 1, AttnMaskType.causal, "self")


def groups_of(num_lanes: int, exchanges: tuple[CpCommType, ...]) -> DynamicCPGroups:
    initialize_model_parallel()
    inner_sizes = (2,) if num_lanes > 2 else ()
    topology = Topology(num_lanes=num_lanes)
    return DynamicCPGroups.build(topology, timeout_s=20, exchanges=exchanges, inner_sizes=inner_sizes)


def state_of(attention: Any) -> tuple[Any, ...]:
    return attention.cp_group, attention.cp_global_ranks, attention.cp_stream, attention.cp_comm_type


Outcome = tuple[Case, str, float, int, int]
"""Case; who did the exchange; error; bytes counted by the planner's formula; bytes that were sent."""


def attend_in_turn(
    version: str, exchanges: tuple[CpCommType, ...], heads: tuple[int, ...]
) -> tuple[list[Outcome], dict[str, int], set[str]]:
    """Return what came of each micro-batch, where the host would wait, and which kernels were called."""
    groups = groups_of(dist.get_world_size(), exchanges)
    counts.waits.clear()  # those of starting
    outcomes: list[Outcome] = []
    for kv_heads in heads:
        attention = attention_of(kv_heads)
        made = cases(exchanges, dist.get_world_size())
        batches = [MicroBatch(case, kv_heads, groups, seed) for seed, case in enumerate(made)]
        sent = dict.fromkeys(batches, 0)
        for batch in batches:
            counts.sent_bytes.clear()
            batch.forward(attention)
            sent[batch] += counts.sent_bytes.total()
            assert state_of(attention) == UNSET, f"the group of {batch.params.label} was left set"
        for batch in reversed(batches):
            counts.sent_bytes.clear()
            batch.backward()
            sent[batch] += counts.sent_bytes.total()
        for batch in batches:
            case = batch.case
            inner = batch.params.inner_cp_size
            who = provider(case.exchange, version, attention._kernel, kv_heads=kv_heads, inner_cp_size=inner)
            who = who if case.cp_size > 1 else "alone"
            outcomes.append((case, who, batch.error(), batch.params.stats.bytes_sent, sent[batch]))
    assert not counts.slow_paths, "TransformerEngine took boundaries for those of padding between sequences"
    return outcomes, dict(counts.waits), set(extension.CALLS)


def check(version: str, num_lanes: int, kernel: str, kv_heads: tuple[int, ...] = KV_HEADS) -> dict[str, int]:
    """Attend on ranks and judge; return where the host would wait."""
    exchanges = tuple(sorted(set(CP_COMM_TYPES) - set(missing_exchanges(CP_COMM_TYPES, version, kernel))))
    exchanges = tuple(one for one in exchanges if num_lanes > 2 or one != "a2a+p2p")
    ranks = run_ranks_with(version, num_lanes, attend_in_turn, version, exchanges, kv_heads, kernel=kernel)
    seen = set()
    for outcomes, _, calls in ranks:
        assert calls == {f"{'fused' if kernel == 'cuDNN' else 'flash'}_attn_{one}" for one in ("fwd", "bwd")}
        for case, who, error, counted, sent in outcomes:
            assert error <= EXACT, (case, who)
            assert counted == sent, (case, who)
            assert (sent > 0) == (case.cp_size > 1)
            seen.add((case.exchange, who))
    assert {exchange for exchange, who in seen if who != "alone"} == set(exchanges)
    assert all(waits == ranks[0][1] for _, waits, _ in ranks)
    return ranks[0][1]


@pytest.mark.nightly
def test_the_kernel_of_an_a100_equals_float64() -> None:
    """flash-attn 2; all_gather, which it gets wrong, is left out, and the backward pass of rings waits."""
    waits = check(NEWEST, 4, "flash-attn 2")
    assert set(waits) == {"__index__ context_parallel.py:backward"}, waits


@pytest.mark.parametrize(
    ("num_lanes", "version", "kv_heads"),
    [
        pytest.param(*case, marks=pytest.mark.of_releases if case == (4, NEWEST, (2,)) else pytest.mark.nightly)
        for case in product([2, 4, 8], VERSIONS, [(2,), (1, 8)])
    ],
)
def test_every_exchange_equals_float64(num_lanes: int, version: str, kv_heads: tuple[int, ...]) -> None:
    assert check(version, num_lanes, "cuDNN", kv_heads) == {}, "the host would wait"


# What may go wrong between a micro-batch and TransformerEngine: an assertion of what stands in for its kernels notices
# it, or the numbers do, or what is counted.


def set_otherwise(change: Callable[[Any, list[int], Any], tuple[Any, list[int], Any]]) -> Callable[..., None]:
    """Return a fault in the group, its ranks or the stream that a module is given."""

    def plant(attention: Any, params: DynamicPackedSeqParams) -> None:
        set_group = attention.set_context_parallel_group

        def wrong(group: Any, ranks: list[int], stream: Any, exchange: str) -> None:
            set_group(*(change(group, ranks, stream) if group else (group, ranks, stream)), exchange)

        attention.set_context_parallel_group = wrong

    return plant


def tell_otherwise(change: Callable[[DynamicPackedSeqParams], dict[str, Any]]) -> Callable[..., None]:
    """Return a fault in what a module is told of a micro-batch."""
    return lambda attention, params: vars(params).update(change(params))


def valid_boundaries(params: DynamicPackedSeqParams, first: int) -> dict[str, torch.Tensor]:
    """Let sequences from `first` on end where their padding begins, as megatron-core's own batches do."""
    boundaries = params.cu_seqlens_q.clone()
    for index in range(first, len(params.seqlens)):
        boundaries[index + 1] = boundaries[index] + params.seqlens[index]
    return {"cu_seqlens_q": boundaries, "cu_seqlens_kv": boundaries}


def leave_the_group_set(attention: Any, params: DynamicPackedSeqParams) -> None:
    set_group = attention.set_context_parallel_group
    attention.set_context_parallel_group = lambda group, *rest: None if group is None else set_group(group, *rest)


def have_everything_done_natively(attention: Any, params: DynamicPackedSeqParams) -> None:
    from megatron.dynamic_cp.attention.te import attention as ours

    ours.provider = lambda *_args, **_kwargs: "native"


def go_back_over_another_group(attention: Any, params: DynamicPackedSeqParams) -> None:
    """As if the backward pass took the group that another micro-batch set."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    ring = context_parallel.AttnFuncWithCPAndKVP2P
    backward = ring.backward

    def wrong(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.cp_group, ctx.cp_global_ranks = dist.group.WORLD, [0, 1, 2, 3]
        return backward(ctx, *grads)

    ring.backward = staticmethod(wrong)


def ring(cp_size: int, shape: dict[str, Any]) -> Case:
    return Case(exchange="p2p", cp_size=cp_size, **shape)


def with_boundaries(first: int) -> Callable[..., None]:
    return tell_otherwise(lambda params: valid_boundaries(params, first % len(params.seqlens)))


TWO_LEVELS = Case(exchange="a2a+p2p", cp_size=4, **ONE)
copied_boundaries = tell_otherwise(lambda params: {"cu_seqlens_q_padded": params.cu_seqlens_q.clone()})
longest_valid = tell_otherwise(lambda params: dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(params.seqlens)))
reversed_ranks = set_otherwise(lambda group, ranks, stream: (group, ranks[::-1], stream))
swapped_levels = set_otherwise(lambda group, ranks, stream: (group[::-1], ranks, stream))
group_of_the_job = set_otherwise(lambda group, ranks, stream: (dist.group.WORLD, [0, 1, 2, 3], stream))
no_stream = set_otherwise(lambda group, ranks, stream: (group, ranks, None))
TOLD = "cuDNN is told max_seqlen_q 17, a sequence has 18"
LACKED = "thd format is not supported with hierarchical CP"
FAULTS: dict[str, tuple[str, Case, Callable[..., None], str]] = {
    "valid boundaries, 2.11": (PINNED, ring(4, PACK), with_boundaries(0), "equal dot_product_attention.py:forward"),
    "valid last boundary, 2.11": (PINNED, ring(4, ONE), with_boundaries(-1), "off by nan"),
    "valid boundaries, 2.20": (NEWEST, ring(4, PACK), with_boundaries(0), "slow path"),
    "copied boundaries": (NEWEST, ring(4, WHOLE), copied_boundaries, "slow path"),
    "longest valid length": (NEWEST, ring(4, ONE), longest_valid, TOLD),
    "reversed ranks": (NEWEST, ring(4, ONE), reversed_ranks, "Pair is not connected|Connection|off by"),
    "swapped levels": (NEWEST, TWO_LEVELS, swapped_levels, "is not part of group"),
    "the job's group": (PINNED, ring(2, ONE), group_of_the_job, "halves of an odd length"),
    "another group's backward": (NEWEST, ring(2, ONE), go_back_over_another_group, "list index out of range"),
    "a group left set": (PINNED, ring(4, ONE), leave_the_group_set, "a group was left set"),
    "an exchange that a version lacks": (PINNED, TWO_LEVELS, have_everything_done_natively, LACKED),
    "no stream": (PINNED, ring(4, ONE), no_stream, "TransformerEngine was given no stream"),
}


def what_is_noticed(fault: str) -> str:
    """Return what this rank notices of a fault; "" if nothing."""
    _, case, plant, _ = FAULTS[fault]
    groups = groups_of(4, (case.exchange,))
    attention, batch = attention_of(2), MicroBatch(case, 2, groups, 0)
    counts.waits.clear()
    plant(attention, batch.params)
    try:
        batch.forward(attention)
        batch.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if state_of(attention) != UNSET:
        return "a group was left set"
    error = batch.error()
    if not error <= EXACT:
        return f"off by {error}"
    return " ".join([*counts.waits, *(["slow path"] if counts.slow_paths else [])])


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str) -> None:
    version, _, _, noticed = FAULTS[fault]
    said = run_ranks_with(version, 4, what_is_noticed, fault, timeout_s=60)
    assert any(re.search(noticed, one) for one in said), said


def refuse_and_fail() -> list[tuple[Any, ...]]:
    """Return the states of all modules after their forward pass failed over a group, with a share of heads too."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("planted: CUDA error in TransformerEngine")

    TEDotProductAttention.forward = fail
    groups = groups_of(4, WITHOUT_ALL_GATHER)
    states = []
    for exchange in WITHOUT_ALL_GATHER:
        attention = attention_of(1)
        batch = MicroBatch(Case(exchange=exchange, cp_size=4, **ONE), 1, groups, 0)
        masked = (Sample(sample_id=0, seqlen=8, mask=FULL), Sample(sample_id=1, seqlen=16))
        refused = {
            r"the micro-batch has full attention \(": replace(batch.params, mask=FULL),
            "have masks of their own, and TransformerEngine's": replace(batch.params, masked_samples=masked),
        }
        qkv = [x[batch.rows] for x in batch.whole[:3]]
        for says, params in refused.items():
            with pytest.raises(UnsupportedFeatureError, match=says):
                attention(*qkv, None, packed_seq_params=params)
        with pytest.raises(RuntimeError, match="planted"):
            batch.forward(attention)
        assert why_no_masks([torch.nn.Sequential(attention)]) == LACKS_MASKS
        states += [state_of(module) for module in (attention, *attention._shares_of_heads.values())]
    assert why_no_masks([torch.nn.Linear(1, 1)]) is None
    with pytest.raises(UnsupportedFeatureError, match=r"layer 1 has a window \(--window-size\)"):
        attention_of(1, window_size=(15, 0))
    with pytest.raises(UnsupportedFeatureError, match="--softmax-type learnable is checked with local layers only"):
        attention_of(1, softmax_type="learnable")
    return states


def test_a_failing_forward_pass_puts_the_group_back() -> None:
    for states in run_ranks_with(PINNED, 4, refuse_and_fail, timeout_s=60):
        assert len(states) == len(WITHOUT_ALL_GATHER) + 2, "one module an exchange, two more with a share of the heads"
        assert set(states) == {UNSET}


def run_the_tests_of_a_gpu(cp_sizes: tuple[int, ...]) -> int:
    """Run those of tests/gpu with attention, on fewer tokens; return how many cases there were."""
    judge.DEVICE = torch.device("cpu")
    from tests.gpu import test_transformer_engine as on_gpu

    on_gpu.DEVICE = judge.DEVICE  # where pytest has imported it before, as in a run of all tests
    on_gpu.SEQLENS = (16, 256, 16 * 9, 512)
    asked: list[int] = []

    def note_waits(mode: str) -> None:
        asked.append(counts.waits.total())
        assert asked[-1] == asked[0], f"the host would wait: {counts.waits}"

    groups = groups_of(1, ("p2p",))
    with mock.patch.object(torch.cuda, "set_sync_debug_mode", note_waits):
        on_gpu.test_attention_waits_for_nothing(groups)
    assert len(asked) == 2
    packs = (on_gpu.SEQLENS, (1, 7, 40), (1,) * 40)
    for seqlens in packs:
        on_gpu.test_packs_equal_the_whole_sequences(seqlens, groups)
    on_gpu.test_a_share_of_the_heads_equals_that_of_the_whole(groups)
    for cp_size in cp_sizes:
        on_gpu.test_each_lane_of_a_ring_equals_the_whole_sequence(cp_size, groups)
    return len(packs) + len(cp_sizes) + 2


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_the_tests_of_a_gpu_are_right_themselves(version: str) -> None:
    """They have not run on one; bounds are those of bfloat16, which is what is computed in."""
    assert run_ranks_with(version, 1, run_the_tests_of_a_gpu, (2, 4, 8)) == [8]
