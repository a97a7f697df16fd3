"""A rank, its data, its disk or the store fails: all ranks end soon, say in which phase, and leave nobody behind."""

import functools
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.moe import token_dispatcher

from dynamic_cp.errors import DataError
from dynamic_cp.search import planner_process
from megatron.dynamic_cp.data import prefetch
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.plans import plan_source as planning
from megatron.dynamic_cp.plans import planner
from megatron.dynamic_cp.pool import ticks
from megatron.dynamic_cp.repairs import releases
from megatron.dynamic_cp.step import schedule
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.data import index_once
from megatron.trainer.data.stream import SampleStream
from megatron.trainer.ending import exits
from megatron.trainer.ending.stop_guard import StopGuard
from megatron.trainer.reporting.profiling import Profiling
from megatron.trainer.setup import run
from megatron.trainer.setup.run import Run
from tests import patience
from tests.faults.job import Job, RankEnd
from tests.faults.test_planner_faults import WORDS as WITHOUT_WORKERS
from tests.faults.test_planner_faults import faulty, figures
from tests.trainer.checkpoints import verified
from tests.trainer.commandline import command_line

LIMIT_S = 40.0
WORDS = f"{WITHOUT_WORKERS} --num-workers 1"
NOTICED_S = 8.0
"""Seconds from a rank's death to the end of the others, when their connections or rank 0's store tell them."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(at_call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `real`, which kills this process at its `at_call`-th call."""
    calls = []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == at_call:
            die()
        return real(*args, **options)

    return call


def in_writers(checkpoint: str, act: Callable[[], None]) -> None:
    """Have the process that writes this rank's files of `checkpoint` do something first, then take its time."""
    real, rank_pid = FileSystemWriterAsync.write_preloaded_data, os.getpid()

    def write(*args: Any, **options: Any) -> Any:
        if any(checkpoint in str(bucket[0]) for bucket in (*args, *options.values()) if isinstance(bucket, tuple)):
            assert os.getpid() != rank_pid, "the rank writes by itself"
            act()
            time.sleep(2 * LIMIT_S)
        return real(*args, **options)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


def die_in(phase: str, victim: int, rank: int) -> None:
    """Have rank `victim` killed in a phase of the run."""
    if rank != victim:
        return
    rank_pid = os.getpid()
    if phase == "indexing":
        index_once.index_entries = dying(1, index_once.index_entries)
    elif phase == "reading the index":
        run.build_splits = dying(1, run.build_splits)
    elif phase == "the warm-up":
        planner_process.subprocess = subprocess  # a fresh one: its plan comes after the death
        real = planning.PlanSource.take
        planning.PlanSource.take = lambda *args: (time.sleep(0.5), die(), real(*args))
    elif phase == "waiting for a plan":
        planning.PlanSource._wait_for = dying(4, planning.PlanSource._wait_for)  # the first is the warm-up
    elif phase == "packing":
        prefetch.Packer.take = dying(3, prefetch.Packer.take)
    elif phase == "a pass":
        real_get, calls = schedule.get_forward_backward_func, []

        def get() -> Any:
            calls.append(None)
            if len(calls) == 3:
                threading.Timer(0.01, die).start()
            return real_get()

        schedule.get_forward_backward_func = get
    elif phase == "reducing gradients":
        DistributedDataParallel.finish_grad_sync = dying(3, DistributedDataParallel.finish_grad_sync)
    elif phase == "gathering parameters":
        _ParamAndGradBucketGroup.start_param_sync = dying(3, _ParamAndGradBucketGroup.start_param_sync)
    elif phase == "beginning a checkpoint":
        checkpoint_files.begin = dying(2, checkpoint_files.begin)
    elif phase == "writing a checkpoint":
        in_writers("iter_0000004", lambda: os.kill(rank_pid, signal.SIGKILL))
    elif phase == "naming a checkpoint":  # each writes its manifest and the tracker
        checkpoint_files._write_synced = dying(4, checkpoint_files._write_synced)
    else:
        raise AssertionError(phase)


