"""Layers with windows on the command line: read as Megatron-LM reads them, checked at once, planned and trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.search.planner_process import Request
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, Lambda, PlanOptions, Topology
from megatron.dynamic_cp.plans.plan_dump import RecordedPlans
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line, parsed
from tests.trainer.training_ranks import losses, train

WINDOW = "--window-size 15,0"


@pytest.mark.parametrize(
    ("flags", "window_tokens", "skip", "windowed"),
    [
        ("", 0, 0, 0),
        (WINDOW, 16, 0, 4),
        ("--window-size (0,0)", 1, 0, 4),
        (f"{WINDOW} --window-attn-skip-freq 2", 16, 2, 2),
        (f"{WINDOW} --window-attn-skip-freq 1", 16, 1, 0),
        (f"{WINDOW} --window-attn-skip-freq [0,1]*2", 16, (0, 1, 0, 1), 2),
        (f"{WINDOW} --window-attn-skip-freq ([1]*3+[0])*1", 16, (1, 1, 1, 0), 3),
    ],
)
def test_flags_are_those_of_megatron_lm(flags, window_tokens, skip, windowed):
    settings = parsed(flags)
    shape = derive.model_shape(settings.model, 264)
    assert (shape.window_tokens, shape.window_attn_skip_freq, shape.num_windowed_layers) == (
        window_tokens,
        skip,
        windowed,
    )
    assert settings.planning.has_windows == (windowed > 0)
    exchanges = settings.planning.options(64).cp_comm_types
    assert exchanges == (("a2a", "all_gather", "blocks") if windowed else CP_COMM_TYPES)
    sink = derive.model_shape(parsed(f"{flags} --window-sink-tokens 3").model, 264) if windowed else None
    assert sink is None or sink.window == Lambda(3, window_tokens)


def test_a_ring_is_allowed_where_no_group_has_two_lanes():
    assert parsed(f"{WINDOW} --cp-comm-type p2p --max-dynamic-cp-size 1").planning.has_windows
    alone = parse_args(command_line(f"{WINDOW} --cp-comm-type p2p"), 4)  # the static plan of CP size 1
    assert alone.planning.policy == "static"


def assert_replayed_only_with_its_windows(folder: Path, text: str) -> None:
    record = next(json.loads(line) for line in text.splitlines() if "/lambda" in line)
    request = Request(key=record["key"], **{name: np.array(record[name]) for name in ("sample_ids", "seqlens")})
    options = PlanOptions(max_tokens_per_rank=96, cp_comm_types=("p2p",))
    for masks, said in (
        ((CAUSAL, Lambda(2, 16)), None),
        ((CAUSAL, Lambda(3, 16)), "those of this run have causal, lambda:3,16"),
        ((Lambda(2, 16),), "those of this run have lambda:2,16"),
        ((CAUSAL,), "those of this run have causal: replay with the same --window-size, --window-attn-skip-freq and"),
    ):
        answer = RecordedPlans(str(folder), Topology(num_lanes=2, ranks_per_node=2), options, masks)(request)
        assert (answer.error is None) == (said is None), answer.error
        if said is not None:
            assert f"attention placed for layers with the masks causal, lambda:2,16, {said}" in str(answer.error)


@pytest.mark.nightly
def test_plans_of_several_lanes_train_as_those_of_one(tmp_path: Path) -> None:
    sink = "--window-sink-tokens 2"
    words = f"--dynamic-cp --mock-data --num-layers 4 --train-iters 3 {WINDOW} {sink} --window-attn-skip-freq 2"
    dump, placed = tmp_path / "dump", tmp_path / "placed"
    several = train(2, f"{words} --max-seqlen-per-dp-cp-rank 64 --cp-comm-type all_gather --dynamic-cp-dump {dump}")
    blocks = train(2, f"{words} --max-seqlen-per-dp-cp-rank 96 --cp-comm-type blocks --dynamic-cp-dump {placed}")
    one = train(2, f"{words} --max-seqlen-per-dp-cp-rank 128 --max-dynamic-cp-size 1 --cp-comm-type p2p")
    assert losses(several) == pytest.approx(losses(one), rel=2e-5)
    assert losses(blocks) == pytest.approx(losses(one), rel=2e-5)
    assert len(losses(one)) == 3
    wider = train(2, f"{words.replace(sink, '')} --max-seqlen-per-dp-cp-rank 128 --max-dynamic-cp-size 1")
    assert losses(wider) != pytest.approx(losses(one), rel=2e-5), "the sink made no difference"
    text = (placed / "plans.jsonl").read_text()
    assert text.count("/causal/lambda:2,16") >= 2
    assert_replayed_only_with_its_windows(placed, text)
    plans = [json.loads(line) for line in (dump / "plans.jsonl").read_text().splitlines()]
    assert len(plans) == 3
    shape = derive.model_shape(parsed(words, 2).model, 264)
    assert shape.num_windowed_layers == 2
    window = Lambda(2, 16)
    used = set()
    for plan in plans:
        squares = sum(n * n + window.squared_tokens(n) for n in plan["seqlens"])
        assert plan["facts"]["seqlen_squared_sum"] == round(squares / 2)
        used |= {int(size) for size in plan["facts"]["cp_histogram"]}
    assert used == {1, 2}
