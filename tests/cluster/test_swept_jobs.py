"""What `dynamic-cp sweep --output` writes starts as it is: by torchrun, and by the jobs of examples/slurm."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.parameters import SweepInput
from dynamic_cp.decide.cli.starting import Starter
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep import Point, Space, Sweep, SweepJob, layouts_of, settings_of
from dynamic_cp.decide.sweep.job_files import RUN, beside
from dynamic_cp.decide.sweep.search import Found
from dynamic_cp.decide.sweep.space import Refused
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models import catalog
from dynamic_cp.types import Sample
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.trainer.data import tokenizer
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.flags.settings import Settings
from megatron.trainer.setup.run import data_config
from tests.cluster.conftest import Cluster
from tests.cluster.test_jobs import flags_of, option

CONFIGS = Path(__file__).parent / "published_configs.json"
MODELS: Mapping[str, dict[str, Any]] = {
    "llama-3-70b": {"gpus": 64, "tp": (8,), "pp": (1, 2)},
    "deepseek-v3": {"gpus": 2048, "tp": (1,), "pp": (16,), "ep": (64,)},
    "gpt-oss-120b": {"gpus": 128, "tp": (1, 2), "pp": (1, 2), "ep": (16,)},
    "qwen3-30b-a3b": {"gpus": 64, "tp": (1, 2), "pp": (1,), "ep": (8,)},
    "qwen3-next-80b-a3b": {"gpus": 64, "tp": (1,), "pp": (1, 2), "ep": (16,)},
    "nemotron-3-nano": {"gpus": 64, "tp": (1, 2), "pp": (1,), "ep": (8,)},
}
"""Model -> GPUs, and layouts that fit there."""
LENGTHS = (16000, 9000, 700, 90)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The name of a model, or a file with its config.json as it is published."""
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))
    if request.param not in configs:
        return str(request.param)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configs[request.param]), encoding="utf-8")
    return str(path)


def settings_that_fit(space: Space, job: SweepJob) -> Iterator[Setting]:
    """Yield settings of dynamic CP and of static CP, of each layout the one with the largest limit."""
    for layout in layouts_of(space, job.model):
        assert not isinstance(layout, Refused), layout
        for policy in ("dynamic", "balanced"):
            found = settings_of(*layout, policy, space, job)
            if not isinstance(found, Refused) and found:
                yield found[0]


def found_of(settings: Mapping[str, Setting]) -> Sweep:
    """Return what a sweep that found these settings returns; the first policy is recommended."""
    figures = {"batches_s": (2.0,), "peak_bytes": 7e10, "tokens_per_s_per_gpu": 1.0, "num_microbatches": 1.0}
    points = {name: Point(setting=setting, **figures, largest_cp_size=1) for name, setting in settings.items()}
    policies = {name: Found(best=point, next_best=None, num_planned=1, refused={}) for name, point in points.items()}
    return Sweep(policies=policies, recommended=next(iter(points)), front=tuple(points.values())[:1])


