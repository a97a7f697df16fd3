"""Losses, log-probs and entropies over chunks of tokens equal those of all at once, and hold logits of a chunk."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.model.chunked_head import ChunkedHead
from megatron.integrations.post_training.megatron_passes import token_log_probs
from tests.distributed import fake_apex, reference
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.parity import TOLERANCE, Layout, assert_equal_to_reference, case_of, run_step
from tests.distributed.test_attention import LargestTensor

TOKENS, HIDDEN, WORDS = 2 * 84, 24, 640

CHUNKS = {"loss_chunk_tokens": 100}
FUSED = {"gradient_accumulation_fusion": True}


def run_fused(*case: Any) -> tuple[Any, int]:
    fake_apex.install()
    return run_step(*case), len(fake_apex.calls)


@pytest.mark.parametrize("variant", ["llama_tied", pytest.param("llama", marks=pytest.mark.nightly)])
def test_chunks_add_their_weight_gradients_by_a_fused_kernel(variant: str, reference_of: Any) -> None:
    case = case_of(reference_of, Layout(1, variant=variant, config=CHUNKS | FUSED))
    ((comparison, num_products),) = run_ranks(1, run_fused, *case)
    assert_equal_to_reference([comparison], case.layout, case.expected)
    assert num_products > (4 * case.layout.num_layers + 1) * case.plan.num_microbatches, "one of each chunk"


def make_head(*, sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> ColumnParallelLinear:
    config = reference.transformer_config(
        reference.LLAMA, tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel, params_dtype=dtype,
    )  # fmt: skip
    table = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    head = ColumnParallelLinear(
        HIDDEN, WORDS, config=config, init_method=lambda weight: weight, bias=False, gather_output=False
    )
    size, rank = dist.get_world_size(), dist.get_rank()
    head.weight.data.copy_(table.chunk(size)[rank])
    return head


def inputs(head: ColumnParallelLinear, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return (this rank's hidden states, labels of all)."""
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=made).to(dtype)
    labels = torch.randint(WORDS, (1, TOKENS), generator=made)
    if head.sequence_parallel:
        hidden = hidden.chunk(dist.get_world_size())[dist.get_rank()]
    return hidden.clone().requires_grad_(), labels


def losses_of(logits: Tensor, labels: Tensor) -> tuple[Tensor]:
    return (vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t(),)


def plain_log_probs(head: ColumnParallelLinear, hidden: Tensor, labels: Tensor, temperature: float) -> list[Tensor]:
    """Return log-probs and entropies of gathered logits, by torch alone."""
    logits = gather_from_tensor_model_parallel_region(head(hidden)[0])[:, 0] / temperature
    every = logits.log_softmax(-1)
    return [every.gather(-1, labels.t()).t(), -(every.exp() * every).sum(-1)[None]]


