"""Whole runs on forked ranks: what changes the losses and what must not."""

import contextlib
import errno
import itertools
import math
import os
import signal
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import _wrap_exception
from torch.nn import functional

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import AUTO_CHUNK_TOKENS
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.ending import exits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.flags.settings import TrainingSettings
from megatron.trainer.loop.training import Evaluation
from megatron.trainer.reporting.log import StepRecord
from megatron.trainer.setup import run
from tests.distributed.harness import run_ranks
from tests.trainer.commandline import SMALL, command_line
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.test_fusions import WORDS, as_eager_functions, losses_of
from tests.trainer.test_memory import AUTO, limit_of
from tests.trainer.training_ranks import Ended, _command_on_one_rank, _train_one_rank, losses, run_command, train

# Four ranks where it matters that lanes exchange in groups of four, two where it does not.
DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 48"
ON_TWO = DYNAMIC.replace("48", "64")
ON = {2: ON_TWO, 4: DYNAMIC}
STATIC = "--context-parallel-size 2 --mock-data --max-seqlen-per-dp-cp-rank 64"
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 128"
PP2_VPP2 = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--max-seqlen-per-dp-cp-rank 128"
)
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# The order of float32 sums differs between layouts; measured 6e-8 after 8 iterations.
LAYOUT_TOLERANCE = 1e-5
NUM_DROPOUTS = 5
"""Of a pass of two layers: after the embedding, and after attention and MLP of each."""


def test_the_same_seed_gives_bit_equal_losses_and_records_count_real_tokens(uninterrupted):
    first = uninterrupted(ON_TWO, 2)
    records = train(2, ON_TWO, TO_LAST, "--num-workers 1 --exit-interval 3")  # which saves nothing, and packs beside
    assert losses(records) == first[:3]
    other = losses(train(2, ON_TWO, TO_LAST, "--seed 8 --exit-interval 1"))
    assert len(other) == 1
    assert other[0] != first[0]
    assert first[-1] < first[0]
    for record in records.values():
        assert record.plan.num_samples == 12
        assert sum(record.plan.cp_histogram.values()) > 0
        assert record.plan.seqlen_sum <= 12 * 128
        assert 0 <= record.plan.padding_fraction < 1
        assert record.flops > 0
        assert record.plan.predicted_s > 0
        assert record.plan.imbalance >= 1
    # Samples above 64 tokens need more than one lane, so lanes exchange keys and values.
    assert {cp for record in records.values() for cp in record.plan.cp_histogram} > {1}
    assert all((record.exchanged_bytes > 0) == (max(record.plan.cp_histogram) > 1) for record in records.values())


# ranks and words of the run that saves, and of the one that loads, tolerance
RESUMES = [
    (4, "", 4, "", 0.0), (2, SHARDED, 2, SHARDED, 0.0), (4, OVERLAPPED, 4, OVERLAPPED, 0.0),
    (2, "", 2, SHARDED, LAYOUT_TOLERANCE), (4, "", 2, SHARDED, LAYOUT_TOLERANCE),
    (2, SHARDED, 2, "", LAYOUT_TOLERANCE), (4, "", 4, TP2_PP2, LAYOUT_TOLERANCE),
    (2, SHARDED, 4, f"{TP2_SP} {SHARDED}", LAYOUT_TOLERANCE),
    (4, f"--num-layers 4 {TP2_PP2} {SHARDED}", 4, f"{PP2_VPP2} {SHARDED}", LAYOUT_TOLERANCE),
    (2, PP2_VPP2, 2, f"--num-layers 4 {OVERLAPPED}", LAYOUT_TOLERANCE),
]  # fmt: skip


@pytest.mark.by_day("2--2---use-distributed-optimizer")
@pytest.mark.parametrize(("saving", "before", "loading", "after", "tolerance"), RESUMES)
def test_a_resumed_run_gives_the_losses_of_the_uninterrupted_one(resumed, saving, before, loading, after, tolerance):
    words = f"{ON[saving]} {before}".strip()
    resumed(words, after, ranks=saving, on=loading, base=ON[loading], rel=tolerance, abs=0.0)


@pytest.mark.nightly
def test_static_and_dynamic_give_the_same_curve():
    curves = [
        losses(train(2, words, "--train-iters 6 --lr 3e-3 --lr-warmup-iters 1"))
        for words in (ON_TWO, STATIC, f"{STATIC} --static-cp-policy balanced")
    ]
    assert len(curves[0]) == 6
    assert curves[0][-1] < 0.99 * curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=2e-5)


def test_the_same_command_without_dynamic_cp_continues_the_run(resumed):
    resumed(ON_TWO, base=STATIC, rel=LAYOUT_TOLERANCE)


