"""The sweep: nothing beats what it finds, processes change nothing, words agree, and its flags start the trainer."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path

import psutil
import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.parameters import exchanges_tried, trained_hardware
from dynamic_cp.decide.cli.parameters import load_model as load_as_trained
from dynamic_cp.decide.config_json.architecture import as_flags
from dynamic_cp.decide.config_json.hugging_face import load_architecture
from dynamic_cp.decide.setting import EXCHANGES
from dynamic_cp.decide.sweep import Point, Setting, Space, SweepJob, evaluate, launch_flags, layouts_of, sweep
from dynamic_cp.decide.sweep.flags import launcher, model_flags
from dynamic_cp.decide.sweep.search import SHOWN, STATIC_POLICIES, pareto_front
from dynamic_cp.decide.sweep.space import Refused, settings_of, variants
from dynamic_cp.errors import InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware, load_model, model_names, why_local
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import AUTO_CHUNK_TOKENS, CP_COMM_TYPES, DataParallel, Experts, Lambda, RecomputedLayers, Topology
from tests import patience
from tests.unit.support import samples_of

ROOT = str(Path(__file__).parents[3])
MODEL = load_model("llama-3-8b")
HARDWARE = load_hardware("h100")
OVERLAPPED = DataParallel(overlap_grad_reduce=True, overlap_param_gather=True)
SPACE = Space(num_gpus=8, tp_sizes=(4,), pp_sizes=(1, 2), vp_sizes=(1,), recompute=("none", "full"))
LENGTHS = [9000, 3000, 700, 700, 90, 40]
JOB = SweepJob(
    batches=(samples_of(LENGTHS * 3), samples_of([*LENGTHS * 2, 5000, 5000])),
    max_seqlen=9000,
    model=MODEL,
    hardware=HARDWARE,
)
POLICIES = ("dynamic", "static", "balanced", "megatron-dev")


SPACES = {"few": SPACE, "many": replace(SPACE, tp_sizes=(2, 4), vp_sizes=(1, 2))}


@cache
def raced(which):
    return sweep(SPACES[which], JOB, policies=POLICIES if which == "many" else ("dynamic", "balanced"))


@pytest.fixture(scope="module")
def found():
    return raced("few")


@cache
def everything(which, policy):
    """All settings of a policy, each planned with all batches: what the race must not miss."""
    layouts = [one for one in layouts_of(SPACES[which], MODEL) if not isinstance(one, Refused)]
    settings = [settings_of(*layout, policy, SPACES[which], JOB) for layout in layouts]
    planned = [evaluate(one, JOB) for some in settings if not isinstance(some, Refused) for one in some]
    points = [one for one in planned if isinstance(one, Point)]
    assert len(points) >= 10
    return points


@pytest.mark.by_day("few-dynamic")
@pytest.mark.parametrize(("which", "policy"), [("few", "dynamic"), *(("many", policy) for policy in POLICIES)])
def test_the_race_misses_nothing(which, policy):
    found = raced(which)
    best = found.best[policy]
    assert best.setting.policy == policy
    assert best.iteration_s <= min(point.iteration_s for point in everything(which, policy))
    assert found.policies[policy].next_best.setting.layout != best.setting.layout
    assert found.policies[policy].next_best.iteration_s >= best.iteration_s


def test_nothing_close_beats_the_front(found):
    assert found.front[0] == found.best[found.recommended]
    for point, best in product(everything("few", found.recommended), found.front):
        beaten = point.iteration_s < best.iteration_s and point.peak_bytes < 0.99 * best.peak_bytes
        assert not beaten
    for faster, slower in zip(found.front, found.front[1:], strict=False):
        assert faster.iteration_s <= slower.iteration_s <= SHOWN * found.front[0].iteration_s
        assert faster.peak_bytes > slower.peak_bytes


def test_of_equally_fast_settings_one_is_chosen_for_all_that_is_printed(monkeypatch):
    """Verdict, list and launch line named two settings of equal seconds."""

    def evaluated(setting, job):
        return point_of(setting, (1.0,), float(setting.max_tokens_per_rank))

    monkeypatch.setattr("dynamic_cp.decide.sweep.search.evaluate_first", evaluated)
    few = replace(SPACE, tp_sizes=(4,), pp_sizes=(1,), vp_sizes=(1,))
    found = sweep(few, replace(JOB, batches=JOB.batches[:1]), policies=("dynamic",))
    assert found.num_planned > 2
    assert found.front == (found.best["dynamic"],), "the one that needs least memory"


def test_the_front_keeps_what_saves_memory():
    points = [
        point_of(setting_of(Topology(num_lanes=1)), (iteration_s - 0.5, iteration_s + 0.5), peak_bytes)
        for iteration_s, peak_bytes in ((3, 50), (1, 100), (1.5, 99.5), (2, 80), (2, 90), (4, 50), (1, 120))
    ]
    assert [(one.iteration_s, one.peak_bytes) for one in pareto_front(points)] == [(1, 100), (2, 80), (3, 50)]


def test_the_dynamic_policy_is_at_least_as_fast_as_the_others(found):
    for point in found.best.values():
        assert found.best["dynamic"].iteration_s <= point.iteration_s * (1 + 1e-9)


def test_what_it_finds_fits_in_memory_and_is_what_planning_gives(found):
    for point in (*found.front, *found.best.values()):
        memory = JOB.memory(point.setting)
        assert point.peak_bytes <= memory.available_bytes
        assert point.setting.max_tokens_per_rank <= memory.max_tokens_per_rank(9000)
        assert point == evaluate(point.setting, JOB)


@pytest.mark.nightly
def test_the_numbers_of_ranks_that_share_experts_are_searched():
    """What does not fit is counted by its reason, and the launch line says what was found."""
    experts = Experts(num_experts=8, topk=2, ffn_hidden_size=MODEL.ffn_hidden_size)
    shape = replace(MODEL, experts=experts)
    few = replace(SPACE, tp_sizes=(1, 2), pp_sizes=(1,), vp_sizes=(1,), recompute=("full",))
    found = [one for one in layouts_of(few, shape) if not isinstance(one, Refused)]
    assert {(one.tp_size, one.ep_size) for one, _ in found} == {(tp, ep) for tp in (1, 2) for ep in (1, 2, 4, 8)}
    refused = [one.reason for one in layouts_of(replace(few, ep_sizes=(16,)), shape) if isinstance(one, Refused)]
    assert refused == ["EP 16 does not divide 8 experts"] * 2
    assert {one.ep_size for one, _ in layouts_of(few, MODEL)} == {1}
    roomy = replace(HARDWARE, hbm_bytes=6 * HARDWARE.hbm_bytes)
    best = sweep(few, replace(JOB, model=shape, hardware=roomy), policies=("dynamic",)).best["dynamic"]
    assert f"EP {best.setting.topology.ep_size}" in best.setting.layout or best.setting.topology.ep_size == 1
    lines = lines_of(replace(best.setting, topology=Topology(num_lanes=8, ep_size=4)), shape)
    words = " ".join(flag for line in lines for flag in line)
    assert "--expert-model-parallel-size 4" in words
    assert f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size {MODEL.ffn_hidden_size}" in words


@pytest.mark.parametrize("policy", ["static", "balanced"])
def test_a_static_policy_has_one_cp_size_in_all_batches(policy):
    """Short batches, too, run at the CP size that the longest needs: a run has one."""
    job = replace(JOB, batches=(samples_of([200] * 16), samples_of([9000, 3000])))
    few = replace(SPACE, tp_sizes=(2,), pp_sizes=(1,), recompute=("full",))
    result = sweep(few, job, policies=(policy,))
    assert result.num_planned > 3
    assert result.recommended == policy
    for point in result.front:
        cp_size = point.setting.static_cp_size
        options = point.setting.options()
        assert (options.static_cp_size, options.min_cp_size, options.max_cp_size) == (cp_size, cp_size, cp_size)
        for batch in job.batches:
            plan = plan_global_batch(
                batch, topology=point.setting.topology, model=MODEL, hardware=HARDWARE, options=options, policy=policy
            ).plan
            assert set(plan.cp_histogram) == {cp_size} == {point.largest_cp_size}
    roomy = replace(JOB, hardware=replace(HARDWARE, hbm_bytes=4 * HARDWARE.hbm_bytes))
    most = {}
    for setting in settings_of(Topology(num_lanes=8), "full", policy, SPACE, roomy):
        most.setdefault(setting.static_cp_size, setting.max_tokens_per_rank)
    assert list(most) == [1, 2, 4, 8]
    assert most[1] > most[8]  # communicators of large groups only where they are used


@pytest.mark.nightly
def test_processes_change_nothing_and_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    if sys.version_info >= (3, 11):
        for name in ("multiprocessing", "numpy", "dynamic_cp"):
            (tmp_path / f"{name}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    monkeypatch.chdir(tmp_path)
    few = replace(SPACE, tp_sizes=(4,), pp_sizes=(1,))
    policies = ("dynamic", "static")
    assert sweep(few, JOB, policies=policies, num_processes=2) == sweep(few, JOB, policies=policies)
    assert not (tmp_path / "ran").exists()


KILLED = """
import os, sys
from multiprocessing import active_children
from dynamic_cp.decide.sweep import workers

