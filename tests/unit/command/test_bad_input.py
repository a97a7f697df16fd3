"""Every wrong input of every command: one line with the remedy on stderr, status 2, nothing on stdout or on disk."""

from __future__ import annotations

import json
import os

import pytest

from dynamic_cp.decide import cli
from tools.command_goldens import INPUTS

FILES = ["--model", str(INPUTS / "model.json"), "--hardware", str(INPUTS / "hardware.json")]
LENGTHS = ["--lengths", str(INPUTS / "lengths.txt")]
DRAWN = [*LENGTHS, "--global-batch-size", "8"]
COMMANDS = {
    "lengths": ["lengths", LENGTHS[1]],
    "plan": ["plan", *LENGTHS, "--lanes", "4", *FILES],
    "check": ["check", "plan.json"],
    "simulate": ["simulate", *DRAWN, "--lanes", "4", *FILES],
    "sweep": ["sweep", *DRAWN, "--gpus", "4", *FILES, "--jobs", "1"],
    "trace": ["trace", *LENGTHS, "--lanes", "4", *FILES, "--output", "trace.json"],
    "report": ["report", *DRAWN, "--lanes", "4", *FILES, "--output", "report.html"],
    "hardware": ["hardware", "h100"],
    "doctor": ["doctor", "--quick"],
}