def test_a_run_that_leaves_at_an_interval_has_saved(tmp_path, uninterrupted):
    first = losses(train(2, ON_TWO, TO_LAST, f"--exit-interval {SAVED} --save {tmp_path}"))
    assert first == uninterrupted(ON_TWO, 2)[:SAVED]
    assert (tmp_path / checkpoint_files.TRACKER).read_text() == f"{SAVED}\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        "--recompute-activations --overlap-grad-reduce",
        "--recompute-granularity full --cp-comm-type all_gather",
        "--eval-interval 2 --eval-iters 2 --split 90,10,0",
    ],
)
def test_what_must_not_change_the_losses(uninterrupted, words):
    base = ON_TWO if "--split" not in words else f"{ON_TWO} --split 90,10,0"
    found = losses(train(2, base, TO_LAST, words))
    assert found == pytest.approx(uninterrupted(base, 2), rel=LAYOUT_TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [64, 44])
def test_placed_attention_on_three_lanes_does_not_change_the_losses(uninterrupted, limit):
    """A sample of --seq-length fits two lanes of 64 tokens, and none but all three of 44."""
    words = "--cp-comm-type blocks --dynamic-cp-verify full --dynamic-cp-refine 1"
    records = train(3, ON_TWO.replace("64", str(limit)), TO_LAST, words, SHARDED)
    assert losses(records) == pytest.approx(uninterrupted(ON_TWO, 2), rel=LAYOUT_TOLERANCE)
    placed = [record for record in records.values() if 3 in record.plan.cp_histogram]
    assert placed, "without placements the largest group of three lanes has two"
    assert all(record.exchanged_bytes > 0 for record in placed)


def test_evaluation_and_tensorboard(tmp_path, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = f"{ON_TWO} --split 60,30,10 --eval-interval 2 --eval-iters 1"
    train(2, words, f"--train-iters 3 --log-interval 2 --tensorboard-dir {tmp_path}")
    out = capfd.readouterr().out
    assert out.count("validation loss at iteration") == 2  # at 2 and at the end
    assert out.count("test loss at iteration 3") == 1
    assert out.count("elapsed time per iteration") == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [2]
    values = [event.value for event in events.Scalars("lm loss validation")]
    assert [event.step for event in events.Scalars("lm loss validation")] == [2, 3]
    assert all(math.isfinite(value) for value in values)
    assert values[1] < values[0]


def _evaluate(words: list[str], num_samples: int) -> tuple[list[float], list[int]]:
    """Return the losses of the first half of `num_samples`, of both halves, and of all at once; tokens of each half."""
    built = run.set_up(parse_args(words, dist.get_world_size()))
    settings, half = built.settings, num_samples // 2
    losses = []
    kept = {field.name for field in fields(TrainingSettings)}
    only_parsed = {name: None for name in TrainingSettings.__dataclass_fields__ if name not in kept}
    with contextlib.closing(built):
        for eval_iters, size in ((1, half), (2, half), (1, num_samples)):
            training = replace(settings.training, eval_iters=eval_iters, global_batch_size=size, **only_parsed)
            one = replace(built, settings=replace(settings, training=training))
            validation = Evaluation.of(one, "validation")
            losses.append(validation._loss(validation.stream, len(losses)))
    return losses, [int(validation.stream.global_batch(first, half).seqlens.sum()) for first in (0, half)]


def test_evaluation_weighs_every_token_alike():
    """However many global batches it is cut into, and however many tokens each of them has."""
    (first, both, whole), tokens = run_ranks(2, _evaluate, command_line(SMALL, ON_TWO), 4)[0]
    assert both == pytest.approx(whole, rel=1e-6)
    second = (whole * sum(tokens) - first * tokens[0]) / tokens[1]
    assert (first + second) / 2 != pytest.approx(whole, rel=1e-4), "the mean of the batches' means is another figure"


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [("", ""), ("", SHARDED), (SHARDED, "")])
def test_bf16_trains_and_resumes(uninterrupted, resumed, before, after):
    words = f"{ON_TWO} --bf16 {before}"
    expected = uninterrupted(words, 2)
    assert expected == pytest.approx(uninterrupted(ON_TWO, 2), rel=1e-2)
    assert expected != uninterrupted(ON_TWO, 2)
    resumed(words, f"--bf16 {after}", base=ON_TWO, rel=0.0 if before == after else 1e-4)


DROPOUT = f"{ON_TWO} --hidden-dropout 0.1"


@pytest.mark.of_releases
def test_dropout_resumes_exactly_on_the_same_layout(uninterrupted, tmp_path):
    words = f"{DROPOUT} --train-iters 2 --lr-decay-iters 8"
    expected = losses(train(2, words, f"--save-interval 1 --save {tmp_path}"))
    assert expected != uninterrupted(ON_TWO, 2)[:2]
    (tmp_path / checkpoint_files.TRACKER).write_text("1\n")
    assert losses(train(2, words, f"--load {tmp_path}")) == expected[1:]


