"""megatron-core's layers over TransformerEngine's own Python, and tables of versions against its parsed sources."""

import ast
import importlib
import math
import zipfile
from collections.abc import Set
from typing import Any, NamedTuple

import pytest
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module

from dynamic_cp.types import CP_COMM_TYPES, Plan, Sample
from megatron.dynamic_cp.attention.te.support import (
    FLASH_4_OVER_LANES_SINCE,
    NATIVE_SINCE,
    PERMITTED_SINCE,
    missing_exchanges,
    release_of,
)
from megatron.dynamic_cp.flags.fp8 import GATHERS_ANYTHING_SINCE
from megatron.dynamic_cp.flags.linear_attention import parts_of_layers
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.trainer.setup.layers import BATCHED_RING
from tests.distributed import fake_apex, reference
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.layouts import layout_of
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
from tests.distributed.real_transformer_engine import quantization
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import NEWEST, OLDEST, PINNED, VERSIONS, wheel_or_skip
from tests.distributed.test_hybrids import config_of, import_without_triton, stock_layer
from tests.distributed.test_transformer_engine_attention import UNSET, state_of

ALL = "p2p a2a all_gather a2a+p2p"


def remember_calls() -> tuple[list[tuple[str, int, int]], list[Any]]:
    """Return lists of what TransformerEngine's attention is asked for from now on, and of its modules."""
    from transformer_engine.pytorch import DotProductAttention

    calls: list[tuple[str, int, int]] = []
    modules: list[Any] = []
    attend = DotProductAttention.forward

    def remembered(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group]
        cp_size = math.prod(group.size() for group in groups if group is not None)
        calls.append((self.cp_comm_type, cp_size, args[0].shape[1]))
        if self not in modules:
            modules.append(self)
        return attend(self, *args, **kwargs)

    DotProductAttention.forward = remembered
    return calls, modules


def run_on_version(
    layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any]
) -> tuple[Comparison, list[tuple[str, int, int]], list[tuple[Any, ...]]]:
    """Return (comparison, what attention was asked for, state of its modules after the step) of this rank."""
    calls, modules = remember_calls()
    if "gradient_accumulation_fusion" in layout.config:
        fake_apex.install()  # for the output layer, which is megatron-core's
    comparison = run_step(layout, samples, plan, expected)
    return comparison, calls, [state_of(module) for module in modules]


def plan_for(layout: Layout, samples: tuple[Sample, ...], wanted: Set[str], over_all: str | None) -> Plan:
    """Return the first random plan that has the exchanges of `wanted` and no other, one of them over all lanes."""
    for seed in range(400):
        plan = mixed_plan(samples, layout, seed, num_rows=6)
        widest = {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size == layout.lanes}
        if {exchange for exchange, _ in exchanges_of(plan)} == wanted and (over_all is None or over_all in widest):
            return plan
    raise AssertionError(f"no plan with {wanted}")


class Asked(NamedTuple):
    """What a step asks of a version, by the plan's `exchanges`; asked None: those, "shared": of a share of heads."""

    version: str
    exchanges: str = "p2p"
    asked: Set[str] | None = None


ALL_AND_SHARES = {*ALL.split(), "shared alone"}
CASES = {
    "four a2a+p2p full": Asked(PINNED, "a2a+p2p p2p", {"p2p", "shared p2p"}),
    "four mixed": Asked(NEWEST, ALL, ALL_AND_SHARES),
    "four a2a gpt2": Asked(OLDEST, "a2a", {"shared alone"}),
    "four a2a+p2p again=core_attn": Asked("2.19.0", "a2a+p2p p2p"),
    "two all_of_engine": Asked("2.18.0"),
    "two tp2 sp a2a llama_8_heads": Asked(PINNED, "a2a", {"shared alone"}),
    "two pp2 vpp2 all_gather distributed": Asked("2.18.0", "all_gather"), "two ep2 moe one_product": Asked(PINNED),
    "two tp2 sp ep2 moe_sigmoid one_product": Asked(NEWEST), "two tp2 sp ep2 moe_sigmoid": Asked(NEWEST),
    "two moe_biased one_product": Asked(OLDEST), "two moe one_product full": Asked(NEWEST),
    "two ep2 moe one_product fused distributed": Asked(NEWEST), "two mtp": Asked(NEWEST),
    "four mixed delta_moe distributed again=core_attn": Asked(NEWEST, ALL, ALL_AND_SHARES),
    "one tp2 pp2 vpp2 delta": Asked(OLDEST, ""), "two delta_mtp": Asked(NEWEST),
    "two tp2 sp delta again=core_attn+gdn_norm_out": Asked(NEWEST), "two tp2 sp delta_1p": Asked(NEWEST),
    "two tp2 sp mamba": Asked(PINNED), "two ep2 mamba_moe one_product full fused": Asked(NEWEST),
}  # fmt: skip
"""Layout -> what it asks of which version."""


