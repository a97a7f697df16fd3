"""Flags of models: checked at once, known to planner, megatron-core and checkpoints, trained and resumed."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from dynamic_cp.errors import CheckpointError, UnsupportedFeatureError
from dynamic_cp.search.planner_process import Request
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, Lambda, LinearAttention, PlanOptions, Topology
from megatron.dynamic_cp.flags.attention import STRETCHED, check_positions
from megatron.dynamic_cp.flags.features import FUTURE_LOSS
from megatron.dynamic_cp.flags.layout import pipeline_layers
from megatron.dynamic_cp.flags.linear_attention import Parts, parts_of_layers
from megatron.dynamic_cp.flags.shape import layer_needs, model_shape
from megatron.dynamic_cp.plans.plan_dump import RecordedPlans
from megatron.trainer.checkpoints import interchange, loading
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.reporting.log import Interval, dump_entry, iteration_line
from tests.trainer.commandline import SMALL, command_line, parsed
from tests.trainer.conftest import TO_LAST
from tests.trainer.training_ranks import config_of, identity_of, losses, run_command, shape_of, train

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 128"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
FEATURES = (
    "--attention-output-gate --qk-l2-norm --no-rope-freq 2 --use-rope-scaling --rope-scaling-factor 32 "
    "--rotary-seq-len-interpolation-factor 2 --softmax-type learnable"
)


def test_flags_reach_megatron_core() -> None:
    settings = parsed(FEATURES)
    config = config_of(settings)
    assert (config.attention_output_gate, config.qk_l2_norm, config.no_rope_freq) == (True, True, [0, 1, 0, 1])
    assert config.softmax_type == "learnable"
    assert not hasattr(config, "yarn_mscale")
    listed = parsed("--no-rope-freq [0,0,1,0]")
    config = config_of(listed)
    assert config.no_rope_freq == [0, 0, 1, 0]
    yarn = parsed(f"{YARN} --mscale 0.5 --no-yarn-correction-range-round-to-int")
    config = config_of(yarn)
    assert (config.yarn_rotary_scaling_factor, config.yarn_original_max_position_embeddings) == (4.0, 4096)
    assert (config.yarn_beta_fast, config.yarn_beta_slow) == (32.0, 1.0)
    assert (config.yarn_mscale, config.yarn_mscale_all_dim) == (0.5, 0.0)
    assert config.yarn_correction_range_round_to_int is False


def test_recomputed_modules_reach_planner_and_megatron_core() -> None:
    for words, names in (("", ["core_attn"]), ("--recompute-modules mlp layernorm mlp", ["mlp", "layernorm"])):
        settings = parsed(f"--recompute-activations {words}")
        assert settings.planning.options(64).repeated == set(names)
        config = config_of(settings)
        assert config.recompute_modules == names
        assert settings.planning.recomputes_norms == ("layernorm" in names)


def test_the_planner_pays_for_the_gate() -> None:
    plain, gated = (shape_of(flags) for flags in ("", "--attention-output-gate"))
    assert gated.linear_weights_per_layer - plain.linear_weights_per_layer == 64 * 64
    assert gated.num_parameters - plain.num_parameters == 4 * 64 * 64


def test_a_checkout_without_flags_for_yarn_is_told() -> None:
    args = parsed("").arguments
    older = SimpleNamespace(**{name: value for name, value in args.items() if not name.startswith("yarn_")})
    check_positions(older)
    older.position_embedding_type = "yarn"
    says = r"this Megatron-LM has no flags for what YaRN needs to know, 0\.19"
    with pytest.raises(UnsupportedFeatureError, match=says):
        check_positions(older)


OF_ATTENTION = STRETCHED | {"attention_output_gate", "qk_l2_norm", "no_rope_freq", "softmax_type", "apply_layernorm_1p"}


def test_checkpoints_know_what_is_on() -> None:
    """What is off is not there, as in checkpoints from before."""
    plain = identity_of("")
    assert not derive.FEATURES & plain.keys()
    windows = "--window-size 7,0 --window-rotary-base 1000 --apply-layernorm-1p"
    assert set().union(*map(identity_of, (FEATURES, YARN, windows))) >= OF_ATTENTION
    assert identity_of("--no-rope-freq 2") == identity_of("--no-rope-freq [0,1]*2")
    assert identity_of("--no-rope-freq 0") == identity_of("--rotary-seq-len-interpolation-factor 1") == plain


@pytest.mark.parametrize(
    "flags",
    [
        *("--attention-output-gate", "--qk-l2-norm", "--no-rope-freq 4", "--use-rope-scaling"),
        *("--softmax-type off-by-one", "--mtp-num-layers 2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_both_directions(flags: str) -> None:
    name = flags.split()[0].removeprefix("--").removeprefix("use-").replace("-", "_")
    for own, saved in (("", flags), (flags, "")):
        with pytest.raises(CheckpointError, match=f"model .*{name}.* = "):
            loading._check_identity({"model": identity_of(own)}, {"model": identity_of(saved)}, "folder")
    loading._check_identity({"model": identity_of(flags)}, {"model": identity_of(flags)}, "folder")


def test_weights_may_go_on_with_positions_that_reach_further() -> None:
    for own, saved in ((YARN, ""), ("", YARN), ("--use-rope-scaling", ""), ("", "--use-rope-scaling")):
        loading._check_weights_fit(identity_of(own), identity_of(saved), "folder")
    with pytest.raises(CheckpointError, match="model no_rope_freq = None"):
        loading._check_weights_fit(identity_of("--no-rope-freq 2"), identity_of(""), "folder")


def test_megatron_lms_checkpoints_say_the_same() -> None:
    for flags in (FEATURES, YARN, ""):
        theirs = argparse.Namespace(**parsed(flags).arguments)
        assert derive.features_of(theirs).keys() == identity_of(flags).keys() & derive.FEATURES
        for own in (FEATURES, YARN, ""):
            found = interchange._model_identity(theirs, identity_of(own))
            if own == flags:
                assert found == identity_of(flags)
            else:
                with pytest.raises(CheckpointError):
                    loading._check_identity({"model": identity_of(own)}, {"model": found}, "folder")


DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64"


@pytest.mark.nightly
@pytest.mark.parametrize("features", [FEATURES, f"{YARN} --attention-output-gate --no-rope-freq [0,1]"])
def test_a_resumed_run_is_that_of_one_lane(features: str, uninterrupted: Any, resumed: Any) -> None:
    """Two lanes with CP sizes 1 and 2, and a run that goes on from them without groups of lanes."""
    words = f"{DYNAMIC} {features}"
    other = losses(train(2, DYNAMIC, TO_LAST, "--exit-interval 1"))
    assert uninterrupted(words, 2)[0] != pytest.approx(other[0], rel=1e-7, abs=0.0), "the features change nothing"
    records = resumed(words, "--max-seqlen-per-dp-cp-rank 128 --max-dynamic-cp-size 1")
    assert {size for record in records.values() for size in record.plan.cp_histogram} == {1}


@pytest.mark.nightly
def test_a_residual_in_float32_is_planned_and_trained() -> None:
    flags = f"{DYNAMIC} --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128 --bf16"
    settings = parsed(f"{flags} --fp32-residual-connection")
    assert settings.planning.options(128).element_bytes == (2, 4, 2, 2)
    config = config_of(settings)
    assert (config.params_dtype, config.pipeline_dtype) == (torch.bfloat16, torch.float32)
    rounded, exact = (
        losses(train(2, flags, more, "--train-iters 2 --lr-warmup-iters 0"))
        for more in ("", "--fp32-residual-connection")
    )
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=1e-3)


WIDTHS = "--kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"
LATENT = f"--multi-latent-attention {WIDTHS} --num-query-groups 4"
LATENT_YARN = "--q-lora-rank 32 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 0.5"
LATENT_RUN = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 {SMALL} {LATENT} {LATENT_YARN}"


def test_flags_of_latents_reach_megatron_core_and_the_planner() -> None:
    settings = parsed(f"{LATENT} {LATENT_YARN} --rotary-base 500")
    config = config_of(settings)
    assert config.multi_latent_attention
    assert (config.q_lora_rank, config.kv_lora_rank, config.kv_channels) == (32, 24, 20)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (12, 8, 16)
    assert (config.rope_type, config.rotary_base, config.rotary_scaling_factor) == ("yarn", 500, 4.0)
    assert (config.mscale, config.mscale_all_dim, config.original_max_position_embeddings) == (1.0, 0.5, 4096)
    shape = model_shape(settings.model, 264)
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.kv_channels, shape.v_head_dim) == (32, 24, 20, 16)
    plain = parsed(LATENT)
    config = config_of(plain)
    assert (config.rope_type, config.q_lora_rank, config.mscale_all_dim) == ("rope", None, 0.0)
    assert model_shape(plain.model, 264).q_lora_rank == 0


def test_auto_has_the_exchange_of_latents() -> None:
    options = [parsed(f"{flags} --max-seqlen-per-dp-cp-rank 64").planning.options() for flags in ("", LATENT)]
    assert ["latent" in one.cp_comm_types for one in options] == [False, True]
    forced = parsed(f"{LATENT} --cp-comm-type latent --max-seqlen-per-dp-cp-rank 64").planning
    assert forced.options().cp_comm_types == ("latent",)


def test_checkpoints_know_the_latents() -> None:
    plain, latent, other = (
        identity_of(flags) for flags in ("", LATENT, f"{LATENT} --qk-head-dim 8 --qk-pos-emb-head-dim 12")
    )
    assert "multi_latent_attention" not in plain
    assert latent["kv_lora_rank"] == 24
    for own, saved in ((plain, latent), (latent, plain), (latent, other)):
        with pytest.raises(CheckpointError, match="model "):
            loading._check_weights_fit(own, saved, "folder")


@pytest.mark.nightly
def test_latents_go_on_with_another_layout(resumed: Any) -> None:
    """Two lanes with CP sizes 1 and 2, and a run of two tensor-parallel ranks that goes on from them."""
    resumed(LATENT_RUN, TP2_SP)


LATER = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 {SMALL} --mtp-num-layers 2"


@pytest.mark.nightly
def test_losses_of_all_depths_go_on_with_another_layout(resumed: Any) -> None:
    """Two stages, then one with two lanes: losses of all depths are logged, and go on as they would have."""
    words = f"{LATER} --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128"
    records = resumed(words, base=LATER)
    record = next(iter(records.values()))
    assert {size for record in records.values() for size in record.plan.cp_histogram} == {1, 2}
    assert len(record.future_losses) == 2
    assert all(0.5 < loss / record.loss < 2 for loss in record.future_losses)
    line = iteration_line(Interval(records=(record,), world_size=2), iteration=1, train_iters=2, consumed_samples=3)
    for depth, loss in enumerate(record.future_losses, 1):
        assert f"| {FUTURE_LOSS.format(depth)}: {loss:.6E} |" in line
    assert dump_entry(1, record)["future_losses"] == list(record.future_losses)


DELTA = "--experimental-attention-variant gated_delta_net"
SIZES = "--linear-num-key-heads 2 --linear-num-value-heads 4"
PATTERN = "--hybrid-override-pattern"


def test_a_variant_of_most_layers() -> None:
    experts = "--num-experts 4 --moe-layer-freq [0,1,1,1]"
    words = f"--experimental-attention-variant gdn --linear-attention-freq 4 {SIZES} {experts}"
    model = parse_args(command_line(words), 4).model
    assert model.experimental_attention_variant == "gated_delta_net"
    linear = [parts.mixer == "linear" for parts in parts_of_layers(model)]
    assert linear == [True, True, True, False]
    assert [parts.mlp for parts in parts_of_layers(model)] == ["dense", *["experts"] * 3]
    shape = model_shape(model, 256)
    assert shape.linear_attention == LinearAttention(
        kind="gated_delta_net", num_heads=4, num_groups=2, key_size=128, value_size=128
    )
    assert list(shape.linear_layers) == linear
    listed = parse_args(command_line(f"{DELTA} --linear-attention-freq [1]*3+[0] {SIZES}"), 4).model
    same = parse_args(command_line(f"{DELTA} --linear-attention-freq 4 {SIZES}"), 4).model
    assert derive.model_identity(listed, 256) == derive.model_identity(same, 256)


def test_what_attention_layers_have_besides() -> None:
    """Windows let attention be placed, as they do in other models."""
    words = f"{DELTA} --linear-attention-freq 2 --window-size 7,0 --softmax-type learnable --fp32-residual-connection"
    words += " --recompute-granularity selective --recompute-modules core_attn gdn_norm_out"
    settings = parse_args(command_line(f"{words} --bf16 --dynamic-cp --cp-comm-type auto"), 4)
    assert settings.planning.recompute_modules == ("core_attn", "gdn_norm_out")
    assert set(settings.planning.exchanges) == {"all_gather", "a2a", "blocks"}
    shape = model_shape(settings.model, 256)
    assert shape.windowed_layers == tuple(not one for one in shape.linear_layers)


def test_a_pattern_of_halves() -> None:
    model = parse_args(command_line(f"{PATTERN} M*-M --mamba-num-groups 2 --mamba-head-dim 16"), 4).model
    assert model.mamba_num_heads == 8, "twice the hidden size"
    mamba, attention, mlp = Parts("linear", None), Parts("attention", None), Parts(None, "dense")
    assert parts_of_layers(model) == (mamba, attention, mlp, mamba)
    assert model_shape(model, 256).layer_pattern == "M*-M"
    assert {"hybrid_override_pattern", "mamba_num_heads"} <= derive.model_identity(model, 256).keys()


def test_flags_of_a_megatron_lm_checkpoint_say_the_same() -> None:
    ours = parse_args(command_line(f"{PATTERN} M*-M --mamba-num-groups 2 --mamba-head-dim 16"), 4).model
    sizes = {"mamba_num_heads": None, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 128}
    theirs = SimpleNamespace(hybrid_layer_pattern="M*-M", hidden_size=64, num_layers=4, **sizes)
    assert derive.features_of(theirs) == derive.features_of(ours) != {}


@pytest.mark.parametrize(
    "words",
    [
        f"{DELTA} --linear-attention-freq 2 {SIZES}",
        f"{DELTA} --linear-attention-freq 2 {SIZES} --apply-layernorm-1p --qk-layernorm",
        f"{PATTERN} M*-M --mamba-head-dim 16",
    ],
)
def test_layers_of_transformer_engine_where_they_can_be_used(words: str) -> None:
    settings = parse_args(command_line(words, "--bf16"), 4)
    assert layer_needs(settings.model, settings.planning).why_local is None


LINEAR_WIDTHS = "--linear-key-head-dim 16 --linear-value-head-dim 16"
LINEAR = {
    "delta": f"{DELTA} --linear-attention-freq 2 {SIZES} {LINEAR_WIDTHS}",
    "latents in windows": f"{DELTA} --linear-attention-freq 2 {SIZES} {LINEAR_WIDTHS} --multi-latent-attention "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-query-groups 4 "
    "--window-size 15,0 --window-attn-skip-freq 4 --recompute-granularity selective --recompute-modules gdn_norm_out",
    "mamba": f"{PATTERN} M-*M --num-layers 4 --mamba-num-groups 2 --mamba-head-dim 16 --mamba-state-dim 16",
}
LINEAR_RUN = (
    "--dynamic-cp --mock-data --num-workers 0 --max-seqlen-per-dp-cp-rank 64 --use-distributed-optimizer "
    "--dynamic-cp-verify full --global-batch-size 4"
)


@pytest.mark.by_day("mamba")
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_attention_goes_on_with_another_layout(kind: str, resumed: Any) -> None:
    """Two lanes with the distributed optimizer, and a run of two tensor-parallel ranks that goes on from them."""
    resumed(f"{LINEAR_RUN} {LINEAR[kind]}", TP2_SP)


WINDOW = "--window-size 15,0"


@pytest.mark.parametrize(
    ("flags", "window_tokens", "skip", "windowed"),
    [
        ("", 0, 0, 0), (WINDOW, 16, 0, 4), ("--window-size (0,0)", 1, 0, 4),
        (f"{WINDOW} --window-attn-skip-freq 2", 16, 2, 2), (f"{WINDOW} --window-attn-skip-freq 1", 16, 1, 0),
        (f"{WINDOW} --window-attn-skip-freq [0,1]*2", 16, (0, 1, 0, 1), 2),
        (f"{WINDOW} --window-attn-skip-freq ([1]*3+[0])*1", 16, (1, 1, 1, 0), 3),
    ],
)  # fmt: skip
def test_flags_are_those_of_megatron_lm(flags, window_tokens, skip, windowed):
    settings = parsed(flags)
    shape = model_shape(settings.model, 264)
    assert (shape.window_tokens, shape.window_attn_skip_freq, shape.num_windowed_layers) == (
        window_tokens,
        skip,
        windowed,
    )
    assert settings.planning.has_windows == (windowed > 0)
    exchanges = settings.planning.options(64).cp_comm_types
    assert exchanges == (("a2a", "all_gather", "blocks") if windowed else CP_COMM_TYPES)
    sink = shape_of(f"{flags} --window-sink-tokens 3") if windowed else None
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
    shape = shape_of(words, 2)
    assert shape.num_windowed_layers == 2
    window = Lambda(2, 16)
    used = set()
    for plan in plans:
        squares = sum(n * n + window.squared_tokens(n) for n in plan["seqlens"])
        assert plan["facts"]["seqlen_squared_sum"] == round(squares / 2)
        used |= {int(size) for size in plan["facts"]["cp_histogram"]}
    assert used == {1, 2}


OUTPUTS = (
    "--sandwich-norm --residual-multiplier 0.5 --embedding-multiplier 3 --logits-scaling 2 --softmax-scale 0.4 "
    "--num-layers 2 --apply-layernorm-1p --window-size 15,0 --window-attn-skip-freq 2 --window-rotary-base 1000"
)
ON_ONE = f"--dynamic-cp --mock-data --global-batch-size 6 {OUTPUTS}"
LAYOUTS = {
    "4 lanes": "--max-seqlen-per-dp-cp-rank 48",
    "TP2 SP PP2": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--recompute-granularity full --loss-chunk-tokens 16",
}


DELTA_LAYERS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 --window-attn-skip-freq 3"
)
CASES = {layout: ("", layout) for layout in LAYOUTS} | {
    f"delta, {layout}": (DELTA_LAYERS, layout) for layout in LAYOUTS
}


@pytest.mark.by_day("TP2 SP PP2")
@pytest.mark.parametrize("case", CASES)
def test_every_layout_goes_on_as_one_rank(case, uninterrupted, resumed):
    more, layout = CASES[case]
    words = f"{ON_ONE} {more}".strip()
    resumed(words, LAYOUTS[layout], ranks=1, on=4, abs=5e-6)
    expected = uninterrupted(words, 1)
    assert expected[-1] < expected[0]


@pytest.mark.by_day("--residual-multiplier 0.6")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--residual-multiplier 0.6", "residual_multiplier = 0.5, this run has 0.6: use the same model"),
        ("--window-rotary-base 999", "window_rotary_base = 1000, this run has 999: use the same model"),
        ("--softmax-scale 0.3", "softmax_scale = 0.4, this run has 0.3: use the same model"),
    ],
)
def test_a_run_with_another_factor_is_refused(change, says, saved_by):
    (ended,) = run_command(1, ON_ONE, change, f"--load {saved_by(ON_ONE, 1)}")
    assert says in ended.error


def test_norms_have_weights_and_keep_their_inputs():
    plain, normed = (model_shape(parsed(flags).model, 64) for flags in ("", OUTPUTS))
    assert normed.layer.norm_weights - plain.layer.norm_weights == 2 * 64
    assert normed.layer.more_kept_channels - plain.layer.more_kept_channels == 2 * 64


PP = "--pipeline-model-parallel-size"
FIRST_STAGE, LAST_STAGE = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (f"{PP} 2", ()),
        (f"{PP} 2 {FIRST_STAGE} 1", ((1,), (3,))),
        (f"{PP} 2 {LAST_STAGE} 1", ((3,), (1,))),
        (f"--num-layers 8 {PP} 4 {FIRST_STAGE} 1 {LAST_STAGE} 3", ((1,), (2,), (2,), (3,))),
        (f"--num-layers 6 {PP} 2 {FIRST_STAGE} 2 {CHUNKS} 2", ((1, 1), (2, 2))),
        (f"--num-layers 6 {PP} 4 {EMBEDDING} {LOSS}", ((1,), (2,), (2,), (1,))),
        (f"--num-layers 7 {PP} 2 {LOSS} {CHUNKS} 2", ((2, 2), (2, 1))),
        (f"--num-layers 7 {PP} 2 {EMBEDDING} --num-layers-per-virtual-pipeline-stage 2", ((1, 2), (2, 2))),
        (f"--num-layers 7 {PP} 4 {EMBEDDING} {CHUNKS} 2", ((0, 1), (1, 1), (1, 1), (1, 1))),
    ],
)
def test_layers_are_where_megatron_core_builds_them(flags: str, layers: Any, monkeypatch: Any) -> None:
    settings = parsed(flags, 8)
    assert settings.planning.pipeline_layers == layers
    config = config_of(settings)
    topology = settings.planning.topology
    built = tuple(
        tuple(
            get_num_layers_to_build(config, vp_stage=chunk if topology.vp_size > 1 else None, pp_rank=stage)
            for chunk in range(topology.vp_size)
        )
        for stage in range(topology.pp_size)
    )
    assert built == (layers or ((2,), (2,)))
    shape = model_shape(settings.model, 264, settings.planning.pipeline_layers)
    assert [stage.num_layers for stage in shape.stages(topology.pp_size)] == [sum(chunks) for chunks in built]


def test_a_checkout_without_a_pipeline_may_count_its_embedding() -> None:
    theirs = SimpleNamespace(
        num_layers=4, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
        account_for_embedding_in_pipeline_split=True,
    )  # fmt: skip
    assert pipeline_layers(theirs) == ()


@pytest.mark.nightly
def test_a_run_goes_on_with_other_stages(resumed: Any) -> None:
    """Saved without a pipeline, resumed on stages of 1 and 3 layers, whose times are measured and learned from."""
    words = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 128 --num-layers 4"
    resumed(words, f"{PP} 2 {FIRST_STAGE} 1 --dynamic-cp-refine 1 --dynamic-cp-verify full", on=4)