# phase, victim, what the others say
DEATHS = [
    ("indexing", 0, "starting up: rank 1 cannot reach the job's store"),
    ("reading the index", 1, "starting up: one of 2 ranks ended"),
    ("the warm-up", 0, "starting up: rank 1 cannot reach the job's store"),
    ("waiting for a plan", 0, "iteration 3, plan and samples: "),
    ("waiting for a plan", 1, "iteration 3, plan and samples: one of 2 ranks ended"),
    ("packing", 1, "iteration 3, plan and samples: one of 2 ranks ended"),
    ("a pass", 0, "iteration 3, forward and backward passes"),
    ("a pass", 1, "iteration 3, forward and backward passes"),
    ("reducing gradients", 0, "iteration 3, forward and backward passes, at or after step 3, micro-batch "),
    ("gathering parameters", 1, "iteration 3, the optimizer's step: rank 0: "),
    ("beginning a checkpoint", 0, "iteration 4, saving: rank 1 cannot reach the job's store"),
    ("writing a checkpoint", 1, "iteration 4, saving"),
    ("naming a checkpoint", 0, "iteration 4, saving: rank 1 cannot reach the job's store"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[], dict[int, str]]:
    """What returns the figures of the undisturbed run, which most deaths need not."""

    @functools.cache
    def get() -> dict[int, str]:
        with Job(tmp_path_factory.mktemp("undisturbed"), command_line(WORDS)) as job:
            return without_times(job.wait(LIMIT_S)[0])

    return get


def wait_for_death(job: Job, victim: int) -> float:
    deadline_s = patience.now_s() + LIMIT_S
    while job.processes[victim].is_alive():
        assert patience.now_s() < deadline_s, f"rank {victim} never died:\n{job.said()}"
        time.sleep(0.01)
    return patience.now_s() - job.started_s


def said_by_survivor(ended: list[RankEnd], victim: int, died_s: float) -> str:
    """Return the one line of the rank that was not killed, which ended soon after the other."""
    other = ended[1 - victim]
    assert ended[victim].code == -signal.SIGKILL
    assert other.code == 2, other
    assert other.seconds - died_s < NOTICED_S
    assert "Traceback" not in other.output
    (said,) = re.findall(r"^error.*", other.output, re.MULTILINE)
    return said


def without_times(ended: RankEnd) -> dict[int, str]:
    """Return iteration -> loss and gradient norm."""
    return {iteration: text.split("|")[0] for iteration, text in figures(ended).items()}


@pytest.mark.by_day("a pass-1")
@pytest.mark.parametrize(("phase", "victim", "says"), DEATHS)
def test_the_death_of_a_rank_ends_the_others_at_once(tmp_path, undisturbed, phase, victim, says):
    saving = f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 2" if "checkpoint" in phase else ""
    sharded = "--use-distributed-optimizer" if phase == "gathering parameters" else ""
    with Job(tmp_path, command_line(WORDS, saving, sharded), sabotage=partial(die_in, phase, victim)) as job:
        died_s = wait_for_death(job, victim)
        ended = job.wait(LIMIT_S)
    said = said_by_survivor(ended, victim, died_s)
    assert says in said
    assert not re.search(r"gloo/|typically caused", said), "words for who mends gloo"
    if saving:
        with Job(tmp_path, command_line(WORDS, saving)) as job:
            resumed = job.wait(LIMIT_S)
        assert [end.code for end in resumed] == [0, 0], resumed
        got, known = without_times(resumed[0]), undisturbed()
        assert got == {iteration: known[iteration] for iteration in got}, "goes on where it was saved"
        assert set(got) >= {5, 6}
        assert not list((tmp_path / "saved").glob("*.partial"))


def die_while_serving(at_call: int, rank: int) -> None:
    if rank == 1:
        ticks._Server.serve = dying(at_call, ticks._Server.serve)  # whether or not it computes two nano-batches


@pytest.mark.nightly
def test_a_server_without_tokens_dies_in_a_tick_and_the_others_are_told(tmp_path):
    """The last stage has no micro-batch in the first tick: it only computes for the first one."""
    words = "--num-layers 2 --pipeline-model-parallel-size 2 --dynamic-cp-pool always --max-seqlen-per-dp-cp-rank 128"
    with Job(tmp_path, command_line(WORDS, words), sabotage=partial(die_while_serving, 3)) as job:
        died_s = wait_for_death(job, 1)
        ended = job.wait(LIMIT_S)
    assert re.search(r"iteration \d, forward and backward passes", said_by_survivor(ended, 1, died_s))


def die_while_dispatching(at_call: int, rank: int) -> None:
    if rank == 1:
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        dispatcher.token_dispatch = dying(at_call, dispatcher.token_dispatch)


@pytest.mark.nightly
def test_a_rank_that_shares_experts_dies_in_a_layer_and_the_run_goes_on(tmp_path):
    """The other waits for tokens that never come, ends, and both repeat what an undisturbed run does."""
    experts = (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-router-score-function sigmoid --moe-aux-loss-coeff 0.1 "
        "--moe-router-enable-expert-bias --save-interval 2 --save"
    )
    with Job(tmp_path / "undisturbed", command_line(WORDS, experts, f"{tmp_path}/apart")) as job:
        ended = job.wait(LIMIT_S)
        assert [end.code for end in ended] == [0, 0], ended
        known = figures(ended[0])
    saving = f"{experts} {tmp_path}/saved --load {tmp_path}/saved"
    # One layer, and as many micro-batches in an iteration as its line says.
    calls = sum(int(re.search(r"num_microbatches: (\d+)", known[iteration])[1]) for iteration in (1, 2, 3)) + 1
    with Job(tmp_path / "killed", command_line(WORDS, saving), sabotage=partial(die_while_dispatching, calls)) as job:
        died_s = wait_for_death(job, 1)
        ended = job.wait(LIMIT_S)
    assert "iteration 4, forward and backward passes" in said_by_survivor(ended, 1, died_s)
    with Job(tmp_path / "resumed", command_line(WORDS, saving)) as job:
        resumed = job.wait(LIMIT_S)
    assert [end.code for end in resumed] == [0, 0], resumed
    got = without_times(resumed[0])
    assert min(got) == 3
    assert got == {iteration: known[iteration].split("|")[0] for iteration in got}


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["", "--async-save", "--train-iters 4"], ids=["waits", "beside", "last"])
def test_a_writer_that_is_killed_ends_all_ranks_with_one_message(tmp_path, words):
    """As the kernel does when memory is short: the rank goes on living."""

    def sabotage(rank: int) -> None:
        if rank == 1:
            in_writers("iter_0000004", die)

    saving = f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 2"
    with Job(tmp_path, command_line(WORDS, saving, words), sabotage=sabotage) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, 2], ended
    for end in ended:
        assert re.search(
            r"error.*--save .*checkpoint 4 cannot be written .*rank 1.*killed, or out of memory", end.output
        )
        assert "Traceback" not in end.output
    assert checkpoint_files.latest(str(tmp_path / "saved")).name == "iter_0000002"


