"""A command line is read into settings that nobody changes; what cannot be, or cannot be together, one line refuses."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynamic_cp import errors
from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import AUTO_CHUNK_TOKENS, CP_COMM_TYPES
from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.dynamic_cp.flags.exclusions import NEEDS
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.dynamic_cp.flags.supported import UNSUPPORTED, check_supported
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.data import tokenizer
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import ALREADY_SO, build_parser, parse_args
from megatron.trainer.flags.settings import Settings
from megatron.trainer.flags.validation import checked_settings
from megatron.trainer.setup.planned_runtime import _hardware_name
from megatron.trainer.setup.run import data_config
from tests.faults.job import Job
from tests.trainer.commandline import command_line


def test_a_model_too_small_for_the_default_width_of_swiglu_is_refused():
    words = command_line("--hidden-size 16")
    index = words.index("--ffn-hidden-size")
    del words[index : index + 2]
    with pytest.raises(InvalidInputError, match=r"--hidden-size 16 .* --swiglu.*give --ffn-hidden-size.*at least 24"):
        parse_args(words, 4)
    assert parse_args([*words, "--hidden-size", "24"], 4).model.ffn_hidden_size == 64


def test_limits_themselves_are_accepted():
    parse_args(command_line("--hidden-dropout 0.99 --adam-beta1 0 --exit-duration-in-mins 0 --rotary-percent 0.125"), 4)
    parse_args(command_line("--lr-decay-style WSD --lr-wsd-decay-iters 8"), 4)
    parse_args(command_line("--recompute-granularity full --recompute-num-layers 4"), 4)
    parse_args(command_line("--kv-channels 15 --position-embedding-type none"), 4)
    parse_args(command_line("--dynamic-cp --max-seqlen-per-dp-cp-rank 32"), 4)  # four lanes hold --seq-length


def test_auto_lets_the_planner_choose_among_all_exchanges():
    chosen = {
        choice: parse_args(command_line(f"--cp-comm-type {choice}"), 4).planning.options().cp_comm_types
        for choice in ("auto", *CP_COMM_TYPES)
    }
    assert chosen == {"auto": CP_COMM_TYPES} | {exchange: (exchange,) for exchange in CP_COMM_TYPES}
    assert len(CP_COMM_TYPES) >= 2
    assert parse_args(command_line(""), 4).planning.options().cp_comm_types == CP_COMM_TYPES  # the default


MODEL_IDENTITY = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 264, "gated_linear_unit": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False,
    "max_position_embeddings": 128, "disable_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
}  # fmt: skip


def test_the_identity_of_a_model_stays_as_checkpoints_have_it():
    assert derive.model_identity(parse_args(command_line(), 4).model, 264) == MODEL_IDENTITY


def test_the_planner_counts_a_tied_table_once():
    tied, untied = (
        model_shape(parse_args(command_line(extra), 4).model, 264).vocabulary_weights
        for extra in ("", "--untie-embeddings-and-output-weights")
    )
    assert (tied, untied) == (264 * 64, 2 * 264 * 64)


@pytest.mark.parametrize("feature", UNSUPPORTED, ids=lambda feature: feature.flag)
def test_unsupported_flags_are_named(feature):
    flag = feature.flag
    with pytest.raises(UnsupportedFeatureError, match=flag):
        parse_args(command_line(flag, "2"), 4)
    if not feature.off:
        with pytest.raises(UnsupportedFeatureError, match=flag):
            parse_args(command_line(flag), 4)
    for off in feature.off:
        parse_args(command_line(flag, str(off)), 4)
    if feature.field is not None:
        with pytest.raises(UnsupportedFeatureError, match=flag):
            check_supported(SimpleNamespace(**{feature.field: 2}))


def test_table_fields_exist_in_megatron_core():
    from megatron.core.transformer import TransformerConfig

    fields = {name for cls in TransformerConfig.__mro__ for name in getattr(cls, "__dataclass_fields__", {})}
    named = {feature.field for feature in UNSUPPORTED if feature.field is not None}
    assert len(named) > 20
    assert named - fields == ({"moe_use_legacy_grouped_gemm"} if releases.FIELDS_GONE.here else set())


MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --train-iters 4 --mock-data"
)
OTHER_VALUES = {
    "--max-position-embeddings": "128", "--window-size": "8,0", "--lr-warmup-init": "1e-4", "--data-path": "a",
    "--max-seqlen-per-dp-cp-rank": "auto", "--split": "9,1,0", "--rotary-percent": "0.5", "--adam-beta1": "0.5",
    "--adam-beta2": "0.5", "--lr-warmup-fraction": "0.25", "--hidden-dropout": "0.25", "--min-lr": "1e-4",
    "--experimental-attention-variant": "gdn", "--hybrid-override-pattern": "M-*-", "--num-workers": "0",
    "--dynamic-cp-lookahead": "0", "--recompute-modules": "mlp", "--moe-layer-freq": "[1,0,1,0]",
    "--moe-router-load-balancing-type": "sinkhorn", "--moe-aux-loss-coeff": "0.5", "--dynamic-cp-noise-margin": "5",
    "--stopped-process-timeout": "0", "--linear-attention-freq": "[1,1,1,0]", "--window-attn-skip-freq": "3",
    "--no-rope-freq": "3",
}  # fmt: skip
"""Of flags that take one, where 2 is none, is the default or is out of range."""
GROUPS = [name for name in Settings.__dataclass_fields__ if name != "arguments"]
WITH_EFFECT = """
--ffn-hidden-size --kv-channels --max-position-embeddings --position-embedding-type --qk-layernorm --qk-l2-norm
--attention-output-gate --softmax-type --mtp-num-layers --normalization --norm-epsilon --apply-layernorm-1p
--sandwich-norm --residual-multiplier --embedding-multiplier --logits-scaling --softmax-scale --swiglu --squared-relu
--geglu --quick-geglu --disable-bias-linear --untie-embeddings-and-output-weights --make-vocab-size-divisible-by
--init-method-std --hidden-dropout --attention-backend --bf16 --use-cpu-initialization --transformer-impl
--gradient-accumulation-fusion --bias-swiglu-fusion --bias-gelu-fusion --bias-dropout-fusion --lora-rank --num-experts
--global-batch-size --train-iters --seed --exit-interval --exit-duration-in-mins --eval-iters
--recompute-granularity --recompute-activations --lr-decay-style --lr-warmup-iters --lr-warmup-samples
--lr-warmup-fraction --lr-decay-iters --lr-decay-samples --min-lr --weight-decay --clip-grad --adam-beta1 --adam-beta2
--adam-eps --tensor-model-parallel-size --pipeline-model-parallel-size --use-distributed-optimizer
--overlap-grad-reduce --distributed-timeout-minutes --stopped-process-timeout --num-workers --overlong --split --save
--load --log-interval --tensorboard-dir --distributed-backend --dynamic-cp --context-parallel-size --static-cp-policy
--window-size --varlen-mock-dataset-config-json
--max-seqlen-per-dp-cp-rank --loss-chunk-tokens --dynamic-cp-hardware --dynamic-cp-search --dynamic-cp-lookahead
--dynamic-cp-plan-timeout --dynamic-cp-strict --dynamic-cp-refine --dynamic-cp-dump --dynamic-cp-replay
--dynamic-cp-verify --cp-comm-type --dynamic-cp-inner-sizes
"""
"""Flags that a run reads where they are the only ones: whoever adds one has looked up where."""


def test_each_flag_alone_has_an_effect_or_is_refused():
    refused_by_name = {name for feature in UNSUPPORTED for name in feature.flag.split()}
    effects = dict.fromkeys(("read", "refused", "logged", "none"), frozenset())
    parser = build_parser()
    usual = settings_alone(parser, [])
    for action in parser._actions:
        name = action.option_strings[0]
        if not action.required and action.dest != "help" and not refused_by_name & set(action.option_strings):
            effects[effect_of(parser, action, usual)] |= {name}
    only = {"--optimizer", "--ckpt-format"}  # one value is possible
    assert effects["none"] == {*ALREADY_SO, *only, "--mock-data"}
    assert effects["logged"] == {flag for need in NEEDS if not need.is_refused for flag in need.flags}
    assert effects["read"] == set(WITH_EFFECT.split())
    needy = {flag for need in NEEDS if need.is_refused for flag in need.flags}
    assert needy - effects["refused"] == {"--varlen-mock-dataset-config-json"}  # MINIMAL has what it needs
    assert len(effects["refused"]) > 80
    with pytest.raises(UnsupportedFeatureError, match="--static-cp-policy balanced with --dynamic-cp is not supported"):
        parse_args([*MINIMAL.split(), "--dynamic-cp", "--static-cp-policy", "balanced"], 4)
    parse_args([*MINIMAL.split(), "--wandb-project", "", "--wandb-exp-name", "a"], 4)  # scripts switch it off so


def effect_of(parser, action, usual):
    """Return what becomes of a flag alone: the strongest of what its values do."""
    name = action.option_strings[0]
    values = action.choices or [OTHER_VALUES.get(name, "2")]
    found = set()
    for words in (
        [[word] for word in action.option_strings] if action.nargs == 0 else [[name, str(one)] for one in values]
    ):
        try:
            settings = settings_alone(parser, words)
            tokenizer.build(data_config(settings))
        except DynamicCPError:
            found.add("refused")
            continue
        is_same = all(getattr(settings, group) == getattr(usual, group) for group in GROUPS)
        found.add("logged" if settings.training.without_effect else "none" if is_same else "read")
    return next(effect for effect in ("read", "logged", "refused", "none") if effect in found)


def settings_alone(parser, words):
    args = parser.parse_args([*MINIMAL.split(), *words])
    args.world_size = 4
    return checked_settings(args)


def test_derived_values():
    settings = parse_args(command_line("--sequence-parallel", *ALREADY_SO), 4)
    assert not settings.planning.topology.sequence_parallel  # one tensor-parallel rank has nothing to split
    assert settings.model.kv_channels == 16
    optimizer = settings.optimizer
    assert (settings.training.train_samples, optimizer.lr_warmup_samples, optimizer.lr_decay_samples) == (96, 24, 96)
    assert settings.planning.max_tokens_per_rank == 128
    assert settings.planning.policy == "static"
    longer = parse_args(command_line("--context-parallel-size 4 --seq-length 130"), 4)
    assert longer.planning.max_tokens_per_rank == 34
    planning = parse_args(
        command_line("--dynamic-cp --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"), 8
    ).planning
    assert (planning.policy, planning.topology.vp_size, planning.topology.num_lanes) == ("dynamic", 2, 4)
    assert parse_args(command_line("--static-cp-policy balanced"), 4).planning.policy == "balanced"


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_padded_vocabulary_does_not_depend_on_tensor_parallelism(tp_size):
    assert derive.padded_vocab_size(257, 128, tp_size) == 384
    assert derive.padded_vocab_size(257, 1, tp_size) % tp_size == 0


def test_parsing_needs_no_torch():
    program = (
        "import sys; from megatron.trainer.flags.arguments import parse_args; from tests.trainer.commandline import *; "
        "parse_args(command_line('--dynamic-cp'), 4); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("device", "impl", "asked", "expected"),
    [
        ("cuda", "local", None, "h100-local"),
        ("cuda", "transformer_engine", None, "h100"),
        ("cuda", "local", "h200", "h200"),
        ("cpu", "local", None, "cpu"),
    ],
)
def test_kernels_of_the_layers_are_priced(device: str, impl: str, asked: str | None, expected: str) -> None:
    """Local layers compute attention by FlashAttention-2, TransformerEngine's by cuDNN."""
    settings = SimpleNamespace(hardware=asked)
    assert _hardware_name(settings, torch.device(device), LayerChoice(impl=impl, reason="")) == expected
    rates = [load_hardware(name).attention_flops_per_s for name in ("h100-local", "h100")]
    assert 1.4 < rates[1] / rates[0] < 1.8


