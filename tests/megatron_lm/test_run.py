"""A real checkout trains on CPU ranks, and its losses are those of what it must be equal to: minutes on 2 cores."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.integrations.lm_adaptor.checkout import BATCH_OF_FIELDS, NULL_TOKENIZER_COUNTS_EOD, open_checkout
from megatron.integrations.lm_adaptor.flags import STOCK_SPECS
from tests.megatron_lm.corpora import chat_tokenizer, write_chats

REPOSITORY = Path(__file__).parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM")
pytestmark = [
    pytest.mark.skipif(
        CHECKOUT is None, reason="MEGATRON_LM does not name a Megatron-LM checkout of a supported release"
    ),
    pytest.mark.timeout(900),
]

SHARED = (
    "--distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --tokenizer-type NullTokenizer --vocab-size 127 --position-embedding-type rope "
    "--hidden-dropout 0 --lr 3e-3 --min-lr 3e-4 --lr-decay-style linear --clip-grad 1.0 --weight-decay 0.01 "
    "--seed 1234 --log-interval 1 --num-workers 0 --mock-data --train-iters 4 --global-batch-size 12"
)
# What Megatron-LM needs without TransformerEngine, apex and CUDA.
ON_CPU = (
    "--micro-batch-size 1 --attention-dropout 0 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-persist-layer-norm --use-cpu-initialization --lr-warmup-iters 0 --eval-interval 1000 --eval-iters 1"
)
VERSION = "0" if CHECKOUT is None else open_checkout(Path(CHECKOUT) / "pretrain_gpt.py").version
if NULL_TOKENIZER_COUNTS_EOD.is_in(VERSION):
    ON_CPU = f"--vocab-size 128 {ON_CPU}"  # the ids that SHARED means, as ours and older checkouts count them
ALONE = f"{SHARED} {ON_CPU} --dynamic-cp --use-varlen-dataset --max-seqlen-per-dp-cp-rank 256 --eval-iters 0"
LENGTHS = (
    '{"mode": "distribution", "type": "lognormal", "min_seq_len": 8, "max_seq_len": 257, '
    '"mean_seq_len": 100, "lognormal_sigma": 1.2}'
)
SCRIPT = ["-m", "megatron.dynamic_cp.run", f"{CHECKOUT}/pretrain_gpt.py"]
GATED_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 16 "
    "--linear-value-head-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4 --swiglu --no-bias-swiglu-fusion"
)
PATTERN = (
    "--hybrid-layer-pattern M*-M --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2 --squared-relu "
    "--disable-bias-linear"
)
needs_hybrids = pytest.mark.skipif(
    not BATCH_OF_FIELDS.is_in(VERSION), reason=f"layers of a pattern train in checkouts from {BATCH_OF_FIELDS.since} on"
)
NUMBER = r"([0-9.]+E[+-][0-9]+)"


def ended(
    script: list[str], flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost",
        "--nproc-per-node", str(ranks),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return subprocess.run(
        [*command, *script, *flags.split(), *more], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        timeout=420, check=False,
    )  # fmt: skip


def run(script: list[str], flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()) -> str:
    done = ended(script, flags, ranks=ranks, more=more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def megatron_lm(flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()) -> str:
    script = SCRIPT
    if PATTERN in flags:
        script = [word.replace("_gpt", "_hybrid") for word in SCRIPT] + ["--spec", *STOCK_SPECS[0]]
    return run(script, f"{SHARED} {ON_CPU} {flags}", ranks=ranks, more=more)


def losses_of_ours(log: str, num_steps: int = 4) -> list[float]:
    losses = [float(value) for value in re.findall(rf"lm loss: {NUMBER}", log)]
    assert len(losses) == num_steps, log[-3000:]
    return losses


def losses_of_megatron_lm(log: str, num_steps: int = 4) -> list[float]:
    """Return the loss of each step; Megatron-LM prints the mean of the first two steps as the second's."""
    first, mean, *others = losses_of_ours(log, num_steps)
    return [first, 2 * mean - first, *others]


def cp_sizes(log: str) -> list[set[int]]:
    steps = re.findall(r"buckets: ([cp×0-9 ]+)\|", log)
    assert len(steps) == 4, log[-3000:]
    return [{int(entry.removeprefix("cp").split("×")[0]) for entry in step.split()} for step in steps]


