"""Layers of linear attention by their definition, for the judge: a whole sample, a token after the other, in float64.
Rows of megatron-core's parameters are in the order q k v z beta alpha and z x B C dt."""

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from tests.distributed.linear_reference import gated_delta_net, mamba2, sizes_of

KERNEL = 4


def delta_rows(config: Any) -> dict[str, int]:
    heads = config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    return {"q": keys, "k": keys, "v": values, "z": values, "beta": heads, "alpha": heads}


def mamba_rows(config: Any) -> dict[str, int]:
    keys, values = config.mamba_num_groups * config.mamba_state_dim, config.mamba_num_heads * config.mamba_head_dim
    return {"z": values, "x": values, "B": keys, "C": keys, "dt": config.mamba_num_heads}


def sections_of(name: str, config: Any) -> list[int] | None:
    """Return the rows of the sections of a parameter, each of which TP cuts by itself; None: it has none."""
    rows, convolved = delta_rows(config), "qkv"
    if "M" in (getattr(config, "hybrid_override_pattern", None) or ""):
        rows, convolved = mamba_rows(config), "xBC"
    if name.endswith("self_attention.in_proj.weight"):
        return list(rows.values())
    return [rows[one] for one in convolved] if ".conv1d." in name else None


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig, rows: dict[str, int], num_convolved: int, width: int) -> None:
        super().__init__()
        self.config, self.rows = config, rows
        self.in_proj = nn.Linear(config.hidden_size, sum(rows.values()), bias=False)
        self.conv1d = nn.Conv1d(num_convolved, num_convolved, KERNEL, groups=num_convolved, bias="x" in rows)
        heads = rows.get("dt", rows.get("beta", 0))
        self.A_log = nn.Parameter(torch.linspace(0.2, 1.5, heads))
        self.dt_bias = nn.Parameter(torch.linspace(-1, 1, heads))
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)
        for linear in (self.in_proj, self.out_proj):
            config.init_method(linear.weight)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return (what the layer finds [S, 1, hidden size], None)."""
        parts = self.in_proj(hidden[:, 0]).split(list(self.rows.values()), -1)
        return self.out_proj(self.attend(dict(zip(self.rows, parts, strict=True))).to(hidden.dtype))[:, None], None

    def attend(self, parts: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def convolution(self) -> list[Tensor]:
        return [parameter.double() for parameter in self.conv1d.parameters()]


class _NormOf1More(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class TokenByTokenDelta(_Layer):
    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        rows = delta_rows(config)
        super().__init__(config, rows, 2 * rows["k"] + rows["v"], rows["v"])
        norm = _NormOf1More if config.layernorm_zero_centered_gamma else nn.RMSNorm
        self.out_norm = norm(config.linear_value_head_dim, eps=config.layernorm_epsilon)

    def attend(self, parts: dict[str, Tensor]) -> Tensor:
        config = self.config
        sizes = sizes_of(
            "gated_delta_net",
            *(config.linear_num_value_heads, config.linear_num_key_heads),
            *(config.linear_key_head_dim, config.linear_value_head_dim, KERNEL),
        )
        qkv, beta = torch.cat([parts[one] for one in "qkv"], -1).double(), parts["beta"].double().sigmoid()
        decay = -self.A_log.double().exp() * softplus(parts["alpha"].double() + self.dt_bias)
        found = gated_delta_net(qkv, beta, decay, *self.convolution(), sizes)
        z = parts["z"].unflatten(-1, (sizes.num_heads, -1)).double()
        return (self.out_norm(found.to(self.out_norm.weight.dtype)).double() * silu(z)).flatten(1)


class TokenByTokenMamba(_Layer):
    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        rows = mamba_rows(config)
        super().__init__(config, rows, 2 * rows["B"] + rows["x"], rows["x"])
        self.D = nn.Parameter(torch.linspace(0.5, 1.5, rows["dt"]))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(rows["x"]))

    def attend(self, parts: dict[str, Tensor]) -> Tensor:
        config = self.config
        sizes = sizes_of(
            "mamba2",
            *(config.mamba_num_heads, config.mamba_num_groups),
            *(config.mamba_state_dim, config.mamba_head_dim, KERNEL),
        )
        xbc = torch.cat([parts[one] for one in "xBC"], -1).double()
        step = softplus(parts["dt"].double() + self.dt_bias)
        found = mamba2(xbc, step, self.A_log.double(), self.D.double(), *self.convolution(), sizes)
        gated = found.flatten(1) * silu(parts["z"].double())
        by_group = gated.unflatten(-1, (sizes.num_groups, -1))
        by_group = by_group * torch.rsqrt(by_group.square().mean(-1, keepdim=True) + 1e-5)
        return by_group.flatten(1) * self.norm.weight


def with_linear_layers(layers: list[ModuleSpec], config: TransformerConfig) -> list[ModuleSpec]:
    """Return megatron-core's layers, some with linear attention instead, or halves of them, as a pattern says."""
    pattern = getattr(config, "hybrid_override_pattern", None)
    if pattern:
        return [_half(layers, symbol) for symbol in pattern]
    freq = config.linear_attention_freq
    linear = freq if isinstance(freq, list) else [number % freq != 0 for number in range(1, config.num_layers + 1)]
    return [
        _changed(one, self_attention=ModuleSpec(TokenByTokenDelta, params=one.submodules.self_attention.params))
        if is_linear
        else one
        for one, is_linear in zip(layers, linear, strict=True)
    ]


def _half(layers: list[ModuleSpec], symbol: str) -> ModuleSpec:
    if symbol in "-E":
        nothing = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
        return _changed(layers[-1 if symbol == "E" else 0], **nothing)
    nothing = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    kind = {"M": TokenByTokenMamba, "G": TokenByTokenDelta}.get(symbol)
    return _changed(layers[0], **nothing, **({} if kind is None else {"self_attention": ModuleSpec(kind)}))


def _changed(layer: ModuleSpec, **submodules: Any) -> ModuleSpec:
    changed = ModuleSpec(module=layer.module, submodules=type(layer.submodules)(**vars(layer.submodules)))
    for name, value in submodules.items():
        setattr(changed.submodules, name, value)
    return changed
