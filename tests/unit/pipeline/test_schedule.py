"""Operation lists equal megatron-core's; the graph of a pipeline has each once, in an order that can run."""

from types import SimpleNamespace

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.pipeline.schedule import (
    EMBEDDING,
    HEAD,
    Need,
    Operation,
    edges_paid,
    needed_operation,
    peak_in_flight_tokens,
    pipeline_graph,
    places_of,
    stage_operations,
)


def text(*arguments: int) -> str:
    return " ".join(map(str, stage_operations(*arguments)))


def test_small_schedules():
    assert text(0, 1, 2) == "0F0 0B0 0F1 0B1"
    assert text(0, 2, 3) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(1, 2, 3) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert text(1, 2, 2, 2) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"


def test_fewer_micro_batches_than_stages():
    assert text(0, 4, 2) == "0F0 0F1 0B0 0B1"


def test_every_operation_has_a_text_of_its_own():
    operations = stage_operations(1, 4, 8, 3)
    assert len(set(map(str, operations))) == len(operations) == 2 * 8 * 3


def test_interleaving_needs_a_multiple():
    with pytest.raises(InvalidInputError, match=r"5 micro-batches.*pp_size 4"):
        stage_operations(0, 4, 5, 2)


@pytest.mark.parametrize("m", [1, 3, 8])
def test_in_flight_tokens_of_1f1b(m):
    """Stage s of 4 holds the micro-batches that the stages after it have not sent back, and the one it is at."""
    peak = peak_in_flight_tokens(np.full((m, 2), 10), 4)
    assert peak.tolist() == [[10 * min(m, 4 - stage)] * 2 for stage in range(4)]
    assert peak_in_flight_tokens(np.full((m, 2), 10), 1).tolist() == [[10, 10]]


def test_in_flight_tokens_of_unequal_micro_batches():
    """Stage 0 runs F0 F1 B0 F2 B1 B2: 10, 40, 30, 50 tokens on lane 0; lane 1 peaks earlier."""
    tokens = np.array([[10, 60], [30, 5], [20, 6]])
    assert peak_in_flight_tokens(tokens, 2).tolist() == [[50, 65], [30, 60]]


def test_in_flight_tokens_of_interleaving_count_every_chunk():
    """Stage 0 of 2 warms up with 4 chunks and holds 5, stage 1 warms up with 2 and holds 3."""
    assert peak_in_flight_tokens(np.full((4, 1), 10), 2, 2).tolist() == [[50], [30]]
    # Stage 0 runs 0F0 0F1 1F0 1F1 | 0F2 1B0 0F3 1B1 1F2 0B0 ..: the four chunks of 0 and 1, then 2 as well
    tokens = np.array([[1], [2], [40], [80]])
    # 1+2+1+2 = 6, +40 = 46, -1 = 45, +80 = 125, -2 = 123, +40 = 163, -1 = 162, +80 = 242
    assert peak_in_flight_tokens(tokens, 2, 2)[0].tolist() == [242]
    assert text(0, 2, 4, 2).startswith("0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1")


def test_equals_megatron_core():
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    cases = [(pp, m, vp) for pp in (2, 3, 4, 8) for vp in (1, 2, 5) for m in (pp, 2 * pp, 5 * pp)]
    cases += [(pp, m, 1) for pp in (2, 4) for m in (1, 3, 7)]
    for pp, m, vp in cases:
        table = schedules.get_schedule_table(m, vp, pp) if vp > 1 else [(index, 0) for index in range(m)]
        for stage in range(pp):
            communicator = SimpleNamespace(
                pp_group=SimpleNamespace(size=lambda pp=pp: pp, rank=lambda stage=stage: stage),
                virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
            )
            total, _, num_warmup, num_rest = schedules.get_pp_rank_microbatches(
                m, vp, pp, forward_only=False, p2p_communicator=communicator
            )
            forwards = [Operation("F", micro_batch, chunk) for micro_batch, chunk in table]
            backwards = [Operation("B", micro_batch, vp - 1 - chunk) for micro_batch, chunk in table]
            assert total == m * vp == num_warmup + num_rest
            expected = forwards[:num_warmup]
            for index in range(num_rest):
                expected += [forwards[num_warmup + index], backwards[index]]
            expected += backwards[num_rest:]
            assert stage_operations(stage, pp, m, vp) == tuple(expected), (pp, m, vp, stage)


SHAPES = [(1, 3, 1), (2, 1, 1), (4, 7, 1), (8, 23, 1), (2, 4, 2), (4, 8, 3), (8, 16, 5)]


def test_who_pays_embedding_and_head():
    assert edges_paid(0, 0, 1, 1) == (True, True)
    paid = {(stage, chunk): edges_paid(stage, chunk, 3, 2) for stage in range(3) for chunk in range(2)}
    assert {place for place, edges in paid.items() if edges[EMBEDDING]} == {(0, 0)}
    assert {place for place, edges in paid.items() if edges[HEAD]} == {(2, 1)}


@pytest.mark.parametrize(("pp", "m", "vp"), SHAPES)
def test_the_order_is_every_list_in_an_order_that_can_run(pp, m, vp):
    graph = pipeline_graph(pp, m, vp)
    assert not any(array.flags.writeable for array in graph), "it is kept for whoever asks next"
    places = places_of(graph)
    for stage in range(pp):
        assert tuple(operation for at, operation in places if at == stage) == stage_operations(stage, pp, m, vp)
    index_of = {place: index for index, place in enumerate(places)}
    num_hops = 0
    for index, (stage, operation) in enumerate(places):
        needed = needed_operation(stage, operation, pp, vp)
        if needed is None or not needed.by_hop:
            assert graph.sender[index] == -1
            continue
        assert graph.sender[index] == index_of[needed.stage, needed.operation] < index
        num_hops += 1
    assert num_hops == 2 * m * (pp * vp - 1)
    assert len(places) == 2 * m * pp * vp


@pytest.mark.parametrize(("pp", "m", "vp"), SHAPES)
def test_an_operation_comes_after_its_stage_and_after_its_own_forward(pp, m, vp):
    graph = pipeline_graph(pp, m, vp)
    places = places_of(graph)
    previous = dict.fromkeys(range(pp), -1)
    num_own = 0
    for index, (stage, operation) in enumerate(places):
        assert graph.before[index] == previous[stage]
        previous[stage] = index
        if needed_operation(stage, operation, pp, vp) == Need(stage, operation._replace(kind="F"), by_hop=False):
            at = index
            while places[at] != (stage, operation._replace(kind="F")):
                at = graph.before[at]
                assert at >= 0
            num_own += 1
    assert num_own == m, "one backward of a micro-batch turns round"
    assert graph.last.tolist() == [previous[stage] for stage in range(pp)]
    # Forward and backward of every micro-batch embed once and compute the loss once.
    assert graph.pays.sum(axis=0).tolist() == [2 * m, 2 * m]
    assert [edges_paid(stage, operation.chunk, pp, vp) for stage, operation in places] == [*map(tuple, graph.pays)]
