"""What all settings of a sweep share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.resolution import options_of_prices
from dynamic_cp.setting import Setting
from dynamic_cp.types import Hardware, ModelShape, Sample, SearchEffort


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """Data, model and hardware.

    Attributes:
        batches: global batches, each of which every setting plans.
        max_seqlen: longest sample that the run must hold (tokens), at least that of the batches.
    """

    batches: tuple[tuple[Sample, ...], ...]
    max_seqlen: int
    model: ModelShape
    hardware: Hardware
    search: SearchEffort = "fast"
    distributed_optimizer: bool = True

    def model_of(self, setting: Setting) -> ModelShape:
        """Return the model in the stages of `setting`."""
        return replace(self.model, pipeline_layers=setting.pipeline_layers)

    def memory(self, setting: Setting) -> MemoryModel:
        """Return the memory of `setting`."""
        return MemoryModel(
            self.model_of(setting),
            self.hardware,
            setting.topology,
            setting.options(self.search),
            distributed_optimizer=self.distributed_optimizer,
        )

    def prices(self, setting: Setting) -> CostModel:
        """Return the prices of `setting`; UnsupportedFeatureError: no allowed exchange serves any of its CP sizes."""
        model = self.model_of(setting)
        options = options_of_prices(setting.options(self.search), model)
        return CostModel(model, self.hardware, setting.topology, options)
