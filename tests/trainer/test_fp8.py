"""Products in FP8 on the command line: checked at once, known to the planner, and never computed by local layers."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.transformer_config import TransformerConfig

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.flags import fp8
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.trainer.setup import model
from tests.layer_choices import chosen_layers
from tests.trainer.commandline import SMALL, parsed

HYBRID = f"--bf16 {SMALL} --fp8-format hybrid"
TP = "--tensor-model-parallel-size 2"
H100 = {"capability": (9, 0), "flash_attn": None, "attention_backend": "auto", "bf16": True, "kv_channels": 128}


@pytest.mark.parametrize(
    ("recipe", "more", "alignment", "multiple"),
    [
        ("tensorwise", "", 16, 16), ("tensorwise", f"{TP} --sequence-parallel", 16, 32), ("mxfp8", "", 32, 32),
        ("mxfp8", f"{TP} --sequence-parallel", 32, 64), ("blockwise", TP, 16, 16),
        ("blockwise", f"{TP} --sequence-parallel", 128, 256),  # gathered in FP8
    ],
)  # fmt: skip
def test_the_planner_and_megatron_core_know_the_recipe(recipe: str, more: str, alignment: int, multiple: int) -> None:
    settings = parsed(f"{HYBRID} --fp8-recipe {recipe} {more} --seq-length 1024 --max-seqlen-per-dp-cp-rank 512")
    assert settings.planning.topology.rank_token_multiple == multiple
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert (config.fp8, config.fp8_recipe) == ("hybrid", recipe)
    assert fp8.token_alignment(config) == settings.planning.topology.token_alignment == alignment
    assert alignment % get_fp8_align_size(recipe) == 0
    plain = parsed(f"--bf16 {SMALL} {more}").planning.topology
    assert plain.token_alignment == 1


def test_recipes_are_those_of_megatron_core() -> None:
    from megatron.core.enums import Fp8Recipe

    assert {one.value for one in Fp8Recipe} - {"custom"} == set(fp8.ALIGNMENTS) == set(fp8.CAPABILITIES)
    for one in Fp8Recipe:
        if one.value != "custom":
            alone = {"sequence_parallel": False, "tensor_model_parallel_size": 8}
            in_one_part = {"sequence_parallel": True, "tensor_model_parallel_size": 1}
            for more in (alone, in_one_part):
                found = fp8.token_alignment(SimpleNamespace(fp8="e4m3", fp8_recipe=one, **more))
                assert found == get_fp8_align_size(one)
    assert fp8.token_alignment(SimpleNamespace(fp8=None, fp8_recipe="mxfp8")) == 1


def test_what_follows_the_packing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parsed(HYBRID).model.fp8_recipe == "delayed"
        assert "all lanes wait for each other in every forward pass" in caplog.text
        caplog.clear()
        parsed(f"{HYBRID} --fp8-recipe tensorwise")
        assert not caplog.text


def config_of(**changed: Any) -> TransformerConfig:
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "fp8": "e4m3", "fp8_recipe": "tensorwise"}
    return TransformerConfig(**{**given, "calculate_per_token_loss": True, "attention_dropout": 0.0, **changed})


def test_configurations_are_checked_too() -> None:
    check_supported(config_of(hidden_dropout=0.0))
    for changed, says in (
        ({"fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"}, "--fp8-recipe custom is not supported"),
        ({"fp8_param": True}, "--fp8-param-gather"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention is True, only False"),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16 is True, only False"),
        ({"fp8_wgrad": False}, "fp8_wgrad is False, only True"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=says):
            check_supported(config_of(**changed))
    with pytest.raises(UnsupportedFeatureError, match="--fp8-format e4m3 with local layers is not supported"):
        gpt_block_spec(config_of(), transformer_impl="local")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"version": None, "why_missing": "no such module"}, "--fp8-format is for TransformerEngine's layers, and"),
        ({"capability": None}, "and TransformerEngine needs CUDA devices, this run trains on the CPU"),
        ({"multi_latent_attention": True}, "and latent attention .* is checked with local layers only"),
        (
            {"fp8_recipe": "mxfp8"},
            r"mxfp8 needs compute capability 10\.0 to 11\.0, this device has 9\.0: use --fp8-rec",
        ),
        (
            {"fp8_recipe": "mxfp8", "capability": (12, 0), "flash_attn": 2},
            r"to 11\.0, this device has 12\.0: use --fp8-",
        ),
        (
            {"fp8_recipe": "blockwise", "cuda": "12.8"},
            r"blockwise needs CUDA 12\.9, this torch has 12\.8 .*: use --fp8-",
        ),
        ({"capability": (8, 0), "flash_attn": 2}, r"tensorwise needs .* 8\.9, this device has 8\.0: leave --fp8"),
    ],
)
def test_fp8_never_falls_back_to_local_layers(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**H100, "version": "2.11.0", "fp8": "hybrid", "fp8_recipe": "tensorwise", **changed}
    monkeypatch.setattr(torch.version, "cuda", given.pop("cuda", None))
    with pytest.raises(UnsupportedFeatureError, match=says):
        chosen_layers(None, "auto", **given)


def test_a_device_with_fp8_gets_the_layers() -> None:
    for recipe in ("tensorwise", "blockwise", "delayed"):
        assert (
            chosen_layers(None, "auto", version="2.11.0", fp8="hybrid", fp8_recipe=recipe, **H100).impl
            == "transformer_engine"
        )


def test_blocks_that_sequence_parallelism_cannot_gather_are_told_at_start() -> None:
    """Until 2.13, which asserts it in the first product."""
    given = {"fp8": "hybrid", "fp8_recipe": "blockwise", "sequence_parallel": True, "hidden_size": 2880, **H100}
    with pytest.raises(UnsupportedFeatureError, match=r"is a multiple of 128 in TransformerEngine 2\.13, it is 2880"):
        chosen_layers(None, "auto", version="2.13.0", **given)
    for version, changed in (
        ("2.14.0", {}),
        ("2.13.0", {"hidden_size": 4096}),
        ("2.13.0", {"sequence_parallel": False}),
        ("2.13.0", {"fp8_recipe": "tensorwise"}),
    ):
        assert chosen_layers(None, "auto", version=version, **{**given, **changed}).impl == "transformer_engine"