if __name__ == "__main__":
    with workers.workers("a job", 2) as run:
        def tell(setting, result):
            # By one call: the other process writes what it is told to print to the same pipe.
            os.write(1, f"\\nends with me: {' '.join(str(one.pid) for one in active_children())}\\n".encode())
            os.kill(os.getpid(), int(sys.argv[1]))
        run(print, [None, None], tell)
"""


@pytest.mark.by_day("asked to end")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["asked to end", "killed"],
)
def test_processes_end_with_a_command_that_is_killed(tmp_path, number, code):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    words = [sys.executable, str(script), str(int(number))]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": ROOT})
    assert ended.returncode == code, ended.stderr
    assert number == signal.SIGKILL or not ended.stderr, "semaphores are left"
    (found,) = re.findall(r"^ends with me: (\d+) (\d+)$", ended.stdout, re.MULTILINE)
    pids = [int(pid) for pid in found]
    deadline_s = patience.now_s() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert patience.now_s() < deadline_s, pids
        time.sleep(0.1)


def test_refusals_are_counted_with_their_reasons():
    space = Space(num_gpus=8, tp_sizes=(1, 3, 8), pp_sizes=(1, 5, 8), vp_sizes=(1, 2, 3), recompute=("none",))
    reasons = [layout.reason for layout in layouts_of(space, MODEL) if isinstance(layout, Refused)]
    assert set(reasons) == {
        "TP x PP does not divide the GPUs",
        "PP x VPP cannot share out the layers",
        "VPP without a pipeline",
    }
    heads = list(layouts_of(Space(num_gpus=16, ranks_per_node=16, tp_sizes=(16,)), MODEL))
    assert Refused("TP does not divide heads, KV heads or the MLP") in heads
    refused = sweep(replace(space, vp_sizes=(1,)), JOB).policies["dynamic"].refused
    layouts = list(layouts_of(replace(space, vp_sizes=(1,)), MODEL))
    assert 0 < sum(isinstance(one, Refused) for one in layouts) <= sum(refused.values()) < len(layouts)
    with pytest.raises(MemoryLimitError, match=r"weights and optimizer do not fit in memory \(3\)"):
        sweep(Space(num_gpus=1), JOB)
    with pytest.raises(MemoryLimitError, match="longest sample"):
        sweep(Space(num_gpus=4), replace(JOB, max_seqlen=10**8))
    with pytest.raises(InvalidInputError, match="12 GPUs are not a whole number of nodes of 8"):
        Space(num_gpus=12)


def test_as_few_layers_are_recomputed_as_hold_a_limit():
    """Of chunks of 8 layers, where nothing fits without: each number holds what no smaller one does."""
    tight = replace(JOB, hardware=replace(HARDWARE, hbm_bytes=0.4 * HARDWARE.hbm_bytes))
    topology = Topology(num_lanes=1, tp_size=4, pp_size=2, vp_size=2, sequence_parallel=True)
    space = replace(SPACE, recompute=("none", "block", "full"))
    assert isinstance(settings_of(topology, "none", "dynamic", space, tight), Refused)
    found = settings_of(topology, "block", "dynamic", space, tight)
    numbers = [one.recompute_layers.num_layers for one in found]
    assert len(numbers) >= 2
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 1
    assert numbers[-1] < 8
    for setting in found:
        fewer = setting.recompute_layers.num_layers - 1
        less = replace(setting, recompute_layers=RecomputedLayers("block", fewer))
        with pytest.raises(MemoryLimitError):
            tight.memory(less).check_limit_fits(setting.max_tokens_per_rank)
    (given,) = settings_of(topology, "block", "dynamic", replace(space, recompute_num_layers=7, limits=(9216,)), tight)
    assert (given.recompute_layers.num_layers, given.layout.split(", ")[-1]) == (7, "block 7 recomputation")
    expected = "--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 7"
    assert expected in lines_of(given)
    best = sweep(replace(space, tp_sizes=(4,), pp_sizes=(2,), vp_sizes=(2,)), tight).best["dynamic"].setting
    assert best.recompute_layers.method == "block"


def test_losses_over_chunks_leave_memory_for_tokens():
    topology = Topology(num_lanes=4, tp_size=2, sequence_parallel=True)
    (whole, *_), (chunked, *_) = (
        settings_of(topology, "none", "dynamic", replace(SPACE, loss_chunk_tokens=chunk), JOB) for chunk in (0, "auto")
    )
    assert chunked.max_tokens_per_rank > whole.max_tokens_per_rank
    assert chunked.options().loss_chunk_tokens == 2 * AUTO_CHUNK_TOKENS
    assert chunked.layout == "TP 2, PP 1, 4 lanes, losses over 2048 tokens"
    flags = [{flag for line in lines_of(one) for flag in line} for one in (whole, chunked)]
    assert [flag for flag in flags[1] - flags[0] if "chunk" in flag] == ["--loss-chunk-tokens 2048"]


def test_layers_that_need_not_be_recomputed_are_not():
    """Where all limits fit without, only larger ones are tried with some; pools and modules have no such layers."""
    topology = Topology(num_lanes=4, tp_size=2, sequence_parallel=True)
    space = replace(SPACE, recompute=("none", "block", "full"))
    (without, *_) = settings_of(topology, "none", "dynamic", space, JOB)
    for one in settings_of(topology, "block", "dynamic", space, JOB):
        assert one.max_tokens_per_rank > without.max_tokens_per_rank
    later = replace(JOB, model=replace(MODEL, mtp_num_layers=1))
    assert settings_of(topology, "block", "dynamic", space, later) == ()
    alone = replace(space, recompute=("block",))
    assert "every layer is recomputed" in settings_of(topology, "block", "dynamic", alone, later).reason


def test_static_policies_have_exchanges_where_only_placed_attention_is_allowed():
    """Nobody places for them; what dynamic plans are compared with is at its best all the same."""
    masked = tuple(tuple(replace(one, mask=Lambda(16, 512)) for one in batch) for batch in JOB.batches)
    space = replace(SPACE, tp_sizes=(1,), pp_sizes=(1,), exchanges=(("blocks",),))
    for batches, exchanges in ((JOB.batches, ("p2p", "a2a")), (masked, ("a2a",))):
        for policy, wanted in (("static", exchanges), ("dynamic", ("blocks",))):
            found = settings_of(Topology(num_lanes=8), "full", policy, space, replace(JOB, batches=batches))
            assert {one.cp_comm_types for one in found} == {wanted}
            if policy == "static":
                assert {one.static_cp_size for one in found} >= {2, 4, 8}
    few = replace(space, tp_sizes=(2,), recompute=("full",), limits=(4096,))
    best = sweep(few, replace(JOB, batches=(samples_of(LENGTHS),)), policies=("dynamic", "balanced")).best
    found = {name: point.setting.cp_comm_types for name, point in best.items()}
    assert found == {"dynamic": ("blocks",), "balanced": ("p2p", "a2a")}


def test_less_large_groups_leave_memory_for_tokens():
    """Communicators cost memory: `variants` has the sizes at which that pays, none larger than the setting's own."""
    full = setting_of(Topology(num_lanes=8), cp_comm_types=CP_COMM_TYPES)
    tight = replace(JOB, hardware=replace(HARDWARE, hbm_bytes=1.25 * HARDWARE.hbm_bytes))
    sizes = {one.max_cp_size: one.max_tokens_per_rank for one in variants(full, SPACE, tight)}
    assert len(sizes) > 1
    assert all(size is None or size < 8 for size in sizes)
    assert all(one.max_tokens_per_rank >= 2048 for one in variants(full, SPACE, tight))
    assert variants(full, replace(SPACE, limits=(2048,)), tight) == (replace(full, cp_comm_types=("p2p",)),)