def test_equals_the_checkout_without_dynamic_cp() -> None:
    """Samples of one length: the same losses, validation and test losses, with groups of 2 and 4 lanes."""
    static = megatron_lm("")
    dynamic = megatron_lm("--dynamic-cp --max-seqlen-per-dp-cp-rank 128")
    assert "dynamic CP" not in static
    assert all(sizes <= {2, 4} and sizes for sizes in cp_sizes(dynamic))
    assert losses_of_megatron_lm(dynamic) == pytest.approx(losses_of_megatron_lm(static), rel=2e-6)
    assert losses_of_megatron_lm(dynamic)[3] < losses_of_megatron_lm(dynamic)[0] - 0.3
    evaluated = [re.findall(rf"lm loss value: {NUMBER}", log) for log in (static, dynamic)]
    assert len(evaluated[0]) == 2
    assert [float(v) for v in evaluated[1]] == pytest.approx([float(v) for v in evaluated[0]], rel=2e-6)


@pytest.mark.parametrize(
    "flags",
    [
        "--attention-output-gate --no-rope-freq 2 --use-rope-scaling "
        "--rotary-seq-len-interpolation-factor 2 --recompute-granularity selective --recompute-modules mlp layernorm "
        "--disable-bias-linear",
        "--num-layers 3 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --qk-layernorm",
    ],
    ids=["features", "uneven"],
)
def test_features_equal_the_checkout_without_dynamic_cp(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # megatron-core's gates are compiled, ours are not
    stock = flags.replace("mlp layernorm", "mlp")  # which it cannot recompute without TransformerEngine
    static, dynamic = megatron_lm(stock), megatron_lm(f"{flags} --dynamic-cp --max-seqlen-per-dp-cp-rank 128")
    assert max(set().union(*cp_sizes(dynamic))) > 1
    assert losses_of_megatron_lm(dynamic) == pytest.approx(losses_of_megatron_lm(static), rel=2e-6)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_equal_the_checkout_without_dynamic_cp(ep_size: int, tmp_path: Path) -> None:
    """From its own checkpoint: what experts begin with depends on EP there, and on their number here."""
    # Without a loss that balances them: the stock checkout's follows what is packed together.
    flags = (
        "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-load-balancing-type none "
        f"--moe-token-dispatcher-type alltoall --disable-bias-linear --expert-model-parallel-size {ep_size} "
        "--ckpt-format torch_dist"
    )
    megatron_lm(f"{flags} --train-iters 1 --save {tmp_path} --save-interval 1 --no-save-optim")
    static, dynamic = (
        megatron_lm(f"{flags} --load {tmp_path} --finetune {more}")
        for more in ("", "--dynamic-cp --max-seqlen-per-dp-cp-rank 128")
    )
    assert max(set().union(*cp_sizes(dynamic))) > 1
    assert losses_of_megatron_lm(dynamic) == pytest.approx(losses_of_megatron_lm(static), rel=2e-6)
    norms = [re.findall(r"grad norm: ([0-9.]+)", log) for log in (static, dynamic)]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 4


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--multi-latent-attention --kv-lora-rank 32 --q-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16 --qk-layernorm --disable-bias-linear",
        "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.01 "
        "--expert-model-parallel-size 2",
        f"{GATED_DELTA} --dynamic-cp-state-exchange heads --qk-layernorm --attention-output-gate --disable-bias-linear",
        f"{GATED_DELTA} --dynamic-cp-state-exchange states --tensor-model-parallel-size 2 --sequence-parallel "
        "--make-vocab-size-divisible-by 64",  # Megatron-LM multiplies it by TP
        pytest.param(f"{PATTERN} --pipeline-model-parallel-size 2", marks=needs_hybrids),
    ],
    ids=[
        *("dp4", "dp2_pp2", "dp2_pp2_vpp2", "latents", "latents_biases", "experts_ep2"),
        *("gated_delta", "states_tp2", "pattern_pp2"),
    ],
)
def test_equals_our_trainer_on_samples_of_their_own_lengths(layout: str) -> None:
    """The same data, order, plans and weights: the same losses, with several CP sizes in one run."""
    more = ("--varlen-mock-dataset-config-json", LENGTHS)
    limit = 160 if "pipeline" in layout or "tensor" in layout else 96
    flags = f"--dynamic-cp --cp-comm-type p2p --max-seqlen-per-dp-cp-rank {limit} --num-layers 4 {layout}"
    theirs = megatron_lm(f"{flags} --use-varlen-dataset", more=more)
    ours = run(["pretrain_gpt.py"], f"{SHARED} --normalization LayerNorm {flags}", more=more)
    assert len(set().union(*cp_sizes(theirs))) >= 2, "the plans do not mix CP sizes"
    assert losses_of_megatron_lm(theirs) == pytest.approx(losses_of_ours(ours), rel=3e-6)
    for figure in (r"grad norm: ([0-9.]+)", r"exchanged(?: \(MB\))?: ([0-9.]+)"):
        found = [re.findall(figure, log) for log in (theirs, ours)]
        assert found[0] == found[1]
        assert len(found[0]) == 4