@pytest.mark.nightly
def test_the_death_of_rank_0_beside_a_living_store_is_noticed_after_a_signal(tmp_path):
    """As under torchrun, whose agent hosts the store: nothing closes, but the launcher sends SIGTERM."""
    saving = f"--save {tmp_path}/saved --save-interval 2"

    def sabotage(rank: int) -> None:
        exits.GIVE_UP_S = 3.0
        die_in("naming a checkpoint", 0, rank)

    with Job(tmp_path, command_line(WORDS, saving), sabotage=sabotage, own_store=True, launched=True) as job:
        died_s, started_s = wait_for_death(job, 0), time.monotonic()
        ended = job.wait(LIMIT_S)
    assert ended[1].code in (1, 2), ended
    assert time.monotonic() - started_s >= 2.9  # its death was seen a moment after it happened
    assert ended[1].seconds - died_s < 3.0 + NOTICED_S
    assert "iteration 4, saving: rank 0 has not said anything" in ended[1].output


@pytest.mark.nightly
def test_the_death_of_rank_0_in_the_save_after_a_signal_is_noticed(tmp_path):
    """Beside a living store; the launcher's own SIGTERM is the second one then."""

    def sabotage(rank: int) -> None:
        exits.GIVE_UP_S = 3.0
        if rank == 0:
            checkpoint_files.commit = dying(1, checkpoint_files.commit)

    words = command_line(WORDS, f"--save {tmp_path}/saved --train-iters 500")
    with Job(tmp_path, words, sabotage=sabotage, own_store=True, launched=True) as job:
        job.wait_for(0, r"iteration +2/")
        for rank in (0, 1):
            job.signal(rank, signal.SIGTERM)
        died_s = wait_for_death(job, 0)
        ended = job.wait(LIMIT_S)
    assert ended[1].code == 2, ended
    assert ended[1].seconds - died_s < 3.0 + NOTICED_S
    assert "saving: rank 0 has not said anything" in ended[1].output


