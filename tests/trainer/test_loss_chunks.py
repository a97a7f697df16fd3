"""A run whose losses are computed over chunks of tokens has the losses of one without, and may hold more tokens."""

from __future__ import annotations

import pytest

from dynamic_cp.types import AUTO_CHUNK_TOKENS
from megatron.trainer.flags.arguments import parse_args
from tests.distributed.harness import run_ranks
from tests.trainer.commandline import command_line
from tests.trainer.test_fusions import WORDS, as_eager_functions, losses_of
from tests.trainer.test_memory import AUTO, limit_of
from tests.trainer.training_ranks import losses, train

RUN = "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --train-iters 3 --eval-iters 1 --eval-interval 2"
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
    plain, chunked = (losses(train(2, RUN, extra, more)) for more in ("", CHUNK))
    assert chunked[0] == plain[0]
    assert chunked == pytest.approx(plain, rel=1e-6)


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
