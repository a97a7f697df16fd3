"""Loss of every token and every gradient equal stock megatron-core: a single process, and its own static CP."""

import functools
from collections import Counter
from collections.abc import Iterable
from inspect import signature
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, PlanOptions, Sample
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.step.schedule import sum_of_losses
from tests.distributed import reference
from tests.distributed.harness import params_of, run_ranks
from tests.distributed.layouts import (
    BY_DAY,
    BY_NIGHT,
    FACTORS,
    FAMILIES,
    FULL_RECOMPUTE,
    case_in,
    covering_rows,
    layout_of,
    lines_of,
    pairs_of,
)
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    Comparison,
    Layout,
    assert_all_equal_to_reference,
    assert_bytes_as_planned,
    assert_equal_to_reference,
    case_of,
    compare_with_reference,
    mixed_plan,
    planned_blocks,
    samples_of,
)


def cases_of(lines: Iterable[str], reference_of: Any, batch: str = "long_tail") -> dict[str, Case]:
    cases = {line: case_in(line, reference_of, batch) for line in lines}
    for layout, _, _, expected in cases.values():
        if layout.variant == "deepseek":
            assert any(name.startswith("mtp.layers.0") for name in expected["expert_biases"]), "its module has experts"
            assert "decoder.layers.0.mlp.linear_fc1.weight" in expected["gradients"], "the first layer is dense"
    return cases


def counts_bytes(line: str, layout: Layout) -> bool:
    """Return whether ranks of a layout send what is planned, which is without modules of further tokens."""
    is_uneven = "placed" in line.split() and layout.pp > 1 and layout.model.mtp_num_layers > 0
    return layout.lanes > 1 and not is_uneven


def assert_layouts_equal_single_process(lines: Iterable[str], reference_of: Any) -> None:
    """Moved biases of experts included; and bytes of exchanges are those of the plan."""
    cases = cases_of(lines, reference_of)
    uncounted = {line: cases.pop(line) for line in [*cases] if not counts_bytes(line, cases[line].layout)}
    assert_all_equal_to_reference(cases, bytes_too=True)
    assert_all_equal_to_reference(uncounted)


@pytest.mark.of_releases
@pytest.mark.parametrize("family", BY_DAY)
def test_layouts_of_the_day_equal_single_process(family: str, reference_of: Any) -> None:
    assert_layouts_equal_single_process(BY_DAY[family], reference_of)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_covering_layouts_equal_single_process(family: str, reference_of: Any) -> None:
    assert_layouts_equal_single_process(lines_of(family), reference_of)


def test_a_gradient_of_heads_may_be_as_far_off_as_float32_alone() -> None:
    one, layout = torch.ones(1, dtype=torch.float64), Layout(1)
    expected = {"gradients": {"A_log": one}, "terms": {"A_log": one}, "expert_biases": {}, "num_tokens": 2000}

    def check(error: float, of_one_process: float) -> None:
        alone = {"A_log": (one + of_one_process).float()}
        comparison = Comparison(0.0, {"A_log": error}, Counter(dict.fromkeys(range(2000), 1)), 0)
        assert_equal_to_reference([comparison], layout, expected | {"in_float32": lambda: [{"gradients": alone}]})

    check(7e-6, 4e-6)
    for error, of_one_process in ((7e-6, 3e-6), (9e-6, 4e-6), (float("nan"), 4e-6)):
        with pytest.raises(AssertionError, match="gradients differ"):
            check(error, of_one_process)


