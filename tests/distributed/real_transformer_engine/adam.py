"""What TransformerEngine 2.11's FusedAdam calls of its compiled part, in torch (`common/multi_tensor/adam.cu`)."""

from typing import Any

import torch
from torch import Tensor


def multi_tensor_adam(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], *settings: Any) -> None:
    """Step by AdamW, in float32: lists of gradients, parameters, both moments, and main parameters where there are."""
    for grad, parameter, first, second, *main in zip(*lists, strict=True):
        (weights,) = main or (parameter,)
        stepped = _stepped(grad, weights.float(), first, second, *settings)
        weights.copy_(stepped)
        parameter.copy_(stepped)


def multi_tensor_adam_param_remainder(
    chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], *settings: Any
) -> None:
    """As above, where a bfloat16 parameter, rounded to nearest, and an int16 are the halves of a float32."""
    for grad, parameter, first, second, lower in zip(*lists, strict=True):
        assert (parameter.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
        upper = parameter.view(torch.int16).int() - (lower < 0).int()
        whole = ((upper << 16) | (lower.int() & 0xFFFF)).view(torch.float32)
        bits = _stepped(grad, whole, first, second, *settings).view(torch.int32)
        lower.copy_(bits.to(torch.int16))
        parameter.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


def _stepped(
    grad: Tensor, weights: Tensor, first: Tensor, second: Tensor, lr: float, beta_1: float, beta_2: float, eps: float,
    step: int, mode: int, is_corrected: int, decay: float,
) -> Tensor:  # fmt: skip
    """Return the weights after a step, and move both moments."""
    assert mode == 1, "AdamW"
    assert is_corrected
    grad = grad.float()
    new_first = beta_1 * first.float() + (1 - beta_1) * grad
    new_second = beta_2 * second.float() + (1 - beta_2) * grad * grad
    first.copy_(new_first)
    second.copy_(new_second)
    scale = (new_second / (1 - beta_2**step)).sqrt() + eps
    return weights - lr * (new_first / (1 - beta_1**step) / scale + decay * weights)


WRITTEN = (multi_tensor_adam, multi_tensor_adam_param_remainder)