@pytest.mark.parametrize(
    "model", [GATED_DELTA, pytest.param(PATTERN, marks=needs_hybrids)], ids=["gated_delta", "pattern"]
)
def test_both_go_on_with_linear_attention(model: str, tmp_path: Path) -> None:
    """From the checkout's checkpoint, whose tensors have megatron-core's names: the losses of one run of ours."""
    more = ("--varlen-mock-dataset-config-json", LENGTHS)
    flags = (
        f"--dynamic-cp --max-seqlen-per-dp-cp-rank 160 --num-layers 4 --eval-iters 0 {model} --ckpt-format torch_dist"
    )
    megatron_lm(
        f"{flags} --use-varlen-dataset --exit-interval 2 --save {tmp_path} --save-interval 4", ranks=2, more=more
    )
    ours = f"{SHARED} --normalization LayerNorm {flags}"
    logs = [run(["pretrain_gpt.py"], f"{ours} {load}", ranks=2, more=more) for load in ("", f"--load {tmp_path}")]
    whole, resumed = losses_of_ours(logs[0]), losses_of_ours(logs[1], 2)
    assert resumed == pytest.approx(whole[2:], rel=3e-6)
    log = megatron_lm(f"{flags} --use-varlen-dataset --load {tmp_path}", ranks=2, more=more)
    assert losses_of_megatron_lm(log, 2) == pytest.approx(resumed, rel=3e-6)


def test_global_batch_of_any_size_and_a_script_that_imports_the_adaptor(tmp_path: Path) -> None:
    """Links to a checkout with a script of its own, whose first line is the import."""
    assert CHECKOUT is not None
    for name in ("megatron", "gpt_builders.py", "model_provider.py"):
        (tmp_path / name).symlink_to(Path(CHECKOUT) / name)
    script = tmp_path / "my_pretrain_gpt.py"
    source = (Path(CHECKOUT) / "pretrain_gpt.py").read_text(encoding="utf-8")
    script.write_text(f"import megatron.dynamic_cp.megatron_lm\n{source}", encoding="utf-8")
    flags = f"{SHARED} {ON_CPU} --dynamic-cp --use-varlen-dataset --max-seqlen-per-dp-cp-rank 160 --global-batch-size 7"
    log = run([str(script)], flags, ranks=2)
    assert re.findall(r"consumed samples: +([0-9]+)", log) == ["7", "14", "21", "28"]
    assert set(re.findall(r"global batch size: +([0-9]+)", log)) == {"7"}
    # The schedule of 28 samples from 3e-3 to 3e-4, after each step.
    rates = [float(rate) for rate in re.findall(rf"learning rate: {NUMBER}", log)]
    assert rates == pytest.approx([2.325e-3, 1.65e-3, 9.75e-4, 3e-4])


def test_run_that_leaves_early_goes_on_where_it_was(tmp_path: Path) -> None:
    """Twice the same command, each for two iterations, without evaluation; worker processes end with the run."""
    flags = (
        "--dynamic-cp --use-varlen-dataset --max-seqlen-per-dp-cp-rank 160 --eval-iters 0 --exit-interval 2 "
        f"--num-workers 1 --exit-signal-handler --save {tmp_path} --load {tmp_path} --save-interval 100"
    )
    logs = [megatron_lm(flags, ranks=2) for _ in range(2)]
    consumed = [re.findall(r"consumed samples: +([0-9]+)", log) for log in logs]
    assert consumed == [["12", "24"], ["36", "48"]]
    assert "lm loss value" not in "".join(logs)
    whole = megatron_lm("--dynamic-cp --use-varlen-dataset --max-seqlen-per-dp-cp-rank 160 --eval-iters 0", ranks=2)
    parts = [loss for log in logs for loss in losses_of_megatron_lm(log, 2)]
    assert parts == pytest.approx(losses_of_megatron_lm(whole), abs=3e-6)