def test_every_pair_is_in_a_layout() -> None:
    """Of all the words that a layout may have; those that no run may have together are few. Each word is by day."""
    lines = [line for family in FAMILIES for line in lines_of(family)]
    by_day = {line for of_family in BY_DAY.values() for line in of_family}
    assert by_day - set(lines) == {"one tp2 sp pp2 vpp2 llama_tied distributed full"}
    words = {word for name, values in FACTORS.items() if name != "family" for value in values for word in value.split()}
    # All exchanges are by day in test_mixed_exchanges_on_four_lanes_equal_single_process.
    assert words - {"again", "layers=2", *CP_COMM_TYPES} <= set(" ".join(by_day).split())
    assert len(set(lines)) == len(covering_rows()) <= 45
    found = {pair for row in covering_rows() for pair in pairs_of(row)}
    all_of_them = sum(len(one) * len(other) for one in FACTORS.values() for other in FACTORS.values())
    all_of_them = (all_of_them - sum(len(one) ** 2 for one in FACTORS.values())) // 2
    assert (len(found), all_of_them) == (386, 408)
    assert {layout_of(line).variant for line in lines} == set(" ".join(FAMILIES.values()).split())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.of_releases] * (name == "plain")) for name in BY_NIGHT]
)
def test_lists_of_layouts_equal_single_process(name: str, reference_of: Any) -> None:
    if name == "uneven stages":  # whose bytes are planned as if they were even
        assert_all_equal_to_reference(cases_of(BY_NIGHT[name], reference_of))
    else:
        assert_layouts_equal_single_process(BY_NIGHT[name], reference_of)