def results(head: ColumnParallelLinear, function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    """Return what a function gives, and both gradients of a weighed sum of it."""
    hidden, labels = inputs(head, dtype)
    head.weight.grad = None
    outputs = [output.float() for output in function(hidden, labels)]
    weights = [torch.linspace(-1, 2, TOKENS).roll(7 * index) for index in range(len(outputs))]
    torch.stack([(output[0] * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum().backward()
    return [output.detach() for output in outputs] + [hidden.grad, head.weight.grad]


def compare(chunk_tokens: int, *, sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """Return the relative errors of losses, log-probs and entropies with their gradients on this rank."""
    initialize_model_parallel(dist.get_world_size())
    head = make_head(sequence_parallel=sequence_parallel, dtype=dtype)
    pairs = (
        (lambda hidden, labels: losses_of(head(hidden)[0], labels), ChunkedHead(head, losses_of, chunk_tokens)),
        (
            lambda hidden, labels: plain_log_probs(head, hidden, labels, 0.7),
            lambda hidden, labels: token_log_probs(head, hidden, labels, chunk_tokens, temperature=0.7),
        ),
    )
    return [
        [
            ((mine - theirs).float().norm() / theirs.float().norm()).item()
            for theirs, mine in zip(*(results(head, function, dtype) for function in pair), strict=True)
        ]
        for pair in pairs
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("chunk_tokens", [50, pytest.param(1, marks=pytest.mark.nightly)])
def test_log_probs_and_entropies_have_exact_gradients(chunk_tokens: int, sequence_parallel: bool) -> None:
    size = 2 if sequence_parallel else 1

    for losses, log_probs in run_ranks(size, compare_on_rank, chunk_tokens, sequence_parallel):
        assert losses[0] < 1e-7, "but for the rounding of products with fewer rows"
        assert max(*losses, *log_probs) < TOLERANCE


def compare_on_rank(chunk_tokens: int, sequence_parallel: bool) -> list[list[float]]:
    return compare(chunk_tokens, sequence_parallel=sequence_parallel)


def compare_in_bf16() -> list[list[float]]:
    return compare(32, sequence_parallel=False, dtype=torch.bfloat16)


def test_in_bf16_only_sums_of_weight_gradients_are_rounded() -> None:
    ((losses, _),) = run_ranks(1, compare_in_bf16)
    assert losses[:2] == [0.0, 0.0], "losses and gradients of hidden states"
    assert losses[2] < 5e-3


def run_in_buffer(*, takes_flags: bool) -> tuple[bool, float, float]:
    """Return whether nothing is left to add to the buffer, and the errors in bf16 of the buffer and of all at once."""
    initialize_model_parallel()
    exact, plain, head = (
        make_head(sequence_parallel=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    exact.weight.data.copy_(head.weight.data)
    head.weight.main_grad = torch.zeros(WORDS, HIDDEN)
    if takes_flags:
        head.weight.grad_added_to_main_grad = False  # as megatron-core's DDP does before each step
    hidden, labels = inputs(head, torch.bfloat16)
    ChunkedHead(head, losses_of, 16)(hidden, labels)[0].sum().backward()
    for layer in (exact, plain):
        losses_of(layer(hidden.detach().to(layer.weight.dtype))[0], labels)[0].sum().backward()
    expected = exact.weight.grad
    errors = [
        ((found - expected).norm() / expected.norm()).item() for found in (head.weight.main_grad, plain.weight.grad)
    ]
    assert head.weight.grad is not None, "hooks wait for one"
    is_done = head.weight.grad_added_to_main_grad if takes_flags else not head.weight.grad.any()
    return is_done, errors[0], errors[1]


@pytest.mark.parametrize("takes_flags", [False, True])
def test_chunks_add_up_in_the_precision_of_the_gradient_buffer(takes_flags: bool) -> None:
    """And a DDP that takes flags is not handed zeros of the weight's shape to add."""
    ((is_done, error, error_at_once),) = run_ranks(1, partial(run_in_buffer, takes_flags=takes_flags))
    assert is_done
    assert 0 < error < 1.05 * error_at_once


def largest_tensors(chunk_tokens: int) -> tuple[int, int]:
    """Return the elements of the largest tensor that losses, and log-probs, with their gradients make."""
    initialize_model_parallel()
    head, found = make_head(sequence_parallel=False), []
    for function in (
        ChunkedHead(head, losses_of, chunk_tokens),
        lambda hidden, labels: token_log_probs(head, hidden, labels, chunk_tokens),
    ):
        with LargestTensor() as largest:
            results(head, function, torch.float32)
        found.append(largest.num_elements)
    return found[0], found[1]


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    assert max(TOKENS, WORDS) * HIDDEN < 32 * WORDS, "neither hidden states nor the weight are"
    assert run_ranks(1, largest_tensors, 32) == [(32 * WORDS, 32 * WORDS)]
    assert run_ranks(1, largest_tensors, TOKENS) == [(TOKENS * WORDS, TOKENS * WORDS)]


def test_what_cannot_be_is_told() -> None:
    head = SimpleNamespace(weight=torch.ones(2, 2))
    with pytest.raises(InvalidInputError, match="a chunk of 0 tokens is not possible"):
        ChunkedHead(head, losses_of, 0)(torch.ones(1, 1, 2), torch.ones(1, 1))
    with pytest.raises(InvalidInputError, match="temperature is 0, it must be greater than 0"):
        token_log_probs(head, torch.ones(1, 1, 2), torch.ones(1, 1), 8, temperature=0)