@pytest.mark.by_day("four mixed")
@pytest.mark.parametrize("line", CASES)
def test_step_equals_single_process(line: str, reference_of) -> None:
    version, words, asked = CASES[line]
    layout, exchanges = layout_of(f"{line} engine"), {*words.split()}
    asked = exchanges if asked is None else asked
    samples, expected = BATCHES["long_tail"], reference_of(layout, "long_tail")
    plan = plan_for(layout, samples, exchanges, "a2a" if "shared alone" in asked else None)
    world = layout.topology.world_size
    results = run_ranks_with(version, world, run_on_version, layout, samples, plan, expected)
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


Saved = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def saved_tensors(kind: str) -> tuple[Saved, Saved]:
    """Return name -> (whole shape, offsets of this rank) of our layer of linear attention, and of megatron-core's."""
    initialize_model_parallel(2)
    config = config_of(kind, tensor_model_parallel_size=2)
    if kind == "mamba":
        spec = import_without_triton("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec
        parts = spec.submodules.mamba_layer.submodules.mixer.submodules
    else:
        specs = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
        backend = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider").TESpecProvider()
        parts = specs.get_gated_delta_net_module_spec(config, backend).submodules
    linear = next(number for number, parts_of in enumerate(parts_of_layers(config)) if parts_of.mixer == "linear")
    ours = gpt_block_spec(config, transformer_impl="transformer_engine").layer_specs[linear]
    assert ours.submodules.input_layernorm is IdentityOp, "the norm is in the first matrix"
    groups = ProcessGroupCollection.use_mpu_process_groups()
    built = build_module(ours.submodules.self_attention, config=config, layer_number=1, pg_collection=groups)
    found: list[Saved] = []
    for layer in (built, stock_layer(kind, config, parts)):
        tensors = [
            tensor
            for whole in layer.sharded_state_dict(prefix="layer.").values()
            for tensor in (whole.build() if isinstance(whole, ShardedTensorFactory) else [whole])
        ]
        found.append({one.key: (one.global_shape, one.global_offset) for one in tensors if "_extra" not in one.key})
    return found[0], found[1]


@pytest.mark.by_day("delta")
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_linear_layers_are_saved_as_by_megatron_cores_spec(kind: str) -> None:
    """Names, shapes and shares of two tensor-parallel ranks."""
    for ours, theirs in run_ranks_with(PINNED, 2, saved_tensors, kind):
        assert "layer.in_proj.layer_norm_weight" in ours
        assert ours == theirs


CURRENT, BLOCKS, MX = "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"
DELAYED = "TEDelayedScaling"
IN_FP8 = {
    "four mixed fp8=mxfp8": (ALL, MX), "two tp2 sp fp8=tensorwise e4m3 full": ("p2p", CURRENT),
    "two tp2 sp delta_16_heads fp8=tensorwise full": ("p2p", CURRENT), "two tp2 sp fp8=blockwise": ("p2p", BLOCKS),
    "two delta_16_heads fp8=mxfp8": ("p2p", MX), "two pp2 vpp2 distributed fp8=blockwise": ("p2p", BLOCKS),
    "two tp2 sp a2a llama_8_heads fp8=delayed again=core_attn": ("a2a", DELAYED),
    "four fp8=delayed": ("p2p", DELAYED),
}  # fmt: skip
"""Layout -> exchanges of the plan, and the class of the recipe."""

Quantized = tuple[Comparison, list[quantization.Context], list[tuple[str, int]]]


def run_in_fp8(layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any]) -> Quantized:
    """Return (comparison, contexts that were entered, products in FP8) of this rank."""
    quantization.install()
    comparison = run_step(layout, samples, plan, expected)
    return comparison, quantization.entered, quantization.products


@pytest.mark.by_day(f"{NEWEST}-two tp2 sp fp8=blockwise")
@pytest.mark.parametrize("line", IN_FP8)
@pytest.mark.parametrize("version", [PINNED, NEWEST])
def test_products_in_fp8_get_whole_multiples(version: str, line: str, reference_of) -> None:
    """Of what TransformerEngine asks for; they are computed exactly, so that nothing else may have changed."""
    layout, (words, recipe) = layout_of(f"{line} engine"), IN_FP8[line]
    samples, expected = BATCHES["long_tail"], reference_of(layout, "long_tail")
    exchanges = {*words.split()} - {*missing_exchanges(CP_COMM_TYPES, version, "cuDNN")}
    plan = plan_for(layout, samples, exchanges, None)
    empty = [bucket for bucket in plan.buckets if not bucket.samples]
    assert empty, "no place of padding alone"
    world = layout.topology.world_size
    results = run_ranks_with(version, world, run_in_fp8, layout, samples, plan, expected)
    comparisons = [comparison for comparison, _, _ in results]
    assert_equal_to_reference(comparisons, layout, expected)
    assert_bytes_as_planned(comparisons, layout, plan)
    forwards = 2 if "recompute_granularity" in layout.config and recipe != DELAYED else 1
    chunks = layout.num_layers // layout.pp if recipe != DELAYED else layout.vpp
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