@pytest.mark.nightly
def test_random_states_of_another_layout_are_said_not_to_fit(saved_by, capfd):
    run_command(2, DROPOUT, TP2_SP, f"{TO_LAST} --load {saved_by(DROPOUT, 2)}")
    assert capfd.readouterr().out.count("random states do not fit") == 1


def _numbers_at_dropout(words: list[str]) -> list[tuple[float, ...]]:
    """Train one iteration on this rank; return the random numbers that the dropouts of its first pass would draw."""
    real = functional.dropout
    drawn: dict[tuple[float, ...], None] = {}  # torch may call one dropout through another

    def dropout(*args, **options):
        state = torch.get_rng_state()
        drawn[tuple(torch.rand(8).tolist())] = None
        torch.set_rng_state(state)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(functional, "dropout", dropout)
        _train_one_rank(words)
    return list(drawn)[:NUM_DROPOUTS]


@pytest.mark.by_day("-")
@pytest.mark.parametrize(("layout", "tp_ranks_agree"), [("", True), ("--sequence-parallel", False)])
def test_lanes_drop_different_activations(layout, tp_ranks_agree):
    """Tensor-parallel ranks hold the same activations and drop the same, unless sequence parallelism splits them."""
    words = f"{DYNAMIC.replace('48', '128')} --tensor-model-parallel-size 2 {layout}"
    drawn = run_ranks(
        4, _numbers_at_dropout, command_line(SMALL, words, "--hidden-dropout 0.1 --train-iters 1 --lr-warmup-iters 0")
    )
    assert [len(numbers) for numbers in drawn] == [NUM_DROPOUTS] * 4
    for one_lane, another in itertools.product(drawn[:2], drawn[2:]):
        assert not set(one_lane) & set(another)
    for first, second in (drawn[:2], drawn[2:]):
        assert len(set(first) & set(second)) == (NUM_DROPOUTS if tp_ranks_agree else 0)


@pytest.mark.nightly
def test_exit_duration_leaves_after_the_iteration_with_a_checkpoint(tmp_path, capfd):
    records = train(2, ON_TWO, "--exit-duration-in-mins 0 --save", str(tmp_path))
    assert list(records) == [1]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert list(train(2, ON_TWO, "--train-iters 1 --lr-decay-iters 8 --load", str(tmp_path))) == []
    assert "nothing to train: iteration 1 of 1" in capfd.readouterr().out


def test_finetuning_starts_anew_from_the_weights(uninterrupted, saved_by):
    expected = uninterrupted(ON_TWO, 2)
    tuning = f"{ON_TWO} --lr-decay-iters 8 --finetune --load {saved_by(ON_TWO, 2)} --train-iters"
    assert sorted(train(2, tuning, "1 --seed 8")) == [1]
    assert losses(train(2, tuning, "1"))[0] < expected[0], "the same samples, learned from before"


@pytest.mark.nightly
def test_finetuning_may_change_how_far_positions_reach_and_no_weight(tmp_path, capfd):
    two = ON_TWO
    train(2, two, "--train-iters 1 --lr-warmup-iters 0 --save", str(tmp_path))
    longer = DYNAMIC.replace("48", "128") + " --train-iters 1 --lr-warmup-iters 0 --seq-length 256"
    longer += f" --rotary-base 500000 --load {tmp_path}"
    assert list(train(2, longer, "--finetune")) == [1]
    said = capfd.readouterr().out
    assert "--finetune: rotary_base was 10000, it is 500000 now" in said
    assert "--finetune: max_position_embeddings was 128, it is 256 now" in said
    ended = run_command(2, longer, "--finetune --ffn-hidden-size 128")
    assert [one.code for one in ended] == [2, 2]
    assert "ffn_hidden_size = 96, this run has 128: use the same model" in ended[0].stderr
    ended = run_command(2, longer)
    assert [one.code for one in ended] == [2, 2]
    assert "rotary_base = 10000, this run has 500000" in ended[0].stderr


def test_samples_that_fill_no_batch_are_left_out_visibly(monkeypatch, capfd):
    monkeypatch.setattr("tests.trainer.commandline.TRAINING", "--global-batch-size 12 --lr 1e-3 --seed 7")
    assert list(train(2, ON_TWO, "--train-samples 17")) == [1]
    said = "--train-samples is rounded down to 12, 1 iterations of 12 samples: 5 are left out"
    assert capfd.readouterr().out.count(said) == 1