def lines_of(setting, model=MODEL):
    words = {"model": model, "architecture": None, "hardware_name": "h100"}
    return launch_flags(setting, **words, max_seqlen=9000, global_batch_size=18)


def setting_of(topology, limit=2048, **more):
    given = {"policy": "dynamic", "recompute": "full", "cp_comm_types": ("p2p",), **more}
    return Setting(topology=topology, max_tokens_per_rank=limit, **given)


def point_of(setting, batches_s, peak_bytes):
    return Point(
        setting=setting, batches_s=batches_s, peak_bytes=peak_bytes, tokens_per_s_per_gpu=1.0, num_microbatches=1.0,
        largest_cp_size=1,
    )  # fmt: skip


SWEEP = "sweep --lengths github --max-seqlen 16384 --global-batch-size 8 --batches 2 --gpus 8 --tp 2,4 --pp 1 --jobs 1"


def ran(words, capsys):
    assert cli.main(words.split()) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return the JSON of SWEEP, and its text of a terminal, without line breaks."""
    import contextlib
    import io

    path = tmp_path_factory.mktemp("swept") / "sweep.json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*SWEEP.split(), "--json", str(path)]) == 0
    return json.loads(path.read_text()), " ".join(out.getvalue().split())


@pytest.mark.nightly
def test_the_commands_that_take_gpus_have_what_the_sweep_found(swept, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # to start processes takes longer than to plan
    data, _ = swept
    best = {policy: one["best"] for policy, one in data["policies"].items()}
    words = SWEEP.removeprefix("sweep").replace("--tp 2,4", "").replace("--jobs 1", "")
    one_tp = words + " --tp 2"
    path = tmp_path / "simulated.json"
    text = " ".join(ran(f"simulate {one_tp} --policy dynamic,balanced --json {path}", capsys).split())
    simulated = json.loads(path.read_text())
    assert simulated["inputs"]["is_tuned"]
    for policy in ("dynamic", "balanced"):
        ours = simulated["policies"][policy]
        assert ours["setting"]["tp"] == 2
        if best[policy]["tp"] == 2:
            assert {name: best[policy][name] for name in ours["setting"]} == ours["setting"]
            assert [one["iteration_s"] for one in ours["batches"]] == pytest.approx(best[policy]["batches_s"])
    assert any(best[policy]["tp"] == 2 for policy in ("dynamic", "balanced"))
    assert "every policy at its own fastest layout" in text
    setting = simulated["policies"]["balanced"]["setting"]
    assert f"TP 2, PP 1, 4 lanes, limit {setting['max_tokens_per_rank']}" in text or setting["recompute"] != "none"
    assert "Best static" in text
    one_batch = one_tp.replace("--batches 2", "")
    text = " ".join(ran(f"plan {one_batch}", capsys).split())
    assert re.search(r"layout TP 2, PP 1, 4 lanes, .*: fastest of \d+ settings planned", text)
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    assert "dynamic at its own fastest setting: TP 2, PP 1, 4 lanes" in ran(
        f"trace {one_batch} --output {trace}", capsys
    )
    assert json.loads(trace.read_text())["traceEvents"]
    pytest.importorskip("matplotlib")
    ran(f"report {one_batch} --policy dynamic,balanced --output {page}", capsys)
    assert "every policy at its own fastest layout" in page.read_text()
    assert "dynamic at TP 2, PP 1, 4 lanes" in page.read_text()


def parsed(setting, model, architecture, monkeypatch, **more):
    """Return the settings that the trainer makes of a recommended line."""
    from megatron.trainer.flags.arguments import parse_args

    given = {"hardware_name": "h100", "max_seqlen": 9000, "global_batch_size": 18, "data_parallel": OVERLAPPED}
    given |= {"options": setting.options("thorough"), **more}
    groups = launch_flags(setting, model=model, architecture=architecture, **given)
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
    setting = setting_of(topology, 8192, recompute=recompute, cp_comm_types=CP_COMM_TYPES)
    settings = parsed(setting, MODEL, load_architecture("llama-3-8b"), monkeypatch)
    planning = settings.planning
    assert planning.topology == topology
    options = planning.options()
    assert options.max_tokens_per_rank == 8192
    assert options.cp_comm_types == CP_COMM_TYPES
    assert (options.recompute, options.search, options.bytes_per_element) == (recompute, "thorough", 2)
    assert planning.policy == "dynamic"
    assert (planning.seq_length, settings.training.global_batch_size) == (9000, 18)
    assert planning.data_parallel == OVERLAPPED


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
    "llama-3.1": {"rope_scaling": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "windows": {"model_type": "mistral", "sliding_window": 512},
    "alternating": {"model_type": "qwen3", "head_dim": 64, "use_sliding_window": True, "sliding_window": 512,
                    "layer_types": ["sliding_attention", "full_attention"] * 4},
    "pattern": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3},
    "YaRN": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
                              "truncate": False}},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
                  "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 64,
                "attention_bias": True, "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"] * 4},
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
TRAINED = [name for name in model_names() if load_model(name).causal_attention]


@pytest.mark.parametrize("name", [*TRAINED, *CONFIGS])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_flags_train_the_model_that_was_priced(name, tp_size, tmp_path, monkeypatch):
    """Every field of shape and architecture, as the trainer's own parser reads the line."""
    from megatron.dynamic_cp.flags.shape import layer_needs, model_shape
    from megatron.trainer.flags import derive

    if name in CONFIGS:
        config = {**LLAMA_CONFIG, **CONFIGS[name]}
        name = str(tmp_path / "config.json")
        (tmp_path / "config.json").write_text(json.dumps(config))
    model, architecture = load_as_trained(name, "h100", None, None), load_architecture(name)
    topology = Topology(num_lanes=8, tp_size=tp_size, sequence_parallel=tp_size > 1)
    setting = setting_of(topology, 8192, cp_comm_types=CP_COMM_TYPES)
    settings = parsed(setting, model, architecture, monkeypatch, max_seqlen=3000)
    trained_model = settings.model
    # The command prices the layers that the trainer chooses; experts are one product where these have it.
    wants = layer_needs(settings.model, settings.planning).why_local
    assert (wants is None) == (why_local(as_flags(model, architecture)) is None)
    assert (trained_hardware(name, "h100"), trained_hardware(name, "h200")) == (
        ("h100", "h200") if wants is None else ("h100-local", "h200-local")
    )
    assert trained_hardware(name, "a100-80gb") == "a100-80gb"
    assert settings.model.moe_grouped_gemm is (model.experts is not None and wants is None)
    if model.experts is not None:  # where the hardware is that of local layers, their experts are priced and printed
        assert not any(load_as_trained(name, one, None, None).experts.grouped for one in ("h100-local", "cpu"))
    rows = derive.padded_vocab_size(settings.data.vocab_size, trained_model.make_vocab_size_divisible_by, tp_size)
    assert model.vocab_size <= rows < model.vocab_size + tp_size
    shape = replace(model_shape(trained_model, model.vocab_size), source=model.source)
    compared = {field.name: (getattr(shape, field.name), getattr(model, field.name)) for field in fields(model)}
    trained = {name: getattr(trained_model, name) for name in architecture.flags}
    trained |= {name: MEANINGS[name].usual for name, value in trained.items() if value is None}
    compared |= {name: (trained[name], value) for name, value in architecture.flags.items()}
    trained_for, made_for = compared.pop("max_position_embeddings")
    assert trained_for == max(made_for, 3000)
    assert len(compared) == len(fields(model)) + len(architecture.flags) - 1
    assert len(architecture.flags) > 35
    assert {field: pair for field, pair in compared.items() if pair[0] != pair[1]} == {}