@pytest.mark.by_day("killed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_store_that_cannot_be_reached_ends_the_job(tmp_path, number):
    limits = "" if number == signal.SIGKILL else "--dynamic-cp-plan-timeout 5 --distributed-timeout-minutes 0.1"

    def sabotage(rank: int) -> None:
        planner.CLOSE_LIMIT_S = planning.CLOSE_LIMIT_S = 1.0

    words = command_line(WORDS, "--train-iters 500", limits)
    with Job(tmp_path, words, own_store=True, sabotage=sabotage) as job:
        job.wait_for(0, r"iteration +3/")
        os.kill(job.store_host.pid, number)
        lost_s = patience.now_s() - job.started_s
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, 2], ended
    assert max(end.seconds for end in ended) - lost_s < 25.0
    said = "cannot reach the job's store" if number == signal.SIGKILL else "job's store|has not said anything"
    # A rank that had its plan when the store was stopped waits for the other one, and cannot know why.
    also = "" if number == signal.SIGKILL else "|did not answer"
    for end in ended:
        assert re.search(rf"error.*: iteration \d+, plan and samples: .*({said}{also})", end.output), end.output
    assert any(re.search(rf"error.*: .*({said})", end.output) for end in ended), [end.output for end in ended]


@pytest.mark.nightly
def test_another_digest_on_one_rank_is_an_error_of_all(tmp_path):
    def sabotage(rank: int) -> None:
        real, of_steps = planning.decode_lane, []

        def decode(message: bytes) -> Any:
            plan = real(message)
            if b'"num_samples":12' in message:  # the warm-up has another number
                of_steps.append(plan)
            if len(of_steps) != 3 or of_steps[-1] is not plan:
                return plan
            return replace(plan, facts=replace(plan.facts, digest="0" * 64))

        if rank == 1:
            planning.decode_lane = decode

    with Job(tmp_path, command_line(WORDS), sabotage=sabotage) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, 2], ended
    for end in ended:
        assert "ranks disagree on the plan of step 3: digests 000000000000000 and " in end.output
    assert sorted(figures(ended[0])) == [1, 2]


@pytest.mark.by_day("1-error2")
@pytest.mark.parametrize(
    ("num_workers", "error"),
    [(0, DataError("planted", sample_id=30)), (1, DataError("planted")), (1, KeyError("planted"))],
)
def test_a_corrupt_sample_of_one_rank_is_an_error_of_all(tmp_path, num_workers, error):
    real = SampleStream.read

    def read(self: SampleStream, sample_id: int) -> Any:
        if 24 <= sample_id < 36:
            raise error
        return real(self, sample_id)

    def sabotage(rank: int) -> None:
        if rank == 1:
            SampleStream.read = read

    with Job(tmp_path, command_line(WORDS, f"--num-workers {num_workers}"), sabotage=sabotage) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, 2], ended
    assert all("planted" in end.output for end in ended)
    assert "(rank 1)" in ended[0].output
    assert sorted(figures(ended[0])) == [1, 2]


def die_while_reading(rank: int) -> None:
    real, rank_pid = SampleStream.read, os.getpid()

    def read(self: SampleStream, sample_id: int) -> Any:
        if 24 <= sample_id < 36:
            assert os.getpid() != rank_pid, "a worker reads"
            die()
        return real(self, sample_id)

    if rank == 1:
        SampleStream.read = read


def test_a_worker_that_dies_while_it_reads_ends_all_ranks(tmp_path):
    with Job(tmp_path, command_line(WORDS), sabotage=die_while_reading) as job:
        ended = job.wait(LIMIT_S)
    assert all(end.code in (1, 2) for end in ended), ended
    between = r"\(pid\(?s?\)? ?\d+\) .*(killed|exited unexpectedly)"
    assert re.search(rf"DataLoader worker ({between}|ended as it sent a pack)", ended[1].output)
    assert re.search(r"DataLoader worker|one of 2 ranks ended|rank 0 failed \(iteration", ended[0].output)


def give_up_soon(_: int) -> None:
    checkpoint_files.WAIT_S = 0.5


