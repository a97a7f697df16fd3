"""A real checkout on CPU ranks without --dynamic-cp, all layouts from one checkpoint: what others compare with."""

import re
import shutil
from pathlib import Path

import pytest

from tests.megatron_lm import test_run as checkout

pytestmark = checkout.pytestmark

VPP = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
DROPOUT = "--hidden-dropout 0.1"


def train(flags: str, *, ranks: int = 2) -> str:
    return checkout.megatron_lm(f"--num-layers 4 {flags}", ranks=ranks)


def figures(log: str) -> tuple[list[float], list[str], list[str]]:
    """Return losses and gradient norms of the steps, and the losses of validation and test."""
    norms = re.findall(r"grad norm: ([0-9.]+)", log)
    return checkout.losses_of_megatron_lm(log), norms, re.findall(rf"lm loss value: {checkout.NUMBER}", log)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step."""
    folder = tmp_path_factory.mktemp("weights")
    train(f"--train-iters 1 --eval-iters 0 --save {folder} --save-interval 1")
    return folder


@pytest.fixture(scope="module")
def by_data(weights: Path) -> tuple[list[float], list[str], list[str]]:
    """Figures of a run on two data-parallel ranks."""
    return figures(train(go_on(weights)))


def go_on(weights: Path) -> str:
    return f"--load {weights} --finetune --no-load-rng"


@pytest.mark.parametrize(
    "flags",
    [VPP, f"{VPP} --dynamic-cp --max-seqlen-per-dp-cp-rank 256", "--tensor-model-parallel-size 2"],
    ids=["vpp", "vpp dynamic", "tp"],
)
def test_layouts_give_the_same_losses(
    weights: Path, by_data: tuple[list[float], list[str], list[str]], flags: str
) -> None:
    # Megatron-LM pads the vocabulary to a multiple of this times the TP size.
    log = train(f"{go_on(weights)} {flags} --make-vocab-size-divisible-by 64")
    losses, norms, evaluated = figures(log)
    assert losses == pytest.approx(by_data[0], rel=2e-6)
    assert norms == by_data[1]
    assert [float(v) for v in evaluated] == pytest.approx([float(v) for v in by_data[2]], rel=2e-6)
    assert len(evaluated) == 2
    assert losses[3] < losses[0] - 0.3


@pytest.mark.parametrize(
    "flags",
    ["--use-distributed-optimizer", f"--use-distributed-optimizer {VPP}", DROPOUT],
    ids=["distributed optimizer", "with vpp", "dropout"],
)
def test_a_resumed_run_goes_on_to_the_last_digit(tmp_path: Path, flags: str) -> None:
    whole = train(f"{flags} --save {tmp_path}/whole --save-interval 2")
    shutil.copytree(tmp_path / "whole" / "iter_0000002", tmp_path / "half" / "iter_0000002")
    (tmp_path / "half" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(f"{flags} --load {tmp_path}/half")
    losses, norms, evaluated = figures(whole)
    first, second = checkout.losses_of_megatron_lm(resumed, 2)
    assert first == losses[2]
    assert second == pytest.approx(losses[3], abs=2e-6)
    assert re.findall(r"grad norm: ([0-9.]+)", resumed) == norms[2:]
    assert re.findall(rf"lm loss value: {checkout.NUMBER}", resumed) == evaluated