def test_windows_are_swept_and_trained_with_sinks_and_blocks(monkeypatch):
    """A run of the recommended flags allows placed attention, so its memory and its plans are swept with it."""
    from megatron.dynamic_cp.flags.shape import model_shape

    plain = load_model("llama-3-8b")
    model = replace(plain, window_tokens=512, window_attn_skip_freq=2, window_sink_tokens=4)
    assert exchanges_tried(None, plain, "auto") == EXCHANGES
    assert exchanges_tried(None, model, "auto") == (("a2a", "all_gather", "blocks"), ("p2p",))
    assert exchanges_tried("auto", model, "auto") == (("a2a", "all_gather", "blocks"),)
    hybrid = replace(load_model("qwen3-next-80b-a3b"), window_tokens=512)
    for use, allowed in (("heads", ("a2a", "all_gather")), ("states", ("a2a", "all_gather", "blocks"))):
        assert exchanges_tried("auto", hybrid, use) == (allowed,)
    setting = setting_of(Topology(num_lanes=8), 8192, cp_comm_types=(*CP_COMM_TYPES, "blocks"))
    settings = parsed(setting, model, load_architecture("llama-3-8b"), monkeypatch, max_seqlen=3000)
    assert replace(model_shape(settings.model, model.vocab_size), source=model.source) == model
    assert set(settings.planning.options().cp_comm_types) == {"a2a", "all_gather", "blocks"}


