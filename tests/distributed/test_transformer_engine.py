"""megatron-core's real TransformerEngine layers over a fake of TransformerEngine that asserts what the real one needs.

A step of the whole GPT equals the single-process reference on old and new versions and with every exchange; faults
planted in what TransformerEngine is given are noticed by the fake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import FULL, Plan, Sample, Topology
from megatron.dynamic_cp.attention.te.support import LACKS_MASKS, why_no_masks
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from tests.distributed import fake_transformer_engine as fake
from tests.distributed import reference
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks
from tests.distributed.parity import (
    BATCHES,
    Comparison,
    Layout,
    assert_bytes_as_planned,
    assert_equal_to_reference,
    exchanges_of,
    mixed_plan,
    run_step,
)

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
UNSET = (None, None, None, "p2p")
ALL = {"p2p", "a2a", "all_gather", "a2a+p2p"}
# Without all_gather, which 2.11 lacks.
OLD = ("p2p", "a2a", "a2a+p2p")


def inner_size(exchange: str, cp_size: int) -> int:
    """Return the lanes that exchange heads; two of a2a+p2p."""
    return {"a2a": cp_size, "a2a+p2p": 2}.get(exchange, 1)


def engine(lanes: int, exchange: str, **rest: Any) -> Layout:
    return Layout(lanes, exchange=exchange, transformer_impl="transformer_engine", **rest)


def remember_modules() -> list[Any]:
    """Return a list to which every attention module that is built from now on adds itself."""
    modules: list[Any] = []
    build = fake.DotProductAttention.__init__

    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        modules.append(self)

    fake.DotProductAttention.__init__ = remembered  # type: ignore[method-assign]
    return modules


def state_of(module: Any) -> tuple[Any, ...]:
    return module.cp_group, module.cp_global_ranks, module.cp_stream, module.cp_comm_type


def run_on_version(
    version: str,
    layout: Layout,
    samples: tuple[Sample, ...],
    plan: Plan,
    expected: dict[str, Any],
    sabotage: Callable[[], None] | None = None,
) -> tuple[Comparison, list[tuple[str, int, int]], list[tuple[Any, ...]]]:
    """Return (comparison, what the fake attended with, state of its modules after the step) of this rank."""
    fake.install(version)
    modules = remember_modules()
    comparison = run_step(layout, samples, plan, expected, sabotage)
    return comparison, fake.DotProductAttention.forwards, [state_of(module) for module in modules]


def plan_for(layout: Layout, samples: tuple[Sample, ...], wanted: set[str], over_all: str | None) -> Plan:
    """Return the first random plan that has the exchanges of `wanted` and no other, one of them over all lanes."""
    for seed in range(400):
        plan = mixed_plan(samples, layout, seed, num_rows=6)
        widest = {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size == layout.lanes}
        if {exchange for exchange, _ in exchanges_of(plan)} == wanted and (over_all is None or over_all in widest):
            return plan
    raise AssertionError(f"no plan with {wanted}")


# Version; layout; exchanges of the plan; what the fake must have been asked for, "shared" being a share of the heads.
CASES = {
    "two_levels_wrapped_full_recompute": (
        "2.11.0",
        engine(4, "a2a+p2p", config=FULL_RECOMPUTE),
        {"a2a+p2p", "p2p"},
        {"p2p", "shared p2p"},
    ),
    "all_four_few_kv_heads": ("2.20.2", engine(4, "mixed"), ALL, ALL | {"shared alone"}),
    "a2a_wrapped": ("2.10.0", engine(4, "a2a", variant="gpt2"), {"a2a"}, {"shared alone"}),
    "two_levels_selective_recompute": (
        "2.19.0",
        engine(4, "a2a+p2p", config=SELECTIVE_RECOMPUTE),
        {"a2a+p2p", "p2p"},
        {"a2a+p2p", "p2p"},
    ),
    "features": ("2.18.0", engine(2, "p2p", variant="all_of_engine"), {"p2p"}, {"p2p"}),
    "tp2_sp": ("2.11.0", engine(2, "a2a", tp=2, sp=True, variant="llama_8_heads"), {"a2a"}, {"shared alone"}),
    "pp2_vpp2_distributed_optimizer": (
        "2.18.0",
        engine(2, "all_gather", pp=2, vpp=2, distributed_optimizer=True),
        {"all_gather"},
        {"all_gather"},
    ),
}


@pytest.mark.by_day("two_levels_wrapped_full_recompute", "pp2_vpp2_distributed_optimizer")
@pytest.mark.parametrize("name", CASES)
def test_step_equals_single_process(name: str, reference_of) -> None:
    version, layout, exchanges, asked = CASES[name]
    samples = BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    plan = plan_for(layout, samples, exchanges, "a2a" if "shared alone" in asked else None)
    results = run_ranks(layout.topology.world_size, run_on_version, version, layout, samples, plan, expected)
    comparisons = [comparison for comparison, _, _ in results]
    assert_equal_to_reference(comparisons, layout, expected)
    assert_bytes_as_planned(comparisons, layout, plan)
    heads = reference.transformer_config(reference.VARIANTS[layout.variant]).num_attention_heads // layout.tp
    used = {
        ("shared " if own_heads < heads else "") + (exchange if cp_size > 1 else "alone")
        for _, forwards, _ in results
        for exchange, cp_size, own_heads in forwards
    }
    assert used - {"alone"} == asked
    assert all(state == UNSET for _, _, left in results for state in left), "a group was left set"


def in_fp8(recipe: str, form: str = "hybrid") -> dict[str, Any]:
    return {"fp8": form, "fp8_recipe": recipe}


# Layout, exchanges of the plan, class of the recipe.
IN_FP8 = {
    "four_lanes_mxfp8": (engine(4, "mixed", config=in_fp8("mxfp8")), ALL, "MXFP8BlockScaling"),
    "tp2_sp_tensorwise_full_recompute": (
        engine(2, "p2p", tp=2, sp=True, config=in_fp8("tensorwise", "e4m3") | FULL_RECOMPUTE),
        {"p2p"},
        "Float8CurrentScaling",
    ),
    "tp2_sp_blockwise": (
        engine(2, "p2p", tp=2, sp=True, config=in_fp8("blockwise")),
        {"p2p"},
        "Float8BlockScaling",
    ),
}
IN_FP8_EACH_NIGHT = {
    "pp2_vpp2_distributed_optimizer_blockwise": (
        engine(2, "p2p", pp=2, vpp=2, distributed_optimizer=True, config=in_fp8("blockwise")),
        {"p2p"},
        "Float8BlockScaling",
    ),
    "tp2_sp_delayed": (
        engine(2, "a2a", tp=2, sp=True, variant="llama_8_heads", config=in_fp8("delayed") | SELECTIVE_RECOMPUTE),
        {"a2a"},
        "TEDelayedScaling",
    ),
    "four_lanes_delayed": (engine(4, "p2p", config=in_fp8("delayed")), {"p2p"}, "TEDelayedScaling"),
}

Quantized = tuple[Comparison, list[tuple[str, str, tuple[int, ...]]], list[tuple[str, int]]]


def run_in_fp8(layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any]) -> Quantized:
    """Return (comparison, contexts that were entered, products in FP8) of this rank."""
    fake.install("2.20.2")
    comparison = run_step(layout, samples, plan, expected, None)
    return comparison, fake.Quantization.entered, fake.Quantization.products


@pytest.mark.parametrize(
    "name", [*IN_FP8, *(pytest.param(name, marks=pytest.mark.nightly) for name in IN_FP8_EACH_NIGHT)]
)
def test_products_in_fp8_get_whole_multiples(name: str, reference_of) -> None:
    """Of what TransformerEngine asks for; the fake computes them exactly, so that nothing else may have changed."""
    layout, exchanges, recipe = (IN_FP8 | IN_FP8_EACH_NIGHT)[name]
    samples, expected = BATCHES["long_tail"], reference_of(layout, "long_tail")
    plan = plan_for(layout, samples, exchanges, None)
    empty = [bucket for bucket in plan.buckets if not bucket.samples]
    assert empty, "no place of padding alone"
    world = layout.topology.world_size
    results = run_ranks(world, run_in_fp8, layout, samples, plan, expected)
    comparisons = [comparison for comparison, _, _ in results]
    assert_equal_to_reference(comparisons, layout, expected)
    assert_bytes_as_planned(comparisons, layout, plan)
    forwards = 2 if "recompute_granularity" in layout.config and recipe != "TEDelayedScaling" else 1
    chunks = layout.num_layers // layout.pp if recipe != "TEDelayedScaling" else layout.vpp
    for rank, (_, entered, products) in enumerate(results):
        assert {name for name, _ in products} == {recipe}
        # Two products of attention and two of the MLP in each layer.
        layers = layout.num_layers // layout.pp
        assert len(products) == 4 * layers * plan.num_microbatches * (2 if "full" in layout.config.values() else 1)
        assert min(rows for _, rows in products) == layout.topology.token_alignment, "an empty place was computed"
        assert {(one, form) for one, form, _ in entered} == {(recipe, layout.config["fp8"].upper())}
        assert len(entered) == chunks * forwards * plan.num_microbatches
        # Largest values are shared over the tensor-parallel ranks and lanes of a stage: static CP is 1.
        of_stage = world // layout.pp
        first = rank // of_stage * of_stage
        assert {ranks for _, _, ranks in entered} == {tuple(range(first, first + of_stage))}


def test_tokens_that_are_not_padded_for_fp8_are_noticed(reference_of) -> None:
    """As in a plan for a topology that does not know of it."""
    layout, exchanges, _ = IN_FP8["tp2_sp_tensorwise_full_recompute"]
    samples = BATCHES["long_tail"]
    plan = plan_for(layout, samples, exchanges, None)
    unaligned = replace(plan, topology=replace(plan.topology, token_alignment=1))
    with pytest.raises(RankError, match="a multiple of 16 is needed"):
        run_ranks(4, run_in_fp8, layout, samples, unaligned, reference_of(layout, "long_tail"))


def test_blocks_that_cannot_be_gathered_are_noticed(reference_of) -> None:
    """With sequence parallelism; as in a plan that knows of the products alone."""
    layout, exchanges, _ = IN_FP8["tp2_sp_blockwise"]
    samples = BATCHES["long_tail"]
    plan = plan_for(layout, samples, exchanges, None)
    unaligned = replace(plan, topology=replace(plan.topology, token_alignment=16))
    with pytest.raises(RankError, match="a multiple of 128 is needed to gather"):
        run_ranks(4, run_in_fp8, layout, samples, unaligned, reference_of(layout, "long_tail"))


# What may go wrong between a micro-batch and TransformerEngine; each must be noticed by the fake, or by the comparison.


def leave_the_group_set() -> None:
    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention as Attention

    original = Attention.set_context_parallel_group

    def only_set(self: Any, group: Any, ranks: Any, stream: Any, exchange: str) -> None:
        if stream is not None:
            original(self, group, ranks, stream, exchange)

    Attention.set_context_parallel_group = only_set


def take_the_wrong_group() -> None:
    """Its ranks are those of the whole job."""
    original = fake.DotProductAttention.set_context_parallel_group

    def wrong(self: Any, group: Any, ranks: Any, stream: Any, exchange: str) -> None:
        original(self, group and dist.group.WORLD, ranks, stream, exchange)

    fake.DotProductAttention.set_context_parallel_group = wrong  # type: ignore[method-assign]


def reverse_the_ranks() -> None:
    original = fake.DotProductAttention.set_context_parallel_group

    def wrong(self: Any, group: Any, ranks: Any, stream: Any, exchange: str) -> None:
        original(self, group, ranks and ranks[::-1], stream, exchange)

    fake.DotProductAttention.set_context_parallel_group = wrong  # type: ignore[method-assign]


def without_a_stream() -> None:
    """What megatron-core 0.16.1 does at a static CP size of 1."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    fake.FakeStream = torch.cuda.Stream = lambda: None  # type: ignore[assignment, misc]
    assert TEDotProductAttention.cp_stream is None


