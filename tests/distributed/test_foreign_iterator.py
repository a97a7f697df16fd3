"""ForeignIteratorWrapper: what a training loop's own iterators yield comes out once, right, and on every layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import PlanOptions, Sample, Topology
from megatron.dynamic_cp.plans.plan_source import PlanSource
from megatron.dynamic_cp.plans.planner import Planner
from megatron.dynamic_cp.step import schedule
from megatron.integrations.foreign.iterator import chunks_of
from tests.distributed import reference
from tests.distributed.foreign import (
    LAYOUTS,
    LaneData,
    Piece,
    RankRecord,
    check_step,
    lane_data,
    make_wrapper,
    mask_of,
    needs_of_rank,
    piece_of,
    run_foreign,
)
from tests.distributed.harness import run_ranks
from tests.distributed.parity import BATCHES, TOLERANCE, Layout, build_chunks, reference_name
from tests.distributed.test_planning import PROBLEM as THREE_LANES

NUM_BATCHES = 15


def all_data(layout: Layout, num_items: int, **kinds) -> list[LaneData]:
    return [lane_data(lane, num_items, **kinds) for lane in range(layout.lanes)]


def pieces_of(data: list[LaneData], step: int, global_batch_size: int) -> list[Piece]:
    pieces = []
    for lane, items in enumerate(data):
        share = global_batch_size // len(data) + (lane < global_batch_size % len(data))
        pieces += [piece for item in items[step * share : (step + 1) * share] for piece in item]
    return pieces


def check_ranks(
    layout: Layout, ranks: list[RankRecord], data: list[LaneData], global_batch_size: int, num_batches: int
) -> int:
    """Every token once per TP rank of the stages that read it; ranks without data know the packs. Returns tokens."""
    assert {len(rank.steps) for rank in ranks} == {rank.ended_at for rank in ranks} == {num_batches}
    looked_at = 0
    for step in range(num_batches):
        records = [rank.steps[step] for rank in ranks]
        assert len({record.counts for record in records}) == 1
        assert len({record.consumed for record in records}) == 1
        pieces = pieces_of(data, step, global_batch_size)
        expected = sorted(token for piece in pieces for token in piece["tokens"].tolist())
        lengths = [len(piece["tokens"]) for piece in pieces]
        samples = [Sample(sample_id=0, seqlen=len(piece["tokens"]), mask=mask_of(piece)) for piece in pieces]
        assert records[0].counts[1:] == (sum(lengths), sum(sample.squared_tokens for sample in samples))
        for lane in range(layout.lanes):
            packs = [rank.steps[step].packs for rank in ranks if rank.lane == lane]
            assert len(packs) == layout.tp * layout.pp
            assert all(pack == packs[0] for pack in packs), "stages and TP ranks of a lane differ"
        for tp_rank in range(layout.tp):
            for column in ("tokens", "labels"):
                came = sorted(
                    token
                    for rank in ranks
                    if rank.tp_rank == tp_rank
                    for token in rank.steps[step].tokens.get(column, [])
                )
                assert came == expected, f"step {step}: {column}"
                looked_at += len(came)
    return looked_at


@pytest.mark.by_day("pp2_vpp2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_comes_out_once(name: str) -> None:
    """15 global batches, uneven shares; samples with and without labels, masks and position ids."""
    layout, global_batch_size = LAYOUTS[name], 7 if name != "dp3" else 6
    share = -(-global_batch_size // layout.lanes)
    data = all_data(layout, NUM_BATCHES * share, flavours=(0, 1, 4, 3, 2))
    settings = {"lookahead": 1, "verify": "full"}
    ranks = run_ranks(layout.topology.world_size, run_foreign, layout, data, global_batch_size, settings)
    assert check_ranks(layout, ranks, data, global_batch_size, NUM_BATCHES) > 3_000
    if layout.lanes > 2:
        cp_sizes = {pack[0] for rank in ranks for step in rank.steps for pack in step.packs}
        assert cp_sizes >= {1, 2}, "the plans do not mix CP sizes"


def test_masks_come_with_their_samples() -> None:
    """In packs of mixed CP sizes, on a stage that reads tokens and on one that reads labels."""
    layout = Layout(2, pp=2, exchange="a2a")
    data = all_data(layout, 12, packed=True, flavours=(1, 5, 0))
    ranks = run_ranks(4, run_foreign, layout, data, 6, {"verify": "full", "lookahead": 1})
    assert check_ranks(layout, ranks, data, 6, 4) > 1000
    buckets = [pack[-1] for rank in ranks for step in rank.steps for pack in step.packs]
    masked = {bucket.cp_size for bucket in buckets if any(sample.mask is not None for sample in bucket.samples)}
    assert masked == {1, 2}


def refused_masks(layout: Layout, data: list[LaneData], changed: str) -> str:
    if changed == "lengths":
        data[1][1][0]["mask"] = "shared_question:3,4,5"
    settings = {"why_no_masks": "these layers compute none"} if changed == "layers" else {}
    try:
        run_foreign(layout, data, 4, settings)
    except DynamicCPError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("lengths", "key 'mask' is shared_question:3,4,5, which does not fit: prompt and answers have 12 tokens, the"),
        (
            "layers",
            "2 samples of step 0 came with a mask (key 'mask'), and these layers compute none: use local layers",
        ),
    ],
)
def test_masks_that_cannot_be_are_refused_on_all_ranks_alike(changed: str, message: str) -> None:
    layout = Layout(2)
    data = all_data(layout, 4, flavours=(5,))
    data[0][:2] = lane_data(0, 2, flavours=(1,))  # of the first batch lane 1 alone has masks
    (said,) = set(run_ranks(2, refused_masks, layout, data, changed))
    assert message in said


def test_middle_stages_hold_nothing_and_know_the_packs() -> None:
    layout = Layout(1, pp=4)
    data = all_data(layout, 12, flavours=(1,))
    ranks = run_ranks(4, run_foreign, layout, data, 4, {})
    check_ranks(layout, ranks, data, 4, 3)
    held = [set().union(*(step.held for step in rank.steps)) for rank in ranks]
    assert held == [{"tokens", "position_ids"}, set(), set(), {"labels", "loss_mask"}]


@pytest.mark.nightly
def test_lookahead_changes_no_batch() -> None:
    layout = LAYOUTS["pp2"]
    data = all_data(layout, 16, flavours=(4,))
    runs = [run_ranks(4, run_foreign, layout, data, 6, {"lookahead": lookahead}) for lookahead in (0, 2)]
    for without, ahead in zip(*runs, strict=True):
        assert len(without.steps) == 5
        assert without.steps == ahead.steps
        assert ahead.requested == list(range(5))


# lanes with 8, 5 and 6 items and shares of 2, 2 and 1 of a global batch of 5: full batches while lane 1 has 2 more.
UNEVEN = (8, 5, 6)


@pytest.mark.by_day("True-2")
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_all_ranks_end_together_on_uneven_data(drop_last: bool, lookahead: int) -> None:
    layout = LAYOUTS["dp3"]
    data = [lane_data(lane, num_items, flavours=(1,)) for lane, num_items in enumerate(UNEVEN)]
    settings = {"drop_last": drop_last, "lookahead": lookahead, "verify": "full"}
    ranks = run_ranks(3, run_foreign, layout, data, 5, settings)
    num_batches = 2 if drop_last else 6
    assert check_ranks(layout, ranks, data, 5, num_batches) > 100
    consumed = [step.consumed for step in ranks[0].steps]
    # Lane 1 is out after 2 full batches and a single item, lane 0 after 4 batches, lane 2 after 6.
    assert consumed == ([5, 10] if drop_last else [5, 10, 14, 17, 18, 19])


@pytest.mark.by_day("pp2_vpp2")
@pytest.mark.parametrize("name", ["tp2", "pp2_vpp2"])
def test_short_last_batch_reaches_ranks_without_data(name: str) -> None:
    layout = LAYOUTS[name]
    data = all_data(layout, 5, flavours=(0,))
    ranks = run_ranks(4, run_foreign, layout, data, 4, {"drop_last": False})
    check_ranks(layout, ranks, data, 4, 3)
    assert [step.consumed for step in ranks[-1].steps] == [4, 8, 10]


def continue_foreign(layout: Layout, data: list[LaneData], global_batch_size: int, num_steps: int) -> list[RankRecord]:
    """Stop after `num_steps` with batches in flight; go on with other iterators from what was consumed."""
    wrapper, _, _ = make_wrapper(layout, data, global_batch_size, lookahead=2)
    for _ in range(num_steps):
        next(wrapper)
    assert wrapper.consumed_samples == num_steps * global_batch_size
    assert wrapper.step == num_steps
    share = wrapper.consumed_samples // layout.lanes
    rest = [lane[share:] for lane in data]
    parallel_state.destroy_model_parallel()
    settings = {"first_step": wrapper.step, "consumed_samples": wrapper.consumed_samples, "lookahead": 1}
    return run_foreign(layout, rest, global_batch_size, settings)


def test_what_is_in_flight_is_not_consumed() -> None:
    """A run that goes on where another stopped sees the batches that it would have seen."""
    layout = Layout(2)
    data = all_data(layout, 12, flavours=(1,))
    undisturbed = run_ranks(2, run_foreign, layout, data, 4, {})
    resumed = run_ranks(2, continue_foreign, layout, data, 4, 2)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert len(after.steps) == 4
        assert before.steps[2:] == after.steps
        assert after.ended_at == 6


def gradients_of_step(layout: Layout, samples: Sequence[Sample], initial: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's gradients, name in the whole model -> tensor, and the sum of losses."""
    items = [[vars(reference.read_sample(sample)) for sample in samples[lane :: layout.lanes]] for lane in range(4)]
    data = [[[{"tokens": i["tokens"], "labels": i["labels"]}] for i in lane] for lane in items]
    wrapper, plans, _ = make_wrapper(layout, data, len(samples), lookahead=1, drop_last=False, verify="full")
    config, chunks = build_chunks(layout, reference.LLAMA)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.copy_(initial[reference_name(chunk, name)])
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    assert chunks_of(model) == tuple(needs_of_rank(layout))
    config.finalize_model_grads_func = finalize_model_grads
    step = next(wrapper)
    for chunk in model:
        chunk.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=schedule.forward_step,
        data_iterator=step.data_iterators if len(model) > 1 else step.data_iterators[0],
        model=model if len(model) > 1 else model[0], num_microbatches=step.num_microbatches, seq_length=64,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    assert plans.latest is not None
    return {
        "gradients": {
            reference_name(chunk, name): parameter.main_grad.clone()
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
        },
        "losses": sum(entry["lm loss"] for entry in losses) if losses else torch.zeros(2),
        "cp_sizes": {bucket.cp_size for bucket in plans.latest.buckets},
    }