def check_is(settings: Settings, setting: Setting, job: SweepJob) -> None:
    """Check that the trainer runs what the sweep priced: layout, limits, exchange, recomputation and model."""
    planning, options = settings.planning, settings.planning.options()
    assert planning.topology == setting.topology
    assert planning.policy == setting.policy
    assert (options.max_tokens_per_rank, options.cp_comm_types) == (setting.max_tokens_per_rank, setting.cp_comm_types)
    assert (options.recompute, options.recompute_layers) == (setting.recompute, setting.recompute_layers)
    assert options.max_cp_size == setting.max_cp_size
    assert not setting.is_static or options.static_cp_size == setting.static_cp_size
    assert planning.data_parallel == job.data_parallel
    assert (planning.seq_length, settings.training.global_batch_size) == (job.max_seqlen, len(job.batches[0]))
    tokens = tokenizer.build(data_config(settings)).vocab_size
    priced, trained = job.model_of(setting), model_shape(settings.model, tokens)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "vocab_size", "layer_pattern"):
        assert getattr(trained, name) == getattr(priced, name), name
    assert planning.pipeline_layers == setting.pipeline_layers
    if priced.experts is not None:
        assert trained.experts is not None
        assert (trained.experts.num_experts, trained.experts.grouped) == (
            priced.experts.num_experts,
            priced.experts.grouped,
        )


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_lines_and_files_start_what_was_priced(
    model: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each with the trainer's own parser at the job's number of ranks, as torchrun and as SLURM start it."""
    sizes = MODELS[request.node.callspec.params["model"]]
    run = SweepInput.of({**sizes, "model": model, "hardware": "h100", "vpp": (1,), "recompute": "none,full,block"})
    num_gpus, space = run.gpus, run.space
    samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate(LENGTHS))
    job = SweepJob(
        batches=(samples,), max_seqlen=max(LENGTHS), model=run.whole_model, hardware=run.hardware_values,
        data_parallel=run.data_parallel,
    )  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings = list(settings_that_fit(space, job))
    assert {one.policy for one in settings} == {"dynamic", "balanced"}
    about: dict[str, Any] = {
        "job": job, "run": run, "architecture": hugging_face.load_architecture(model),
        "command": "dynamic-cp sweep ...", "shared": ["dynamic-cp simulate"], "resume": None,
    }  # fmt: skip
    pairs = [{one.policy: one for one in settings[i : i + 2]} for i in range(0, len(settings), 2)]
    for number, pair in enumerate(pairs):
        found = found_of(pair)
        path = str(tmp_path / f"job{number}.flags")
        starter = Starter(output=path, **about)
        written = [name for name, _ in starter.write(found)]
        assert written == [path, beside(path, "static")][: len(pair)]
        for name, setting in zip(written, pair.values(), strict=True):
            check_is(parse_args([f"@{name}", *RUN.split()], num_gpus), setting, job)
        line = " ".join(starter.line(found.front[0]))
        words = shlex.split(line[line.index("pretrain_gpt.py") + len("pretrain_gpt.py") :])
        check_is(parse_args([*words, *RUN.split()], num_gpus), found.front[0].setting, job)

    pair = pairs[-1]
    path = str(tmp_path / "job.sbatch")
    Starter(output=path, **about).write(found_of(pair))
    assert f"\n#SBATCH --nodes={num_gpus // 8}\n" in Path(path).read_text(encoding="utf-8")
    starts = [(name, {}) for name in (path, beside(path, "static"))][: len(pair)]
    starts += [("examples/slurm/multi_node.sbatch", {"FLAGS_FILE": name}) for name in written]
    for (script, environment), setting in zip(starts, [*pair.values()] * 2, strict=True):
        (cluster.folder / "calls.jsonl").unlink(missing_ok=True)
        code, output = cluster.run("--nodes=1", script, "--lr", "3e-6", **environment)  # the others start the same
        assert code == 0, output
        (call,) = cluster.launches()
        assert option(call["words"], "--nproc-per-node") == "8"
        started = parse_args(flags_of(call["words"]), num_gpus)
        check_is(started, setting, job)
        assert started.optimizer.lr == 3e-6
        assert started.checkpoints.save == cluster.environment["RUN_DIR"]


def test_a_job_has_its_own_data_and_refuses_a_file_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "job.flags"
    path.write_text(
        "# a comment with 'one quote\n--num-layers 2 --hidden-size 64\n--num-attention-heads '4' --seq-length 64"
    )
    words = ("--nodes=1", "examples/slurm/multi_node.sbatch")
    code, output = cluster.run(*words, FLAGS_FILE=str(path), DATA="/data/prefix", EOD_ID="7")
    assert code == 0, output
    flags = flags_of(cluster.launches()[0]["words"])
    assert flags[:8] == ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
    assert option(flags, "--data-path") == "/data/prefix"
    assert option(flags, "--eod-id") == "7"
    assert "--recompute-granularity" not in flags
    code, output = cluster.run(*words, FLAGS_FILE=str(tmp_path / "absent.flags"))
    assert code == 2
    assert "absent.flags, which cannot be read here" in output


def test_a_sweep_writes_both_settings_and_a_changed_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        "sweep --lengths sft_short --global-batch-size 8 --batches 1 --gpus 8 --tp 4 --pp 1 --recompute none --jobs 1 "
        "--max-tokens-per-rank 2048 --policy dynamic,balanced --set bandwidth_across_nodes=20GB/s --output job.flags"
    )
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out
    text = Path("job.flags").read_text(encoding="utf-8")
    other = next(Path(name) for name in ("job-static.flags", "job-dynamic.flags") if Path(name).exists())
    assert "written: job.flags (" in printed
    assert other.name in " ".join(printed.split())
    first = text.splitlines()[0].removeprefix("# dynamic-cp ")
    assert sorted(first.split()) == sorted(command.split())
    assert "dynamic-cp hardware" not in printed, "the file is written, no command has to write it"
    start = re.search(r"# Start: torchrun .*--nproc-per-node 8 pretrain_gpt.py (@\S+)", text)
    made_up = re.search(r"# Made-up samples: (.*)", text)
    assert start is not None
    assert made_up is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for word in (start[1], f"@{other}"):
        settings = parse_args([word, *made_up[1].split()], 8)
        assert settings.planning.topology.tp_size == 4
        assert settings.planning.hardware == "job-hardware.json"
    assert catalog.load_hardware("job-hardware.json").bandwidth_across_nodes_bytes_per_s == 20e9
    assert (settings.planning.policy == "dynamic") == ("dynamic" in other.name)

    look = printed[printed.index("dynamic-cp simulate ") :].split("\n\n")[0].replace("\\\n", "")
    assert cli.main([*shlex.split(look)[1:], "--json", "seen.json"]) == 0
    seen = json.loads(Path("seen.json").read_text(encoding="utf-8"))
    (policy,) = seen["policies"].values()
    shown_s = re.search(r"best static ([\d.]+) s .* dynamic ([\d.]+) s", " ".join(printed.lower().split()))
    assert shown_s is not None
    assert f"{policy['mean']['iteration_s']:.3f}" in shown_s.groups()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--output job.txt", "ends in '.txt', a file that starts a job is .flags or .sbatch"),
        ("--output nowhere/job.flags", "cannot write nowhere/job.flags"),
        ("--output job.flags --model wan2.1-t2v-14b", "does not train this model"),
        ("--output job.flags --policy megatron-dev", "has no policy megatron-dev"),
        ("--output job.flags --resume job.flags", "--output and --resume are both job.flags"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(f"sweep --lengths github --global-batch-size 8 --gpus 8 {words}".split()) == 2
    assert says in capsys.readouterr().err
    assert list(islice(tmp_path.iterdir(), 1)) == []


WORDS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 5 --mock-data"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read flags from @job.flags: .*No such file"),
        ("--lr '1e-4", "cannot read flags from @job.flags: No closing quotation"),
        (b"\xff\xfe", "cannot read flags from @job.flags: "),
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag 1"),
    ],
)
def test_a_file_of_flags_that_cannot_be_read_is_one_error(
    text: str | bytes | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("job.flags").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInputError, match=says) as raised:
        parse_args(["@job.flags", *WORDS.split()], 1)
    assert "\n" not in str(raised.value)


def test_flags_behind_a_file_win(tmp_path: Path) -> None:
    path = tmp_path / "a b.flags"
    path.write_text(f"# what\n{WORDS} # why\n--seed 3\n", encoding="utf-8")
    assert parse_args([f"@{path}"], 1).optimizer.lr == 1e-3
    assert parse_args([f"@{path}"], 1).training.seed == 3
    assert parse_args([f"@{path}", "--lr", "2e-3"], 1).optimizer.lr == 2e-3
    assert parse_args(["--lr", "2e-3", f"@{path}"], 1).optimizer.lr == 1e-3