def with_params(change: Callable[[DynamicPackedSeqParams], None]) -> None:
    original = DynamicPackedSeqParams.build.__func__

    def changed(cls: Any, *args: Any, **kwargs: Any) -> DynamicPackedSeqParams:
        params = original(cls, *args, **kwargs)
        change(params)
        return params

    DynamicPackedSeqParams.build = classmethod(changed)  # type: ignore[assignment]


def copy_the_boundaries() -> None:
    def change(params: DynamicPackedSeqParams) -> None:
        vars(params)["cu_seqlens_q_padded"] = params.cu_seqlens_q.clone()

    with_params(change)


def take_valid_lengths_for_the_longest() -> None:
    def change(params: DynamicPackedSeqParams) -> None:
        vars(params).update(dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), params.max_seqlen_q - 1))

    with_params(change)


def end_sequences_where_padding_begins() -> None:
    def change(params: DynamicPackedSeqParams) -> None:
        valid = params.cu_seqlens_q.clone()
        valid[-1] -= 1
        vars(params).update(cu_seqlens_q=valid, cu_seqlens_kv=valid)

    with_params(change)


def forget_the_exchange() -> None:
    """What an older version lacks is asked of it all the same."""
    from megatron.dynamic_cp.attention.te import attention as transformer_engine

    transformer_engine.way = lambda *args, **kwargs: "native"


