"""TransformerEngine's attention and layers on one GPU against float64, and lanes of a ring one after the other."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from dynamic_cp.types import Topology
from megatron.dynamic_cp.attention.te.support import OLDEST, installed_version, release_of, shown
from megatron.dynamic_cp.flags.fp8 import why_no_device
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, packed_shard_positions
from tests.distributed import reference
from tests.gpu.judge import (
    DEVICE,
    GRAD_TOLERANCE,
    MERGED_OUT_TOLERANCE,
    assert_close,
    error_in_norm,
    exact,
    random_inputs,
)
from tests.gpu.test_training import MODEL, trained

VERSION, WHY_MISSING = installed_version()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        VERSION is None or release_of(VERSION) < OLDEST,
        reason=f"TransformerEngine {shown(OLDEST)} is needed, found {VERSION or WHY_MISSING}",
    ),
]

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
SEQLENS = (16, 1024, 16 * 33, 4096)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamicCPGroups]:
    """The groups of a job of one rank."""
    torch.cuda.set_device(DEVICE)
    store = tmp_path_factory.mktemp("job") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    yield DynamicCPGroups.build(Topology(num_lanes=1), timeout_s=60, exchanges=("p2p",))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def core_attention(**changed: int):
    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    shape = {"num_attention_heads": HEADS, "num_query_groups": KV_HEADS, "kv_channels": HEAD_DIM}
    config = reference.transformer_config(
        reference.LLAMA, hidden_size=HEADS * HEAD_DIM, bf16=True, params_dtype=torch.bfloat16, **{**shape, **changed}
    )
    return TransformerEngineAttention(config, 1, AttnMaskType.causal, "self")


def packed(seqlens: tuple[int, ...], groups: DynamicCPGroups) -> DynamicPackedSeqParams:
    return DynamicPackedSeqParams.build(
        seqlens, torch.zeros(sum(seqlens), dtype=torch.int64, device=DEVICE), groups.group(0, 1), cp_comm_type="p2p",
        label="test", stats=ExchangeStats(),
    )  # fmt: skip


def attend(attention: torch.nn.Module, inputs: list[Tensor], params: DynamicPackedSeqParams) -> list[Tensor]:
    qkv = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(*qkv, None, packed_seq_params=params).view_as(inputs[3])
    return [out.detach(), *torch.autograd.grad(out, qkv, inputs[3])]


@pytest.mark.parametrize("seqlens", [SEQLENS, (1, 7, 40), (1,) * 40])
def test_packs_equal_the_whole_sequences(seqlens: tuple[int, ...], groups: DynamicCPGroups) -> None:
    """One lane, odd lengths, more sequences than cuDNN's first bucket of them."""
    inputs = random_inputs(sum(seqlens), sum(seqlens), HEADS, KV_HEADS, HEAD_DIM)
    expected, _ = exact(inputs, seqlens, seqlens, causal=True)
    # One key: the weight is 1 whatever the scores, so queries and keys have no gradient.
    at_least = 0.3 if max(seqlens) == 1 else 0.0
    assert_close(attend(core_attention(), inputs, packed(seqlens, groups)), expected, torch.bfloat16, at_least)


