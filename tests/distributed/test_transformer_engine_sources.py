"""What of TransformerEngine is written down here, versions above all, against its Python sources, which are parsed."""

from __future__ import annotations

import ast
import inspect
import zipfile
from typing import NamedTuple

import pytest

from dynamic_cp.types import CP_COMM_TYPES
from megatron.dynamic_cp.attention.te.kernels import FLASH_4_OVER_LANES_SINCE
from megatron.dynamic_cp.attention.te.support import NATIVE_SINCE, PERMITTED_SINCE, release_of
from megatron.dynamic_cp.flags.fp8 import GATHERS_ANYTHING_SINCE
from megatron.trainer.setup.layers import BATCHED_RING
from tests.distributed import fake_transformer_engine as fake
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


def signature(module: ast.Module, method: str) -> dict[str, str]:
    """Return parameter -> its default as text, "" if it has none; without self."""
    arguments = definition(module, f"DotProductAttention.{method}").args  # type: ignore[attr-defined]
    assert not arguments.posonlyargs
    assert not arguments.kwonlyargs
    assert arguments.vararg is arguments.kwarg is None
    defaults = [""] * (len(arguments.args) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    return dict(list(zip((a.arg for a in arguments.args), defaults, strict=True))[1:])


def fake_signature(method: str) -> dict[str, str]:
    parameters = list(inspect.signature(getattr(fake.DotProductAttention, method)).parameters.values())[1:]
    return {p.name: "" if p.default is inspect.Parameter.empty else repr(p.default) for p in parameters}


@pytest.mark.parametrize("method", ["__init__", "set_context_parallel_group", "forward"])
def test_signatures_are_those_of_the_fake(sources: Sources, method: str) -> None:
    """In 2.11 the same; later versions may add parameters with defaults, which nothing here passes."""
    real, ours = signature(sources.attention, method), fake_signature(method)
    if release_of(sources.version) == (2, 11):
        assert list(real.items()) == list(ours.items())
        return
    if release_of(sources.version) < (2, 11):
        ours.pop("num_splits", None)
    added = {name: default for name, default in real.items() if name not in ours}
    assert all(added.values()), f"{added} must be passed"
    # query, key and value have defaults of None from 2.20.
    required = {name for name, default in ours.items() if not default}
    kept = [(name, "" if name in required else default) for name, default in real.items() if name in ours]
    assert kept == list(ours.items())


def refuses_thd(node: ast.AST) -> bool:
    """Return whether a function asserts plainly that the format is not thd."""
    return any(ast.unparse(one.test) == "qkv_format != 'thd'" for one in ast.walk(node) if isinstance(one, ast.Assert))


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


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
def test_linear_layers_take_what_the_fake_takes(sources: Sources, name: str) -> None:
    module = sources.linear if name == "Linear" else sources.layernorm_linear
    real = [one.arg for one in definition(definition(module, name), "__init__").args.args][1:]  # type: ignore[attr-defined]
    parameters = inspect.signature(fake.Linear).parameters | inspect.signature(getattr(fake, name)).parameters
    ours = [one.name for one in parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    assert len(ours) >= 10
    assert not {*ours, "tp_group"} - set(real)
    assert real[:2] == ours[:2], "passed by position"
