"""What is trained, in which dtypes, and how lanes share gradients and optimizer state, all under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least
from dynamic_cp.types.layers import Layer, Stage
from dynamic_cp.types.model import ModelShape

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
DTYPES_OF = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""Setting of the precision-aware optimizer -> the dtypes it may have."""
_REMAINDER_BYTES = 2
"""TransformerEngine's FusedAdam keeps the lower half of an fp32 master weight; the upper half is the bf16 weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Dtypes of gradients and of the optimizer's state.

    Attributes:
        grad_reduce_in_bf16: gradients are added, kept and reduced in bf16 instead of fp32.
        use_precision_aware_optimizer: TransformerEngine's FusedAdam reads gradients as they are and keeps its state in
            the dtypes below; without it all are fp32.
        main_grads_dtype, main_params_dtype: of gradients (bf16: as grad_reduce_in_bf16) and of master weights.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments.
    """

    grad_reduce_in_bf16: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name, allowed in DTYPES_OF.items():
            dtype, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if dtype not in allowed:
                raise InvalidInputError(f"{name} ({flag}) is {dtype!r}: use one of {', '.join(allowed)}")
            if dtype != "fp32" and not self.use_precision_aware_optimizer:
                raise InvalidInputError(
                    f"{name} ({flag}) is {dtype}, without the precision-aware optimizer it is fp32: add "
                    "--use-precision-aware-optimizer, or leave it out"
                )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is kept and reduced."""
        return 2 if self.grad_reduce_in_bf16 else DTYPE_BYTES[self.main_grads_dtype]

    @property
    def copied_gradient_bytes(self) -> int:
        """Bytes of the fp32 copy of a gradient that the optimizer's step makes; 0: it reads the gradient itself."""
        return 4 if self.gradient_bytes < 4 and not self.use_precision_aware_optimizer else 0

    def optimizer_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of master weight and moments for one weight of `weight_bytes`; fp32 is its own master."""
        moments = DTYPE_BYTES[self.exp_avg_dtype] + DTYPE_BYTES[self.exp_avg_sq_dtype]
        if weight_bytes >= 4:
            return moments
        return moments + (_REMAINDER_BYTES if self.use_precision_aware_optimizer else 4)

    def check_weights(self, weight_bytes: int) -> None:
        """Refuse what only weights in bfloat16 have, where they have more bytes. Raises InvalidInputError: gradients in
        bf16, or the precision-aware optimizer, of fp32 weights."""
        flags = {
            "--grad-reduce-in-bf16": self.grad_reduce_in_bf16,
            "--use-precision-aware-optimizer": self.use_precision_aware_optimizer,
        }
        for flag, is_on in flags.items():
            if is_on and weight_bytes >= 4:
                raise InvalidInputError(f"{flag} is for weights in bfloat16: add --bf16, or leave it out")


FP32_STATE = StateDtypes()
"""Gradients, master weights and moments in fp32, Megatron-Core's default."""


OF_LINEAR = {"in_proj": "column", "out_proj": "row"}
"""Linear layers of linear attention, by megatron-core's names -> whether TP splits their outputs or their inputs."""
OF_MLP = {"linear_fc1": "column", "linear_fc2": "row"}
ADAPTED = {"linear_qkv": "column", "linear_proj": "row", **OF_MLP, **OF_LINEAR}
"""The same for all linear layers that may have an adapter; MLPs of models with experts have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Products B A of rank `rank` that are added to the weights of some linear layers, times alpha / rank.

    Attributes:
        rank: rows of A and columns of B, which are all that is trained.
        alpha: LoRA's.
        modules: those of `ADAPTED` that have one.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...] = tuple(ADAPTED)

    def __post_init__(self) -> None:
        require_at_least(1, rank=self.rank)
        unknown = [name for name in self.modules if name not in ADAPTED]
        if unknown or not self.modules:
            raise InvalidInputError(
                f"adapters for {', '.join(unknown) or 'nothing'} are not possible: give some of {', '.join(ADAPTED)}"
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    def weights(self, stage: Stage, model: ModelShape, tp_size: int = 1) -> float:
        """Return the weights of A and B on a stage that one TP rank holds; every TP rank has the narrow side whole."""
        shared = {"column": (1, tp_size), "row": (tp_size, 1)}

        def of_layer(layer: Layer) -> float:
            sizes = _sizes(layer, model)
            of_modules = [(sizes[name], shared[ADAPTED[name]]) for name in self.modules if name in sizes]
            return self.rank * sum(inputs / a + outputs / b for (inputs, outputs), (a, b) in of_modules)

        return stage.sum(of_layer)


def _sizes(layer: Layer, model: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers that a layer of `model` has."""
    hidden, linear = model.hidden_size, layer.linear_attention
    found: dict[str, tuple[int, int]] = {}
    if layer.has_attention:
        outputs = layer.query_size + layer.gate_size + 2 * layer.kv_size
        found |= {"linear_qkv": (hidden, outputs), "linear_proj": (layer.query_size, hidden)}
    if layer.mlp_weights:
        inner = (1 + model.gated_linear_unit) * model.ffn_hidden_size
        found |= {"linear_fc1": (hidden, inner), "linear_fc2": (model.ffn_hidden_size, hidden)}
    if linear is not None:
        rows = linear.convolved_channels + linear.value_channels + linear.gate_channels
        found |= {"in_proj": (hidden, rows), "out_proj": (linear.value_channels, hidden)}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What a job does with gradients and optimizer state, under the names of Megatron-Core's flags.

    Attributes:
        distributed_optimizer: optimizer state is sharded over the lanes.
        overlap_grad_reduce, overlap_param_gather: gradients are reduced bucket by bucket during the last backward pass;
            parameters are gathered likewise during the first forward pass.
        adapters: all that is trained, the model's own weights being frozen; None: the model itself is trained.
    """

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    state: StateDtypes = FP32_STATE
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise InvalidInputError(
                "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce: set both, or leave it out"
            )
        if self.state.use_precision_aware_optimizer and not self.distributed_optimizer:
            raise InvalidInputError(
                "--use-precision-aware-optimizer needs an optimizer whose state the lanes share: use the distributed "
                "optimizer, or leave it out"
            )


SHARDED = DataParallel(overlap_grad_reduce=True, overlap_param_gather=True)
"""A sharded optimizer whose collectives overlap with the passes: the default of the command and of functions, and what
launch lines of a sweep say. Megatron-LM's own flags are off unless given."""
