"""Plans survive JSON and text; anything else is a DynamicCPError, never a KeyError or TypeError."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.errors import DynamicCPError, InvalidInputError
from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.serialize import digest, dumps, format_plan, loads, parse_plan, plan_from_dict, plan_to_dict
from dynamic_cp.types import Bucket, MicroBatch, Placement, Plan, PlannedBatch, Sample, Topology
from tests.unit.support import plan_of_buckets

TWO = (Sample(sample_id=7, seqlen=100), Sample(sample_id=3, seqlen=9))
HIERARCHY = Bucket(first_lane=0, cp_size=4, samples=TWO, cp_comm_type="a2a+p2p", inner_cp_size=2)
HEADS = Bucket(first_lane=4, cp_size=2, samples=(Sample(sample_id=4, seqlen=8),), cp_comm_type="a2a")
GATHERED = Bucket(first_lane=1, cp_comm_type="all_gather")
PLAN = Plan(
    topology=Topology(num_lanes=7, tp_size=2, pp_size=2, vp_size=2, sequence_parallel=True),
    max_tokens_per_rank=64,
    policy="static",
    micro_batches=(
        MicroBatch(buckets=(HIERARCHY, HEADS, Bucket(first_lane=6, samples=(Sample(sample_id=5, seqlen=60),)))),
        MicroBatch(buckets=(Bucket(first_lane=0), GATHERED, *(Bucket(first_lane=lane) for lane in range(2, 7)))),
    ),
)


def test_round_trips():
    assert loads(dumps(PLAN)) == PLAN
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(PLAN)))) == PLAN
    assert parse_plan(format_plan(PLAN)) == PLAN


def test_a_field_that_nothing_used_is_still_written_and_may_be_either():
    """Digests of earlier plans stay what they were; such a plan with the field set is read, too."""
    data = plan_to_dict(PLAN)
    assert data["topology"].pop("all_lanes_coupled") is False
    for value in (False, True):
        assert plan_from_dict({**data, "topology": {**data["topology"], "all_lanes_coupled": value}}) == PLAN
    with pytest.raises(InvalidInputError, match="topology lacks all_lanes_coupled"):
        plan_from_dict(data)
    with pytest.raises(InvalidInputError, match="all_lanes_coupled is 1, "):
        plan_from_dict({**data, "topology": {**data["topology"], "all_lanes_coupled": 1}})


def test_text_has_one_line_per_micro_batch():
    lines = format_plan(PLAN).splitlines()
    assert lines[1:] == [
        "0 | lanes 0-3 a2a+p2p/2: 7:100 3:9 | lanes 4-5 a2a: 4:8 | lane 6: 5:60 |",
        "1 | lane 0: - | lane 1 all_gather: - | lane 2: - | lane 3: - | lane 4: - | lane 5: - | lane 6: - |",
    ]


def test_a_placement_is_written_whole_or_for_people():
    homes, tiles = np.array([[0, 0, 40, 0], [0, 40, 100, 2]]), np.array([[0, 0, 0, 0], [1, 0, 2, 1], [1, 1, 2, 0]])
    bucket = Bucket(
        first_lane=0, cp_size=3, cp_comm_type="blocks", samples=(Sample(sample_id=8, seqlen=100),),
        placement=Placement(homes.astype(np.int32), tiles.astype(np.int32)),
    )  # fmt: skip
    plan = plan_of_buckets([bucket], topology=Topology(num_lanes=3))
    text = format_plan(plan)
    assert text.splitlines()[1] == "0 | lanes 0-2 blocks 0.0.40.0,0.40.100.2/0.0.0.0,1.0.2.1,1.1.2.0: 8:100 |"
    assert parse_plan(text) == loads(dumps(plan)) == plan
    shown = format_plan(plan, placements=False)
    assert shown.splitlines()[1] == "0 | lanes 0-2 blocks (2 homes, 3 tiles, 2 divisions): 8:100 |"
    with pytest.raises(InvalidInputError, match=r"line 2 is '0 \| lanes 0-2 blocks \(2 homes"):
        parse_plan(shown)
    assert (plan.num_placed, PLAN.num_placed) == (1, 0)


def test_an_inner_size_is_written_only_where_the_exchange_does_not_imply_it():
    """So plans of p2p, all_gather and a2a keep the text and the digest that they had."""
    rows = plan_to_dict(PLAN)["micro_batches"]
    inner = [bucket.get("inner_cp_size") for row in rows for bucket in row]
    assert inner == [2] + 9 * [None]
    assert [bucket.inner_cp_size for bucket in loads(dumps(PLAN)).buckets] == [2, 2] + 8 * [1]
    said = plan_to_dict(PLAN)
    said["micro_batches"][0][1]["inner_cp_size"] = 2  # implied, so it may be said
    assert plan_from_dict(said) == PLAN
    other = replace(PLAN, micro_batches=PLAN.micro_batches[1:])
    assert "inner" not in dumps(other)


def test_a_lane_is_told_its_inner_size():
    planned = PlannedBatch(plan=PLAN, predicted_s=1.0, predicted_busy_s=(1.0,) * 7, reason="a test")
    messages = encode_lanes(PLAN, PlanFacts.of(planned))
    for lane, message in enumerate(messages):
        first, second = (mb.bucket_of_lane(lane) for mb in PLAN.micro_batches)
        assert decode_lane(message).buckets == (first, second)
    assert decode_lane(messages[3]).buckets[0].inner_cp_size == 2


def test_digest_is_of_the_content():
    assert digest(PLAN) == digest(loads(dumps(PLAN)))
    assert len(digest(PLAN)) == 64
    changed = [
        replace(PLAN, policy="dynamic"),
        replace(PLAN, max_tokens_per_rank=65),
        replace(PLAN, micro_batches=PLAN.micro_batches[::-1]),
        replace(PLAN, topology=replace(PLAN.topology, ranks_per_node=4)),
    ]
    assert len({digest(plan) for plan in (PLAN, *changed)}) == 5


def test_an_unknown_version_is_named():
    with pytest.raises(InvalidInputError, match="schema_version 2, this program reads 1"):
        plan_from_dict({**plan_to_dict(PLAN), "schema_version": 2, "new_key": 1})
    with pytest.raises(InvalidInputError, match="schema_version 2"):
        parse_plan(format_plan(PLAN).replace("plan v1", "plan v2"))


def paths_of(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from paths_of(entry, (*path, key))


def test_every_entry_replaced_or_removed_is_refused():
    original = json.loads(dumps(PLAN))
    refused = 0
    for path in paths_of(original):
        for wrong in (None, "text", 1.5, True, -3, [], {}, "remove", "add"):
            data = copy.deepcopy(original)
            holder, before = None, data
            for key in path:
                holder, before = before, before[key]
            if wrong == "remove":
                if not isinstance(holder, dict):
                    continue  # one sample, bucket or micro-batch fewer is for check_plan to judge
                del holder[path[-1]]
            elif wrong == "add":
                if not isinstance(before, dict):
                    continue
                before["unknown"] = 1
            elif holder is None:
                data = wrong
            else:
                holder[path[-1]] = wrong
            try:
                plan = plan_from_dict(data)
            except DynamicCPError:
                refused += 1
            else:
                assert type(wrong) is type(before), f"{path} took {wrong!r}"
                assert loads(dumps(plan)) == plan
    assert refused > 200


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"plan"', "3", "[" * 100_000, "{}", '{"schema_version": 1}'])
def test_malformed_json(text):
    with pytest.raises(DynamicCPError):
        loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "plan v1", "hello"),
        format_plan(PLAN).replace("0 |", "1 |", 1),
        *(
            format_plan(PLAN).replace(right, wrong)
            for right, wrong in (
                *(("a2a+p2p/2", wrong) for wrong in ("a2a+p2p", "a2a+p2p/4", "p2p/2", "carrier pigeon/2")),
                *(("7:100", "7:x"), ("7:100", "7:0"), ("5:60", "5"), ("lanes 0-3", "lanes 0-2")),
                *(("num_lanes=7", "num_lanes=three"), ("num_lanes=7 ", "")),
            )
        ),
    ],
)
def test_malformed_text(text):
    with pytest.raises(DynamicCPError):
        parse_plan(text)
