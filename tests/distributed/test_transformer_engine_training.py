"""The trainer with TransformerEngine's own layers: the losses of local ones, and their checkpoints."""

import functools
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.dynamic_cp.attention.te import support
from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop import training
from megatron.trainer.setup import layers
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.real_transformer_engine import extension, quantization
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import NEWEST, PINNED
from tests.trainer.commandline import command_line

WORDS = (
    "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 64 --num-workers 0 --dynamic-cp-lookahead 0 --train-iters 6 "
    "--use-distributed-optimizer --cp-comm-type auto"
)


def train_on_this_rank(words: list[str], impl: str) -> dict[int, float]:
    os.environ["RANK"] = str(dist.get_rank())
    if "--fp8-recipe" in words:
        quantization.install()
    if impl == "transformer_engine":
        layers.choose = lambda *_flags, **_more: LayerChoice(impl=impl, reason="test", left_out=("all_gather",))
    losses = {}
    training.pretrain(
        parse_args(words, dist.get_world_size()),
        on_step=lambda iteration, record: losses.__setitem__(iteration, record.loss),
    )
    assert bool(extension.CALLS) == (impl == "transformer_engine")
    assert bool(quantization.products) == ("--fp8-recipe" in words)
    return losses


def train(impl: str, *extra: str, version: str = PINNED) -> dict[int, float]:
    """Return iteration -> loss on two ranks."""
    run = run_ranks if impl == "local" else functools.partial(run_ranks_with, version)
    return run(2, train_on_this_rank, command_line(WORDS, *extra), impl, timeout_s=200)[0]


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall"
)
ONE_LANE = "--max-seqlen-per-dp-cp-rank 128"
# Model and layout; flags of TransformerEngine's layers.
MODELS = {
    "dense": ("", ""),
    "norms_of_queries": ("--qk-layernorm", ""),
    "multi_token_prediction": ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", ""),
    "experts": (EXPERTS, ""),
    "experts_in_one_product": (EXPERTS, "--moe-grouped-gemm"),
    "shared_experts_behind_a_dense_layer": (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 48 --moe-layer-freq [0,1,1,1] "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-grouped-gemm",
    ),
    "gated_delta_nets_beside_experts": (
        f"{EXPERTS} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 "
        "--attention-output-gate",
        "",
    ),
    "mamba": (
        "--hybrid-override-pattern M*-M --mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 16 "
        "--mamba-num-groups 2",
        "",
    ),
    "pp2": (f"--pipeline-model-parallel-size 2 {ONE_LANE}", ""),
    "tp2_sp": (f"--tensor-model-parallel-size 2 --sequence-parallel {ONE_LANE}", ""),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_run_changes_layers_and_goes_on(tmp_path: Path, name: str) -> None:
    """Local layers for two iterations, TransformerEngine's for two, local ones to the end: one loss curve."""
    model, of_engine = MODELS[name]
    whole = train("local", model)
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    files = f"{model} --save {tmp_path} --load {tmp_path} --exit-interval 2"
    pieces = train("local", files) | train("transformer_engine", files, of_engine) | train("local", files)
    assert pieces == pytest.approx(whole, rel=1e-6)


DELTA_IN_16S = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 8"
)


@pytest.mark.nightly
@pytest.mark.parametrize("version", [PINNED, NEWEST])
@pytest.mark.parametrize(
    ("recipe", "model"),
    [("tensorwise", ""), ("blockwise", ""), ("mxfp8", ""), ("delayed", ""), ("delayed", DELTA_IN_16S)],
    ids=["tensorwise", "blockwise", "mxfp8", "delayed", "delayed_gated_delta_nets"],
)
def test_a_run_in_fp8_resumes_to_the_bit(tmp_path: Path, recipe: str, model: str, version: str) -> None:
    """Numbers are not rounded here; modules in FP8 have more to save."""
    in_fp8 = f"{model} --bf16 --fp8-format hybrid --fp8-recipe {recipe} --train-iters 4"
    whole = train("transformer_engine", in_fp8, f"--save {tmp_path} --save-interval 2", version=version)
    (tmp_path / checkpoint_files.TRACKER).write_text("2")
    resumed = train("transformer_engine", in_fp8, f"--load {tmp_path}", version=version)
    assert resumed == {3: whole[3], 4: whole[4]}


@pytest.mark.by_day("True")
@pytest.mark.parametrize("is_known", [True, False])
def test_no_run_trains_over_an_exchange_that_its_kernel_gets_wrong(is_known: bool) -> None:
    """flash-attn 2 and all_gather: refused by what is known of them, and where that fails by what it computes."""
    with pytest.raises(RankError) as refused:
        run_ranks_with(
            NEWEST, 2, train_on_flash_attn, command_line(WORDS), is_known, kernel="flash-attn 2", timeout_s=200
        )
    says = "flash-attn 2 would run here" if is_known else "with all_gather over 2 lanes the output is off by"
    assert says in str(refused.value)


def train_on_flash_attn(words: list[str], is_known: bool) -> None:
    os.environ["RANK"] = str(dist.get_rank())
    if not is_known:
        support.NOT_SERVED = {}
    layers.choose = lambda *_flags, **_more: LayerChoice(impl="transformer_engine", reason="test")
    training.pretrain(parse_args(words, dist.get_world_size()))
