"""The token limit of a run follows from memory, or is refused, before anything is built."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dynamic_cp
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import DataParallel, Problem
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.dynamic_cp.measuring import free_bytes
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import planned_runtime
from tests.trainer.commandline import command_line
from tests.trainer.training_ranks import losses, run_command, train

CPU = load_hardware("cpu")


def limit_of(extra, hbm_bytes, world_size=4):
    settings = parse_args(command_line(extra), world_size)
    shape = model_shape(settings.model, 264)
    return planned_runtime.max_tokens_per_rank(settings.planning, shape, replace(CPU, hbm_bytes=hbm_bytes))


def needed_bytes(extra, tokens, cp_size, distributed_optimizer=False):
    settings = parse_args(command_line(extra), 4)
    planning = settings.planning
    model = MemoryModel(
        Problem(
            topology=planning.topology, model=model_shape(settings.model, 264), hardware=CPU,
            options=planning.used(planning.options(tokens)),
            data_parallel=DataParallel(distributed_optimizer=distributed_optimizer),
        )
    )  # fmt: skip
    return max(stage.total_bytes for stage in model.peak_at(tokens, cp_size))


AUTO = "--dynamic-cp --max-seqlen-per-dp-cp-rank auto"


def test_auto_is_the_largest_limit_that_is_not_refused():
    limit = limit_of(AUTO, 6e6)
    assert 32 <= limit < 4096
    accepted = f"--dynamic-cp --max-seqlen-per-dp-cp-rank {limit}"
    assert limit_of(accepted, 6e6) == limit
    with pytest.raises(MemoryLimitError, match=rf"{limit + 2} tokens per rank .* needs 0\.01 GB .* available"):
        limit_of(f"--dynamic-cp --max-seqlen-per-dp-cp-rank {limit + 2}", 6e6)


def test_without_dynamic_cp_only_the_static_groups_count():
    for cp_size in (1, 4):
        extra = f"--context-parallel-size {cp_size} --max-seqlen-per-dp-cp-rank auto"
        limit = limit_of(extra, 9e6)
        assert needed_bytes(extra, limit, cp_size) <= 0.92 * 9e6 < needed_bytes(extra, limit + 2, cp_size)


def test_what_does_not_fit_is_refused_with_both_numbers_and_remedies():
    with pytest.raises(MemoryLimitError) as caught:
        limit_of("--dynamic-cp --max-seqlen-per-dp-cp-rank 8000000", 80e9)
    message = str(caught.value)
    for part in ("8000000 tokens per rank at CP size 1", " GB on pipeline stage 0, 73.60 GB are available", "cpu has"):
        assert part in message
    remedies = ("lower max_tokens_per_rank (--max-seqlen-per-dp-cp-rank)", "recompute more", "--dynamic-cp-hardware")
    for remedy in remedies:
        assert remedy in message
    assert caught.value.needed_bytes > caught.value.available_bytes == 0.92 * 80e9
    with pytest.raises(MemoryLimitError, match="--dynamic-cp-hardware"):
        limit_of(AUTO, 3e6)
    # The default limit, one sample of --seq-length, is looked at too.
    with pytest.raises(MemoryLimitError, match="128 tokens per rank at CP size 1"):
        limit_of("", 3e6)


def test_unknown_memory_refuses_auto_and_nothing_else():
    assert limit_of("--dynamic-cp --max-seqlen-per-dp-cp-rank 4000000", 0) == 4_000_000
    assert limit_of("", 0) == 128
    with pytest.raises(InvalidInputError, match="auto needs hbm_bytes, which hardware 'cpu' does not state"):
        limit_of(AUTO, 0)


def hardware_file(folder, hbm_bytes):
    """Return the path of the CPU's hardware file with some memory."""
    data = json.loads((Path(dynamic_cp.__file__).parent / "data" / "hardware" / "cpu.json").read_text())
    path = folder / f"{hbm_bytes:.0f}.json"
    path.write_text(json.dumps(data | {"hbm_bytes": {"value": hbm_bytes, "source": "test"}}))
    return str(path)


TRAINING = (
    "--num-layers 4 --mock-data --train-iters 1 --lr-warmup-iters 0 --lr-decay-iters 8 "
    "--make-vocab-size-divisible-by 264"
)


def test_weights_may_lie_in_swap_and_tokens_may_not(monkeypatch):
    said = "MemTotal: 9 kB\nMemAvailable: 3 kB\nSwapTotal: 9 kB\nSwapFree: 4 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: said if str(path) == "/proc/meminfo" else "")
    assert [free_bytes(torch.device("cpu"), swaps=swaps) for swaps in (False, True)] == [3 * 1024, 7 * 1024]


def test_all_ranks_train_at_the_limit_that_memory_gives(tmp_path):
    hardware = f"--dynamic-cp-hardware {hardware_file(tmp_path, 6e6)}"
    auto = train(2, TRAINING, AUTO, hardware)
    limit = limit_of(AUTO, 6e6, world_size=2)
    given = train(2, TRAINING, f"--dynamic-cp --max-seqlen-per-dp-cp-rank {limit}", hardware)
    assert len(auto) == 1
    assert losses(auto) == losses(given)
    assert auto[1].plan.num_microbatches == given[1].plan.num_microbatches


@pytest.mark.by_day("tokens", "token ids")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--dynamic-cp --max-seqlen-per-dp-cp-rank 4096", "4096 tokens per rank at CP size 1 needs"),
        (AUTO, "auto needs hbm_bytes"),
        ("--tokenizer-type NullTokenizer --vocab-size 2000000000", "states of the 2 ranks of this host need 4096."),
        ("--position-embedding-type learned_absolute --max-position-embeddings 2000000000", "2000000000 positions (--"),
        ("--hidden-size 1000000", "make the model smaller (hidden size 1000000, "),
    ],
    ids=["tokens", "auto", "token ids", "positions", "channels"],
)
def test_all_ranks_refuse_what_memory_does_not_hold(tmp_path, words, part):
    hardware = f"--dynamic-cp-hardware {hardware_file(tmp_path, 6e6)}" if "4096" in words else ""
    ended = run_command(2, TRAINING, words, hardware)
    assert [end.code for end in ended] == [2, 2]
    assert part in ended[0].stderr
