"""Layers with windows train as those of a stock megatron-core model in one process, and mistakes in them show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.utils import is_layer_window_attention

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.placement.programme import Programme
from dynamic_cp.types import Lambda, Mask
from megatron.dynamic_cp.attention import packs, placed_packs, torch_thd
from megatron.dynamic_cp.attention.thd import executor_of
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.flags.windows import Windows, set_sinks, windows_of
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from tests.distributed.faults import Plant, around
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import TOLERANCE, case_of, placed_plan, planned_bytes, run_faulty
from tests.distributed.reference import LLAMA, transformer_config, window_mask
from tests.layer_choices import chosen_layers


def config_of(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_layers": 6, "window_size": None, "window_attn_skip_freq": None, **values})


@pytest.mark.parametrize("skip", [None, 1, 2, 3, 7, [1, 0, 0, 1, 1, 0]])
def test_windows_are_those_of_megatron_core(skip: Any) -> None:
    """The token itself is not in Megatron's number, and it is in ours; layers count from 1."""
    for before in (0, 1, 5, 40):
        windows = windows_of(config_of(window_size=(before, 0), window_attn_skip_freq=skip))
        for layer in range(1, 7):
            window = windows.of_layer(layer)
            assert (window is not None) == is_layer_window_attention((before, 0), skip, layer)
            if window is not None:
                hidden = window_mask(12, (before, 0))
                sees = torch.zeros(12, 12, dtype=torch.bool)
                for row, (begin, end, second, last) in enumerate(window.key_ranges(12)):
                    sees[row, begin:end] = sees[row, second:last] = True
                assert torch.equal(sees, ~hidden)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"window_attn_skip_freq": 2},
            "--window-attn-skip-freq 2 skips windows, and there is none: give --window-size",
        ),
        ({"window_size": (-1, 0)}, r"--window-size is -1,0, two numbers are needed, tokens before .at least 0."),
        ({"window_size": (4,)}, "--window-size is 4, two numbers are needed"),
        ({"window_size": (4, 2)}, "--window-size 4,2 shows 2 tokens behind a token, attention is causal: give 4,0"),
        ({"window_size": (4, -1)}, "attention is causal: give 4,0"),
        ({"window_size": (4, 0), "window_attn_skip_freq": 0}, "--window-attn-skip-freq is 0, the smallest allowed"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [1, 0]}, "1,0 has 2 entries, the model has 6 layers"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [2] * 6}, "2,2,2,2,2,2 has 6 entries"),
        (
            {"window_sink_tokens": 4},
            "--window-sink-tokens 4 is for layers with a window, and there is none: give --win",
        ),
        ({"window_size": (4, 0), "window_sink_tokens": -1}, "--window-sink-tokens is -1, the smallest allowed number"),
    ],
)
def test_a_window_that_cannot_be_is_told_at_once(values: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=says):
        windows_of(config_of(**values))
    sink_tokens = values.pop("window_sink_tokens", 0)
    config = transformer_config(LLAMA, **{"num_layers": 6, **values})
    set_sinks(config, sink_tokens)
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=says):
        check_supported(config)


def with_windows(change: Callable[[Windows], Windows]) -> Plant:
    @around(torch_thd, "windows_of")
    def changed(windows: Any, config: Any) -> Windows:
        return change(windows(config))

    return changed


@around(packs, "packed_shard_positions")
def lose_the_shard(positions: Any, seqlens: Any, size: int, _: int) -> Any:
    """Rows of a shard get the ranges of the first tokens of their sequence."""
    return positions(seqlens, size, 0)


FAULTS: dict[str, Plant] = {
    "one key less": with_windows(lambda of: Windows(of.tokens - 1, of.skip_freq)),
    "one key more": with_windows(lambda of: Windows(of.tokens + 1, of.skip_freq)),
    "another layer": with_windows(lambda of: Windows(of.tokens, (0, 1, 0, 1))),
    "no layer": with_windows(lambda of: Windows(0, 0)),
    "another lane's rows": lose_the_shard,
}


