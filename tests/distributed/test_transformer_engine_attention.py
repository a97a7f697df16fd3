"""Attention over TransformerEngine's own Python of several versions: each exchange, mixed CP sizes, against float64.
Bytes that are sent and waits of the host are counted. At start-up what is wrong ends the run, on all ranks alike."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, FULL, CpCommType, Sample, Topology
from megatron.dynamic_cp.attention.te.support import LACKS_MASKS, missing_exchanges, provider, why_no_masks
from megatron.dynamic_cp.groups.attention_check import TOLERANCE, check_attention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, packed_shard_positions
from megatron.dynamic_cp.repairs import releases
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.real_transformer_engine import counts, extension, flash_attn
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.extension import NAN
from tests.distributed.real_transformer_engine.wheels import NEWEST, OLDEST, PINNED, VERSIONS
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
            case.padded, torch.zeros(len(self.rows), dtype=torch.int64), groups.group(first, case.cp_size),
            cp_comm_type=case.exchange,
            levels=groups.levels(first, case.cp_size, case.inner_cp_size if case.cp_size > 1 else 1),
            label=f"{case.exchange} over {case.cp_size}", seqlens=case.valid, stats=ExchangeStats(),
        )  # fmt: skip

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


CPU = torch.device("cpu")


def check_on_this_rank(
    exchanges: tuple[CpCommType, ...], believed: str | None = None, scaled: int | None = None, unwritten: float = NAN
) -> str:
    """Return what start-up logs, or its error; `scaled`: rank whose scores are scaled otherwise."""
    flash_attn.unwritten = unwritten
    initialize_model_parallel()
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    num_lanes = dist.get_world_size()
    groups = DynamicCPGroups.build(Topology(num_lanes=num_lanes), timeout_s=30, exchanges=exchanges, inner_sizes=(2,))
    attention = TransformerEngineAttention(
        reference.transformer_config(reference.LLAMA), 1, AttnMaskType.causal, "self"
    )
    attention._kernel = believed or attention._kernel
    if dist.get_rank() == scaled:
        attention.fused_attention.softmax_scale *= 1.5
    try:
        return check_attention([torch.nn.Sequential(attention)], groups, exchanges, CPU)
    except DynamicCPError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.by_day("2")
@pytest.mark.parametrize(
    ("num_lanes", "version", "kernel", "exchanges", "compared"),
    [
        # Alone; in 2 lanes p2p, a2a, all_gather; in 4 lanes these and a2a+p2p.
        (2, NEWEST, "cuDNN", ("p2p", "all_gather", "a2a"), 4),
        (4, NEWEST, "cuDNN", CP_COMM_TYPES, 8),
        (4, PINNED, "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        (4, NEWEST, "flash-attn 2", WITHOUT_ALL_GATHER, 6),
        (4, OLDEST, "cuDNN", ("p2p",), 3),
    ],
)
def test_what_is_right_is_told(
    num_lanes: int, version: str, kernel: str, exchanges: tuple[CpCommType, ...], compared: int
) -> None:
    for said in run_ranks_with(version, num_lanes, check_on_this_rank, exchanges, kernel=kernel, timeout_s=60):
        assert said.startswith(f"attention of TransformerEngine {version} with {kernel} checked: {compared} exchanges")
        assert float(re.search(r"at most (\S+) of the norm", said)[1]) < TOLERANCE / 100


@pytest.mark.by_day(f"2-{NEWEST}")
@pytest.mark.parametrize("version", ["2.18.0", NEWEST])
@pytest.mark.parametrize("num_lanes", [2, 3])
def test_a_wrong_exchange_ends_the_start_on_all_ranks(num_lanes: int, version: str) -> None:
    """A kernel that nobody knew to be wrong, or to be the one; lane 2 of 3 is alone and has nothing to compare."""
    said = run_ranks_with(
        version, num_lanes, check_on_this_rank, CP_COMM_TYPES, "cuDNN", None, 0.0, kernel="flash-attn 2", timeout_s=60
    )
    (text,) = {re.sub(r" \(rank \d\)$", "", one) for one in said}
    assert text.startswith(
        f"UnsupportedFeatureError: TransformerEngine {version} with cuDNN computes something else than attention here: "
        "with all_gather over 2 lanes the output is off by "
    )
    assert float(re.search(r"off by (\S+) of its norm, 0.02 is allowed", text)[1]) > 0.3
    assert "p2p over" not in text
    assert "Use --cp-comm-type p2p, --transformer-impl local or another version" in text


def test_a_kernel_that_is_known_to_be_wrong_is_not_called() -> None:
    """Where nobody looked before: plans from elsewhere."""
    for said in run_ranks_with(NEWEST, 2, check_on_this_rank, ("all_gather",), kernel="flash-attn 2", timeout_s=60):
        assert said.startswith("UnsupportedFeatureError: --cp-comm-type all_gather with packed sequences needs cuDNN")


@pytest.mark.nightly
def test_attention_that_is_wrong_alone_is_told_so() -> None:
    (said,) = run_ranks_with(NEWEST, 1, check_on_this_rank, CP_COMM_TYPES, None, 0, timeout_s=60)
    assert "on one lane alone the output is off by" in said
    assert "Use --transformer-impl local or another version" in said


def fail_in_two_ways() -> tuple[str, str]:
    """Return what is said where rank 1 is wrong, and where cuDNN fails."""
    wrong = check_on_this_rank(("p2p",), None, 1)
    parallel_state.destroy_model_parallel()
    with (
        mock.patch.object(releases, "two_cudnns", return_value="/a and /b"),
        mock.patch(
            "megatron.dynamic_cp.attention.te.attention.TransformerEngineAttention.forward",
            side_effect=RuntimeError("cuDNN Error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
        ),
    ):
        return wrong, check_on_this_rank(("p2p",))


def test_one_rank_that_is_wrong_ends_all_and_two_cudnns_are_named_where_attention_fails() -> None:
    """Rank 0's gradients of keys and values are sums with rank 1's; no other exchange would do."""
    wrong, failed = zip(*run_ranks_with(NEWEST, 2, fail_in_two_ways, timeout_s=60), strict=True)
    assert len(set(wrong)) == 1
    assert "with p2p over 2 lanes the gradient of the keys is off by" in wrong[0]
    assert "Use --transformer-impl local or another version" in wrong[0]
    for said in failed:
        assert said.startswith("UnsupportedFeatureError"), said
        assert "two versions of cuDNN are loaded, from /a and /b" in said


def test_two_cudnns_are_found_in_the_maps_of_a_process(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f r-xp 0 8:1 1 /site/nvidia/cudnn/lib/libcudnn.so.9\n7f r-xp 0 8:1 2 /lib/libcudnn_ops.so.9\n")
    assert releases.two_cudnns(maps) == ""
    maps.write_text(maps.read_text() + "7f r-xp 0 8:1 3 /lib/libcudnn.so.9.14.0\n")
    assert releases.two_cudnns(maps) == "/lib and /site/nvidia/cudnn/lib"
    assert releases.two_cudnns(tmp_path / "none") == ""
