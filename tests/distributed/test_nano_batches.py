"""Layers in two nano-batches: which tokens are in which, in what order steps come, and what another order does."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from dynamic_cp.errors import DisagreementError
from dynamic_cp.mechanisms.blocks import AGAIN_KEYS, AGAIN_QUERIES, COLLECTED_KEYS, FETCHED_KEYS, FETCHED_QUERIES
from dynamic_cp.plans.padding import placed_share
from dynamic_cp.pool.layer_steps import LayerStep, steps_of
from dynamic_cp.pool.text import decode_ticks, encode_ticks
from dynamic_cp.types.placement import ROW
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, ForwardPass
from megatron.dynamic_cp.attention.mechanisms.transfers import ExchangeError
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.placed_packs import PlacedLane, PlacedPacks
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.pool.layer_pass import StepOrder
from megatron.dynamic_cp.pool.nano_batches import NanoBatchedLayer, NanoBatches, nano_batches_of_tokens
from tests.distributed.faults import around
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import FULL_RECOMPUTE, SELECTIVE_RECOMPUTE
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Comparison,
    Layout,
    case_of,
    in_jobs_of_their_own,
    run_step,
)
from tests.distributed.test_ticks import PoolCase, planned_step, run_planned

ONE_LANE = Layout(1, pp=2)


def lanes_of(layout: Layout, batch: str, multiple: int = 1) -> list[PlacedLane]:
    """Return every server's part of every tick of the planner's plan."""
    texts = encode_ticks(planned_step(BATCHES[batch], layout))
    found = []
    for text in (stage for lane in texts for stage in lane):
        for one in (one for side in decode_ticks(text) for one in side):
            tokens = placed_share(one.programme.num_tokens, 1, multiple) if one.programme.num_tokens else 0
            found.append(PlacedLane(programme=one.programme, samples=one.samples, num_tokens=tokens))
    return found


def nano_batches_of(lane: PlacedLane, multiple: int = 1) -> NanoBatches:
    return NanoBatches(DynamicPackedSeqParams(positions=torch.arange(lane.num_tokens), label="a test"), lane, multiple)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("batch", ["cut", "long_tail"])
def test_every_token_is_in_one_nano_batch_and_comes_back_to_its_place(batch: str, multiple: int) -> None:
    sizes = Counter[tuple[int, int]]()
    for lane in lanes_of(ONE_LANE, batch, multiple):
        nano_batches = nano_batches_of(lane, multiple)
        own = [rows.tolist() for rows in nano_batches.rows]
        assert sorted(own[0] + own[1]) == list(range(lane.num_tokens))
        assert (torch.cat(nano_batches.rows)[nano_batches.back] == torch.arange(lane.num_tokens)).all()
        assert all(
            size % multiple == 0 and size >= len(rows) for size, rows in zip(nano_batches.sizes, own, strict=True)
        )
        assert all(size > 0 for size in nano_batches.sizes) == (lane.num_tokens > 0)
        # Of every sample the first nano-batch has the first tokens, and the programme's tokens are where it says.
        arranged = nano_batches._arranged(lane.programme)
        for before, after in zip(lane.programme.own, arranged.own, strict=True):
            rows = range(before.place, before.place + before.num_tokens)
            (nano_batch,) = {int(nano_batches._of_token[row]) for row in rows}
            first = own[nano_batch].index(before.place)
            assert own[nano_batch][first : first + before.num_tokens] == list(rows)
            assert after.place == first + nano_batches.range_of(nano_batch).start
        sizes[len(own[0]), len(own[1])] += 1
    if batch == "cut" and multiple == 1:
        assert {(0, 0), (16, 1), (0, 1), (0, 2), (992, 989)} == set(sizes)
    assert max(map(min, sizes)) > 100


def test_positions_of_a_nano_batch_are_those_of_its_tokens() -> None:
    lane = next(lane for lane in lanes_of(ONE_LANE, "cut") if lane.num_tokens == 17)
    nano_batches = nano_batches_of(lane, 4)
    assert nano_batches.params_of(0).positions.tolist() == list(range(16))
    assert nano_batches.params_of(1).positions.tolist() == [16, 0, 0, 0]


def test_a_tick_with_other_nano_batches_or_with_none_is_refused() -> None:
    first = next(lane for lane in lanes_of(ONE_LANE, "long_tail") if lane.num_tokens)
    nano_batches = nano_batches_of(first)
    nano_batches.begin(first, 2, is_backward=True, repeats="nothing")
    exchanges = tuple(one._replace(division=1 - one.division) for one in first.programme.exchanges)
    tiles = first.programme.tiles[::-1]
    swapped = replace(first, programme=first.programme._replace(tiles=tiles, exchanges=exchanges))
    with pytest.raises(DisagreementError, match=r"a test: \d+ of \d+ tokens are in another nano-batch backward"):
        nano_batches.begin(swapped, 2, is_backward=True, repeats="nothing")
    whole = tiles[0] + tiles[1]
    both = first.programme._replace(tiles=(whole, whole))
    with pytest.raises(DisagreementError, match=r"computed in the nano-batches \[0, 1\], one of 0 and 1 is needed"):
        nano_batches_of_tokens(replace(first, programme=both))
    with pytest.raises(DisagreementError, match=r"computed in the nano-batches \[\]"):
        nano_batches_of_tokens(replace(first, programme=first.programme._replace(tiles=((), ()), exchanges=())))


def test_a_step_out_of_turn_and_one_left_over_are_refused_with_both() -> None:
    step_order = StepOrder(steps_of(1, is_backward=False, repeats="nothing"), "iteration 3")
    step_order.take(LayerStep("launch", 0, False, 0))
    says = r"iteration 3: attend 0 .* as step 1 of 6, which is launch 1 of layer 0"
    with pytest.raises(DisagreementError, match=says):
        step_order.take(LayerStep("attend", 0, False, 0))
    with pytest.raises(DisagreementError, match=r"1 steps of layers in two nano-batches ran, the tick has 6"):
        step_order.finish()


def run_in_nano_batches(case: Case, see: Callable[[list[Any]], None] = lambda model: None) -> Comparison:
    """Return what a rank found in a step whose layers run in two nano-batches; `see` looks at the model behind it."""

    def schedule(model: list[Any], *args: Any) -> None:
        run_planned(PoolCase(case, None), model, *args)
        see(model)

    return run_step(*case, schedule)


@around(NanoBatchedLayer, "attend_backward")
def swap_on_the_last_stage(attend: Any, self: NanoBatchedLayer, nano_batch: int) -> None:
    """It computes the gradients of the first nano-batch first."""
    attend(self, 1 - nano_batch if parallel_state.is_pipeline_last_stage() else nano_batch)


def run_swapped(case: Case) -> str:
    try:
        with swap_on_the_last_stage():
            run_in_nano_batches(case)
    except DisagreementError as error:
        return f"noticed: {error}"
    except (ExchangeError, RuntimeError) as error:
        return f"lost its peer: {error}"
    return "nothing noticed"


@pytest.mark.nightly
def test_another_order_on_one_rank_ends_all_of_them(reference_of: Any) -> None:
    case = case_of(reference_of, ONE_LANE, planned_step, "cut")
    first, last = run_ranks(2, run_swapped, case, timeout_s=60)
    assert last.startswith("noticed: ")
    assert "attend 1 of layer 1 backward is about to run" in last
    assert "which is attend 0 of layer 1 backward on the other ranks" in last
    assert first.startswith("lost its peer")


def test_random_nano_batches_are_found_from_programmes() -> None:
    """Also those of tokens that only other servers compute."""
    found = np.zeros(2, int)
    for lane in lanes_of(Layout(2, pp=2), "long_tail"):
        sends = [entries for one in lane.programme.exchanges for _, entries in one.sends]
        sent = {number for entries in sends for number, kind in entries if kind == ROW}
        computed = {row for tiles in lane.programme.tiles for row, _ in tiles}
        own = {number for number, one in enumerate(lane.programme.held) if one.kind < 0}
        assert own <= sent | computed
        found += len(own & sent), len(own & computed)
        nano_batches_of_tokens(lane)
    assert found.min() > 10


WITH_DROPOUT = {"hidden_dropout": 0.1}
REPEATED = {"attention": SELECTIVE_RECOMPUTE, "layers": FULL_RECOMPUTE}


def gradients_with_dropout(cases: Mapping[str, Case]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """Return how far a rank's gradients are from those without dropout, and what they are."""
    found = {}
    for name, case in in_jobs_of_their_own(cases):
        gradients: dict[str, torch.Tensor] = {}

        def keep(model: list[Any], into: Any = gradients) -> None:
            for chunk in model:
                into |= {name: one.main_grad.clone() for name, one in chunk.named_parameters()}

        found[name] = run_in_nano_batches(case, keep).gradient_error, gradients
    return found