@pytest.mark.by_day("pp2_vpp2")
@pytest.mark.parametrize("name", ["dp4", "pp2", "pp2_vpp2"])
def test_gradients_equal_single_process(name: str, reference_of: Any) -> None:
    layout, samples = LAYOUTS[name], BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    ranks = run_ranks(4, gradients_of_step, layout, samples, expected["initial"])
    assert set().union(*(rank["cp_sizes"] for rank in ranks)) >= {1, 2}
    compared = set()
    for rank in ranks:
        for parameter, gradient in rank["gradients"].items():
            wanted = expected["gradients"][parameter]
            assert ((gradient - wanted).abs().max() / wanted.abs().max()).item() <= TOLERANCE, parameter
            compared.add(parameter)
    assert compared == set(expected["gradients"])
    total = sum(rank["losses"] for rank in ranks)
    assert total[1] == expected["num_tokens"] == sum(sample.seqlen for sample in samples) > 2000
    wanted_loss = sum(losses.sum() for losses in expected["losses"].values())
    assert abs(total[0] / wanted_loss - 1).item() <= TOLERANCE


PROBLEM = replace(
    THREE_LANES,
    topology=Topology(num_lanes=2, tp_size=2),
    options=PlanOptions(max_tokens_per_rank=300, bytes_per_element=4, cp_comm_types=("p2p",)),
)