def _train_until_signalled(words: list[str]) -> dict[int, StepRecord]:
    """Train on this rank; rank 1 gets SIGUSR1 during the passes of iteration 3."""
    real, calls = run.run_schedule, []

    def run_schedule(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "run_schedule", run_schedule)
        return _train_one_rank(words)


def test_a_signal_ends_the_run_after_the_iteration_it_came_in(tmp_path):
    words = command_line(SMALL, ON_TWO, "--save", str(tmp_path))
    for records in run_ranks(2, _train_until_signalled, words, timeout_s=100.0):
        assert list(records) == [1, 2, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"


def _disk_full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _command_with_a_full_disk(step: str, words: list[str]) -> Ended:
    """Run the command on this rank; rank 1's disk is full when it writes weights, or unreadable."""
    writes, reads = (FileSystemWriterAsync, "retrieve_write_results"), (FileSystemReader, "read_data")
    owner, name = writes if step == "save" else reads
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exits, "SPEAK_FIRST_S", 0.1)
        if dist.get_rank() == 1:
            result = (lambda _self: _wrap_exception(_caught(_disk_full))) if step == "save" else _disk_full
            patched.setattr(owner, name, result)
        return _command_on_one_rank(words)


def _caught(raises) -> BaseException:
    try:
        raises()
    except OSError as error:
        return error


@pytest.mark.by_day("save")
@pytest.mark.parametrize("step", ["save", "load"])
def test_a_disk_that_refuses_one_rank_ends_all_with_one_message(tmp_path, step):
    words = (ON_TWO, "--lr-decay-iters 8 --train-iters")
    if step == "load":
        train(2, *words, "1 --save", str(tmp_path))
    ended = run_ranks(
        2, _command_with_a_full_disk, step, command_line(SMALL, *words, f"2 --{step}", str(tmp_path)), timeout_s=100.0
    )
    assert [end.code for end in ended] == [2, 2], ended
    said = [end.error for end in ended]
    assert said[0] == said[1]
    for part in (f"--{step} {tmp_path}", "rank 1", "No space left", f"another --{step}"):
        assert part in said[0]
    assert step == "load" or f"the disk of {tmp_path} " in said[0]


RAMP = "--rampup-batch-size 4 4 12"


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
    words = f"{ON_TWO} {RAMP}"
    records = resumed(words, rel=0.0, abs=0.0)
    assert [records[iteration].plan.num_samples for iteration in sorted(records)] == [8, 12]
    static = train(2, words.replace("--dynamic-cp", "--context-parallel-size 2"), "--train-iters 4 --lr-decay-iters 8")
    assert [static[iteration].plan.num_samples for iteration in sorted(static)] == [4, 4, 8, 12]
    assert losses(static) == pytest.approx(uninterrupted(words, 2), rel=2e-5)


CHUNKED_RUN = (
    "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --train-iters 3 --eval-iters 1 --eval-interval 2"
)
CHUNK = "--loss-chunk-tokens 48"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "extra",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--mtp-num-layers 1",
        "--pipeline-model-parallel-size 2 --dynamic-cp-pool always",
        "--bf16 --untie-embeddings-and-output-weights --recompute-granularity full --grad-reduce-in-bf16",
    ],
)
def test_losses_are_those_of_a_run_without_chunks(extra):
    plain, chunked = (losses(train(2, CHUNKED_RUN, extra, more)) for more in ("", CHUNK))
    assert chunked[0] == plain[0]
    # Weights of bf16 round a sum's last digits up or down: six sizes of chunks are up to 1.5e-6 off, on either side.
    assert chunked == pytest.approx(plain, rel=3e-6 if "--bf16" in extra else 1e-6)


@pytest.mark.nightly
def test_chunks_of_a_fused_loss():
    words = command_line(WORDS, "--bf16 --tensor-model-parallel-size 2 --cross-entropy-loss-fusion")
    plain, chunked = (run_ranks(2, losses_of, [*words, *more], as_eager_functions) for more in ([], CHUNK.split()))
    assert chunked == [pytest.approx(one, rel=1e-4) for one in plain]


def test_auto_limits_rise():
    whole, chunked = (limit_of(f"{AUTO} {more}", 8e6) for more in ("", "--loss-chunk-tokens 16"))
    assert chunked > whole


def test_what_chunks_can_be():
    def chunk_of(words, world_size=4):
        return parse_args(command_line(words), world_size).planning.options(64).loss_chunk_tokens

    assert chunk_of("") == chunk_of("--loss-chunk-tokens 0") == 0
    assert chunk_of("--loss-chunk-tokens 300") == 300
    assert chunk_of("--loss-chunk-tokens auto --tensor-model-parallel-size 2") == 2 * AUTO_CHUNK_TOKENS
    assert chunk_of("--bf16 --cross-entropy-loss-fusion --loss-chunk-tokens 8") == 8