def test_documents_of_a_real_tokenizer_train_as_in_our_trainer(
    corpora: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """Preprocessed by Megatron-LM's tool, read with its tokenizer: the same losses, and the log says what ends them."""
    folder, prefixes = corpora
    hardware = json.loads((REPOSITORY / "dynamic_cp/data/hardware/cpu.json").read_text())
    (tmp_path / "small.json").write_text(json.dumps({**hardware, "hbm_bytes": {"value": 8e6, "source": "made up"}}))
    flags = (
        f"{SHARED} --dynamic-cp --max-seqlen-per-dp-cp-rank auto --dynamic-cp-hardware {tmp_path}/small.json "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/tokenizer --split 80,10,10 "
        f"--data-path 0.3 {prefixes['a']} 0.7 {prefixes['b']}"
    )
    flags = flags.replace("--mock-data ", "").replace("--tokenizer-type NullTokenizer --vocab-size 127 ", "")
    theirs = run(SCRIPT, f"{flags} {ON_CPU} --use-varlen-dataset --rerun-mode report_stats", ranks=2)
    ours = run(["pretrain_gpt.py"], f"{flags} --normalization LayerNorm", ranks=2)
    assert losses_of_megatron_lm(theirs) == pytest.approx(losses_of_ours(ours), rel=3e-6)
    assert theirs.count("documents end with id 0, the EOD of --tokenizer-type HuggingFaceTokenizer") == 1
    assert theirs.count(f"{prefixes['a']}: 60 .bin/.idx documents, EOD in the data (id 0)") == 3, "once per data set"
    assert theirs.count("--rerun-mode report_stats becomes disabled: a step cannot be run again") == 1
    (limit,) = re.findall(r"([0-9]+) padded tokens per rank and micro-batch \(auto: what the memory", theirs)
    assert f"policy dynamic, {limit} padded tokens per rank" in ours


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets, with which Megatron-LM reads chats, is missing")
def test_chats_train_alike_with_any_cp_size(version: str, tmp_path: Path) -> None:
    write_chats(tmp_path)
    flags = (
        f"{SHARED} {ON_CPU} --dynamic-cp --sft --data-path {tmp_path}/chats.jsonl --split 80,10,10 "
        f"{chat_tokenizer(version, tmp_path)}"
    ).replace("--mock-data ", "")
    flags += " --seq-length 512 --max-position-embeddings 512 --global-batch-size 3"
    alone = run(SCRIPT, f"{flags} --max-seqlen-per-dp-cp-rank 512 --max-dynamic-cp-size 1", ranks=2)
    mixed = run(SCRIPT, f"{flags} --max-seqlen-per-dp-cp-rank 256 --min-dynamic-cp-size 2", ranks=2)
    assert set().union(*cp_sizes(alone)) == {1}
    assert 2 in set().union(*cp_sizes(mixed))
    assert losses_of_megatron_lm(mixed) == pytest.approx(losses_of_megatron_lm(alone), rel=3e-6)


def test_errors_say_where_the_run_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saving = ended(SCRIPT, f"{ALONE} --save {tmp_path}/file/folder --save-interval 2", ranks=1)
    assert saving.returncode != 0
    assert "rank 0 failed (iteration 2, saving):" in saving.stderr, saving.stderr[-3000:]
    (tmp_path / "saved" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "saved" / "iter_0000002" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    loading = ended(SCRIPT, f"{ALONE} --load {tmp_path}/saved", ranks=1)
    assert loading.returncode != 0
    assert "rank 0 failed (loading the checkpoint):" in loading.stderr, loading.stderr[-3000:]


def test_save_that_cannot_write_leaves_no_process(tmp_path: Path) -> None:
    """A process that is left holds the output open; the launcher has ended by then."""
    for name in ("__0_0.distcp", "__0_1.distcp"):
        (tmp_path / "saved" / "iter_0000002" / name).mkdir(parents=True)
    done = ended(SCRIPT, f"{ALONE} --save {tmp_path}/saved --save-interval 2 --ckpt-format torch_dist", ranks=1)
    assert done.returncode != 0
    assert "rank 0 failed (iteration 2, saving):" in done.stderr, done.stderr[-3000:]
    assert re.search("IsADirectoryError|Is a directory", done.stderr), done.stderr[-4500:]


def test_losses_over_chunks_of_tokens() -> None:
    words = "--dynamic-cp --max-seqlen-per-dp-cp-rank 256 --tensor-model-parallel-size 2 --sequence-parallel"
    whole, chunked = (megatron_lm(f"{words} {more}", ranks=2) for more in ("", "--loss-chunk-tokens 32"))
    assert losses_of_megatron_lm(chunked) == pytest.approx(losses_of_megatron_lm(whole), rel=1e-6)
