"""What training keeps of each weight besides it: its gradient, and what the optimizer knows of it.

By Megatron's names, so that flags of the trainer, options of the command and arguments of the library are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
DTYPES_OF = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""Setting of the precision-aware optimizer -> the dtypes that it may have."""
_REMAINDER_BYTES = 2
"""TransformerEngine's FusedAdam keeps the lower half of an fp32 master weight; the upper half is the bf16 weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Dtypes of gradients and of the optimizer's state.

    Attributes:
        grad_reduce_in_bf16: gradients are added up, kept and reduced in bf16, not in fp32.
        use_precision_aware_optimizer: TransformerEngine's FusedAdam reads gradients as they are and keeps its state in
            the dtypes below; without it all are fp32.
        main_grads_dtype: of gradients: bf16 is the same as grad_reduce_in_bf16.
        main_params_dtype: of master weights.
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
                raise InvalidInputError(f"{name} ({flag}) is {dtype!r}: use one of {', '.join(allowed)}", name=name)
            if dtype != "fp32" and not self.use_precision_aware_optimizer:
                raise InvalidInputError(
                    f"{name} ({flag}) is {dtype}, without the precision-aware optimizer it is fp32: add "
                    "--use-precision-aware-optimizer, or leave it out",
                    name=name,
                )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient, as it is kept and reduced."""
        return 2 if self.grad_reduce_in_bf16 else DTYPE_BYTES[self.main_grads_dtype]

    @property
    def copied_gradient_bytes(self) -> int:
        """Bytes of the fp32 copy of a gradient that the optimizer's step makes; 0 = it reads the gradient itself."""
        return 4 if self.gradient_bytes < 4 and not self.use_precision_aware_optimizer else 0

    def optimizer_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of master weight and moments of a weight of so many bytes; fp32 is its own master."""
        moments = DTYPE_BYTES[self.exp_avg_dtype] + DTYPE_BYTES[self.exp_avg_sq_dtype]
        if weight_bytes >= 4:
            return moments
        return moments + (_REMAINDER_BYTES if self.use_precision_aware_optimizer else 4)

    def check_weights(self, weight_bytes: int) -> None:
        """Refuse what only weights in bfloat16 have, where they have more bytes.

        Raises:
            InvalidInputError: gradients in bf16, or the precision-aware optimizer, of fp32 weights.
        """
        flags = {
            "--grad-reduce-in-bf16": self.grad_reduce_in_bf16,
            "--use-precision-aware-optimizer": self.use_precision_aware_optimizer,
        }
        for flag, is_on in flags.items():
            if is_on and weight_bytes >= 4:
                raise InvalidInputError(f"{flag} is for weights in bfloat16: add --bf16, or leave it out", flag=flag)


FP32_STATE = StateDtypes()
"""Gradients, master weights and moments in fp32, as Megatron-Core has them by default."""