class Remembering:
    """A plan source that keeps the latest plan for the checks."""

    def __init__(self, source: PlanSource) -> None:
        self._source = source
        self.latest: LanePlan | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def take(self, step: int) -> LanePlan:
        self.latest = self._source.take(step)
        return self.latest


def wrap_with_the_planner(layout: Layout, data: list[LaneData], global_batch_size: int) -> tuple[int, int]:
    """Return (steps, padded tokens) of this rank."""
    wrapper, _, groups = make_wrapper(layout, data, global_batch_size, verify="full")
    planner = Planner(PROBLEM, max_seqlen=511, publish_whole=True) if torch.distributed.get_rank() == 0 else None
    source = Remembering(PlanSource(planner, topology=PROBLEM.topology, lane=groups.lane, lookahead=2))
    wrapper._plan_source = source
    num_tokens = 0
    for step, batch in enumerate(wrapper):
        share = global_batch_size // layout.lanes
        pieces = [[piece for item in lane[step * share : (step + 1) * share] for piece in item] for lane in data]
        assert source.latest is not None
        assert source.latest.facts.fallback is None
        check_step(wrapper, batch, source.latest, pieces, needs_of_rank(layout))
        num_tokens += sum(wrapper.rank_tokens)
    wrapper.close()
    return wrapper.step, num_tokens


def refused_placements(layout: Layout, data: list[LaneData]) -> str:
    wrapper, _, groups = make_wrapper(layout, data, 2)
    problem = replace(PROBLEM, options=replace(PROBLEM.options, cp_comm_types=("blocks",)))
    planner = Planner(problem, max_seqlen=511, publish_whole=True) if torch.distributed.get_rank() == 0 else None
    wrapper._plan_source = PlanSource(planner, topology=problem.topology, lane=groups.lane, lookahead=0)
    try:
        wrapper.wrap()
    except UnsupportedFeatureError as error:
        return str(error)
    finally:
        wrapper.close()
    return "nothing was refused"


def test_placed_attention_is_refused_on_all_ranks_alike() -> None:
    layout = LAYOUTS["tp2"]
    long = lane_data(0, 1)
    long[0] = [piece_of(0, 0, 420, 1)]
    (said,) = set(run_ranks(4, refused_placements, layout, [long, long]))
    assert "the plan of step 0 uses blocks, which says of each token where it goes" in said


def test_real_planner_plans_what_was_drawn() -> None:
    layout = LAYOUTS["tp2"]
    data = all_data(layout, 24, flavours=(1,))
    ranks = run_ranks(4, wrap_with_the_planner, layout, data, 8)
    assert [steps for steps, _ in ranks] == [6] * 4
    assert ranks[0] == ranks[1]
    assert sum(tokens for _, tokens in ranks) / 2 >= sum(len(p["tokens"]) for lane in data for i in lane for p in i)
