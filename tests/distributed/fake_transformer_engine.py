"""Stands in for TransformerEngine on CPU ranks: asserts what the real one needs of its caller, and computes it.

`install(version)` puts it where `import transformer_engine` finds it and builds megatron-core's extension over it anew,
so that what is tested is megatron-core's real TEDotProductAttention, TELayerNormColumnParallelLinear and so on. Call it
in a forked rank only.

Attention gathers keys and values over gloo, puts them in sequence order and takes a plain softmax: nothing here is code
of this project, the zigzag order least of all. What the real one does not check and gets wrong in silence (or aborts on
the device for) is an AssertionError here, but what flash-attn 2 gets wrong in all_gather is computed as wrongly.
Source: TransformerEngine 2.11, 2.18 and 2.20, `dot_product_attention.py` and `context_parallel.py`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional

from tests.distributed.real_transformer_engine.engine import bind_megatron_core

VERSION = "2.11.0"


class RankGather(torch.autograd.Function):
    """Rows of all ranks of a group, [size * T, ...]; their gradients are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def rows_of(rank: int, cp_size: int, boundaries: list[int]) -> list[int]:
    """Return the tokens of the pack that `rank` holds: chunks rank and 2 * cp_size - 1 - rank of each sequence."""
    rows = []
    for start, stop in pairwise(boundaries):
        if cp_size == 1:
            rows += range(start, stop)
            continue
        chunk = (stop - start) // (2 * cp_size)
        for index in (rank, 2 * cp_size - 1 - rank):
            rows += range(start + index * chunk, start + (index + 1) * chunk)
    return rows


class _Base(torch.nn.Module):
    """Modules of TransformerEngine have an extra state, empty where nothing is quantized."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or isinstance(state, Tensor)


class Quantization:
    """What `fp8_autocast` says of products now, and what it was asked for; of the whole process.

    Attributes:
        recipe: None: products are as their inputs.
        entered: (name of the recipe, format, ranks of the group that shares largest values) of each call.
        products: (name of the recipe, rows of the input) of each product in FP8.
    """

    recipe: ClassVar[Any] = None
    entered: ClassVar[list[tuple[str, str, tuple[int, ...]]]] = []
    products: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def check(cls, x: Tensor, *, is_gathered: bool) -> None:
        """Assert what a product in FP8 needs of its input [rows, 1, channels], of its own ranks' share, too.

        Args:
            is_gathered: by sequence parallelism. Blocks are gathered whole; until 2.13 anything else was an assertion,
                now it is gathered in bfloat16, which takes twice the bytes and no channels are asked of.
        """
        if cls.recipe is None:
            return
        rows, channels = x.numel() // x.shape[-1], x.shape[-1]
        name = type(cls.recipe).__name__
        aligned = 32 if name == "MXFP8BlockScaling" else 16
        assert rows % aligned == 0, f"TE: {rows} rows in FP8 ({name}), a multiple of {aligned} is needed"
        assert channels % 16 == 0, f"TE: {channels} channels in FP8, a multiple of 16 is needed"
        if is_gathered and name == "Float8BlockScaling":
            assert rows % 128 == 0, f"TE: {rows} rows in blocks, a multiple of 128 is needed to gather them in FP8"
        cls.products.append((name, rows))


@contextlib.contextmanager
def fp8_autocast(enabled: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, **unused: Any) -> Iterator[None]:
    """TransformerEngine's: products inside are in FP8; delayed scaling shares largest values at the end of each."""
    assert enabled
    before, Quantization.recipe = Quantization.recipe, fp8_recipe
    ranks = tuple(dist.get_process_group_ranks(fp8_group))
    Quantization.entered.append((type(fp8_recipe).__name__, fp8_recipe.fp8_format, ranks))
    try:
        yield
    finally:
        Quantization.recipe = before
        if isinstance(fp8_recipe, DelayedScaling):
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX, group=fp8_group)  # of the largest values


class DelayedScaling:
    """As TransformerEngine's."""

    def __init__(
        self,
        margin: int = 0,
        fp8_format: str = "HYBRID",
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        **unused: Any,
    ) -> None:
        self.fp8_format = fp8_format
        assert not fp8_dpa
        assert not fp8_mha


class Float8CurrentScaling:
    """As TransformerEngine's."""

    def __init__(self, fp8_format: str = "HYBRID", fp8_dpa: bool = False) -> None:
        self.fp8_format = fp8_format
        assert not fp8_dpa


class Float8BlockScaling(Float8CurrentScaling):
    """As TransformerEngine's."""