def swap_the_two_levels() -> None:
    original = fake.DotProductAttention.set_context_parallel_group

    def wrong(self: Any, group: Any, ranks: Any, stream: Any, exchange: str) -> None:
        original(self, group[::-1] if isinstance(group, list) else group, ranks, stream, exchange)

    fake.DotProductAttention.set_context_parallel_group = wrong  # type: ignore[method-assign]


MUTATIONS = {
    leave_the_group_set: ("2.11.0", "p2p", "shards do not make the pack|a group was left set"),
    take_the_wrong_group: ("2.11.0", "p2p", "TE: the group's shards do not make the pack"),
    reverse_the_ranks: ("2.11.0", "p2p", "TE: cp_global_ranks are not those of the group"),
    without_a_stream: ("2.11.0", "p2p", "TE: cp_stream is None"),
    copy_the_boundaries: ("2.18.0", "p2p", "TE: one tensor must serve"),
    take_valid_lengths_for_the_longest: ("2.11.0", "p2p", "TE: max_seqlen is not the longest padded length"),
    end_sequences_where_padding_begins: ("2.11.0", "p2p", "TE: one tensor must serve"),
    forget_the_exchange: ("2.11.0", "a2a+p2p", r"TE \(2, 11\): a2a\+p2p does not support qkv_format thd"),
    swap_the_two_levels: ("2.19.0", "a2a+p2p", "TE: "),
}