FOUR = (
    *("four", "four all_gather", "two tp2 sp", "two pp2"),
    *(f"four {variant} {states}" for variant in ("delta", "mamba") for states in ("heads", "states")),
    *("four ep2 delta_moe distributed", "four ep2 mamba_moe distributed", "four ep2 delta_mtp again=core_attn"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("line", FOUR)
@pytest.mark.parametrize("batch", ["few", "tiny"])
def test_batch_shapes_equal_single_process(batch: str, line: str, reference_of: Any) -> None:
    case = case_of(reference_of, layout_of(line), functools.partial(mixed_plan, seed=1), batch)
    assert_all_equal_to_reference({line: case})


# The planner's own plans of placed micro-batches, and the limit of tokens per rank.
PLANNED_BLOCKS = {
    "four nodes_of_2": 300, "two tp2 sp": 600, "four layers=4 sink nodes_of_2": 300,
    "two tp2 sp layers=4 window full": 600, "four delta": 640,
}  # fmt: skip


@pytest.mark.by_day("two tp2 sp")
@pytest.mark.parametrize("line", PLANNED_BLOCKS)
def test_attention_that_is_placed_by_plan_equals_single_process(line: str, reference_of: Any) -> None:
    layout = layout_of(line)
    case = case_of(reference_of, layout, functools.partial(planned_blocks, max_tokens_per_rank=PLANNED_BLOCKS[line]))
    plan = case.plan
    check_plan(plan, case.samples)
    placements = [bucket.placement for bucket in plan.buckets if bucket.placement is not None]
    assert max(len(placement.tiles) for placement in placements) > 10
    masks = layout.model.layer_masks
    assert {placement.layer_masks for placement in placements} == {() if masks == (CAUSAL,) else masks}
    if layout.variant == "delta":
        assert any(bucket.is_placed and bucket.exchanges_states for bucket in plan.buckets)
    assert_all_equal_to_reference({line: case}, bytes_too=True)


@pytest.mark.by_day("long_tail")
@pytest.mark.parametrize("batch", [pytest.param("long_tail", marks=pytest.mark.in_check), "tiny"])
def test_mixed_exchanges_on_four_lanes_equal_single_process(batch: str, reference_of: Any) -> None:
    """The step with every exchange that `make check` runs."""
    assert_all_equal_to_reference(cases_of(["four mixed"], reference_of, batch), bytes_too=True)


@pytest.mark.nightly
def test_which_layers_are_recomputed_changes_no_bit(reference_of: Any) -> None:
    """On two stages of two model chunks of two layers; errors are equal to the last digit."""
    few = {
        "block": FULL_RECOMPUTE | {"recompute_method": "block"},
        "units": FULL_RECOMPUTE | {"recompute_num_layers": 2},
    }
    ways = {"none": {}, "full": FULL_RECOMPUTE, **few}
    cases = {
        name: case_of(reference_of, Layout(2, pp=2, vpp=2, config={"num_layers": 8, **config}))
        for name, config in ways.items()
    }
    found = compare_with_reference(cases)
    without = [(rank.loss_error, rank.gradient_errors) for rank in found["none"]]
    for name, ranks in found.items():
        assert_equal_to_reference(ranks, cases[name].layout, cases[name].expected)
        assert_bytes_as_planned(ranks, cases[name].layout, cases[name].plan)
        assert [(rank.loss_error, rank.gradient_errors) for rank in ranks] == without, name


CP_SIZE = 4


def shard_of_this_rank(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of a sequence in the static CP group, cut by megatron-core."""
    from_0_18 = "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(whole, **{"is_hybrid_cp": False} if from_0_18 else {}, cp_group=group)


class StaticGroupAttention(TorchTHDAttention):
    """Our kernel, told of megatron-core's static CP group."""

    def forward(
        self, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: PackedSeqParams, **kw: Any
    ) -> Any:
        group, tokens = parallel_state.get_context_parallel_group(), torch.zeros(len(query), dtype=torch.int64)
        params = params_of((packed_seq_params.max_seqlen_q,), tokens, group, cp_comm_type="p2p")
        return super().forward(query, key, value, *args, packed_seq_params=params, **kw)


def megatron_static_cp_step(samples: tuple[Sample, ...], initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's {"gradients", "losses": (sample_id, position) -> loss}; one sample per micro-batch."""
    parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    variant = reference.LLAMA
    config = reference.transformer_config(variant, num_layers=Layout(CP_SIZE).num_layers, context_parallel_size=CP_SIZE)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = StaticGroupAttention
    chunk = reference.gpt_model(config, variant, spec)
    chunk.load_state_dict(initial, strict=False)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    config.finalize_model_grads_func = finalize_model_grads
    losses = {}

    def micro_batches() -> Any:
        for sample in samples:
            values = reference.read_sample(sample)
            (seqlen,) = padded_seqlens((sample.seqlen,), CP_SIZE)
            padding = seqlen - sample.seqlen
            whole = {
                name: torch.nn.functional.pad(torch.from_numpy(column), (0, padding))[None]
                for name, column in vars(values).items()
            }
            whole["position_ids"] = torch.arange(seqlen)[None]
            boundaries = torch.tensor([0, seqlen], dtype=torch.int32)
            params = PackedSeqParams("thd", boundaries, boundaries, boundaries, boundaries, seqlen, seqlen)
            yield sample.sample_id, shard_of_this_rank(whole), params

    def forward_step(data_iterator: Any, gpt: Any) -> Any:
        sample_id, batch, params = next(data_iterator)
        output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)

        def loss_func(token_losses: torch.Tensor) -> Any:
            kept = batch["loss_mask"].flatten().bool()
            positions = batch["position_ids"].flatten()[kept].tolist()
            for position, value in zip(positions, token_losses.flatten()[kept].tolist(), strict=True):
                losses[sample_id, position] = value
            return sum_of_losses(batch["loss_mask"], token_losses)

        return output, loss_func

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=micro_batches(), model=model, num_microbatches=len(samples),
        seq_length=64, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return {"gradients": {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, "losses": losses}


def test_static_policy_equals_static_context_parallelism() -> None:
    samples = samples_of(801, 700, 600)
    layout = Layout(CP_SIZE)
    single = run_ranks(1, reference.reference_step, "llama", samples, layout.num_layers)[0]
    ranks = run_ranks(CP_SIZE, megatron_static_cp_step, samples, single["initial"])
    by_token = {token: value for rank in ranks for token, value in rank["losses"].items()}
    losses = {s.sample_id: torch.tensor([by_token[s.sample_id, i] for i in range(s.seqlen)]) for s in samples}
    assert len(by_token) == single["num_tokens"]
    static = {**single, "gradients": ranks[0]["gradients"], "losses": losses}
    plan = plan_global_batch(
        samples, topology=layout.topology, model=load_model("llama-3-8b"), hardware=load_hardware("cpu"),
        options=PlanOptions(max_tokens_per_rank=208, static_cp_size=CP_SIZE, cp_comm_types=("p2p",)),
        policy="static",
    ).plan  # fmt: skip
    # Two samples never fit together: one per micro-batch, as megatron-core's side runs them.
    assert [(bucket.cp_size, len(bucket.samples)) for bucket in plan.buckets] == [(CP_SIZE, 1)] * 3
    assert_all_equal_to_reference({"static": Case(layout, samples, plan, static)})
    # ... and both are right, not merely alike.
    for name in ("gradients", "losses"):
        for key, wanted in single[name].items():
            assert (static[name][key] - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), key