class MXFP8BlockScaling(Float8CurrentScaling):
    """As TransformerEngine's."""


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
    **kwargs: Any,
) -> Any:
    """TransformerEngine's, without its random states."""
    recipe = Quantization.recipe

    def again(*args: Any) -> Any:
        before, Quantization.recipe = Quantization.recipe, recipe
        try:
            return function(*args)
        finally:
            Quantization.recipe = before

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class DotProductAttention(_Base):
    """The three signatures of TransformerEngine 2.11; calls of set_context_parallel_group are kept in `set_calls`."""

    set_calls: ClassVar[list[tuple[Any, ...]]] = []  # of all modules of the process
    forwards: ClassVar[list[tuple[str, int, int]]] = []  # (cp_comm_type, cp size, query heads)
    raise_in_forward: ClassVar[bool] = False
    kernel: ClassVar[str] = "cuDNN"  # "flash-attn 2" cannot do all_gather, and does

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        self.heads = num_attention_heads // tp_size
        self.kv_heads = (num_gqa_groups or num_attention_heads) // tp_size
        assert num_attention_heads % (num_gqa_groups or num_attention_heads) == 0
        self.channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = self.channels**-0.5 if softmax_scale is None else softmax_scale
        assert (attention_type, softmax_type, window_size) == ("self", "vanilla", None)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        DotProductAttention.set_calls.append((cp_group, cp_global_ranks, cp_stream, cp_comm_type))
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor = None,
        cu_seqlens_kv: Tensor = None,
        cu_seqlens_q_padded: Tensor = None,
        cu_seqlens_kv_padded: Tensor = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        if DotProductAttention.raise_in_forward:
            raise RuntimeError("planted: CUDA error in TransformerEngine")
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal"), "TE: thd needs a padding mask"
        assert all(x.dim() == 3 for x in (query_layer, key_layer, value_layer)), "TE: thd tensors have 3 dims"
        assert query_layer.shape[1:] == (self.heads, self.channels), "TE: the module is built for other query heads"
        assert key_layer.shape[1:] == value_layer.shape[1:] == (self.kv_heads, self.channels), "TE: other kv heads"
        assert (cu_seqlens_q.dtype, cu_seqlens_q.dim()) == (torch.int32, 1), "TE: cu_seqlens are int32 [b + 1]"
        same = (cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        assert all(x is cu_seqlens_q for x in same), "TE: one tensor must serve as all four cu_seqlens"
        groups = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group]
        cp_size = 1
        for group in groups:
            cp_size *= 1 if group is None else group.size()
        boundaries = cu_seqlens_q.tolist()
        seqlens = [stop - start for start, stop in pairwise(boundaries)]
        ends = (boundaries[0], boundaries[-1])
        assert ends == (0, len(query_layer) * cp_size), "TE: the group's shards do not make the pack"
        assert max_seqlen_q == max_seqlen_kv == max(seqlens), "TE: max_seqlen is not the longest padded length"
        rank = 0
        if cp_size > 1:
            rank = self._check_context_parallel(groups, cp_size, seqlens)
        DotProductAttention.forwards.append((self.cp_comm_type, cp_size, self.heads))
        for group in groups:  # the inner lanes first: neighbours come to lie side by side
            if cp_size > 1:
                key_layer, value_layer = RankGather.apply(key_layer, group), RankGather.apply(value_layer, group)
        held = [row for one in range(cp_size) for row in rows_of(one, cp_size, boundaries)]
        order = torch.tensor(held).argsort()
        key_layer, value_layer = key_layer[order], value_layer[order]
        if (self.cp_comm_type, self.kernel) == ("all_gather", "flash-attn 2") and cp_size > 1:
            out = self._halves_where_they_are_not(query_layer, key_layer, value_layer, rank, cp_size, boundaries)
        else:
            rows = rows_of(rank, cp_size, boundaries)
            out = self._plain_attention(query_layer, key_layer, value_layer, rows, boundaries)
        return out.reshape(len(out), -1)

    def _halves_where_they_are_not(
        self, query: Tensor, key: Tensor, value: Tensor, rank: int, cp_size: int, boundaries: list[int]
    ) -> Tensor:
        """As flash-attn 2 reads the early and the late chunks of a rank: a chunk begins where those before it end,
        and so do its keys, whatever lies between them in the tensors.
        """
        outs: list[list[Tensor]] = []
        for which in (rank, 2 * cp_size - 1 - rank):
            chunks = [(stop - start) // (2 * cp_size) for start, stop in pairwise(boundaries)]
            seen = [chunk * (which + 1) for chunk in chunks]
            first_row = first_key = 0
            outs.append([])
            for chunk, keys in zip(chunks, seen, strict=True):
                q = query[first_row : first_row + chunk]
                k, v = (x[first_key : first_key + keys] for x in (key, value))
                outs[-1].append(self._plain_attention(q, k, v, list(range(keys - chunk, keys)), [0, keys]))
                first_row, first_key = first_row + chunk, first_key + keys
        return torch.cat([part for both in zip(*outs, strict=True) for part in both])

    def _check_context_parallel(self, groups: list[Any], cp_size: int, seqlens: list[int]) -> int:
        """Assert what attention over a CP group needs; return this rank's place in it."""
        release = tuple(int(number) for number in sys.modules["transformer_engine"].__version__.split(".")[:2])
        exchange = self.cp_comm_type
        since = {"p2p": (1, 10), "a2a": (2, 11), "all_gather": (2, 18), "a2a+p2p": (2, 19)}[exchange]
        assert release >= since, f"TE {release}: {exchange} does not support qkv_format thd"
        assert self.cp_stream is not None, "TE: cp_stream is None"
        assert all(seqlen % (2 * cp_size) == 0 for seqlen in seqlens), "TE: padded lengths must divide by 2 * cp"
        assert isinstance(self.cp_group, list) == (exchange == "a2a+p2p"), "TE: a2a+p2p needs [a2a group, p2p group]"
        shared = {"a2a": cp_size, "a2a+p2p": groups[0].size()}.get(exchange, 1)
        assert (self.heads % shared, self.kv_heads % shared) == (0, 0), "TE: heads must divide by the CP size"
        inner, outer = groups if len(groups) == 2 else (None, groups[0])
        inner_size, inner_rank = (1, 0) if inner is None else (inner.size(), inner.rank())
        rank = outer.rank() * inner_size + inner_rank
        assert len(self.cp_global_ranks) == cp_size, "TE: cp_global_ranks has another length than the group"
        assert self.cp_global_ranks[rank] == dist.get_rank(), "TE: cp_global_ranks are not those of the group"
        peers = [self.cp_global_ranks[one * inner_size + inner_rank] for one in range(outer.size())]
        assert peers == dist.get_process_group_ranks(outer), "TE: the ring's peers are not those of its group"
        return rank

    def _plain_attention(
        self, query: Tensor, key: Tensor, value: Tensor, rows: list[int], boundaries: list[int]
    ) -> Tensor:
        """Causal attention of each sequence, float64; key and value are those of the whole pack."""
        copies = self.heads // self.kv_heads
        at, local, outs = torch.tensor(rows), 0, []
        for start, stop in pairwise(boundaries):
            count = sum(start <= row < stop for row in rows)
            mine = slice(local, local + count)
            local += count
            q = query[mine].double().transpose(0, 1)
            k, v = (x[start:stop].double().repeat_interleave(copies, 1).transpose(0, 1) for x in (key, value))
            scores = q @ k.transpose(1, 2) * self.softmax_scale
            later = torch.arange(start, stop)[None] > at[mine, None]
            outs.append((scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outs).to(query.dtype)


def _parameter(*shape: int, device: Any, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))


class _ProductWithAccumulation(torch.autograd.Function):
    """x W^T; W's gradient goes to its main_grad, and what autograd gets instead must not be used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert hasattr(weight, "main_grad"), "TE: fuse_wgrad_accumulation needs main_grad"
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        ctx.main_grad += grad.reshape(-1, grad.size(-1)).float().t() @ x.reshape(-1, x.size(-1)).float()
        weight.grad_added_to_main_grad = True
        Linear.num_accumulated += 1
        return grad @ weight, torch.full_like(weight, float("nan"))


class Linear(_Base):
    """TransformerEngine's Linear: column and row parallel, by megatron-core's communication."""

    num_accumulated: ClassVar[int] = 0  # gradients that went to a main_grad, of all modules of the process

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_size: int,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features // (tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel, self.parallel_mode, self.return_bias = sequence_parallel, parallel_mode, return_bias
        self.use_bias, self.tp_size, self.tp = bias, tp_size, unused["tp_group"]
        self.product = _ProductWithAccumulation.apply if unused["fuse_wgrad_accumulation"] else functional.linear
        rows = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = _parameter(self.out_features, rows, device=device, dtype=params_dtype)
        self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        init_method(self.weight)
        if bias:
            self.bias = _parameter(self.out_features, device=device, dtype=params_dtype)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        is_gathered = self.sequence_parallel and self.parallel_mode == "column" and self.tp_size > 1
        Quantization.check(x, is_gathered=is_gathered)
        bias = self.bias if self.use_bias else None
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=self.tp)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp)
            out = self.product(x, self.weight)
            if bias is not None and not self.return_bias:
                out = out + bias
        else:
            out = self.product(x, self.weight)
            if self.sequence_parallel:
                out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp)
            else:
                out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp)
            if bias is not None and not self.return_bias:
                out = out + bias
        return (out, bias) if self.return_bias else out


def _normalize(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "RMSNorm":
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


class LayerNormLinear(Linear):
    """TransformerEngine's LayerNormLinear."""

    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **rest: Any) -> None:
        super().__init__(in_features, out_features, **rest)
        self.eps, self.normalization = eps, normalization
        place = {"device": rest["device"], "dtype": rest["params_dtype"]}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **place))
        self.layer_norm_weight.sequence_parallel = rest["sequence_parallel"]
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **place))
            self.layer_norm_bias.sequence_parallel = rest["sequence_parallel"]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = getattr(self, "layer_norm_bias", None)
        return super().forward(_normalize(x, self.normalization, self.layer_norm_weight, bias, self.eps))