def attend_thrice(version: str, exchange: str, sabotage: Callable[[], None] | None) -> None:
    """Attend over four lanes, over two in a ring, then alone."""
    fake.install(version)
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=4), timeout_s=30, exchanges=(exchange,), inner_sizes=(2,))
    if sabotage is not None:
        sabotage()
    from megatron.dynamic_cp.model.layer_specs import gpt_block_spec

    config = reference.transformer_config(reference.LLAMA)
    spec = gpt_block_spec(config, transformer_impl="transformer_engine")
    model = reference.gpt_model(config, reference.LLAMA, spec)
    attention = model.decoder.layers[0].self_attention.core_attention
    for cp_size in (4, 2, 1):
        first = groups.lane - groups.lane % cp_size
        inner = inner_size(exchange, 4) if cp_size == 4 else 1
        params = DynamicPackedSeqParams.build(
            (8 * cp_size, 16 * cp_size),
            torch.zeros(24, dtype=torch.int64),
            groups.group(first, cp_size),
            cp_comm_type=exchange if cp_size == 4 else "p2p",
            levels=groups.levels(first, cp_size, inner),
            label="test",
            stats=ExchangeStats(),
        )
        q, k, v = (torch.randn(24, heads, config.kv_channels, requires_grad=True) for heads in (4, 2, 2))
        attention(q, k, v, None, packed_seq_params=params).sum().backward()
    assert state_of(attention) == UNSET, "a group was left set"
    masked = (Sample(sample_id=0, seqlen=8, mask=FULL), Sample(sample_id=1, seqlen=16))
    params = replace(params, masked_samples=masked)
    with pytest.raises(
        UnsupportedFeatureError, match="samples of test have masks of their own, and TransformerEngine's"
    ):
        attention(q, k, v, None, packed_seq_params=params)
    assert why_no_masks([model]) == LACKS_MASKS
    assert why_no_masks([model.embedding]) is None


@pytest.mark.by_day("2.11.0-p2p", "2.19.0-a2a+p2p")
@pytest.mark.parametrize(("version", "exchange"), sorted({case[:2] for case in MUTATIONS.values()}))
def test_three_groups_in_turn(version: str, exchange: str) -> None:
    """What the mutations below break."""
    run_ranks(4, attend_thrice, version, exchange, None, timeout_s=60)


@pytest.mark.by_day("take_the_wrong_group", "copy_the_boundaries")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_faults_are_noticed(mutation: Callable[[], None]) -> None:
    version, exchange, message = MUTATIONS[mutation]
    with pytest.raises(RankError, match=message):
        run_ranks(4, attend_thrice, version, exchange, mutation, timeout_s=60)


def fail_in_forward() -> list[tuple[Any, ...]]:
    """Return the states of all modules after their forward pass failed over a group, with a share of heads too."""
    fake.install("2.11.0")
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    modules = remember_modules()
    fake.DotProductAttention.raise_in_forward = True
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=4), timeout_s=30, exchanges=OLD, inner_sizes=(2,))
    config = reference.transformer_config(reference.LLAMA)
    q, k, v = (torch.randn(8, heads, config.kv_channels) for heads in (4, 2, 2))
    for exchange in OLD:
        params = DynamicPackedSeqParams.build(
            (32,),
            torch.zeros(8, dtype=torch.int64),
            groups.group(0, 4),
            cp_comm_type=exchange,
            levels=groups.levels(0, 4, inner_size(exchange, 4)),
            label="test",
            stats=ExchangeStats(),
        )
        attention = TransformerEngineAttention(config, 1, AttnMaskType.causal, "self")
        with pytest.raises(UnsupportedFeatureError, match=r"the micro-batch has full attention \(test\)"):
            attention(q, k, v, None, packed_seq_params=replace(params, mask=FULL))
        with pytest.raises(RuntimeError, match="planted"):
            attention(q, k, v, None, packed_seq_params=params)
    assert len(fake.DotProductAttention.set_calls) == 2 * len(OLD), "every group was set and put back"
    return [state_of(module) for module in modules]


def test_a_failing_forward_pass_puts_the_group_back() -> None:
    for states in run_ranks(4, fail_in_forward, timeout_s=60):
        assert len(states) == len(OLD) + 2, "one module an exchange, two more with a share of the heads"
        assert all(state == UNSET for state in states)
