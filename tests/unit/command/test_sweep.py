"""The sweep: nothing beats its front, processes change nothing, and its flags start the trainer."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import fields, replace
from itertools import product

import pytest

from dynamic_cp.architecture import Architecture
from dynamic_cp.catalog import load_architecture, load_hardware, load_model, model_names
from dynamic_cp.errors import InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.memory_model import MemoryModel
from dynamic_cp.search import plan_global_batch
from dynamic_cp.sweep import Point, Setting, Space, SweepJob, evaluate, launch_flags, layouts_of, pareto_front, sweep
from dynamic_cp.sweep.evaluate import options_of
from dynamic_cp.sweep.flags import launcher
from dynamic_cp.sweep.space import Refused, settings_of
from dynamic_cp.types import CP_COMM_TYPES, Topology
from tests.unit.planner.support import samples_of

MODEL = load_model("llama-3-8b")
HARDWARE = load_hardware("h100")
SPACE = Space(num_gpus=8, tp_sizes=(2, 4), pp_sizes=(1, 2), vp_sizes=(1,), recompute=("none", "full"))
JOB = SweepJob(batches=(samples_of([9000, 3000, 700, 700, 90, 40] * 3),), model=MODEL, hardware=HARDWARE)


@pytest.fixture(scope="module")
def found():
    return sweep(SPACE, JOB, max_seqlen=9000)


def test_no_setting_beats_the_front(found):
    points = []
    for layout in layouts_of(SPACE, MODEL):
        if isinstance(layout, Refused):
            continue
        settings = settings_of(*layout, model=MODEL, hardware=HARDWARE, max_seqlen=9000, distributed_optimizer=True)
        points += [] if isinstance(settings, Refused) else [evaluate(setting, JOB) for setting in settings]
    points = [point for point in points if isinstance(point, Point)]
    assert len(points) >= 10
    assert found.fastest.iteration_s <= min(point.iteration_s for point in points)
    for point, best in product(points, found.front):
        beaten = point.iteration_s < best.iteration_s and point.peak_bytes < best.peak_bytes
        assert not beaten
    for faster, slower in zip(found.front, found.front[1:], strict=False):
        assert faster.iteration_s <= slower.iteration_s
        assert faster.peak_bytes > slower.peak_bytes


def test_what_it_finds_fits_in_memory(found):
    for point in found.front:
        memory = MemoryModel(MODEL, HARDWARE, point.setting.topology, options_of(point.setting, JOB))
        assert point.peak_bytes <= memory.available_bytes
        assert point.setting.max_tokens_per_rank <= memory.max_tokens_per_rank(9000)
        assert point == evaluate(point.setting, JOB)


@pytest.mark.parametrize("policy", ["static", "balanced"])
def test_a_static_policy_has_one_cp_size_in_all_batches(policy):
    """Short batches, too, run at the CP size that the longest needs: a run has one."""
    job = replace(JOB, batches=(samples_of([200] * 16), samples_of([9000, 3000])), policy=policy)
    few = replace(SPACE, tp_sizes=(2,), pp_sizes=(1,), recompute=("full",))
    result = sweep(few, job, max_seqlen=9000)
    assert result.num_evaluated > 3
    for point in result.front:
        cp_size = point.setting.static_cp_size
        options = options_of(point.setting, job)
        assert (options.static_cp_size, options.min_cp_size, options.max_cp_size) == (cp_size, cp_size, cp_size)
        for batch in job.batches:
            plan = plan_global_batch(
                batch, topology=point.setting.topology, model=MODEL, hardware=HARDWARE, options=options, policy=policy
            ).plan
            assert set(plan.cp_histogram) == {cp_size} == {point.largest_cp_size}
    found = settings_of(
        Topology(num_lanes=8),
        "full",
        model=MODEL,
        hardware=replace(HARDWARE, hbm_bytes=4 * HARDWARE.hbm_bytes),
        max_seqlen=9000,
        distributed_optimizer=True,
        policy=policy,
    )
    most = {}
    for setting in found:
        most.setdefault(setting.static_cp_size, setting.max_tokens_per_rank)
    assert list(most) == [1, 2, 4, 8]
    assert most[1] > most[8]  # communicators of large groups only where they are used


def test_processes_change_nothing_and_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    if sys.version_info >= (3, 11):
        for name in ("multiprocessing", "numpy", "dynamic_cp"):
            (tmp_path / f"{name}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    monkeypatch.chdir(tmp_path)
    few = replace(SPACE, tp_sizes=(4,), pp_sizes=(1,))
    assert sweep(few, JOB, max_seqlen=9000, num_processes=2) == sweep(few, JOB, max_seqlen=9000)
    assert not (tmp_path / "ran").exists()


def test_refusals_are_counted_with_their_reasons():
    space = Space(num_gpus=8, tp_sizes=(1, 3, 8), pp_sizes=(1, 5, 8), vp_sizes=(1, 2, 3), recompute=("none",))
    reasons = [layout.reason for layout in layouts_of(space, MODEL) if isinstance(layout, Refused)]
    assert set(reasons) == {
        "TP x PP does not divide the GPUs",
        "PP x VPP does not divide the layers",
        "VPP without a pipeline",
    }
    heads = list(layouts_of(Space(num_gpus=16, ranks_per_node=16, tp_sizes=(16,)), MODEL))
    assert Refused("TP does not divide heads, KV heads or the MLP") in heads
    result = sweep(replace(space, vp_sizes=(1,)), JOB, max_seqlen=9000)
    layouts = list(layouts_of(replace(space, vp_sizes=(1,)), MODEL))
    assert 0 < sum(isinstance(one, Refused) for one in layouts) <= sum(result.refused.values()) < len(layouts)
    with pytest.raises(MemoryLimitError, match=r"weights and optimizer do not fit in memory \(3\)"):
        sweep(Space(num_gpus=1), JOB, max_seqlen=9000)
    with pytest.raises(MemoryLimitError, match="longest sample"):
        sweep(Space(num_gpus=4), JOB, max_seqlen=10**8)
    with pytest.raises(InvalidInputError, match="12 GPUs are no whole number of nodes of 8"):
        Space(num_gpus=12)


def test_the_front_keeps_what_saves_memory():
    def point(iteration_s, peak_bytes):
        setting = Setting(topology=Topology(num_lanes=1), recompute="none", max_tokens_per_rank=1)
        return Point(
            setting=setting,
            iteration_s=iteration_s,
            peak_bytes=peak_bytes,
            tokens_per_s_per_gpu=1,
            num_microbatches=1,
            largest_cp_size=1,
        )

    points = [point(3, 50), point(1, 100), point(2, 99.5), point(2, 80), point(2, 90), point(4, 50), point(1, 120)]
    assert [(one.iteration_s, one.peak_bytes) for one in pareto_front(points)] == [(1, 100), (2, 80), (3, 50)]


def parsed(setting, model, architecture, monkeypatch, **more):
    """Return the arguments that the trainer makes of a recommended line."""
    from megatron.trainer.arguments import parse_args

    groups = launch_flags(
        setting,
        model=model,
        architecture=architecture,
        **{"hardware_name": "h100", "max_seqlen": 9000, "global_batch_size": 18, "search": "thorough", **more},
    )
    words = launcher(setting)
    (per_node,) = [int(number) for number in re.findall(r"--nproc-per-node (\d+)", words)]
    nodes = [int(number) for number in re.findall(r"--nnodes (\d+)", words)]
    assert ("--node-rank $NODE_RANK --master-addr $HEAD_NODE --master-port 29500" in words) == (len(nodes) > 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    words = [word for group in groups for flag in group for word in shlex.split(flag)]
    return parse_args([*words, "--lr", "1e-4", "--train-iters", "10"], world_size=per_node * (nodes or [1])[0])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "topology",
    [
        Topology(num_lanes=4, tp_size=2, sequence_parallel=True),
        Topology(num_lanes=4, tp_size=2, pp_size=2, vp_size=2, sequence_parallel=True),
        Topology(num_lanes=16),
    ],
    ids=str,
)
def test_the_trainer_takes_the_flags(recompute, topology, monkeypatch):
    from megatron.trainer.derive import plan_options
    from megatron.trainer.derive import topology as topology_of

    setting = Setting(topology=topology, recompute=recompute, max_tokens_per_rank=8192, cp_comm_types=CP_COMM_TYPES)
    args = parsed(setting, MODEL, load_architecture("llama-3-8b"), monkeypatch)
    assert topology_of(args) == topology
    options = plan_options(args)
    assert options.max_tokens_per_rank == 8192
    assert options.cp_comm_types == CP_COMM_TYPES
    assert (options.recompute, options.search, options.bytes_per_element) == (recompute, "thorough", 2)
    assert args.dynamic_cp
    assert (args.seq_length, args.global_batch_size, args.use_distributed_optimizer) == (9000, 18, True)


LLAMA_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32_768,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16_384, "initializer_range": 0.01, "torch_dtype": "bfloat16", "use_cache": True,
    "bos_token_id": 1, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "rope_scaling": None,
}  # fmt: skip
CONFIGS = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "vocab_size": 32_001},
    "tied": {"tie_word_embeddings": True, "head_dim": 48, "rms_norm_eps": 1e-06, "rope_theta": 10000},
    "partial": {"partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    "transformers-5": {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 8,
              "layer_types": ["full_attention"] * 8},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
}  # fmt: skip
TRAINED = [name for name in model_names() if load_model(name).causal_attention]


@pytest.mark.parametrize("name", [*TRAINED, *CONFIGS])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_flags_train_the_model_that_was_priced(name, tp_size, tmp_path, monkeypatch):
    """Every field of shape and architecture, as the trainer's own parser reads the line."""
    from megatron.trainer import derive

    if name in CONFIGS:
        config = {**LLAMA_CONFIG, **CONFIGS[name]}
        name = str(tmp_path / "config.json")
        (tmp_path / "config.json").write_text(json.dumps(config))
    model, architecture = load_model(name), load_architecture(name)
    topology = Topology(num_lanes=8, tp_size=tp_size, sequence_parallel=tp_size > 1)
    setting = Setting(topology=topology, recompute="full", max_tokens_per_rank=8192)
    args = parsed(setting, model, architecture, monkeypatch, max_seqlen=3000)
    rows = derive.padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, tp_size)
    assert model.vocab_size <= rows < model.vocab_size + tp_size
    shape = replace(derive.model_shape(args, model.vocab_size), source=model.source)
    compared = {field.name: (getattr(shape, field.name), getattr(model, field.name)) for field in fields(model)}
    trained = {
        **vars(args),
        "add_bias_linear": not args.disable_bias_linear,
        "layernorm_epsilon": args.norm_epsilon,
        "not_trained": (),
    }
    compared |= {field.name: (trained[field.name], getattr(architecture, field.name)) for field in fields(architecture)}
    trained_for, made_for = compared.pop("max_position_embeddings")
    assert trained_for == max(made_for, 3000)
    assert len(compared) == len(fields(model)) + len(fields(Architecture)) - 1
    assert {field: pair for field, pair in compared.items() if pair[0] != pair[1]} == {}


