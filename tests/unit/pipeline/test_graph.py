"""The graph of a pipeline: each operation once, in an order that can run, with what it waits for and what it pays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dynamic_cp
from dynamic_cp.pipeline.schedule import (
    EMBEDDING,
    HEAD,
    Need,
    Operation,
    edges_paid,
    needed_operation,
    pipeline_graph,
    places_of,
    stage_operations,
)

SHAPES = [(1, 3, 1), (2, 1, 1), (4, 7, 1), (8, 23, 1), (2, 4, 2), (4, 8, 3), (8, 16, 5)]


def need(stage: int, operation: str, pp: int, vp: int) -> tuple[int, str, bool] | None:
    found = needed_operation(stage, Operation.parse(operation), pp, vp)
    return None if found is None else (found.stage, str(found.operation), found.by_hop)


def test_what_operations_need():
    assert need(0, "0F3", 4, 2) is None
    assert need(1, "0F3", 4, 2) == (0, "0F3", True)
    assert need(0, "1F3", 4, 2) == (3, "0F3", True), "the next chunk goes on where the last stage stopped"
    assert need(3, "1B3", 4, 2) == (3, "1F3", False), "its own forward is there already"
    assert need(2, "1B3", 4, 2) == (3, "1B3", True)
    assert need(3, "0B3", 4, 2) == (0, "1B3", True)
    assert need(0, "0B3", 4, 2) == (1, "0B3", True)
    assert need(0, "0F0", 1, 1) is None
    assert need(0, "0B0", 1, 1) == (0, "0F0", False)


def test_who_pays_embedding_and_head():
    assert edges_paid(0, 0, 1, 1) == (True, True)
    paid = {(stage, chunk): edges_paid(stage, chunk, 3, 2) for stage in range(3) for chunk in range(2)}
    assert {place for place, edges in paid.items() if edges[EMBEDDING]} == {(0, 0)}
    assert {place for place, edges in paid.items() if edges[HEAD]} == {(2, 1)}


@pytest.mark.parametrize(("pp", "m", "vp"), SHAPES)
def test_the_order_is_every_list_in_an_order_that_can_run(pp, m, vp):
    graph = pipeline_graph(pp, m, vp)
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


def test_a_graph_is_made_once_and_cannot_be_changed():
    graph = pipeline_graph(4, 7, 1)
    assert pipeline_graph(4, 7, 1) is graph
    for array in graph:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_nothing_else_counts_virtual_stages():
    """A second copy of the rule would drift: whatever walks through a pipeline reads the graph."""
    root = Path(dynamic_cp.__file__).parent
    counted = re.compile(r"chunk\w* \* [\w.]*pp_size|pp_size \* [\w.]*vp_size - 1|last_virtual")
    counting = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if counted.search(path.read_text())}
    assert counting == {"pipeline/schedule.py"}