FOLDER = "transformer_engine/pytorch/attention/dot_product_attention"


class Sources(NamedTuple):
    """Files of a TransformerEngine."""

    version: str
    attention: ast.Module
    context_parallel: ast.Module
    utils: ast.Module
    linear: ast.Module
    layernorm_linear: ast.Module


@pytest.fixture(scope="module", params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Sources:
    files = [f"{FOLDER}/{name}.py" for name in ("dot_product_attention", "context_parallel", "utils")]
    files += [f"transformer_engine/pytorch/module/{name}.py" for name in ("linear", "layernorm_linear")]
    with zipfile.ZipFile(wheel_or_skip(request.param)) as wheel:
        return Sources(request.param, *(ast.parse(wheel.read(name)) for name in files))


def definition(module: ast.Module, name: str) -> ast.AST:
    """Return the class or function NAME, or the method CLASS.NAME."""
    found: ast.AST = module
    for part in name.split("."):
        found = next(node for node in ast.walk(found) if getattr(node, "name", None) == part)
    return found


def refuses_thd(node: ast.AST) -> bool:
    """Return whether a function asserts plainly that the format is not thd."""
    return any(ast.unparse(one.test) == "qkv_format != 'thd'" for one in ast.walk(node) if isinstance(one, ast.Assert))


@pytest.mark.of_releases
def test_exchanges_with_thd_are_those_of_the_table(sources: Sources) -> None:
    """What a version refuses for packed sequences, by its own assertions, is what our table does not permit there."""
    places = {
        "p2p": "AttnFuncWithCPAndKVP2P.forward",
        "a2a": "AttnFuncWithCPAndQKVOA2A.forward",
        "all_gather": "AttnFuncWithCPAndKVAllGather.forward",
        "a2a+p2p": "attn_forward_func_with_cp",
    }
    refused = {one for one, place in places.items() if refuses_thd(definition(sources.context_parallel, place))}
    assert refused == {one for one in CP_COMM_TYPES if release_of(sources.version) < PERMITTED_SINCE[one]}


def test_a2a_is_native_once_its_rows_are_reordered_by_a_kernel(sources: Sources) -> None:
    """Before, by a Python loop over sequences and lanes that reads each boundary from the device."""
    names = {node.name for node in ast.walk(sources.context_parallel) if isinstance(node, ast.FunctionDef)}
    loops = [name for name in names if name.startswith("reorder_seq_chunks_") and name.endswith("_thd")]
    kernels = names & {"thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order"}
    if release_of(sources.version) < PERMITTED_SINCE["a2a"]:
        assert not loops
        assert not kernels
        return
    assert bool(loops) != bool(kernels)
    assert bool(loops) == (release_of(sources.version) < NATIVE_SINCE["a2a"])
    for name in loops:
        assert "torch.arange(" in ast.unparse(definition(sources.context_parallel, name))


def test_flash_attn_4_computes_over_lanes_since_as_said(sources: Sources) -> None:
    text = ast.unparse(definition(sources.utils, "get_attention_backend"))
    over_lanes = "fa4_cp_supported = cp_comm_type in ['p2p', 'all_gather', 'a2a']" in text
    assert over_lanes == (release_of(sources.version) >= FLASH_4_OVER_LANES_SINCE)


def test_blocks_are_asserted_to_be_whole_until_as_said(sources: Sources) -> None:
    for layers in (sources.linear, sources.layernorm_linear):
        asserts = "assert_dim_for_all_gather(inputmat" in ast.unparse(layers)
        assert asserts == (release_of(sources.version) < GATHERS_ANYTHING_SINCE)


def test_the_switch_of_the_ring_is_read_in_each_pass(sources: Sources) -> None:
    """So that it may be set after TransformerEngine was imported."""
    for name in ("forward", "backward"):
        ring = definition(sources.context_parallel, f"AttnFuncWithCPAndKVP2P.{name}")
        assert f"os.getenv('{BATCHED_RING}', '0')" in ast.unparse(ring)


def test_flash_attention_is_known_where_we_ask(sources: Sources) -> None:
    flags = ast.unparse(definition(sources.utils, "FlashAttentionUtils"))
    assert "is_installed = False" in flags
    assert "v3_is_installed = False" in flags