# Words after those above (a later option wins); what stderr says.
ANY_BATCH = [
    (["--lengths", "/nowhere.npy"], "cannot read /nowhere.npy: No such file or directory: check the path"),
    (["--lengths", "empty.txt"], "holds 0 lengths, at least 1 is needed"),
    (["--lengths", "latin.txt"], "is not a .txt file of lengths"),
    (["--lengths", "lengths.xls"], "ends in '.xls': give a .npy, .txt, .csv, .jsonl, .parquet, .idx file"),
    (["--lengths", "folder.npy"], "folder.npy"),
    (["--lengths", "gitub"], "is not a workload (did you mean 'github'"),
    (["--lengths", "lognormal:mean=9"], "lognormal"),
    (["--global-batch-size", "0"], "--global-batch-size is 0, 1 to 10000000"),
    (["--global-batch-size", "-4"], "--global-batch-size is -4"),
    (["--global-batch-size", "many"], "Invalid value for '--global-batch-size': 'many' is not a valid integer"),
    (["--global-batch-size", "8", "--seed", "-1"], "error: --seed is -1, the smallest allowed value is 0"),
    (["--global-batch-size", "8", "--max-seqlen", "-5"], "error: --max-seqlen is -5"),
    (["--global-batch-size", "8", "--overlong", "cut"], "Invalid value for '--overlong': 'cut' is not one of"),
    (["--model", "llama3-8b"], "none of the bundled models (did you mean 'llama-3-8b'"),
    (["--model", "/nowhere.json"], "cannot read /nowhere.json"),
    (["--state-exchange", "heads"], "error: --state-exchange heads is for layers with linear attention, and the model"),
    (["--model", "words.json"], "is not JSON"),
    (["--hardware", "h1000"], "none of the bundled hardware (did you mean 'h100'"),
    (["--hardware", "words.json"], "is not JSON"),
    (["--hardware", "cpu"], "hardware 'cpu' gives no hbm_bytes"),
    (["--hardware", "off.json"], "off.json: hbm_bytes is 80 bytes, plausible are 1 MB to 100 TB: if 80 GB is meant"),
    (["--set", "hbm=80"], "--set hbm=80: hbm_bytes is '80', it must be a number with a unit of bytes, such as 80GB"),
    (["--set", "hmb=80GB"], "--set hmb=80GB: hmb is no number of a hardware file (did you mean 'hbm'"),
    (["--set", "hbm=80GB", "--set", "peak=3"], "--set peak=3: peak_flops_per_s is '3', it must be a number with"),
    (["--model", "empty.json"], "empty.json: num_layers is 0, the smallest allowed value is 1"),
    (["--model", "moe.json"], "moe.json: model_type 'dbrx' has experts (moe_num_experts 16), which cannot be priced"),
    (["--model", "mla.json"], "mla.json: model_type 'minicpm3' has multi-head latent attention (kv_lora_rank 256)"),
    (["--ranks-per-node", "0"], "error: --ranks-per-node is 0"),
    (["--lenghts", "x"], "No such option '--lenghts'"),
]
ANY_JOB = [
    (["--lanes", "0"], "error: --lanes is 0, the smallest allowed value is 1: give 1 <= --lanes <= 2147483647"),
    (["--lanes", "-1"], "error: --lanes is -1"),
    (["--lanes", "2000000"], "error: --lanes is 2000000, at most 1048576"),
    (["--tp", "0"], "error: --tp is 0"),
    (["--pp", "0"], "error: --pp is 0"),
    (["--vpp", "0"], "error: --vpp is 0"),
    (["--vpp", "2"], "error: --vpp is 2 but --pp is 1: interleaving needs --pp >= 2"),
    (["--pp", "16"], "--tp 1 --pp 16 --vpp 1: PP x VPP cannot share out the layers (the model has 8 layers, "),
    (["--pp", "5", "--vpp", "3"], "--tp 1 --pp 5 --vpp 3: PP x VPP cannot share out the layers"),
    (["--pp", "4", "--vpp", "3"], "--tp 1 --pp 4 --vpp 3: PP x VPP cannot share out the layers"),
    (["--tp", "3"], "--tp 3 --pp 1 --vpp 1: TP does not divide heads, KV heads or the MLP"),
    (["--tp", "16"], "--tp 16 --pp 1 --vpp 1: TP beyond a node"),
    (["--tp", "16", "--ranks-per-node", "16"], "TP does not divide heads, KV heads or the MLP (the model has 8 layers"),
    (
        ["--tp", "2", "--ranks-per-node", "7"],
        "--tp 2 --pp 1 --vpp 1: TP does not divide the GPUs of a node, so that some groups would cross nodes (the",
    ),
    (["--max-tokens-per-rank", "many"], "'many' is neither a number of tokens nor 'auto'"),
    (["--max-tokens-per-rank", "0"], "error: --max-tokens-per-rank is 0"),
    (["--max-tokens-per-rank", "-1"], "error: --max-tokens-per-rank is -1"),
    (["--max-tokens-per-rank", "64"], "64 per rank): raise --max-tokens-per-rank or --lanes"),
    (["--lanes", "6", "--static-cp-size", "6"], "--static-cp-size 6 is not a power of two"),
    (["--static-cp-size", "3"], "--static-cp-size 3 does not divide --lanes 4"),
    (["--cp-comm-type", "ring"], "Invalid value for '--cp-comm-type'"),
    (["--tp", "2", "--tp-overlap", "all"], "--tp-overlap all is for jobs of --gpus, --lanes 4 is a given layout"),
    (["--recompute", "some"], "Invalid value for '--recompute'"),
    (["--recompute-num-layers", "2"], "says which layers full recomputation repeats, it is none: use full"),
    (["--recompute", "full", "--recompute-num-layers", "0"], "recompute_num_layers is 0, the smallest allowed value"),
    (
        ["--recompute", "full", "--recompute-method", "block", "--recompute-num-layers", "99"],
        " layers of a model chunk: give at most ",
    ),
    (["--mask", "shared_question:1000000x0.2"], "mask shared_question:1000000x0.2 fits no sample: the longest has "),
    (["--mask", "shared_question:4x0.00001"], "tokens of the longest is empty: raise the share"),
    (["--mask", "shared_question:3x1.5"], "the prompt has a share of 1.5 of the tokens"),
    (["--mask", "shared_question:100,30"], "prompt and answers have 130 tokens, the sample "),
    (["--mask", "windowed:3"], "mask 'windowed:3' is unknown: use causal"),
    (["--mask", "lambda:4,0"], "window is 0, the smallest allowed value is 1"),
]
SEVERAL = [(["--batches", "0"], "--batches is 0, 1 to 1000 can be compared"), (["--batches", "-2"], "--batches is -2")]
POLICY = [
    (["--policy", "dynamik"], "policy 'dynamik' is unknown (did you mean 'dynamic'?)"),
    (["--policy", ","], "0 policies are given"),
]
JSON = [
    (["--json", ""], "cannot write to a file without a name"),
    (["--json", "no/such/folder.json"], "cannot write no/such/folder.json: No such file or directory"),
    (["--json", "."], "cannot write .: it is a folder"),
    (["--json", "lengths.xls/x.json"], "cannot write lengths.xls/x.json: Not a directory"),
]
CASES = {
    "lengths": [
        *(
            ([words[1]], says)
            for words, says in ANY_BATCH
            if words[0] == "--lengths" and not words[1].startswith("log")
        ),
        *JSON,
        (["--samples", "0"], "--samples is 0, at least 1 is needed"),
        (["--samples", "99999999999"], "--samples is 99999999999, at most 10000000 can be drawn"),
        (["--samples", "5", "--seed", "-3"], "error: --seed is -3"),
        (["--samples", "5", "--max-seqlen", "0"], "error: --max-seqlen is 0"),
        (["--seed", "3"], "--seed is about drawing a batch"),
        (["--max-seqlen", "100"], "is taken as it is: give --samples, or leave it out"),
        (["--output", "x.txt", "--json", "./x.txt"], "--output and --json are both ./x.txt: give each its own place"),
        (["numbers"], "numbers has no ending that says what it is: give a .npy"),
        (["loop"], "cannot read loop: Too many levels of symbolic links"),
        (["lengths.txt.gz"], "lengths.txt.gz is compressed: unpack it first"),
        (["gzip.txt"], "gzip.txt is not a .txt file of lengths: it is compressed: gunzip it first"),
    ],
    "plan": [
        (["--lanes", "2", "--max-tokens-per-rank", "256"], "allowed group of 2 lanes holds 512 (256 per rank): "),
        (["--output", "."], "cannot write .: it is a folder"), *ANY_BATCH, *ANY_JOB, *JSON,
        (["--output", "no/plan.json"], "cannot write no/plan.json"),
        (["--policy", "best"], "policy 'best' is unknown: use one of dynamic"),
        (["--seed", "1"], "--seed is about drawing a batch, but all of"),
        (["--max-seqlen", "100"], "--max-seqlen is about drawing a batch"),
        (["--overlong", "drop"], "--overlong is about drawing a batch"),
        (["--lengths", "github"], "--lengths github is a workload without a number of samples"),
        (["--lengths", "lognormal:mean=9,sigma=1"], "give --global-batch-size"),
        (["--global-batch-size", "9", "--max-seqlen", "20", "--overlong", "error"], "longer than --max-seqlen 20"),
        (["--max-tokens-per-rank", "auto", "--hardware", "h100", "--model", "llama-2-13b"], "are available (92% of"),
        (["--max-dynamic-cp-size", "8"], "--max-dynamic-cp-size is 8, the largest group of 4 lanes has 4"),
        (["--max-dynamic-cp-size", "3"], "--max-dynamic-cp-size 3 is not a power of two"),
        (["--search", "slow"], "Invalid value for '--search': 'slow' is not one of"),
        (["--ep", "2"], "--tp 1 --pp 1 --vpp 1 --ep 2: EP 2 without experts"),
        (["--ep", "3", "--model", "mixtral-8x7b"], "--ep 3 is not a power of two"),
        (["--ep", "8", "--model", "mixtral-8x7b"], "--ep 8 makes blocks of 8 lanes (TP 1), which do not divide the 4"),
        (["--ep", "4", "--model", "mixtral-8x7b", "--expert-imbalance", "0.5"], "the imbalance of experts is 0.5"),
        (
            ["--model", "wan2.1-t2v-14b", "--mtp-num-layers", "1"],
            "--mtp-num-layers 1: mtp_num_layers is 1 and causal_at",
        ),
        (["--model", "nemotron-3-nano", "--mtp-num-layers", "1"], "--mtp-num-layers 1: layer_pattern MEMEM"),
        (["--model", "llama-3-8b", "--expert-imbalance", "2"], "--expert-imbalance is 2.0, llama-3-8b has no experts"),
        (["--output", "x.json", "--json", "x.json"], "--output and --json are both x.json: give each its own place"),
        (["--output", "-", "--json", "-"], "--output and --json are both -: give each its own place"),
        (["--lanes"], "Option '--lanes' requires an argument (dynamic-cp plan --help lists the options)"),
        (["--model", "none.json"], "none.json is not JSON: it is empty: compare it with "),
        (["--model", "list.json"], "list.json holds a list, an object is needed: compare it with "),
        (["--hardware", "gzip.json"], "gzip.json is not JSON: byte 0x8b in line 1 is not UTF-8"),
        (["--hardware", "twice.json"], "twice.json has 'base' twice in one object: keep one of them"),
    ],
    "check": [
        ([], "cannot read plan.json: No such file or directory"),
        (["more.json"], "Got unexpected extra argument"),
        (["--lengths", "empty.txt"], "cannot read plan.json"),
    ],
    "simulate": [*ANY_BATCH, *ANY_JOB, *SEVERAL, *POLICY, *JSON],
    "sweep": [
        *ANY_BATCH, *SEVERAL, *JSON, (["--gpus", "0"], "error: --gpus is 0, at least 1 is needed"),
        (["--gpus", "12"], "12 GPUs are not a whole number of nodes of 8"),
        (["--tp", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--pp", "0"], "error: --pp is 0, at least 1"),
        (["--max-tokens-per-rank", "0"], "error: --max-tokens-per-rank is 0, at least 1"),
        (["--tp", "3"], "none of the settings can run on 4 GPUs: TP x PP does not divide the GPUs (7)"),
        (["--recompute", "half"], "error: --recompute is half: use some of none, selective, full"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--max-tokens-per-rank", "10000000"], "no token limit fits both memory and the longest sample"),
        (["--policy", "wlb"], "policy 'wlb' is unknown: use some of dynamic"),
    ],
    "trace": [
        *ANY_BATCH, *ANY_JOB, *POLICY, (["--output", "-"], "cannot write -: it is not a file"),
        (["--output", "/dev/null"], "cannot write /dev/null: it is not a file"),
        (["--output", "no/trace.json"], "cannot write no/trace.json"),
        (["--output", "trace.pdf"], "--output trace.pdf ends in '.pdf', a trace is .json or .json.gz: rename it"),
        (["--first-lanes", "5"], "--first-lanes is 5, there are 4 lanes"),
    ],
    "report": [
        *ANY_BATCH, *ANY_JOB, *SEVERAL, *POLICY, (["--output", "no/report.html"], "cannot write no/report.html"),
        (["--output", "report.pdf"], "--output report.pdf ends in '.pdf', a report is .html or .htm: rename it"),
        (["--output", "report"], "--output report ends in nothing, a report is .html or .htm: rename it"),
        (["--run", "folder.npy"], "--lengths says what to simulate, --run is about a run"),
    ],
    "hardware": [
        (["--name", ""], "--name is '', which no table can show: give it a name"),
        (["--name", "a\nb"], r"--name is 'a\nb', which no table can show"),
        (["--set", "hbm"], "--set hbm: give NAME=VALUE"),
        (["--output", "no/mine.json"], "cannot write no/mine.json"),
        (["a100"], "Got unexpected extra argument"),
        (["--output", "x.txt"], "--output x.txt ends in '.txt', a hardware file is .json"),
    ],
    "doctor": JSON,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"12 \xe9\xff 3")
    (tmp_path / "words.json").write_text("five")
    (tmp_path / "lengths.xls").write_text("5")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "numbers").write_text("5")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lengths.txt.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "gzip.txt").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "gzip.json").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "none.json").write_text(" \n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "twice.json").write_text('{"base": "h100", "base": "h200"}')
    (tmp_path / "off.json").write_text('{"base": "h100", "hbm_bytes": {"value": 80, "source": "datasheet"}}')
    model = json.loads((INPUTS / "model.json").read_text())
    (tmp_path / "empty.json").write_text(json.dumps(model | {"num_layers": 0}))
    (tmp_path / "moe.json").write_text('{"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}')
    (tmp_path / "mla.json").write_text('{"model_type": "minicpm3", "kv_lora_rank": 256}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words, capsys, folder):
    """Return the line on stderr of a command that refuses, and leaves nothing."""
    before = sorted(os.listdir(folder))
    status = cli.main(words)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), f"{words}: {err}"
    assert err.startswith("dynamic-cp: error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert sorted(os.listdir(folder)) == before
    return err


@pytest.mark.parametrize("command", CASES)
def test_bad_input(command, folder, capsys):
    assert len(CASES[command]) >= 3
    lines = [(change, says, refused([*COMMANDS[command], *change], capsys, folder)) for change, says in CASES[command]]
    assert [(change, says, err) for change, says, err in lines if says not in err] == []


REMEDIES = [
    # command, what is wrong, what the message says, what to give instead
    ("plan", ["--tp", "3"], "change --tp", ["--tp", "2"]),
    ("plan", ["--pp", "5", "--vpp", "3"], "change --pp or --vpp", ["--pp", "5"]),
    ("plan", ["--ep", "2"], "change --ep", ["--ep", "1"]),
    ("sweep", ["--tp", "3"], "; give other --tp", ["--tp", "2"]),
    ("sweep", ["--ep", "2"], "; give other --ep", ["--ep", "1"]),
    ("sweep", ["--pp", "16", "--gpus", "16"], "; give other --pp", ["--pp", "8", "--gpus", "16"]),
    ("plan", ["--cp-comm-type", "latent"], "use p2p or auto (--cp-comm-type)", ["--cp-comm-type", "p2p"]),
    ("sweep", ["--cp-comm-type", "latent"], "use p2p or auto (--cp-comm-type)", ["--cp-comm-type", "auto"]),
    ("plan", ["--lanes", "20000", "--set", "hbm=9GB"], "exchange by p2p alone (--cp-comm-type)", [
        "--lanes", "20000", "--set", "hbm=9GB", "--cp-comm-type", "p2p"]),
    ("plan", ["--lanes", "20000", "--set", "hbm=9GB"], "lower --lanes", ["--lanes", "64", "--set", "hbm=9GB"]),
    ("sweep", ["--max-tokens-per-rank", "10000000"], ", or give another --max-tokens-per-rank", [
        "--max-tokens-per-rank", "10000"]),
    ("plan", ["--gpus", "4", "--static-cp-size", "5", "--policy", "static"], "; give another --static-cp-size", [
        "--gpus", "4", "--static-cp-size", "4", "--policy", "static"]),
]  # fmt: skip
FEW_JOBS = ["--batches", "1", "--recompute", "none", "--vpp", "1"]


@pytest.mark.by_day("plan-wrong0")
@pytest.mark.parametrize(("command", "wrong", "says", "right"), REMEDIES)
def test_remedies_help(command, wrong, says, right, folder, capsys):
    words = [*COMMANDS[command], *(FEW_JOBS if command == "sweep" else [])]
    if "--gpus" in wrong and "--lanes" in words:
        at = words.index("--lanes")
        del words[at : at + 2]
    assert says in refused([*words, *wrong], capsys, folder)
    assert cli.main([*words, *right]) == 0, capsys.readouterr().err


RECOMPUTED = ["simulate", *LENGTHS, "--gpus", "1", "--model", "llama-3-70b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulat"], "there is no command 'simulat': did you mean simulate?"),
        (["plan", "--lengths", "x.txt"], "Missing option '--lanes'"),
        (
            ["sweep", *DRAWN, "--gpus", "8", "--output", "a.flags", "--output=a.sbatch"],
            "--output is given 2 times (a.flags, a.sbatch), 1 is written: leave out",
        ),
        (["report", "--output", "r.html"], "Missing option '--lengths' (or '--run DIR' for a training run)"),
        (["report", "--output", "r.html", "--run", "folder.npy"], "was the run started with --dynamic-cp-dump?"),
        (["lengths", "folder.npy", "--tokenizer", "."], "--tokenizer reads text files, folder.npy is not one"),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (["--frobnicate"], "No such option '--frobnicate'"),
        (["simulate", "--lengths", "github", "--lanes", "4"], "github is a workload without a number of samples"),
        (["simulate", *DRAWN], "Missing option '--lanes' (a given layout) or '--gpus'"),
        (["plan", *DRAWN, "--gpus", "8", "--lanes", "8"], "leave one of them out"),
        (["plan", *DRAWN, "--gpus", "8", "--max-dynamic-cp-size", "0"], "size is 0, at least 1 is needed"),
        (["trace", *DRAWN, "--gpus", "8", "--first-lanes", "9", "--output", "t.json"], "there are 8 lanes"),
        # They would say nothing of the other modes, or narrow what is tried of "block".
        ([*RECOMPUTED, "--recompute-method", "uniform"], "with --gpus use --recompute full --recompute-method block"),
        ([*RECOMPUTED, "--recompute-num-layers", "1"], "with --gpus use --recompute full --recompute-method block"),
        (["hardware", "h1000"], "none of the bundled hardware (did you mean 'h100'"),
        (["hardware", "--set", "hbm=80GB"], "0 hardware is named, 1 is needed"),
        (["hardware", "--name", "x"], "0 hardware is named, 1 is needed"),
    ],
)
def test_bad_usage(words, says, folder, capsys):
    assert says in refused(words, capsys, folder)


