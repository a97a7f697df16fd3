"""Low-rank adapters beside frozen linear layers (LoRA): what is trained then, and how much of it there is."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least
from dynamic_cp.types.model import ModelShape

ADAPTED = {"linear_qkv": "column", "linear_proj": "row", "linear_fc1": "column", "linear_fc2": "row"}
"""Linear layers of a dense model, by megatron-core's names -> whether TP splits their outputs or their inputs."""


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
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def weights_per_layer(self, model: ModelShape, tp_size: int = 1) -> float:
        """Return the weights of A and B of a layer that a TP rank holds: the narrow side is on all of them."""
        inner = (1 + model.gated_linear_unit) * model.ffn_hidden_size
        sizes = {
            "linear_qkv": (model.hidden_size, model.query_size + model.gate_size + 2 * model.kv_size),
            "linear_proj": (model.query_size, model.hidden_size),
            "linear_fc1": (model.hidden_size, inner),
            "linear_fc2": (model.ffn_hidden_size, model.hidden_size),
        }
        shared = {"column": (1, tp_size), "row": (tp_size, 1)}
        of_modules = [(sizes[name], shared[ADAPTED[name]]) for name in self.modules]
        return self.rank * sum(inputs / a + outputs / b for (inputs, outputs), (a, b) in of_modules)