def test_a_value_of_0_is_a_flag_where_0_is_not_what_is_so_without_it():
    llama = load_architecture("llama-3-8b")
    unrotated = replace(llama, flags={**llama.flags, "rotary_percent": 0.0})
    assert "--rotary-percent 0.0" in model_flags(load_model("llama-3-8b"), unrotated, tp_size=1).values()
    assert not any("window" in flag for flag in model_flags(load_model("llama-3-8b"), llama, tp_size=1))


def test_bundled_models_have_the_layers_that_were_published():
    for name in ("llama-3-8b", "llama-3-70b"):
        assert load_architecture(name)["rotary_base"] == 500_000
    assert [name for name in TRAINED if load_architecture(name)["add_qkv_bias"]] == ["qwen2.5-32b", "qwen2.5-7b"]
    assert [name for name in TRAINED if load_architecture(name)["qk_layernorm"]] == [
        "qwen3-30b-a3b",
        "qwen3-8b",
        "qwen3-next-80b-a3b",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rope_scaling": CONFIGS["llama-3.1"]["rope_scaling"] | {"original_max_position_embeddings": 4096}},
            "RoPE is scaled by YaRN, or as in Llama 3 with {'low_freq_factor': 1.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling {'type': 'linear'"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5: a whole number"),
        ({"attention_bias": True}, "attention_bias without mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0: not known here"),
    ],
)
def test_a_model_that_the_trainer_does_not_have_gets_no_line_and_the_reason(changes, says, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG | changes))
    words = (
        f"sweep --lengths sft_short --global-batch-size 8 --batches 1 --gpus 2 --tp 1 --pp 1 --model {path} --jobs 1"
    )
    with pytest.raises(UnsupportedFeatureError, match=r"pretrain_gpt\.py does not train this model"):
        launch_flags(
            setting_of(Topology(num_lanes=8), policy="static"), model=load_model(path),
            architecture=load_architecture(path), hardware_name="h100", max_seqlen=9, global_batch_size=1,
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


def test_how_a_hybrid_shares_its_layers_is_planned_with_and_reaches_the_trainer(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_5))
    (tmp_path / "lengths.txt").write_text("3000 900 9000 400")
    words = f"--lengths {tmp_path / 'lengths.txt'} --model {path} --max-tokens-per-rank 6000"
    for use in ("auto", "heads", "states"):
        given = f"{words} --state-exchange {use}"
        plan = ran(f"plan {given} --lanes 4 --json -", capsys)
        assert ('"state_exchange": "states"' in plan) == (use == "states")
        drawn = f"{given} --global-batch-size 4 --batches 1 --policy dynamic"
        simulated = json.loads(ran(f"simulate {drawn} --lanes 4 --json -", capsys))
        assert simulated["inputs"]["options"]["state_exchange"] == use
        data = json.loads(ran(f"sweep {drawn} --gpus 4 --tp 1 --pp 1 --recompute full --jobs 1 --json -", capsys))
        assert data["inputs"]["state_exchange"] == use
        line = " ".join(data["recommended"]["command"])
        assert (f"--dynamic-cp-state-exchange {use} " in line) == (use != "auto")
    for command in ("plan --lanes 4", "simulate --gpus 4", "sweep --global-batch-size 4 --batches 1 --gpus 4"):
        assert cli.main(f"{command} {words} --cp-comm-type blocks --state-exchange heads".split()) != 0
        assert "error: --state-exchange heads needs equal chunks of a sample on all lanes" in " ".join(
            capsys.readouterr().err.split()
        )
    for command in ("plan", "simulate --policy dynamic"):
        found = json.loads(ran(f"{command} {words} --lanes 4 --mtp-num-layers 1 --json -", capsys))
        assert (found["inputs"]["mtp_num_layers"], found["inputs"]["expert_imbalance"]) == (1, None)
    exact = ran(f"plan {words} --lanes 4 --state-exchange heads --search exact", capsys)
    assert "proven the fastest" in " ".join(exact.split())
    setting = setting_of(Topology(num_lanes=4), 6000)
    options = replace(setting.options("thorough"), state_exchange="heads")
    settings = parsed(setting, load_model(path), load_architecture(path), monkeypatch, options=options)
    assert settings.planning.options().state_exchange == "heads"


