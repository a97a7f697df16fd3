"""Released code of other frameworks with the planner in the place of Megatron-Core's scheduler, on gloo ranks.

verl's own test of the seam is in none of its wheels. From its repository, with our class registered, the five tests
passed that need neither peft nor omegaconf (2026-11-26); what they assert of a plan is asserted here of ours.
"""

from __future__ import annotations

import ast
import logging
import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp import load_model
from megatron.integrations.frameworks import TESTED
from megatron.integrations.scheduler.groups import check_groups
from megatron.integrations.scheduler.job import MODEL, PP
from tests.distributed import verl_seam
from tests.distributed.harness import run_forked, run_ranks
from tests.distributed.outside import load_planner
from tests.wheels import newest_or_skip, wheel_or_skip

LIMIT = 128
LENGTHS = (300, 17, 64, 120, 5, 90, 33, 200, 1, 77, 128, 41, 12, 60, 8, 99)


def steps_on_ranks(world_size: int, site: Path, *batches: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Return what each rank of a job finds in steps on batches; verl is imported once, in a process of its own."""
    load_planner()
    return run_forked(_import_and_run, world_size, site, batches)


def _import_and_run(world_size: int, site: Path, batches: tuple[tuple[int, ...], ...]) -> list[Any]:
    verl_seam.open_seam(site)
    return run_ranks(world_size, steps_of, site, batches)


def steps_of(site: Path, batches: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    """Run steps of a job whose model and pipeline the environment says."""
    os.environ.update({MODEL: "qwen2.5-7b", PP: "4"})
    seam = verl_seam.open_seam(site)
    chosen = verl_seam.register_by_import()
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
            found.append(verl_seam.step(seam, lengths, LIMIT) | {"warnings": warnings})
        except ValueError as error:
            found.append({"error": str(error)})
    return found


def test_every_sample_is_trained_once_and_results_come_in_order() -> None:
    """Where no ranks hold a sample, that is said in verl's words."""
    check_step(verl_seam.unpacked_or_skip())


@pytest.mark.nightly
def test_the_newest_release_of_verl_does_the_same() -> None:
    """Where this fails, or names another release, `frameworks.TESTED` and the page are to be looked at."""
    newest = newest_or_skip(verl_seam.FOLDER, "verl")
    check_step(verl_seam.unpacked_or_skip(newest))
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
    for (rank,) in steps_on_ranks(6, verl_seam.unpacked_or_skip(), lengths):
        assert [ids for ids, _, _ in rank["packs"]] == [[sample] for sample in range(len(lengths))]
        (warning,) = rank["warnings"]
        assert "6 lanes are not a power of two" in warning
        assert len(rank["log_probs"]) == len(lengths)


def test_a_provider_of_bridge_says_the_model() -> None:
    """Fields of it that megatron-core's configuration lacks. No release of Bridge up to this one calls a scheduler."""
    folder = verl_seam.FOLDER
    wheel = wheel_or_skip(folder, "megatron-bridge", "0.6.2", "--python-version", "3.12")  # pip's own is not enough
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