class _Norm(_Base):
    kind = ""

    def __init__(
        self,
        *,
        normalized_shape: int | None = None,
        hidden_size: int | None = None,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        # megatron-core 0.16 uses the older name.
        assert (normalized_shape is None) != (hidden_size is None)
        size = normalized_shape or hidden_size
        assert size is not None
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=params_dtype))
        if self.kind == "LayerNorm":
            self.bias = _parameter(size, device=device, dtype=params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.kind, self.weight, getattr(self, "bias", None), self.eps)


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"


class FakeStream:
    """What torch.cuda.Stream() gives where there is a device."""


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


# Kernel -> a device that has it; flash-attn 3 and 4 with --attention-backend flash.
CAPABILITIES = {"cuDNN": (9, 0), "flash-attn 2": (8, 0), "flash-attn 3": (9, 0), "flash-attn 4": (10, 0)}


def install(version: str = VERSION, kernel: str = "cuDNN") -> None:
    """Let this process find the fake as TransformerEngine `version`, and megatron-core's extension use it.

    Args:
        kernel: that attention is computed with: the device and the packages are such.
    """
    assert "megatron.dynamic_cp.attention.te.attention" not in sys.modules, "already bound to another one"
    recipe = _module(
        "transformer_engine.common.recipe",
        Format=types.SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID"),
        DelayedScaling=DelayedScaling,
        Float8CurrentScaling=Float8CurrentScaling,
        Float8BlockScaling=Float8BlockScaling,
        MXFP8BlockScaling=MXFP8BlockScaling,
    )
    common = _module("transformer_engine.common", recipe=recipe)
    of_fp8 = ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init")
    fp8 = _module("transformer_engine.pytorch.fp8", **{name: MagicMock() for name in of_fp8})
    tracker = type("CudaRNGStatesTracker", (), {})
    distributed = _module("transformer_engine.pytorch.distributed", CudaRNGStatesTracker=tracker, checkpoint=checkpoint)
    router = _module("transformer_engine.pytorch.router")
    for name in ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"):
        setattr(router, name, None)
    pytorch = _module(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        LayerNorm=LayerNorm,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
        GroupedLinear=type("GroupedLinear", (torch.nn.Module,), {}),
        distributed=distributed,
        router=router,
        fp8=fp8,
        fp8_autocast=fp8_autocast,
        ops=MagicMock(),
        cpu_offload=None,
    )
    _module("transformer_engine.pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (), {}))
    DotProductAttention.kernel = kernel
    torch.cuda.get_device_capability = lambda device=None: CAPABILITIES[kernel]
    installed = {f"v{one}_is_installed": kernel == f"flash-attn {one}" for one in (3, 4)}
    flags = types.SimpleNamespace(is_installed=kernel == "flash-attn 2", **installed)
    folder = "transformer_engine.pytorch.attention"
    for name in (folder, f"{folder}.dot_product_attention"):
        _module(name, __path__=[])
    _module(f"{folder}.dot_product_attention.utils", FlashAttentionUtils=flags)
    _module("transformer_engine", __version__=version, __path__=[], common=common, pytorch=pytorch)
    pytorch.__path__ = []  # type: ignore[attr-defined]
    torch.cuda.Stream = FakeStream  # type: ignore[misc, assignment]
    tensors = {"QuantizedTensor": type("QuantizedTensor", (), {})}
    pytorch.tensor = _module("transformer_engine.pytorch.tensor", **tensors)  # type: ignore[attr-defined]
    bind_megatron_core()