def test_a_hybrid_with_its_published_module_gets_a_line(monkeypatch):
    """The module has attention, as the last layer: its price and weights are those of the other layers with it."""
    name = "qwen3-next-80b-a3b"
    model = replace(load_model(name), mtp_num_layers=1)
    setting = setting_of(Topology(num_lanes=16, ep_size=16), 4096)
    settings = parsed(setting, model, load_architecture(name), monkeypatch)
    assert settings.model.mtp_num_layers == 1
    (stage,) = model.stages(1)
    _, module = stage.layers[-1]
    attention = next(layer for _, layer in stage.layers if layer.has_attention)
    assert module.query_size == attention.query_size
    projection = 2 * model.hidden_size**2
    assert module.held_weights == attention.held_weights + projection
    assert model.num_parameters - load_model(name).num_parameters == (
        module.held_weights + module.held_expert_weights + module.norm_weights
    )


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
"""As published."""


def test_deepseek_v3_as_published_is_swept_in_pipelines_and_gets_a_line(tmp_path, monkeypatch):
    """61 layers: no number of stages divides them. That weights are quantized is nothing of its shape."""
    path = str(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    model, architecture = load_model(path), load_architecture(path)
    assert architecture.not_trained == ()
    assert "fp8" in architecture.not_imported[0]
    space = Space(num_gpus=2048, tp_sizes=(1,), ep_sizes=(64,), recompute=("full",))
    layouts = [one for one in layouts_of(space, model) if not isinstance(one, Refused)]
    assert {one.pp_size for one, _ in layouts} == {1, 2, 4, 8, 16}
    job = replace(JOB, model=model)
    topology, recompute = next(layout for layout in layouts if layout[0].pp_size == 16)
    setting = settings_of(topology, recompute, "dynamic", space, job)[0]
    assert "PP 16 (15x4+1 layers)" in setting.layout
    heaviest = max(stage.num_layers for stage in job.model_of(setting).stages(16))
    assert heaviest == 4
    settings = parsed(setting, model, architecture, monkeypatch, max_seqlen=3000)
    assert settings.planning.pipeline_layers == setting.pipeline_layers == ((4,),) * 15 + ((1,),)
    assert isinstance(evaluate(setting, job), Point)


@pytest.mark.nightly
def test_a_sweep_with_unlike_stages_names_their_flags(tmp_path, capsys):
    """Also where the config says that weights are quantized; a comment says what that means."""
    path = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 7} | quantized))
    words = f"--lengths sft_short --global-batch-size 8 --model {path} --pp 2 --vpp 1 --tp 1"
    sweep_words = f"sweep {words} --batches 1 --gpus 4 --jobs 1 --policy dynamic"
    text = " ".join(ran(sweep_words, capsys).replace("\\", "").split())
    assert "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4 " in text
    assert "PP 2 (4+3 layers)" in text
    assert "this starts with new weights: quantization_config {'quant_method': 'mxfp4'}: weights are quantized" in text
    data = json.loads(ran(f"{sweep_words} --json -", capsys))
    assert data["recommended"]["pipeline_layers"] == [[4], [3]]
    assert "stages of 4+3 layers" in " ".join(ran(f"plan {words} --lanes 2", capsys).split())
    assert "PP 2 (4+3 layers)" in " ".join(ran(f"plan {words} --gpus 4", capsys).split())
    simulated = ran(f"simulate {words} --batches 1 --lanes 2 --policy dynamic,balanced", capsys)
    assert "PP 2 (4+3 layers)" in " ".join(simulated.split())