def test_output_is_refused_before_the_work(folder, capsys, monkeypatch):
    def work(*_arguments, **_options):
        raise AssertionError("planned before the output was checked")

    monkeypatch.setattr("dynamic_cp.decide.comparison.compare_policies", work)
    monkeypatch.setattr("dynamic_cp.decide.sweep.sweep", work)
    monkeypatch.setattr("dynamic_cp.search.search.plan_global_batch", work)
    for command in ("plan", "simulate", "sweep"):
        refused([*COMMANDS[command], "--json", "no/x.json"], capsys, folder)
    refused([*COMMANDS["trace"], "--output", "no/x.json"], capsys, folder)
    refused([*COMMANDS["report"], "--output", "no/x.html"], capsys, folder)


@pytest.mark.nightly
def test_devices_stay_devices(folder, capsys):
    assert cli.main([*COMMANDS["simulate"], "--json", "/dev/null"]) == 0
    assert not os.path.isfile("/dev/null")


def test_without_arguments_help_is_shown(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "simulate" in err


def test_an_interrupt_is_no_traceback(monkeypatch, folder, capsys):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dynamic_cp.decide.comparison.compare_policies", interrupted)
    assert cli.main(COMMANDS["simulate"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_partial_is_left_when_writing_fails(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert "No space left on device" in refused([*COMMANDS["lengths"], "--json", "x.json"], capsys, folder)


def test_json_is_strict(folder, capsys):
    assert cli.main([*COMMANDS["simulate"], "--batches", "1", "--json", "-"]) == 0

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(capsys.readouterr().out, parse_constant=refuse)