def test_a_share_of_the_heads_equals_that_of_the_whole(groups: DynamicCPGroups) -> None:
    """What a lane computes between the all-to-alls of a2a+p2p."""
    inputs = random_inputs(sum(SEQLENS), sum(SEQLENS), HEADS // 2, KV_HEADS // 2, HEAD_DIM)
    expected, _ = exact(inputs, SEQLENS, SEQLENS, causal=True)
    share = core_attention()._with_heads(HEADS // 2, KV_HEADS // 2)
    assert_close(attend(share, inputs, packed(SEQLENS, groups)), expected, torch.bfloat16)


def test_attention_waits_for_nothing(groups: DynamicCPGroups) -> None:
    """No synchronization of host and device once kernels are planned: one tensor serves as all four boundaries."""
    attention, params = core_attention(), packed(SEQLENS, groups)
    inputs = random_inputs(sum(SEQLENS), sum(SEQLENS), HEADS, KV_HEADS, HEAD_DIM)
    attend(attention, inputs, params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(attention, inputs, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Copied:
    """A transfer whose copy is on the current stream; who waits for it may be on another one, as every other step."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class EmulatedRing:
    """Gives one lane of a ring what its neighbours would send: forward the shard of rank - i - 1 in step i, backward
    that of rank + 1 first, then of rank + i + 2, beside gradients or alone."""

    def __init__(self, rank: int, shards: list[Tensor]) -> None:
        self._rank, self._shards, self.calls = rank, shards, 0

    def communicate(self, rank: int, sent: Tensor, to: int, received: Tensor, *_rest: object) -> list[Copied]:
        size = len(self._shards)
        step, self.calls = self.calls, self.calls + 1
        received.zero_()
        if step < size - 1:
            received.copy_(self._shards[(self._rank - step - 1) % size].view_as(received))
            return [Copied()]
        step -= size - 1
        if step < size - 1:
            shard = self._shards[(self._rank + step + 2) % size]
            place = received if received.numel() == shard.numel() else received[0]
            place.copy_(shard.view_as(place))
        return [Copied()]


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_each_lane_of_a_ring_equals_the_whole_sequence(cp_size: int, groups: DynamicCPGroups) -> None:
    """Output and gradient of the queries; the ring merges its steps in the queries' dtype, hence the wider bound."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel, dot_product_attention

    inputs = random_inputs(sum(SEQLENS), sum(SEQLENS), HEADS, KV_HEADS, HEAD_DIM)
    (expected_out, expected_grad, *_), _ = exact(inputs, SEQLENS, SEQLENS, causal=True)
    starts = torch.tensor((0, *SEQLENS[:-1])).cumsum(0)
    starts = starts.repeat_interleave(torch.tensor([seqlen // cp_size for seqlen in SEQLENS]))
    tokens = [
        (starts + torch.from_numpy(packed_shard_positions(SEQLENS, cp_size, rank))).to(DEVICE)
        for rank in range(cp_size)
    ]
    shards = [torch.cat((inputs[1][rows].flatten(), inputs[2][rows].flatten())) for rows in tokens]
    attention, params = core_attention(), packed(SEQLENS, groups)
    for rank, rows in enumerate(tokens):
        ring = EmulatedRing(rank, shards)
        query, key, value = (x[rows].detach().requires_grad_() for x in inputs[:3])
        with (
            mock.patch.object(context_parallel, "flash_attn_p2p_communicate", ring.communicate),
            mock.patch.object(context_parallel, "get_distributed_world_size", return_value=cp_size),
            mock.patch.object(context_parallel, "get_distributed_rank", return_value=rank),
            mock.patch.object(dot_product_attention, "get_distributed_world_size", return_value=cp_size),
            mock.patch(
                "transformer_engine.pytorch.attention.dot_product_attention.backends.get_distributed_world_size",
                return_value=cp_size,
            ),
        ):
            group = groups.group(0, 1)
            out = attention._attend_over(query, key, value, params, group, list(range(cp_size)), "p2p")
            out = out.view_as(query)
            (grad,) = torch.autograd.grad(out, query, inputs[3][rows])
        assert ring.calls == 2 * cp_size - 1, "the ring did not turn as in TransformerEngine 2.11"
        errors = error_in_norm(out.detach(), expected_out[rows]), error_in_norm(grad, expected_grad[rows])
        assert errors[0] <= MERGED_OUT_TOLERANCE, (cp_size, rank, errors)
        assert errors[1] <= GRAD_TOLERANCE, (cp_size, rank, errors)


def with_its_layers(cache: Path, flags: str = "") -> tuple[list[float], str]:
    """Return the losses and the output of a run that chooses layers by itself, and takes these."""
    found, output = trained(flags, cache, 300, model=MODEL.replace("--transformer-impl local ", ""))
    assert "layers: transformer_engine" in output, output
    return found, output


@pytest.mark.timeout(660)
def test_loss_falls_with_transformer_engine(tmp_path: Path) -> None:
    """A short run of the trainer, with layers chosen by themselves; its losses are those of local layers."""
    found, output = with_its_layers(tmp_path)
    assert "warm-up: " in output, output
    assert found[-1] < found[0] - 1, found
    expected, _ = trained("", tmp_path, 300)
    # bfloat16: before any step losses agree to its rounding, later ones drift apart with the weights.
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert found[:3] == pytest.approx(expected[:3], rel=5e-2)


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses that runs of every recipe are compared with."""
    return with_its_layers(tmp_path_factory.mktemp("bfloat16"))[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "delayed"])
def test_the_trainer_computes_in_fp8(recipe: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A short run with products in FP8 learns as one in bfloat16; skipped where the device has not the recipe."""
    reason = why_no_device(recipe, torch.cuda.get_device_capability(), torch.version.cuda)
    if reason is not None:
        pytest.skip(reason)
    expected = request.getfixturevalue("in_bfloat16")
    found, _ = with_its_layers(tmp_path, f"--fp8-format hybrid --fp8-recipe {recipe}")
    # E4M3 has 4 bits of mantissa: products are off by percents, losses by less.
    assert found[0] == pytest.approx(expected[0], rel=2e-2)
    assert found[0] != expected[0], "nothing was in FP8"
    assert found[-1] < found[0] - 1, found
    assert found[-1] == pytest.approx(expected[-1], rel=1e-1)
