"""A real core_v0.16.1 checkout trains on CPU ranks, and its losses are those of what it must be equal to.

MEGATRON_LM=/path/to/Megatron-LM python -m pytest tests/megatron_lm/test_run.py

Each run imports Megatron-LM on 4 ranks: minutes on 2 cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM does not name a Megatron-LM checkout of core_v0.16.1"),
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
LENGTHS = (
    '{"mode": "distribution", "type": "lognormal", "min_seq_len": 8, "max_seq_len": 257, '
    '"mean_seq_len": 100, "lognormal_sigma": 1.2}'
)
SCRIPT = ["-m", "megatron.dynamic_cp.run", f"{CHECKOUT}/pretrain_gpt.py"]
NUMBER = r"([0-9.]+E[+-][0-9]+)"


def ended(
    script: list[str], flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Return how a job ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return subprocess.run(
        [*command, *script, *flags.split(), *more],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )


def run(script: list[str], flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()) -> str:
    """Return what a job prints."""
    done = ended(script, flags, ranks=ranks, more=more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def megatron_lm(flags: str, *, ranks: int = 4, more: tuple[str, ...] = ()) -> str:
    return run(SCRIPT, f"{SHARED} {ON_CPU} {flags}", ranks=ranks, more=more)


def losses_of_megatron_lm(log: str) -> list[float]:
    """Return the loss of each step; Megatron-LM prints the mean of the first two steps as the second's."""
    printed = [float(value) for value in re.findall(rf"lm loss: {NUMBER}", log)]
    assert len(printed) == 4, log[-3000:]
    return [printed[0], 2 * printed[1] - printed[0], *printed[2:]]


def losses_of_ours(log: str) -> list[float]:
    losses = [float(value) for value in re.findall(rf"lm loss: {NUMBER}", log)]
    assert len(losses) == 4, log[-3000:]
    return losses


def cp_sizes(log: str) -> list[set[int]]:
    """Return the CP sizes of each step."""
    steps = re.findall(r"buckets by CP size: ([0-9: ]+)\|", log)
    assert len(steps) == 4, log[-3000:]
    return [{int(entry.split(":")[0]) for entry in step.split()} for step in steps]


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
    "layout",
    [
        "",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
    ids=["dp4", "dp2_pp2", "dp2_pp2_vpp2"],
)
def test_equals_our_trainer_on_samples_of_their_own_lengths(layout: str) -> None:
    """The same data, order, plans and weights: the same losses, with several CP sizes in one run."""
    more = ("--varlen-mock-dataset-config-json", LENGTHS)
    flags = f"--dynamic-cp --max-seqlen-per-dp-cp-rank {96 if not layout else 160} --num-layers 4 {layout}"
    theirs = megatron_lm(f"{flags} --use-varlen-dataset", more=more)
    ours = run(["pretrain_gpt.py"], f"{SHARED} --normalization LayerNorm {flags}", more=more)
    assert len(set().union(*cp_sizes(theirs))) >= 2, "the plans do not mix CP sizes"
    assert losses_of_megatron_lm(theirs) == pytest.approx(losses_of_ours(ours), rel=3e-6)
    norms = [re.findall(r"grad norm: ([0-9.]+)", log) for log in (theirs, ours)]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 4


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
    # Megatron-LM prints the mean of the first two steps as the second's.
    losses = [[float(value) for value in re.findall(rf"lm loss: {NUMBER}", log)] for log in (*logs, whole)]
    assert [losses[0][0], losses[1][0], 2 * losses[1][1] - losses[1][0]] == pytest.approx(
        [losses[2][0], *losses[2][2:]], abs=3e-6
    )
