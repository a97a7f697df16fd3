"""Released code of other frameworks with the planner in the place of Megatron-Core's scheduler, on gloo ranks.

verl's own test of the seam is in none of its wheels. From its repository, with our class registered, the five tests
passed that need neither peft nor omegaconf (2026-11-26); what they assert of a plan is asserted here of ours.
verl/__init__.py starts Ray and reads configurations, which no step of the seam needs; so `verl` and `verl.utils` are
packages without it here. Every module of verl that runs is the released one, and so is tensordict, without which it
selects nothing. Of Megatron-Core there is the class that verl asks for by name: no release has it.
"""

import ast
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from dynamic_cp import load_model
from megatron.integrations import TESTED
from megatron.integrations.scheduler.groups import Groups, check_groups
from megatron.integrations.scheduler.job import MODEL, PP
from megatron.integrations.scheduler.planned import PlainScheduler
from tests.distributed.harness import run_forked, run_ranks
from tests.distributed.outside import load_planner
from tests.wheels import FRAMEWORKS, alone, newest_or_skip, wheel_or_skip

VERL = "0.9.1"
NEEDED = (("tensordict", "0.15.3"), ("pyvers", "0.2.3"), ("orjson", "3.13.0"), ("cloudpickle", "3.1.3"))
ENVIRONMENT = "megatron.integrations.scheduler.from_environment"


class Theirs(PlainScheduler):
    """Stands for Megatron-Core's DefaultDynamicCPScheduler: one sample after the other, on all lanes."""

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
        return [[[sample]] * (self.cp_size * self.dp_size) for sample, _ in sample_id_seqlens]


def unpacked_or_skip(release: str = VERL) -> Path:
    """Return a folder to import verl's modules and tensordict from; the test is skipped where they cannot be had."""
    wheels = [wheel_or_skip(FRAMEWORKS, package, version) for package, version in (("verl", release), *NEEDED)]
    target = FRAMEWORKS / f"verl-{release}-site"
    with alone(FRAMEWORKS, target.name):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=FRAMEWORKS) as name:
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
    """Return what verl hands this rank of a batch, and all results: sample i is 1000 i, 1000 i + 1, ..., a result
    half."""
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


LIMIT = 128
LENGTHS = (300, 17, 64, 120, 5, 90, 33, 200, 1, 77, 128, 41, 12, 60, 8, 99)


def steps_on_ranks(world_size: int, site: Path, *batches: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Return what each rank of a job finds in steps on batches; verl is imported once, in a process of its own."""
    load_planner()
    return run_forked(_import_and_run, world_size, site, batches)


def _import_and_run(world_size: int, site: Path, batches: tuple[tuple[int, ...], ...]) -> list[Any]:
    open_seam(site)
    return run_ranks(world_size, steps_of, site, batches)


def steps_of(site: Path, batches: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    """Run steps of a job whose model and pipeline the environment says."""
    os.environ.update({MODEL: "qwen2.5-7b", PP: "4"})
    seam = open_seam(site)
    chosen = register_by_import()
    assert chosen.__name__ == "DynamicCPPlannerScheduler"
    job = chosen(LIMIT, 2, 2).job  # type: ignore[call-arg]
    assert job.model == load_model("qwen2.5-7b")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.integrations.scheduler").addHandler(handler)
    found: list[dict[str, Any]] = []
    for lengths in batches:
        try:
            found.append(step(seam, lengths, LIMIT) | {"warnings": warnings})
        except ValueError as error:
            found.append({"error": str(error)})
    return found


def test_every_sample_is_trained_once_and_results_come_in_order() -> None:
    """Where no ranks hold a sample, that is said in verl's words."""
    check_step(unpacked_or_skip())


@pytest.mark.nightly
def test_the_newest_release_of_verl_does_the_same() -> None:
    """Where this fails, or names another release, `frameworks.TESTED` and the page are to be looked at."""
    newest = newest_or_skip(FRAMEWORKS, "verl")
    check_step(unpacked_or_skip(newest))
    assert newest in TESTED["verl"]


def check_step(site: Path) -> None:
    """Check groups, tokens and results of a step of verl's on four ranks."""
    ranks, refused = zip(*steps_on_ranks(4, site, LENGTHS, (600, 5)), strict=True)
    assert all("A sequence with 600 tokens needs at least 5 ranks" in one["error"] for one in refused)
    groups = [[pack[0] for pack in lanes] for lanes in zip(*(rank["packs"] for rank in ranks), strict=True)]
    sizes = check_groups(groups, dict(enumerate(LENGTHS)), num_lanes=4, max_tokens_per_rank=LIMIT)
    assert len(sizes) >= 2, "the plan does not mix CP sizes"
    assert sum(tokens for rank in ranks for _, _, tokens in rank["packs"]) == sum(LENGTHS)
    for lanes in zip(*(rank["packs"] for rank in ranks), strict=True):
        copies = Counter(tuple(ids) for ids, _, _ in lanes)
        assert all(cp_size == copies[tuple(ids)] for ids, cp_size, _ in lanes)
    expected = [[(token + 1000 * sample) / 2 for token in range(length)] for sample, length in enumerate(LENGTHS)]
    for rank in ranks:
        assert rank["log_probs"] == expected, "results of another sample, or in another order"
        assert sum(rank["losses"]) == len(LENGTHS)
        assert not rank["warnings"]


@pytest.mark.nightly
def test_lanes_that_are_no_power_of_two_are_verls_to_plan() -> None:
    """verl takes any even number of them; the warning comes once."""
    lengths = LENGTHS[:5]
    for (rank,) in steps_on_ranks(6, unpacked_or_skip(), lengths):
        assert [ids for ids, _, _ in rank["packs"]] == [[sample] for sample in range(len(lengths))]
        (warning,) = rank["warnings"]
        assert "6 lanes are not a power of two" in warning
        assert len(rank["log_probs"]) == len(lengths)


def test_a_provider_of_bridge_says_the_model() -> None:
    """Fields of it that megatron-core's configuration lacks. No release of Bridge up to this one calls a scheduler."""
    wheel = wheel_or_skip(FRAMEWORKS, "megatron-bridge", "0.6.2", "--python-version", "3.12")  # pip's own is not enough
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    tree = ast.parse(sources["megatron/bridge/models/gpt_provider.py"])
    (provider,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GPTModelProvider"]
    assert "TransformerConfig" in {node.id for node in ast.walk(provider) if isinstance(node, ast.Name)}
    annotated = [node.target for node in provider.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    assert {"vocab_size", "share_embeddings_and_output_weights"} <= fields
    assert "dynamic_context_parallel" in sources["megatron/bridge/training/initialize.py"]
    assert not [name for name, source in sources.items() if "wrap_data_iterator" in source], "it has the seam: run it"
