"""Low-rank adapters beside frozen linear layers (LoRA): what is trained then, and how much of it there is."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least
from dynamic_cp.types.layers import Layer, Stage
from dynamic_cp.types.model import ModelShape

OF_LINEAR = {"in_proj": "column", "out_proj": "row"}
"""Linear layers of linear attention, by megatron-core's names -> whether TP splits their outputs or their inputs."""
OF_MLP = {"linear_fc1": "column", "linear_fc2": "row"}
ADAPTED = {"linear_qkv": "column", "linear_proj": "row", **OF_MLP, **OF_LINEAR}
"""The same of all that may have an adapter; MLPs of models with experts have none."""


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

    def weights(self, stage: Stage, model: ModelShape, tp_size: int = 1) -> float:
        """Return the weights of A and B of a stage that a TP rank holds: the narrow side is on all of them."""
        shared = {"column": (1, tp_size), "row": (tp_size, 1)}

        def of_layer(layer: Layer) -> float:
            sizes = _sizes(layer, model)
            of_modules = [(sizes[name], shared[ADAPTED[name]]) for name in self.modules if name in sizes]
            return self.rank * sum(inputs / a + outputs / b for (inputs, outputs), (a, b) in of_modules)

        return stage.sum(of_layer)


def _sizes(layer: Layer, model: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of those linear layers that a layer of `model` has."""
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
