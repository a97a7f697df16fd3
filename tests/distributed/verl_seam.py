"""verl's own code around Megatron-Core's scheduler, out of its released wheel: a step on gloo ranks.

verl/__init__.py starts Ray and reads configurations, which no step of the seam needs; so `verl` and `verl.utils` are
packages without it here. Every module of verl that runs is the released one, and so is tensordict, without which it
selects nothing. Of Megatron-Core there is the class that verl asks for by name: no release has it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from megatron.integrations.scheduler.groups import Groups
from megatron.integrations.scheduler.planned import PlainScheduler
from tests.wheels import alone, wheel_or_skip

VERL = "0.9.1"
NEEDED = (
    ("tensordict", "0.15.3"),
    ("pyvers", "0.2.3"),
    ("orjson", "3.13.0"),
    ("cloudpickle", "3.1.3"),
)
FOLDER = Path(os.environ.get("FRAMEWORK_WHEELS") or Path(__file__).parents[2] / "runs/frameworks")
ENVIRONMENT = "megatron.integrations.scheduler.from_environment"


class Theirs(PlainScheduler):
    """Stands for Megatron-Core's DefaultDynamicCPScheduler: one sample after the other, on all lanes."""

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
        return [[[sample]] * (self.cp_size * self.dp_size) for sample, _ in sample_id_seqlens]


def unpacked_or_skip(release: str = VERL) -> Path:
    """Return a folder to import verl's modules and tensordict from; the test is skipped where they cannot be had."""
    wheels = [wheel_or_skip(FOLDER, package, version) for package, version in (("verl", release), *NEEDED)]
    target = FOLDER / f"verl-{release}-site"
    with alone(FOLDER, target.name):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as name:
                there = Path(name) / "site"
                for wheel in wheels:
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extractall(there)
                shutil.move(there, target)
    return target


def open_seam(site: Path) -> Any:
    """Return verl's module `dynamic_cp_scheduler`, in a process that ends after the test."""
    sys.path.insert(0, str(site))
    for name in ("verl", "verl.utils"):
        package: Any = ModuleType(name)
        package.__path__ = [str(site.joinpath(*name.split(".")))]
        sys.modules[name] = package
    import verl.utils.dynamic_cp_scheduler as seam
    from megatron.core.datasets import data_schedule

    vars(data_schedule).update(scheduler_map={}, DefaultDynamicCPScheduler=Theirs)
    return seam


def step(seam: Any, lengths: Sequence[int], limit: int) -> dict[str, Any]:
    """Return what verl hands this rank of a batch, and the results of all ranks as verl puts them together.

    Sample i has tokens 1000 i, 1000 i + 1, ...; the "model" returns the half of each token.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    nested = torch.nested.as_nested_tensor(
        [torch.arange(length) + 1000 * sample for sample, length in enumerate(lengths)], layout=torch.jagged
    )
    batch = TensorDict({"input_ids": nested, "sample": torch.arange(len(lengths))}, batch_size=[len(lengths)])
    lanes = dist.get_world_size()
    scheduler = seam.DynamicCPScheduler(limit, dp_size=lanes // 2, cp_size=2)
    micro_batches = scheduler.schedule(batch, dist.group.WORLD, tp_size=1)
    packs, outputs = [], []
    for micro_batch in micro_batches:
        ids = tu.get_non_tensor_data(micro_batch, seam.DCP_SAMPLE_IDS, None)
        assert micro_batch["sample"].tolist() == ids
        halves = [tokens / 2 for tokens in micro_batch["input_ids"].unbind()]
        outputs.append(
            {
                seam.DCP_SAMPLE_IDS: ids,
                seam.DCP_GROUP_LEADER: tu.get_non_tensor_data(micro_batch, seam.DCP_GROUP_LEADER, None),
                "model_output": {"log_probs": torch.nested.as_nested_tensor(halves, layout=torch.jagged)},
                "loss": float(len(ids)),
                "metrics": {},
            }
        )
        cp_size = tu.get_non_tensor_data(micro_batch, "local_cp_size", None)
        packs.append((ids, cp_size, tu.get_non_tensor_data(micro_batch, seam.DCP_LOCAL_NUM_TOKENS, None)))
    together = seam.postprocess_dynamic_cp_batch(outputs, len(lengths), dist.group.WORLD)
    log_probs = [part.tolist() for part in together["model_output"]["log_probs"].unbind()]
    return {"packs": packs, "log_probs": log_probs, "losses": together["loss"]}


def register_by_import() -> type:
    """Return the class that verl finds once it has imported what VERL_USE_EXTERNAL_MODULES names."""
    import verl.utils.dynamic_cp_scheduler as seam
    from verl.utils.import_utils import import_external_libs

    sys.modules.pop(ENVIRONMENT, None)  # of a test that ran before in the process this one is forked off
    import_external_libs([ENVIRONMENT])
    found: type = seam.get_megatron_dynamic_cp_scheduler_cls()
    return found