def test_what_is_written_down_of_a_run_has_every_flag_completed() -> None:
    words = "--dynamic-cp --cp-comm-type a2a --recompute-activations --lr-warmup-fraction 0.25 --split 90,10,0"
    words += " --loss-chunk-tokens auto"
    line = " ".join(command_line(words)).replace("--lr-warmup-iters 2", "")
    arguments = parse_args(line.split(), 8).arguments
    parsed = {action.dest for action in build_parser()._actions if action.default != "==SUPPRESS=="}
    assert parsed <= set(arguments)
    completed = {
        "max_seqlen_per_dp_cp_rank": 128, "max_dynamic_cp_size": 4, "dynamic_cp_inner_sizes": None,
        "loss_chunk_tokens": AUTO_CHUNK_TOKENS, "recompute_granularity": "selective", "lr_warmup_samples": 24,
        "kv_channels": 16, "world_size": 8, "ranks_per_node": 8, "split": "90,10,0",
    }  # fmt: skip
    assert {name: arguments[name] for name in completed} == completed
    auto = parse_args(command_line("--dynamic-cp --max-seqlen-per-dp-cp-rank auto"), 4)
    assert (auto.planning.max_tokens_per_rank, auto.arguments["max_seqlen_per_dp_cp_rank"]) == (None, "auto")


