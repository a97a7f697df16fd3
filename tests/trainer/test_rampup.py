"""A run whose global batches grow: learning rate, plans and data follow, and a resumed run goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line
from tests.trainer.training_ranks import losses, train

RAMP = "--rampup-batch-size 4 4 12"
DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64"


def settings_of(flags: str) -> Any:
    words = command_line("--lr-warmup-iters 0", flags)
    if "--train-samples" in flags:
        index = words.index("--train-iters")
        del words[index : index + 2]
    return parse_args(words, 2)


def test_the_schedule_counts_samples_of_the_ramp() -> None:
    """Sizes 4, 4, 8 (8 consumed: two of the two shares of 6 are one), 12, ..."""
    settings = settings_of(f"{RAMP} --lr-warmup-iters 2 --lr-decay-iters 5")
    training, optimizer = settings.training, settings.optimizer
    sizes = [training.batch_sizes.at(consumed) for consumed in (0, 4, 8, 16, 28)]
    assert sizes == [4, 4, 8, 12, 12]
    assert (training.train_iters, training.train_samples) == (8, 4 + 4 + 8 + 5 * 12)
    assert (optimizer.lr_warmup_samples, optimizer.lr_decay_samples) == (8, 40)
    training = settings_of(f"{RAMP} --train-samples 30").training
    assert (training.train_iters, training.train_samples, training.train_samples_left_out) == (4, 28, 2)
    with pytest.raises(InvalidInputError, match="--train-samples 3 is less than the 4 that --rampup-batch-size begins"):
        settings_of(f"{RAMP} --train-samples 3")


@pytest.mark.nightly
def test_a_run_that_grows_resumes_where_it_was(uninterrupted: Any, resumed: Any) -> None:
    """The planner is two steps ahead, and a replica draws the same samples: the ramp is a function of what was used."""
    words = f"{DYNAMIC} {RAMP}"
    records = resumed(words, rel=0.0, abs=0.0)
    assert [records[iteration].num_samples for iteration in sorted(records)] == [8, 12]
    static = train(2, words.replace("--dynamic-cp", "--context-parallel-size 2"), "--train-iters 4 --lr-decay-iters 8")
    assert [static[iteration].num_samples for iteration in sorted(static)] == [4, 4, 8, 12]
    assert losses(static) == pytest.approx(uninterrupted(words, 2), rel=2e-5)
