"""FLOPs of a step against what torch counts on a real model, and the per-token loss function."""

from types import SimpleNamespace

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from torch.utils.flop_counter import FlopCounterMode

from dynamic_cp.pricing.work import batch_flops
from dynamic_cp.types import ModelShape
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.step.schedule import forward_step, sum_of_losses
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.parity import Layout

SEQLEN = 48


def shape_of(name: str) -> ModelShape:
    return Layout(1, variant=name, config={"num_layers": 4}).model


VARIANTS = ("llama", "gpt2", "mtp", "latent", "latent_plain")


def counted_flops() -> list[int]:
    initialize_model_parallel()
    return [flops_of(reference.VARIANTS[name]) for name in VARIANTS]


def flops_of(variant: reference.ModelVariant) -> int:
    config = reference.transformer_config(variant)
    spec = reference.stock_layer(config)
    model = reference.gpt_model(config, variant, spec, mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False))
    tokens = torch.ones(1, SEQLEN, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(SEQLEN)[None], None, labels=tokens).sum().backward()
    return counter.get_total_flops()


def test_flops_are_those_of_the_real_model() -> None:
    (counted,) = run_ranks(1, counted_flops, timeout_s=60)
    for name, flops in zip(VARIANTS, counted, strict=True):
        # megatron-core computes all scores, we count the causal half: 3 * (2 + 2) * q * S^2 / 2 a layer.
        shape = shape_of(name)
        masked_half = (shape.num_layers + shape.mtp_num_layers) * 3 * shape.layer.attention_flops_per_token2 * SEQLEN**2
        assert batch_flops(shape, SEQLEN, SEQLEN**2).model_flops == flops - masked_half, name


def test_loss_counts_unmasked_tokens_only() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    losses = torch.tensor([[2.0, 100.0, 3.0, 0.5]], requires_grad=True)
    total, num_tokens, logs = sum_of_losses(mask, losses)
    assert total.item() == 5.5
    assert num_tokens.item() == 3
    assert not num_tokens.is_floating_point(), "the schedules add it to an integer"
    assert logs["lm loss"].tolist() == [5.5, 3.0]
    assert not logs["lm loss"].requires_grad
    total.backward()
    assert losses.grad.tolist() == mask.tolist()


def test_loss_of_padding_only_is_zero() -> None:
    losses = torch.full((1, 4), 7.0, requires_grad=True)
    total, num_tokens, _ = sum_of_losses(torch.zeros(1, 4), losses)
    total.backward()
    assert (total.item(), num_tokens.item()) == (0.0, 0)
    assert losses.grad.abs().sum() == 0


def test_loss_of_bf16_is_summed_in_float32() -> None:
    """A sum in bf16 would stop at 256: 256 + 1 rounds to 256."""
    total, num_tokens, logs = sum_of_losses(torch.ones(1, 1000), torch.ones(1, 1000, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    assert (total.item(), num_tokens.item(), logs["lm loss"].tolist()) == (1000.0, 1000, [1000.0, 1000.0])


def test_forward_step_hands_each_tensor_to_its_argument() -> None:
    calls = []

    def model(tokens, position_ids, attention_mask, *, labels, packed_seq_params):
        calls.append((tokens, position_ids, attention_mask, labels, packed_seq_params))
        return torch.tensor([[1.0, 2.0, 4.0]])

    params = SimpleNamespace(label="step 1, micro-batch 0", positions=torch.arange(3), future=None)
    batch = {
        "tokens": "tokens", "position_ids": "position_ids", "labels": "labels", "packed_seq_params": params,
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0]]),
    }  # fmt: skip
    batches = iter([batch, {}])
    output, loss_func = forward_step(batches, model)
    assert calls == [("tokens", "position_ids", None, "labels", params)]
    assert phase.micro_batch() == ("step 1, micro-batch 0", 3)
    assert loss_func(output)[0].item() == 5.0
    assert list(batches) == [{}], "one micro-batch a call"
