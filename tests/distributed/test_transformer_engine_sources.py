"""What of TransformerEngine is written down here, versions above all, against its Python sources, which are parsed."""

from __future__ import annotations

import ast
import zipfile
from typing import NamedTuple

import pytest

from dynamic_cp.types import CP_COMM_TYPES
from megatron.dynamic_cp.attention.te.support import FLASH_4_OVER_LANES_SINCE, NATIVE_SINCE, PERMITTED_SINCE, release_of
from megatron.dynamic_cp.flags.fp8 import GATHERS_ANYTHING_SINCE
from megatron.trainer.setup.layers import BATCHED_RING
from tests.distributed.real_transformer_engine.wheels import VERSIONS, wheel_or_skip

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