ROWS = Path(__file__).with_name("refused_flags.txt")
HEAD = re.compile(r"(?:(\d+) ranks?(?:, (\d+) on a node)?: )?(?:without (.*?): )?(.*)")


def cases() -> Iterator[object]:
    """Yield (head, kind of error, pattern) of each row."""
    section = head = ""
    for line in filter(None, ROWS.read_text(encoding="utf-8").splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("    "):
            name, _, kind = section.partition(": ")
            yield pytest.param(head, kind or "DynamicCPError", line.strip(), id=f"{name}: {head}")
        elif not line.startswith("#"):
            head = line


def words_of(head: str) -> tuple[list[str], int, str | None]:
    """Return the words of the command line, the number of ranks, and how many are on a node if the row says it."""
    world_size, on_a_node, without, flags = HEAD.fullmatch(head).groups(default="")
    kept = [word for word in command_line() if word not in without.split()]
    return [*kept, *flags.split()], int(world_size or 4), on_a_node or None


@pytest.mark.parametrize(("head", "kind", "pattern"), list(cases()))
def test_flags_that_cannot_be_are_told_at_once(
    head: str, kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, world_size, on_a_node = words_of(head)
    if on_a_node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_a_node)
    with pytest.raises(getattr(errors, kind)) as caught:
        parse_args(words, world_size)
    said = str(caught.value)
    assert re.search(pattern, said), said
    assert "\n" not in said


def test_the_rows_are_read_whole() -> None:
    found = list(cases())
    assert len(found) == sum(line.startswith("    ") for line in ROWS.read_text(encoding="utf-8").splitlines()) > 200
    without = [word for word in command_line("--lr 1") if word != "--swiglu"]
    assert words_of("8 ranks, 2 on a node: without --swiglu: --lr 1") == (without, 8, "2")


ONE_LAYER = (
    "--dynamic-cp --max-seqlen-per-dp-cp-rank 128 --num-layers 1 --lr-warmup-iters 0 --lr-decay-iters 8 --split 1,0,0"
)


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    return folder


@pytest.mark.nightly
def test_folders_of_a_run_may_have_names_that_are_not_utf8(tmp_path: Path, odd_folder: Path) -> None:
    data = odd_folder / "data"
    data.mkdir()
    for number in range(40):
        (data / f"{number}.txt").write_text("some words " * (1 + number % 9))
    words = command_line(
        ONE_LAYER,
        f"--data-path {data} --data-cache-path {odd_folder}/cache --dynamic-cp-dump {odd_folder}/dump",
        f"--save {odd_folder}/saved --load {odd_folder}/saved --save-interval 1 --async-save --exit-interval 2",
    )
    for last in (2, 4):
        with Job(tmp_path / "logs", words, ranks=1) as job:
            (ended,) = job.wait(60.0)
        assert ended.code == 0, ended.output
        assert "Logging error" not in ended.output
        assert "caf\\udce9/saved" in ended.output
        assert checkpoint_files.latest(f"{odd_folder}/saved").name == f"iter_{last:07d}"
    assert len(list((odd_folder / "cache").glob("*.tokens"))) == 1
    assert (odd_folder / "dump" / "plans.jsonl").stat().st_size > 0
    with Job(tmp_path / "logs", [*words, "--dynamic-cp-replay", f"{odd_folder}/none"], ranks=1) as job:
        (ended,) = job.wait(60.0)
    assert ended.code == 2
    assert "error: --dynamic-cp-replay: cannot read " in ended.output


@pytest.mark.parametrize(
    ("flag", "more"), [("--tensorboard-dir", ""), ("--profile-dir", "--profile --use-pytorch-profiler")]
)
def test_writers_that_need_utf8_are_refused_by_their_flag(flag: str, more: str) -> None:
    folder = os.fsdecode(b"/runs/caf\xe9")
    with pytest.raises(InvalidInputError) as raised:
        parse_args(command_line(ONE_LAYER, "--mock-data", more, flag, folder), 1)
    assert f"{flag} '/runs/caf\\udce9' is not UTF-8" in str(raised.value)
    str(raised.value).encode()
