"""What a config.json is read as, against what transformers makes of it: parameters of hybrids, and entries of all."""

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from dynamic_cp.decide.config_json import entries, families, hugging_face
from dynamic_cp.errors import DynamicCPError

CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_name("hybrid_configs.json").read_text())
"""Entries of config.json with small sizes: by class of transformers, as released (and which of those nothing reads)."""
FAMILIES, PUBLISHED, NOT_READ = CONFIGS["parameters"], CONFIGS["published"], CONFIGS["not read"]
LLAMA_OF_4 = PUBLISHED["llama of 4.x"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hybrid_has_as_many_parameters_as_in_transformers(name):
    config = getattr(transformers, name)(**FAMILIES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Norms of queries and keys are not counted.
    counted = sum(
        one.numel() for key, one in model.named_parameters() if not key.endswith(("q_norm.weight", "k_norm.weight"))
    )
    assert hugging_face.model_shape(name, config.to_dict()).num_parameters == counted


NO_ENTRIES = {
    *("get", "pop", "setdefault", "rope_type", "short_factor", "long_factor", "mscale_all_dim", "mrope_section"),
    *("full_attention", "sliding_attention", "is_sliding", "default_theta", "get_text_config", "_is_hf_initialized"),
    *("cu_seq_lens_q", "past_key_values", "token_type_ids", "mm_token_type_ids", "image", "video", "image_grid_thw"),
    *("video_grid_thw", "text_config", "vision_config", "image_token_id", "video_token_id", "mm_tokens_per_image"),
    *("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size"),
}
"""What the same source reads of something else: entries of RoPE and of layer_types, arguments, and vision towers."""


def read_by(module: ModuleType, *of: str) -> Iterator[str]:
    """Yield the names of attributes and keys that the source of a module reads of variables called as in `of`."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            value = node.value
            if (isinstance(value, ast.Name) and value.id in of) or getattr(value, "attr", "") == "config":
                yield node.attr
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            where = {"getattr": 1, "hasattr": 1, "pop": 0, "get": 0, "setdefault": 0}.get(called, len(node.args))
            found = node.args[where] if where < len(node.args) else None
            if isinstance(found, ast.Constant) and isinstance(found.value, str):
                yield found.value


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the newest transformers needs Python 3.11")
def test_an_entry_that_transformers_reads_of_a_family_is_known():
    """Every other changes nothing, whatever wrote it into a published file."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (major, minor) == entries.LOOKED_THROUGH, "another release of transformers: look through its entries"
    kinds = transformers.CONFIG_MAPPING
    encoders = {name for name, family in families.FAMILIES.items() if family.is_encoder}
    without = {"deepseek", *families.SAME_AS, *families.TEXTS, *encoders}
    decoders = [one for one in hugging_face.MODEL_TYPES if one not in without]
    num_read = 0
    for family in decoders:
        kind = kinds[family]
        module = kind.__module__
        modeling = importlib.import_module(module.replace("configuration", "modeling"))
        read = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        read |= {*read_by(importlib.import_module(module), "self", "kwargs"), *read_by(modeling, "config")}
        read -= NO_ENTRIES | {name for name in dir(kind) if callable(getattr(kind, name))}
        num_read += len(read)
        assert read - hugging_face.known_entries(family) - entries.READ_BY_TRANSFORMERS.keys() == set(), family
    assert len(decoders) > 25
    assert num_read > 900


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_trained_whole_and_what_nothing_reads_is_named(name):
    config, not_read = PUBLISHED[name], tuple(NOT_READ[name])
    hugging_face.model_shape(name, config)
    found = hugging_face.architecture(name, config)
    assert (found.not_trained, found.not_imported, found.not_read) == ((), (), not_read)
    logits = []
    for left_out in ((), not_read):
        values = {key: value for key, value in config.items() if key not in ("model_type", *left_out)}
        torch.manual_seed(3)
        theirs = transformers.AutoConfig.for_model(config["model_type"], **values)
        model = AutoModelForCausalLM.from_config(theirs).eval()
        with torch.no_grad():
            logits.append(model(input_ids=torch.arange(4, 40)[None], use_cache=False).logits)
    assert torch.equal(*logits)


def test_an_entry_of_a_later_release_is_refused():
    for version, is_known in (("5.23.1", True), ("5.24.0.dev0", False), ("6.0", False), (None, True), (4, True)):
        found = hugging_face.architecture("it", LLAMA_OF_4 | {"transformers_version": version, "logit_scale": 2.0})
        assert found.not_read == (("logit_scale",) if is_known else ())
        assert ("logit_scale 2.0: not known here" in "".join(found.not_trained)) is not is_known


@pytest.mark.parametrize(
    "entry", [{"is_causal": False}, {"original_max_position_embeddings": 64}, {"resid_pdrop": 0.1}]
)
def test_an_entry_that_transformers_reads_and_no_layer_here_has_is_refused(entry):
    (why,) = hugging_face.architecture("it", LLAMA_OF_4 | entry).not_trained
    assert why.endswith(": not known here")


BAD = ("x", -1, 0, 1.5, [], ["full_attention"], [None], {}, {"a": 1}, True, None, float("nan"), float("inf"), 10**30)


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
GEMMA_3 = {
    **LLAMA_OF_4, "model_type": "gemma3_text", "rope_scaling": None, "hidden_act": families.TANH_GELU,
    "rope_parameters": {families.WHOLE: PLAIN, families.SLIDING: PLAIN},
}  # fmt: skip


def spoiled(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config with each bad value of each entry, and of each of what is in an entry."""
    for key in (*config, "quantization_config", "layer_types", "mlp_only_layers"):
        yield from (config | {key: value} for value in BAD)
        if isinstance(inner := config.get(key), dict):
            yield from (config | {key: inner | {name: value}} for name in inner for value in BAD)


def test_a_bad_value_of_any_entry_is_read_or_refused():
    num_read, num_refused = 0, 0
    for config in (*PUBLISHED.values(), GEMMA_3):
        for changed in spoiled(config):
            try:
                hugging_face.model_shape("it", changed)
                hugging_face.architecture("it", changed)
                num_read += 1
            except DynamicCPError:
                num_refused += 1
    assert min(num_read, num_refused) > 500
    rope = GEMMA_3["rope_parameters"] | {families.WHOLE: 3}
    (why,) = hugging_face.architecture("it", GEMMA_3 | {"rope_parameters": rope}).not_trained
    assert why.endswith("full_attention is no object")
