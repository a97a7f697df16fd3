"""Linear attention as it is defined: of one sample, token after token, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dynamic_cp.types import LinearAttention, ModelShape
from dynamic_cp.types.linear_attention import LinearKind


def sizes_of(kind: LinearKind, *numbers: int) -> LinearAttention:
    """Return a layer of so many heads, groups, channels of a key and of a value, and tokens of a convolution."""
    names = "num_heads", "num_groups", "key_size", "value_size", "kernel_size"
    return LinearAttention(kind=kind, **dict(zip(names, numbers, strict=True)))


def hybrid_of(sizes: LinearAttention) -> ModelShape:
    """Return a model of three layers, the first of them linear."""
    return ModelShape(
        num_layers=3, hidden_size=64, ffn_hidden_size=64, num_attention_heads=1, num_query_groups=1, kv_channels=64,
        vocab_size=8, linear_attention=sizes, layer_pattern="G*-" if sizes.kind == "gated_delta_net" else "M*-",
    )  # fmt: skip


def convolved(x_TC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return each channel convolved with the tokens before it, and SiLU; `weight`: [C, 1, kernel size]."""
    before = functional.pad(x_TC.T, (weight.shape[2] - 1, 0))  # [C, kernel size - 1 + T]
    found = sum(weight[:, 0, tap, None] * before[:, tap : tap + len(x_TC)] for tap in range(weight.shape[2]))
    return functional.silu(found if bias is None else found + bias[:, None]).T


def gated_delta_net(qkv: Tensor, beta: Tensor, decay: Tensor, weight: Tensor, sizes: LinearAttention) -> Tensor:
    """Return what each token finds, [T, heads, value size]."""
    keys = sizes.num_groups * sizes.key_size
    q, k, v = convolved(qkv, weight, None).split((keys, keys, sizes.num_heads * sizes.value_size), dim=1)
    q, k = (_of_heads(x, sizes) for x in (q, k))
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())[..., None, :] for x in (q, k))
    v, beta, kept = v.unflatten(1, (-1, 1, sizes.value_size)), beta[..., None, None], decay.exp()[..., None, None]
    state = qkv.new_zeros(sizes.num_heads, sizes.key_size, sizes.value_size)
    found = []
    for q_t, k_t, v_t, beta_t, kept_t in zip(q, k, v, beta, kept, strict=True):
        state = kept_t * state
        state = state + k_t.mT * (beta_t * (v_t - k_t @ state))
        found.append(q_t @ state)
    return torch.stack(found)[:, :, 0] / sizes.key_size**0.5


def mamba2(
    xbc: Tensor, dt: Tensor, decay_rate: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, sizes: LinearAttention
) -> Tensor:
    """Return what each token finds, [T, heads, value size]."""
    keys = sizes.num_groups * sizes.key_size
    x, key, query = convolved(xbc, weight, bias).split((sizes.num_heads * sizes.value_size, keys, keys), dim=1)
    x = x.unflatten(1, (-1, sizes.value_size))
    key, query = (_of_heads(one, sizes) for one in (key, query))
    kept = (-decay_rate.exp() * dt).exp()[..., None, None]
    own = key[..., None] * (dt[..., None] * x)[:, :, None]
    state = xbc.new_zeros(sizes.num_heads, sizes.key_size, sizes.value_size)
    found = []
    for query_t, own_t, kept_t in zip(query[..., None, :], own, kept, strict=True):
        state = kept_t * state + own_t
        found.append(query_t @ state)
    return torch.stack(found)[:, :, 0] + skip[:, None] * x


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
