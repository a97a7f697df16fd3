"""Multi-token prediction on the command line: checked at once, trained, logged and kept by checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.flags.multi_token import FUTURE_LOSS
from megatron.trainer.checkpoints import loading
from megatron.trainer.flags import derive
from megatron.trainer.reporting.log import Interval, dump_entry, iteration_line
from tests.trainer.commandline import SMALL, parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, train

LATER = f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 {SMALL} --mtp-num-layers 2"


def test_checkpoints_know_the_modules() -> None:
    """None is what a checkpoint from before says."""
    plain, none, later = (
        derive.model_identity(parsed(flags).model, 264) for flags in ("", "--mtp-num-layers 0", "--mtp-num-layers 2")
    )
    assert plain == none
    assert later == plain | {"mtp_num_layers": 2}
    with pytest.raises(CheckpointError, match="model mtp_num_layers = None"):
        loading._check_weights_fit(later, plain, "folder")
    assert derive.model_shape(parsed("--mtp-num-layers 2").model, 264).mtp_num_layers == 2


@pytest.mark.nightly
def test_a_resumed_run_is_that_of_another_layout(uninterrupted: Any, saved_by: Any) -> None:
    """Two stages, then one with two lanes: losses of all depths are logged, and go on as they would have."""
    words = f"{LATER} --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128"
    first = uninterrupted(words, 2)
    resumed = train(2, LATER, TO_LAST, f"--load {saved_by(words, 2)}")
    assert losses(resumed) == pytest.approx(first[SAVED:], rel=1e-5)
    record = next(iter(resumed.values()))
    assert {size for record in resumed.values() for size in record.cp_histogram} == {1, 2}
    assert len(record.future_losses) == 2
    assert all(0.5 < loss / record.loss < 2 for loss in record.future_losses)
    line = iteration_line(Interval(records=(record,), world_size=2), iteration=1, train_iters=2, consumed_samples=3)
    for depth, loss in enumerate(record.future_losses, 1):
        assert f"| {FUTURE_LOSS.format(depth)}: {loss:.6E} |" in line
    assert dump_entry(1, record)["future_losses"] == list(record.future_losses)
