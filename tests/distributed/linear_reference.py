"""Linear attention as it is defined: of one sample, token after token, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dynamic_cp.types import LinearAttention


def convolved(x_TC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return each channel convolved with the tokens before it, and SiLU; `weight`: [C, 1, kernel size]."""
    found = []
    for token in range(len(x_TC)):
        total = torch.zeros_like(x_TC[0]) if bias is None else bias
        for back in range(min(weight.shape[2], token + 1)):
            total = total + weight[:, 0, weight.shape[2] - 1 - back] * x_TC[token - back]
        found.append(functional.silu(total))
    return torch.stack(found)


def gated_delta_net(qkv: Tensor, beta: Tensor, decay: Tensor, weight: Tensor, sizes: LinearAttention) -> Tensor:
    """Return what each token finds, [T, heads, value size]."""
    keys = sizes.num_groups * sizes.key_size
    q, k, v = convolved(qkv, weight, None).split((keys, keys, sizes.num_heads * sizes.value_size), dim=1)
    q, k = (_of_heads(x, sizes) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(1, (-1, sizes.value_size))
    state = qkv.new_zeros(sizes.num_heads, sizes.key_size, sizes.value_size)
    found = []
    for token in range(len(q)):
        state = decay[token].exp()[:, None, None] * state
        error = v[token] - torch.einsum("hk,hkv->hv", k[token], state)
        state = state + torch.einsum("hk,hv->hkv", k[token], beta[token][:, None] * error)
        found.append(torch.einsum("hk,hkv->hv", q[token], state) / sizes.key_size**0.5)
    return torch.stack(found)


def mamba2(
    xbc: Tensor, dt: Tensor, decay_rate: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, sizes: LinearAttention
) -> Tensor:
    """Return what each token finds, [T, heads, value size]."""
    keys = sizes.num_groups * sizes.key_size
    x, key, query = convolved(xbc, weight, bias).split((sizes.num_heads * sizes.value_size, keys, keys), dim=1)
    x = x.unflatten(1, (-1, sizes.value_size))
    key, query = (_of_heads(one, sizes) for one in (key, query))
    state = xbc.new_zeros(sizes.num_heads, sizes.key_size, sizes.value_size)
    found = []
    for token in range(len(x)):
        decay = (-decay_rate.exp() * dt[token]).exp()
        own = torch.einsum("hk,hv->hkv", key[token], dt[token][:, None] * x[token])
        state = decay[:, None, None] * state + own
        found.append(torch.einsum("hk,hkv->hv", query[token], state) + skip[:, None] * x[token])
    return torch.stack(found)


REFERENCES = {"gated_delta_net": gated_delta_net, "mamba2": mamba2}


def random_inputs(sizes: LinearAttention, seqlens: Sequence[int]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return [sample] tensors of its tokens, and parameters, in the order of `REFERENCES`."""
    generator = torch.Generator().manual_seed(sum(seqlens) + sizes.num_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = sizes.convolved_channels
    weight = random(channels, 1, sizes.kernel_size) / 2
    if sizes.has_delta_rule:
        gates = [(random(n, sizes.num_heads).sigmoid(), -random(n, sizes.num_heads).exp() / 8) for n in seqlens]
        parameters = [weight]
    else:
        gates = [(random(n, sizes.num_heads).exp() / 2,) for n in seqlens]
        parameters = [random(sizes.num_heads) - 1, random(sizes.num_heads), weight, random(channels)]
    return [[random(n, channels), *gate] for n, gate in zip(seqlens, gates, strict=True)], parameters


def _of_heads(x_TC: Tensor, sizes: LinearAttention) -> Tensor:
    return x_TC.unflatten(1, (-1, sizes.key_size)).repeat_interleave(sizes.num_heads // sizes.num_groups, dim=1)