def test_what_the_configs_of_that_test_say(tmp_path):
    """Against the published layers of these types: what is wrong in both directions would be equal above."""

    def of(name):
        (tmp_path / f"{name}.json").write_text(json.dumps({**LLAMA_CONFIG, **CONFIGS[name]}))
        return load_architecture(str(tmp_path / f"{name}.json"))

    llama = Architecture(
        normalization="RMSNorm", norm_epsilon=1e-5, position_embedding_type="rope", add_bias_linear=False,
        add_qkv_bias=False, qk_layernorm=False, rotary_base=500_000, max_position_embeddings=16_384,
        init_method_std=0.01,
    )  # fmt: skip
    assert of("llama") == llama
    assert of("biases") == replace(llama, add_bias_linear=True)
    assert of("tied") == replace(llama, norm_epsilon=1e-6, rotary_base=10_000)
    assert of("partial") == replace(llama, rotary_percent=0.5, max_position_embeddings=2048)
    assert of("transformers-5") == of("mistral") == replace(llama, rotary_base=1_000_000)
    assert of("qwen2") == replace(llama, add_qkv_bias=True)
    assert of("qwen3") == replace(llama, qk_layernorm=True)
    assert load_architecture("llama-3-8b").rotary_base == load_architecture("llama-3-70b").rotary_base == 500_000
    assert [name for name in TRAINED if load_architecture(name).add_qkv_bias] == ["qwen2.5-32b", "qwen2.5-7b"]
    assert [name for name in TRAINED if load_architecture(name).qk_layernorm] == ["qwen3-8b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling {'rope_type': 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling {'type': 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters {'rope_type': 'yarn'"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5: a whole number"),
        ({"attention_bias": True}, "attention_bias without mlp_bias"),
        ({"mlp_bias": True}, "mlp_bias without attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap 30.0: not known here"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}: not known here"),
    ],
)
def test_a_model_that_the_trainer_does_not_have_gets_no_line_and_the_reason(changes, says, tmp_path, capsys):
    from dynamic_cp import cli

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG | changes))
    words = (
        f"sweep --lengths sft_short --global-batch-size 8 --batches 1 --gpus 2 --tp 1 --pp 1 --model {path} --jobs 1"
    )
    with pytest.raises(UnsupportedFeatureError, match=r"pretrain_gpt\.py does not train this model"):
        launch_flags(
            Setting(topology=Topology(num_lanes=8), recompute="none", max_tokens_per_rank=100),
            model=load_model(path), architecture=load_architecture(path), hardware_name="h100", max_seqlen=9,
            global_batch_size=1,
        )  # fmt: skip
    if changes not in ({"hidden_act": "gelu"}, {"attention_bias": True}):
        assert says in load_architecture(path).not_trained[0]
        return
    assert cli.main(words.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "torchrun" not in out
    assert says in out
    assert cli.main([*words.split(), "--json", "-"]) == 0
    recommended = json.loads(capsys.readouterr().out)["recommended"]
    assert recommended["command"] is None
    assert says in recommended["no_command"]


def test_flags_of_static_policies():
    setting = Setting(topology=Topology(num_lanes=8), recompute="none", max_tokens_per_rank=100)

    def words(policy):
        return launch_flags(
            setting,
            model=MODEL,
            architecture=None,
            hardware_name="a b.json",
            max_seqlen=9,
            global_batch_size=1,
            policy=policy,
        )[1]

    fixed = replace(setting, static_cp_size=4)
    for policy in ("static", "balanced"):
        flags = launch_flags(
            fixed,
            model=MODEL,
            architecture=None,
            hardware_name="h100",
            max_seqlen=9,
            global_batch_size=1,
            policy=policy,
        )
        assert "--context-parallel-size 4" in flags[1]
    assert words("dynamic")[0] == "--dynamic-cp"
    assert words("balanced")[0] == "--static-cp-policy balanced"
    assert words("static")[-1] == "--dynamic-cp-hardware 'a b.json'"


def test_the_flags_hold_the_longest_sample_of_the_data_not_of_the_draw(capsys, tmp_path):
    """Not more either: with a limit of its own for samples that are not there, it recomputed what fits in memory."""
    from dynamic_cp import cli

    lengths = tmp_path / "lengths.txt"
    lengths.write_text(" ".join(map(str, [*range(60, 700, 7)] * 3 + [1022])))

    def recommended(words):
        words += " --global-batch-size 8 --batches 1 --gpus 8 --tp 4 --pp 1 --jobs 1 --json -"
        assert cli.main(["sweep", *words.split()]) == 0
        data = json.loads(capsys.readouterr().out)
        return data, re.search(r"--seq-length (\d+)", " ".join(data["recommended"]["command"]))[1]

    data, seq_length = recommended("--lengths sft_short")
    assert seq_length == "1021"  # the longest of the list: docs/how-to/decide.md says so, too
    assert data["recommended"]["recompute"] == "none"
    assert (data["inputs"]["seed"], data["inputs"]["max_seqlen"], data["inputs"]["overlong"]) == (0, 131072, "truncate")
    assert recommended("--lengths sft_short --max-seqlen 500")[1] == "500"
    assert recommended(f"--lengths {lengths}")[1] == "1022"
    assert recommended(f"--lengths {lengths} --max-seqlen 400")[1] == "400"
    assert recommended(f"--lengths {lengths} --max-seqlen 1000 --overlong drop")[1] == "697"