@pytest.mark.nightly
def test_two_jobs_do_not_save_into_one_folder_and_a_killed_one_leaves_it_free(tmp_path):
    saved = tmp_path / "saved"
    saving = f"--save {saved} --save-interval 1 --train-iters 500"
    with Job(tmp_path / "first", command_line(WORDS, saving)) as first:
        first.wait_for(0, "saved .*iter_0000001 in")
        with Job(tmp_path / "second", command_line(WORDS, saving), sabotage=give_up_soon) as second:
            ended = second.wait(LIMIT_S)
        holder = rf"process {first.processes[0].pid} on \S+, since [-\d]+ [:\d]+"
        for end in ended:
            assert end.code == 2
            assert "Traceback" not in end.output
            assert re.search(
                rf"error.*: --save {saved}: another job saves there \({holder}\), and did not end within 0\.5 s: "
                "end it, or choose another --save",
                end.output,
            ), end.output
        number = len(re.findall("saved .*iter", first.output(0)))
        first.wait_for(0, rf"saved .*iter_{number + 2:07d} in")
        first.kill(0)
        resumed = f"--load {saved} --train-iters {number + 20} --exit-interval 1"
        with Job(tmp_path / "third", command_line(WORDS, saving, resumed)) as third:
            assert [end.code for end in third.wait(LIMIT_S)] == [0, 0]


def never_close(closer: Any, rank: int) -> None:
    if rank == 0:
        closer.close = lambda _: threading.Event().wait()


@pytest.mark.by_day("DataIteratorWrapper")
@pytest.mark.parametrize("closer", [DataIteratorWrapper, Profiling, Run, StopGuard], ids=lambda one: one.__name__)
def test_a_failing_rank_that_cannot_close_something_still_says_why(tmp_path, closer):
    """As under a launcher, whose signal comes while it closes."""
    sabotage = partial(never_close, closer)
    with Job(tmp_path, command_line(WORDS, "--train-iters 500"), launched=True, sabotage=sabotage) as job:
        job.wait_for(0, r"iteration +3/")
        job.kill(1)
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, -signal.SIGKILL], ended
    limit = f"{exits.CLOSE_ONCE_ASKED_S:g} s"
    assert re.search(rf"error: iteration \d+, .*; then {closer.__name__} did not close within {limit}", ended[0].output)


def _saving_of_common() -> tuple[Any, str]:
    """Return the owner and the name of what writes common.pt; from megatron-core 0.19 on nothing does."""
    if releases.COMMON_BY_FUNCTION.here:
        return serialization, "save_common"
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    return TorchCommonSaveStrategy, "save_common"


def fill_disk(phase: str, saved: Path | None, rank: int) -> None:
    """Let no file grow beyond a few bytes in one phase of one rank; the first checkpoint of `saved` is written."""
    owner, name, victim = {
        "index": (index_once, "index_entries", 0),
        "checkpoint": (FileSystemWriterAsync, "write_preloaded_data", 1),
        "manifest": (checkpoint_files, "commit", 0),
        "common state": (*_saving_of_common(), 0),
    }[phase]
    real = getattr(owner, name)

    def fill(*args: Any, **options: Any) -> Any:
        if saved is not None and checkpoint_files.latest(str(saved)) is None:
            return real(*args, **options)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        try:
            return real(*args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    if rank == victim:
        setattr(owner, name, fill)


@pytest.mark.by_day("checkpoint")
@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("checkpoint", "File too large"),
        ("manifest", "File too large"),
        ("common state", r"a file was cut short \(unexpected pos "),  # as torch has it
    ],
)
def test_a_full_disk_ends_all_ranks_and_keeps_the_older_checkpoint(tmp_path, phase, reason):
    if phase == "common state" and releases.COMMON_AS_OBJECT.here:
        pytest.skip("this megatron-core writes no common.pt: its values are among the tensors")
    saved = tmp_path / "saved"
    words = command_line(WORDS, f"--save {saved} --save-interval 2")
    with Job(tmp_path, words, sabotage=partial(fill_disk, phase, saved)) as job:
        ended = job.wait(LIMIT_S)
    assert all(end.code in (1, 2) for end in ended), ended
    pattern = rf"^error.*cannot be written \((on )?the disk of {saved}.* are free.*{reason}.*--save"
    assert any(re.search(pattern, end.output, re.MULTILINE) for end in ended), ended
    assert not any("Traceback" in end.output for end in ended), ended
    assert checkpoint_files.latest(str(saved)).name == "iter_0000002"
    assert verified(saved / "iter_0000002")["iteration"] == 2