def test_flags_of_policies(monkeypatch):
    setting = setting_of(Topology(num_lanes=8), recompute="none")

    def flags(policy, **changes):
        own = replace(setting, policy=policy, **changes)
        words = {"model": MODEL, "architecture": load_architecture("llama-3-8b")}
        group = launch_flags(own, **words, hardware_name="a b.json", max_seqlen=9000, global_batch_size=18)[1]
        planning = parsed(own, **words, monkeypatch=monkeypatch).planning
        return group, planning, planning.options()

    for policy in STATIC_POLICIES:
        group, planning, options = flags(policy, static_cp_size=8, cp_comm_types=CP_COMM_TYPES)
        assert "--context-parallel-size 8" in group
        assert (planning.policy, options.cp_comm_types) == (policy, CP_COMM_TYPES)
        assert options.static_cp_size == 8
    assert "--static-cp-policy balanced" in flags("balanced", static_cp_size=8)[0]
    group, planning, options = flags("dynamic", max_cp_size=8)
    assert (group[0], planning.policy, options.max_cp_size) == ("--dynamic-cp", "dynamic", 8)
    assert group[-1] == "--dynamic-cp-hardware 'a b.json'"


def test_the_flags_hold_the_longest_sample_of_the_data_not_of_the_draw(capsys, tmp_path):
    """Not more either: with a limit of its own for samples that are not there, it recomputed what fits in memory."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(" ".join(map(str, [*range(60, 700, 7)] * 3 + [1022])))

    def recommended(words):
        words += " --global-batch-size 8 --batches 1 --gpus 8 --tp 4 --pp 1 --jobs 1 --policy dynamic --json -"
        assert cli.main(["sweep", *words.split()]) == 0
        data = json.loads(capsys.readouterr().out)
        return data, re.search(r"--seq-length (\d+)", " ".join(data["recommended"]["command"]))[1]

    data, seq_length = recommended("--lengths sft_short")
    assert seq_length == "1021"  # the longest of the list: docs/how-to/decide.md says so, too
    assert data["recommended"]["recompute"] == "none"
    assert (data["inputs"]["seed"], data["inputs"]["max_seqlen"], data["inputs"]["overlong"]) == (0, 131072, "truncate")
    for words, longest in (
        ("--lengths sft_short --max-seqlen 500", "500"),
        (f"--lengths {lengths}", "1022"),
        (f"--lengths {lengths} --max-seqlen 400", "400"),
        (f"--lengths {lengths} --max-seqlen 1000 --overlong drop", "697"),
    ):
        assert recommended(f"{words} --recompute none --max-tokens-per-rank 2048")[1] == longest


@pytest.mark.nightly
def test_a_pool_is_tuned_like_any_policy_and_its_line_has_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """At layouts that have one, each limit and number of chunks tried; the dynamic policy tries its layout, too."""
    space = Space(num_gpus=8, tp_sizes=(1, 2), pp_sizes=(1, 2), vp_sizes=(1, 2), recompute=("full",))
    job = SweepJob(
        batches=(samples_of([60000, *[2000] * 20]),), max_seqlen=60000, model=MODEL, hardware=HARDWARE
    )  # fmt: skip
    found = sweep(space, job, policies=("dynamic", "pool", "with-pool"))
    dynamic, pool, either = (found.best[name] for name in ("dynamic", "pool", "with-pool"))
    assert pool.setting.topology.pp_size == either.setting.topology.pp_size == 2
    assert found.policies["pool"].num_planned >= 3
    assert found.policies["pool"].refused["a pool has servers of at least 2 stages"] >= 2
    assert dynamic.iteration_s <= evaluate(replace(pool.setting, policy="dynamic"), job).iteration_s
    assert either.iteration_s <= 1.0001 * evaluate(replace(pool.setting, policy="with-pool"), job).iteration_s
    for point, use in ((pool, "always"), (either, "auto")):
        assert point.peak_bytes <= job.memory(point.setting).available_bytes
        assert f"--dynamic-cp-pool {use}" in lines_of(point.setting)[1]
    mixtral = settings_of(Topology(num_lanes=2, tp_size=2, pp_size=2, sequence_parallel=True), "full", "pool", space,
                          replace(job, model=load_model("mixtral-8x7b")))  # fmt: skip
    assert mixtral.reason == "attention of this model cannot be tasks of a pool"
    unlike = settings_of(
        Topology(num_lanes=2, tp_size=2, pp_size=3, sequence_parallel=True), "full", "pool", space, job
    )
    assert unlike.reason == "a pool has as many layers on each stage"
    words = "sweep --lengths github --global-batch-size 16 --gpus 16 --tp 4 --pp 1,2 --recompute full --jobs 1"
    assert cli.main([*words.split(), "--policy", "dynamic,balanced,pool,with-pool", "--batches", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"pool .*PP 2", printed)
    assert "with-pool" in printed


@pytest.mark.parametrize(("max_cp_size", "static_cp_size"), [(2, 4), (4, 8)])
def test_what_a_sweep_recommends_can_be_looked_at(max_cp_size, static_cp_size, tmp_path, capsys):
    """By options of a given layout: groups of all sizes would take memory from tokens."""
    topology = Topology(num_lanes=8)
    job = replace(JOB, max_seqlen=9000, batches=JOB.batches[:1])
    space = replace(SPACE, max_cp_size=max_cp_size)
    settings = settings_of(topology, "full", "dynamic", space, job)
    assert {setting.max_cp_size for setting in settings} == {max_cp_size}
    setting = settings[0]
    assert setting.max_tokens_per_rank > settings_of(topology, "full", "dynamic", SPACE, job)[0].max_tokens_per_rank
    expected = evaluate(setting, job)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(sample.seqlen) for sample in job.batches[0]))
    layout = f"--lengths {path} --lanes 8 --recompute full --max-tokens-per-rank {setting.max_tokens_per_rank}"
    layout += f" --cp-comm-type {setting.cp_comm_type}"
    limited = f"{layout} --max-dynamic-cp-size {max_cp_size}"
    planned = json.loads(ran(f"plan {limited} --json -", capsys))
    assert (planned["max_cp_size"], planned["predicted_s"]) == (max_cp_size, expected.iteration_s)
    every = json.loads(ran(f"plan {layout} --json -", capsys))
    assert every["peak_parts_bytes"]["communicators"] > planned["peak_parts_bytes"]["communicators"]

    # The size is one of dynamic groups: static CP is compared at its own.
    words = f"simulate {limited} --static-cp-size {static_cp_size} --policy dynamic,balanced --json -"
    simulated = json.loads(ran(words, capsys))["policies"]
    assert simulated["dynamic"]["mean"]["iteration_s"] == expected.iteration_s
    assert simulated["balanced"]["setting"]["static_cp_size"] == static_cp_size
    static = f"plan {limited} --static-cp-size {static_cp_size} --policy balanced --json -"
    assert json.loads(ran(static, capsys))["cp_histogram"].keys() == {str(static_cp_size)}
