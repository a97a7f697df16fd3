"""What a global batch is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.hardware import Hardware
from dynamic_cp.types.model import ModelShape
from dynamic_cp.types.options import PlanOptions
from dynamic_cp.types.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a plan depends on besides the samples; arguments of `search.plan_global_batch`.

    Attributes:
        distributed_optimizer: its state is sharded over the lanes; only pools of servers are planned by memory.
    """

    topology: Topology
    model: ModelShape
    hardware: Hardware
    options: PlanOptions
    policy: str = "dynamic"
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        topology, options = self.topology, self.options
        options.state.check(options.element_bytes.weight, distributed_optimizer=self.distributed_optimizer)
        reason = self.model.why_no_expert_split(ep_size=topology.ep_size, tp_size=topology.tp_size)
        if reason is not None:
            raise InvalidInputError(
                f"{reason}: use an ep_size (--expert-model-parallel-size) that divides the experts of the model",
                ep_size=topology.ep_size,
                tp_size=topology.tp_size,
            )