def test_a_full_disk_while_indexing_is_one_error_on_all_ranks(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(40):
        (tmp_path / "data" / f"{number}.txt").write_text("some text " * (1 + number % 9))
    data = f"--split 1,0,0 --data-path {tmp_path}/data --data-cache-path {tmp_path}/cache --train-iters 1"
    words = command_line(WORDS.replace("--mock-data", ""), data)
    with Job(tmp_path / "logs", words, sabotage=partial(fill_disk, "index", None)) as job:
        ended = job.wait(LIMIT_S)
    assert all(end.code in (1, 2) for end in ended), ended
    pattern = r"^error.*its tokens could not be saved \(.*File too large\).*--data-cache-path"
    assert any(re.search(pattern, end.output, re.MULTILINE) for end in ended), ended
    assert not any("Traceback" in end.output for end in ended), ended
    assert not list((tmp_path / "cache").iterdir())


def slow(rank: int, folder: str, slow_s: float) -> None:
    """A planner that takes its time in iteration 3; a signalled rank gives a silent rank 0 three seconds."""
    exits.GIVE_UP_S = 3.0
    faulty(rank, fault="slow", iterations=(3,), folder=folder, slow_s=slow_s)


def saved_at(ended: list[RankEnd], folder: Path) -> int:
    assert [end.code for end in ended] == [0, 0], ended
    last = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert f"leaving after iteration {last} (SIGTERM)" in ended[0].output
    return last


@pytest.mark.nightly
def test_a_signal_while_waiting_for_a_plan_saves_once_the_plan_comes(tmp_path):
    """Rank 0 waits, too, and says so: nobody gives it up although the plan takes longer than GIVE_UP_S."""
    words = command_line(WORDS, f"--save {tmp_path}/saved --train-iters 500")
    with Job(tmp_path, words, sabotage=partial(slow, folder=str(tmp_path), slow_s=6.0)) as job:
        job.wait_for(0, r"iteration +2/")
        time.sleep(0.5)
        for rank in (0, 1):
            job.signal(rank, signal.SIGTERM)
        ended = job.wait(LIMIT_S)
    assert saved_at(ended, tmp_path / "saved") == 3


@pytest.mark.nightly
def test_a_signal_while_rank_0_takes_long_to_save_does_not_spoil_the_checkpoint(tmp_path):
    def sabotage(rank: int) -> None:
        exits.GIVE_UP_S = 3.0  # it speaks every second, on a busy machine a second later
        real = checkpoint_files.commit

        def commit(*args: Any) -> Any:
            print("saving slowly", flush=True)
            time.sleep(5.0)
            return real(*args)

        if rank == 0:
            checkpoint_files.commit = commit

    words = command_line(WORDS, f"--save {tmp_path}/saved --save-interval 2 --train-iters 500")
    with Job(tmp_path, words, sabotage=sabotage) as job:
        job.wait_for(0, "saving slowly")
        for rank in (0, 1):
            job.signal(rank, signal.SIGTERM)
        ended = job.wait(LIMIT_S)
    assert saved_at(ended, tmp_path / "saved") in (2, 3)


def test_a_signal_while_waiting_for_a_dead_rank_0_ends_the_wait(tmp_path):
    sabotage = partial(slow, folder=str(tmp_path), slow_s=30.0)
    with Job(tmp_path, command_line(WORDS), sabotage=sabotage, own_store=True) as job:
        job.wait_for(0, r"iteration +2/")
        time.sleep(1.5)  # both wait, and rank 0 has said so
        job.signal(0, signal.SIGSTOP)  # as dead as can be with its connections open
        job.signal(1, signal.SIGTERM)
        signalled_s = patience.now_s() - job.started_s
        left_s = wait_for_death(job, 1)
        assert left_s - signalled_s < NOTICED_S
        job.kill(0)
        ended = job.wait(LIMIT_S)
    assert "iteration 3, plan and samples: rank 0 has not said anything about" in ended[1].output
    assert ended[1].code == 2