@pytest.mark.by_day("layers-pp2")
@pytest.mark.parametrize("layout", [ONE_LANE, Layout(1, tp=2, sp=True, pp=2)], ids=["pp2", "tp2_sp_pp2"])
@pytest.mark.parametrize("repeated", REPEATED)
def test_what_is_computed_again_drops_what_forward_dropped(repeated: str, layout: Layout, reference_of: Any) -> None:
    """States of random numbers come back, although pieces of neighbouring layers are computed between each other."""
    cases = {
        name: case_of(reference_of, replace(layout, config={**WITH_DROPOUT, **recompute}), planned_step)
        for name, recompute in (("nothing", {}), ("again", REPEATED[repeated]))
    }
    compared = 0
    for of_rank in run_ranks(layout.topology.world_size, gradients_with_dropout, cases, timeout_s=120):
        (error, wanted), (_, found) = of_rank["nothing"], of_rank["again"]
        assert error > 0.01  # it drops
        assert found.keys() == wanted.keys()
        for name, one in found.items():
            assert (one - wanted[name]).abs().max() <= TOLERANCE * wanted[name].abs().max(), name
            compared += 1
    assert compared > 30


def test_buffers_are_as_large_as_memory_is_planned_with() -> None:
    """What a relay has at the same time: gradients of a layer, and the forward pass of the one before."""
    num_rows, num_columns, heads, kv_heads, dim = 100, 300, 4, 2, 8
    packs = PlacedPacks(0, num_rows, num_columns, ((), ()), {}, relays=True)
    query, key = (torch.empty(0, number, dim, dtype=torch.bfloat16) for number in (heads, kv_heads))
    keys = torch.stack((key, key))

    def forward() -> ForwardPass:
        return ForwardPass(RowSums(query, None, 1.0), keys, packs)  # type: ignore[arg-type]

    kept = forward().kept
    rows = RowGradients(query, query, query, torch.empty(heads, 0), None, 1.0)  # type: ignore[arg-type]
    backward = BackwardPass(rows, keys, packs, keeps_apart=True, kept=kept)
    ahead = forward()
    tensors = [
        *backward.rows.tensors, backward.rows.grad_q_THD, *kept, backward.grad_2SHD, backward._collected_2SHD,
        ahead.sums.queries, ahead.sums.out_THD, ahead.sums.lse_HT, ahead.kept.kv_2SHD,
    ]  # fmt: skip
    assert all(one is not None for one in tensors)
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one is not None}
    of_row, of_column, of_lse = 2 * 2 * heads * dim, 2 * 2 * kv_heads * dim, 4 * heads
    planned = num_rows * of_row * (FETCHED_QUERIES + AGAIN_QUERIES)
    planned += num_columns * of_column * (FETCHED_KEYS + AGAIN_KEYS + COLLECTED_KEYS)
    assert sum(found.values()) == planned + 2 * num_rows * of_lse
