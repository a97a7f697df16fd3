"""The trainer with megatron-core's fusions: the losses are those without, and lengths do not compile anything anew."""

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from dynamic_cp.errors import DynamicCPError, InvalidInputError
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import fusions
from tests.distributed import fake_apex
from tests.distributed.harness import run_ranks
from tests.trainer.commandline import command_line
from tests.trainer.training_ranks import _train_one_rank

WORDS = (
    "--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128 --num-workers 0 --dynamic-cp-lookahead 0 --train-iters 2 "
    "--num-layers 2 --lr-warmup-iters 0"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # the second is the CPU, too, on ranks with shims


def count_compilations() -> tuple[Counter[str], set[int]]:
    """Count what is compiled on this rank, by function, without making kernels; note the numbers of tokens."""
    compiled: Counter[str] = Counter()
    tokens: set[int] = set()
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend_of(name: str) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled[name] += 1
            return aot_eager(graph, inputs)

        return backend

    names = {path: list(functions) for path, functions in fusions._PER_TOKEN.items()}
    for path, functions in (names | {fusions._DROPOUT: ["bias_dropout_add_fused_train"]}).items():
        module = importlib.import_module(path)
        for name in functions:
            setattr(module, name, torch.compile(getattr(module, name).__wrapped__, backend=backend_of(name)))
    mark = fusions._of_any_length

    def note_and_mark(tensor: torch.Tensor) -> torch.Tensor:
        tokens.add(len(tensor))
        return mark(tensor)

    fusions._of_any_length = note_and_mark
    return compiled, tokens


def train_and_count(words: list[str]) -> tuple[dict[int, float], Counter[str], set[int]]:
    compiled, tokens = count_compilations()
    losses = {iteration: record.loss for iteration, record in _train_one_rank(words).items()}
    return losses, compiled, tokens


def losses_of(words: list[str], prepare: Any = None) -> dict[int, float]:
    if prepare is not None:
        prepare()
    return {iteration: record.loss for iteration, record in _train_one_rank(words).items()}


LOSS = ("calculate_logits_max", "calculate_predicted_logits", "calculate_cross_entropy_loss", "calculate_gradients")


@pytest.mark.by_day("full_recompute")
@pytest.mark.parametrize(
    ("words", "flags", "expected"),
    [
        (
            "--bf16 --eval-iters 1 --eval-interval 2 --split 90,9,1",
            "--bias-swiglu-fusion --bias-dropout-fusion --cross-entropy-loss-fusion",
            Counter(["swiglu", "swiglu_back", "bias_dropout_add_fused_train", *LOSS]),
        ),
        (
            "--recompute-granularity full",
            "--bias-swiglu-fusion --bias-dropout-fusion",
            # Once more than on a GPU for SwiGLU: the shims of CPU ranks are off while a layer is computed again.
            Counter(["swiglu", "swiglu", "swiglu_back", *["bias_dropout_add_fused_train"] * 2]),
        ),
    ],
    ids=["bf16_evaluation", "full_recompute"],
)
def test_each_function_is_compiled_once_for_all_lengths(words: str, flags: str, expected: Counter[str]) -> None:
    plain = run_ranks(1, losses_of, command_line(WORDS, words))[0]
    ((fused, compiled, tokens),) = run_ranks(1, train_and_count, command_line(WORDS, words, flags))
    assert len(tokens) >= 3, "micro-batches of one length show nothing"
    assert compiled == expected
    assert sorted(fused) == [1, 2]
    assert fused == pytest.approx(plain, rel=1e-3 if "--bf16" in words else 1e-6)


def as_eager_functions() -> None:
    torch.compiler.set_stance("force_eager")


def take_another_cross_entropy() -> None:
    """In the place of TransformerEngine's: it has the interface of megatron-core's wrapper."""

    def te_parallel_cross_entropy(logits: Any, labels: Any, group: Any, is_cg_capturable: bool) -> torch.Tensor:
        assert labels.shape == logits.shape[:2]
        assert labels.stride() == (labels.size(1), 1)
        assert group.size() == 2
        assert not is_cg_capturable
        return vocab_parallel_cross_entropy(logits, labels)

    language_module.te_parallel_cross_entropy = te_parallel_cross_entropy


@pytest.mark.nightly
def test_a_fused_loss_is_the_loss_on_shards_of_the_vocabulary() -> None:
    words = command_line(WORDS, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel")
    plain = run_ranks(2, losses_of, words)
    fused = [*words, "--cross-entropy-loss-fusion"]
    assert run_ranks(2, losses_of, fused, as_eager_functions) == [pytest.approx(one, rel=1e-6) for one in plain]
    by_te = run_ranks(2, losses_of, [*fused, "--cross-entropy-fusion-impl", "te"], take_another_cross_entropy)
    assert by_te == plain


def train_with_accumulation(words: list[str]) -> tuple[dict[int, float], int]:
    fake_apex.install()
    losses = losses_of(words)
    return losses, len(fake_apex.calls)


@pytest.mark.nightly
def test_accumulating_in_products_trains_alike() -> None:
    """bfloat16 gradients are rounded before they are added without, after all were added with the fusion."""
    words = command_line(WORDS, "--use-distributed-optimizer --overlap-grad-reduce --bf16")
    plain = run_ranks(2, losses_of, words)[0]
    for losses, number in run_ranks(2, train_with_accumulation, [*words, "--gradient-accumulation-fusion"]):
        assert losses == pytest.approx(plain, rel=1e-3)
        assert number > 2 * 9, "nine matrices, two steps"


def choose_on_this_rank(words: list[str], device: torch.device, apex_on: tuple[int, ...]) -> str:
    """Return what is said at start: the choice, or the name and text of the error."""
    if dist.get_rank() in apex_on:
        fake_apex.install()
    fusions.has_triton = lambda: True
    try:
        return fusions.choose(parse_args(words, dist.get_world_size()).model, device).describe()
    except DynamicCPError as error:
        return f"{type(error).__name__}: {error}"


def choices(extra: str, device: torch.device = CUDA, apex_on: tuple[int, ...] = (0, 1)) -> str:
    said = run_ranks(2, choose_on_this_rank, command_line(WORDS, extra), device, apex_on, timeout_s=30)
    assert [line.partition("(this rank")[0] for line in said] == [said[0].partition("(this rank")[0]] * 2
    return said[0]


def test_what_is_fused_and_why_not_is_said_in_one_line() -> None:
    gpu = choices("--no-masked-softmax-fusion --no-rope-fusion")
    assert gpu.startswith("fusions: weight gradients, SwiGLU, dropout; off: cross entropy (no --cross-entropy-loss-fus")
    without = choices("--no-bias-swiglu-fusion", apex_on=())
    assert without.startswith(
        "fusions: dropout; off: weight gradients (apex's fused_weight_gradient_mlp_cuda cannot be"
    )
    assert "SwiGLU (--no-bias-swiglu-fusion)" in without
    on_cpu = choices("", CPU)
    assert on_cpu.startswith("fusions: none; off: weight gradients, SwiGLU, dropout (CPU ranks, unless a flag asks")


def test_ranks_that_differ_in_what_is_installed_fail_alike() -> None:
    assert choices("", apex_on=(0,)).startswith("DisagreementError: ranks disagree on fused kernels (apex, ")
    asked = choices("--gradient-accumulation-fusion", apex_on=(0,))
    assert asked.startswith("InvalidInputError: --gradient-accumulation-fusion cannot be had: apex's")
    assert "(rank 1)" in asked
    assert choices("--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te").startswith(
        "InvalidInputError: "
    )


def wrong_kernel(error: Exception | None) -> str:
    fake_apex.install()
    right = fake_apex.wgrad_gemm_accum_fp32

    def wrong(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        if error is not None:
            raise error
        right(inputs, grads, main_grad.zero_())

    fusions.core_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 = wrong
    with pytest.raises(InvalidInputError) as caught:
        fusions.check_kernel(CPU, torch.bfloat16)
    return str(caught.value)


def test_a_kernel_of_another_build_is_noticed_at_start() -> None:
    assert "is off by 1.0" in run_ranks(1, wrong_kernel, None)[0]
    said = run_ranks(1, wrong_kernel, RuntimeError("CUDA error: no kernel image\nis available"))[0]
    assert "no kernel image is available" in said
    assert "--no-gradient-accumulation-fusion" in said


def test_gelu_is_not_fused_where_nobody_asks() -> None:
    words = [word for word in command_line() if word != "--swiglu"]
    assert parse_args([*words, "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"], 1).model.bias_gelu_fusion is False