def packed_for(sink: Callable[[int], int], tokens: int) -> Plant:
    """Layers with a window compute their programme with another mask."""

    @around(placed_packs, "build_placed_packs")
    def changed(build: Any, programme: Programme, masks: Sequence[Mask], *args: Any) -> Any:
        windows = [
            Lambda(sink(mask.sink), mask.window + tokens) if isinstance(mask, Lambda) else mask for mask in masks
        ]
        return build(programme, windows, *args)

    return changed


def lose_the_narrower() -> Any:
    """Layers with a window run the tiles of those without."""
    return mock.patch.object(Programme, "of_layers", lambda self, _: self)


FAULTS_IN_BLOCKS: dict[str, Plant] = {
    "one key less": packed_for(lambda sink: sink, -1),
    "one key more": packed_for(lambda sink: sink, 1),
    "no sink": packed_for(lambda sink: 0, 0),
}


@pytest.mark.nightly
def test_mistakes_in_windows_show(reference_of: Any) -> None:
    case = case_of(reference_of, layout_of("two layers=4 every_second all_gather"))
    cases = {name: (case, plant) for name, plant in FAULTS.items()}
    case = case_of(reference_of, layout_of("two layers=4 sink all_gather"), placed_plan)
    cases |= {f"blocks, {name}": (case, plant) for name, plant in FAULTS_IN_BLOCKS.items()}
    # The tiles of full layers are right, only more: the same gradients, and other bytes than planned.
    cases["tiles of full layers"] = case, lose_the_narrower
    ranks = run_ranks(2, run_faulty, cases, timeout_s=180)
    *faults, same = cases
    for name in faults:
        assert max(rank[name].gradient_error for rank in ranks) > 100 * TOLERANCE, name
    assert max(rank[same].gradient_error for rank in ranks) <= TOLERANCE
    planned = [planned_bytes(case.plan, case.layout, rank) for rank in range(2)]
    assert all(rank[same].bytes_sent > sent for rank, sent in zip(ranks, planned, strict=True))


def refuse_on_this_rank() -> str:
    """Return what the layers say of a plan whose exchange serves no windows."""
    initialize_model_parallel()
    group = dist.group.WORLD
    params = DynamicPackedSeqParams.build(
        (8,), torch.arange(4), group, label="step 3", stats=ExchangeStats(), cp_comm_type="p2p"
    )
    window = windows_of(config_of(window_size=(1, 0))).of_layer(1)
    assert window is not None
    windowed = params.with_mask(window)
    assert windowed is params.with_mask(window), "layers share what is derived"
    assert params.with_mask(params.mask) is params
    assert windowed.stats is params.stats
    executor_of(params, 4, 4, torch.device("cpu"))
    with pytest.raises(UnsupportedFeatureError) as caught:
        executor_of(windowed, 4, 4, torch.device("cpu"))
    return str(caught.value)


def test_an_exchange_that_serves_no_windows_is_named() -> None:
    assert (
        run_ranks(2, refuse_on_this_rank, timeout_s=60)
        == [
            "the plan asks for p2p at step 3, which does not serve layers with a window: plan with all_gather or a2a "
            "or blocks (--cp-comm-type)"
        ]
        * 2
    )


def test_layers_of_transformer_engine_have_no_windows() -> None:
    settings: dict[str, Any] = {"capability": (9, 0), "flash_attn": 2, "attention_backend": "auto", "bf16": True}
    settings |= {"kv_channels": 64, "version": "2.20.0"}
    assert chosen_layers(None, "auto", **settings).impl == "transformer_engine"
    choice = chosen_layers(None, "auto", has_windows=True, **settings)
    assert choice.impl == "local"
    assert "--window-size" in choice.reason
    with pytest.raises(UnsupportedFeatureError, match=r"--window-size.* with local layers only"):
        chosen_layers("transformer_engine", "auto", has_windows=True, **settings)
