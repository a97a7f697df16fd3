"""Faults that stock megatron-core has without a word: the page says in which releases, and here none of them trains.

`upstream_faults.py` rebuilds each in stock. Here the same situations are compared with a stock model in one process, or
with plain arithmetic.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import megatron.core as core
import numpy as np
import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import CrossAttention

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample
from megatron.dynamic_cp.data import micro_batches
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.layout.sharding import shard_positions
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.repairs import releases
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of, lines
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    Layout,
    build_chunks,
    compare_with_reference,
    in_jobs_of_their_own,
    mixed_plan,
    samples_of,
)
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.distributed.upstream_faults import (
    ERRORS,
    SIZED,
    counted_by_norm,
    errors_of_stock,
    groups_of_one,
    size_of_stock,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
UNKNOWN = {"7452.12", "7452.13"}
"""What was not found to read."""


def releases_with_faults() -> dict[str, set[str]]:
    """Return report -> the releases that have it, as the page's table says."""
    rows = re.findall(r"^\| \[?#(\d+)\]?(?:\([^)]*\))?(?: (\d+))? \|[^|]*\| ([^|]*) \|", PAGE, re.MULTILINE)
    every = {release.version for release in releases.RELEASES}
    return {
        ".".join(filter(None, (number, finding))): every if where == "all" else set(re.findall(r"\d+\.\d+\.\d+", where))
        for number, finding, where in rows
    }


def largest_errors_of_stock() -> dict[str, float]:
    sizes = {report: run_ranks(1, size_of_stock, variant)[0] for report, variant in SIZED.items()}
    ranks = run_ranks(2, errors_of_stock, sizes)
    return {report: max(rank[report] for rank in ranks) for report in ERRORS}


@pytest.mark.nightly
@pytest.mark.of_releases
def test_stock_is_wrong_in_the_releases_that_the_page_names() -> None:
    """In a process of its own: what other tests repair is no longer stock."""
    told = releases_with_faults()
    assert set(told) == set(ERRORS) | UNKNOWN
    code = f"import json; from {__name__} import *; print(json.dumps(largest_errors_of_stock()))"
    words = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    errors = json.loads(ended.stdout.splitlines()[-1])
    version = core.__version__.partition("+")[0]
    found = {report: error > 1e-3 for report, error in errors.items()}
    assert found == {report: version in told[report] for report in ERRORS}, errors


def lanes_without_targets() -> Case:
    """The loss of the long sample is on the first lane alone; then the second has one token, and then nothing."""
    layout, (one, short, other) = Layout(2, variant="mtp"), samples_of(1, 37, 20)
    chat = Sample(sample_id=reference.FIRST_MASKED_ID, seqlen=64)

    def alone(*held: tuple[Sample, ...]) -> MicroBatch:
        return MicroBatch(buckets=tuple(Bucket(first_lane=lane, samples=samples) for lane, samples in enumerate(held)))

    rows = (MicroBatch(buckets=(Bucket(first_lane=0, cp_size=2, samples=(chat,)),)), alone((short,), (one,)))
    plan = Plan(
        topology=layout.topology, max_tokens_per_rank=64, micro_batches=(*rows, alone((other,), ())), policy="test"
    )
    return Case(layout, (chat, one, short, other), plan, {})


def of_lengths(line: str, *seqlens: int) -> Case:
    layout, samples = layout_of(line), samples_of(*seqlens)
    return Case(layout, samples, mixed_plan(samples, layout), {})


SITUATIONS = {
    # Means of shards (7452, 9), weights of later tokens (3), a rank without targets (1764).
    "no_targets": lanes_without_targets(),
    # Gathered logits (2); without padding of the vocabulary and smoothing (1).
    "gathered": of_lengths("one tp2 gathered", 33, 17, 9),
    "mtp_gathered": of_lengths("one tp2 mtp_gathered", 33, 17, 9),
    # Recomputed modules (4), padding and its counts over tensor-parallel ranks (5, 10).
    "recomputed": of_lengths("one tp2 sp moe_mtp full", 21, 5, 3, 1),
    # Losses of each sample of a pack, padding beside it (6108).
    "packs": of_lengths("two ep2 moe_sigmoid", 30, 11, 5, 3, 1),
}
WITHOUT_GATHERING = {"gathered": "llama", "mtp_gathered": "mtp"}


@pytest.mark.by_day("day")
@pytest.mark.of_releases
@pytest.mark.parametrize("names", [("no_targets", "gathered"), tuple(SITUATIONS)], ids=["day", "all"])
def test_training_in_these_situations_equals_a_stock_model_in_one_process(names: tuple[str, ...]) -> None:
    cases = {}
    for name in names:
        case = SITUATIONS[name]
        variant = WITHOUT_GATHERING.get(name, case.layout.variant)
        (expected,) = run_ranks(1, reference.reference_step, variant, case.samples, case.layout.num_layers)
        cases[name] = case._replace(expected=expected)
    for name, comparisons in compare_with_reference(cases).items():
        layout, _, _, expected = cases[name]
        assert max(found.loss_error for found in comparisons) <= TOLERANCE, name
        errors = {key: error for found in comparisons for key, error in found.gradient_errors.items()}
        assert set(errors) == set(expected["gradients"]) | set(expected["expert_biases"]), name
        assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}, name
        seen = sum((found.tokens_seen for found in comparisons), Counter())
        assert len(seen) == expected["num_tokens"], name
        assert set(seen.values()) == {layout.tp}, name


def test_the_second_lane_has_no_target_of_the_long_sample() -> None:
    chat = SITUATIONS["no_targets"].samples[0]
    mask = reference.read_sample(chat).loss_mask
    assert [mask[shard_positions(chat.seqlen, 2, lane)].sum() for lane in range(2)] == [8, 0]


# Learned sinks (7452, 8), biases of experts (5916), gates, latents, modules, and copies on another stage.
NORMS_BY_DAY = lines("""
    one tp2 learned_offset; one tp2 sp gpt_oss; one tp2 sp ep2 gpt_oss; one tp2 sp ep2 gpt_oss distributed
    one tp2 sp moe_biased distributed; one tp2 sp ep2 moe_top_1; one tp2 sp ep2 deepseek; one pp2 mtp_tied
    two ep2 moe_biased; two ep2 moe_biased distributed
""")
NORMS_BY_NIGHT = [f"one tp2 sp {name}" for name in reference.VARIANTS]


def norms(names: list[str]) -> dict[str, int]:
    found = {}
    for name, layout in in_jobs_of_their_own({name: layout_of(name) for name in names}):
        initialize_model_parallel(layout.tp, layout.pp, None, layout.ep)
        _, chunks = build_chunks(layout, reference.VARIANTS[layout.variant])
        found[name] = counted_by_norm(chunks, distributed_optimizer=layout.distributed_optimizer)
    return found


def sizes(names: list[str]) -> dict[str, int]:
    initialize_model_parallel()
    found = {}
    for name in names:
        layout = layout_of(name)
        whole = Layout(1, variant=layout.variant, config={"num_layers": layout.num_layers})
        _, (chunk,) = build_chunks(whole, reference.VARIANTS[layout.variant])
        found[name] = sum(parameter.numel() for parameter in chunk.parameters())
    return found


@pytest.mark.parametrize(
    "names",
    [pytest.param(NORMS_BY_DAY, id="day"), pytest.param(NORMS_BY_NIGHT, id="night", marks=pytest.mark.nightly)],
)
def test_every_parameter_counts_once_in_the_norm_that_gradients_are_clipped_by(names: list[str]) -> None:
    """On all ranks alike: by norms of their own they would train models that drift apart."""
    (expected,) = run_ranks(1, sizes, names)
    assert run_ranks(2, norms, names, timeout_s=240) == [expected, expected]


NORMS_OF_ENGINE = [
    f"one tp2 sp engine {variant}{ep}{product}"
    for variant in ("moe", "moe_biased", "moe_sigmoid", "moe_top_1")
    for ep in ("", " ep2")
    for product in ("", " one_product")
]


@pytest.mark.nightly
def test_every_parameter_of_transformer_engine_counts_once_in_that_norm() -> None:
    """5916: of its experts megatron-core counts no weight on any tensor-parallel rank but the first."""
    (expected,) = run_ranks(1, sizes, NORMS_OF_ENGINE)
    assert run_ranks_with(PINNED, 2, norms, NORMS_OF_ENGINE, timeout_s=240) == [expected, expected]


def said_of_groups(variant: str) -> str:
    initialize_model_parallel(tp=2)
    given = reference.VARIANTS[variant]
    config = reference.transformer_config(given)
    with pytest.raises(UnsupportedFeatureError) as caught:
        reference.gpt_model(config, given, gpt_block_spec(config), pg_collection=groups_of_one())
    return str(caught.value)


@pytest.mark.parametrize("variant", ["llama", "latent"])
def test_a_model_in_groups_that_are_not_megatron_cores_own_is_refused(variant: str) -> None:
    """7452, 4 to 7: a mask, a recomputation or cross-attention would be that of other ranks."""
    for rank, said in enumerate(run_ranks(2, said_of_groups, variant)):
        assert said.startswith(f"the model's pg_collection.tp has the ranks [{rank}], megatron-core's own group of ")
        assert "[0, 1]: leave pg_collection out" in said


def kinds_of_modules(variant: str) -> set[type]:
    initialize_model_parallel()
    _, (chunk,) = build_chunks(Layout(1, variant=variant), reference.VARIANTS[variant])
    return {type(module) for module in chunk.modules()}


def test_no_model_has_cross_attention_or_pictures() -> None:
    for variant in ("gpt_oss", "deepseek"):
        (kinds,) = run_ranks(1, kinds_of_modules, variant)
        assert CrossAttention not in kinds
        assert not [kind for kind in kinds if "multimodal" in kind.__module__]


def test_no_field_asks_for_smoothed_labels() -> None:
    assert not [name for name in TransformerConfig.__dataclass_fields__ if "smooth" in name]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("distribute_saved_activations", True, "distribute_saved_activations is True, only False is supported"),
        ("calculate_per_token_loss", False, "calculate_per_token_loss is False, only True is supported"),
    ],
)
def test_what_reaches_a_fault_is_refused(field: str, value: Any, said: str) -> None:
    config = reference.transformer_config(reference.MTP)
    check_supported(config)
    setattr(config, field, value)  # not by the constructor: what is refused there depends on what is installed
    with pytest.raises(UnsupportedFeatureError, match=said):
        check_supported(config)


@pytest.mark.parametrize("seqlen", [1, 5, 7, 8])
def test_no_target_lies_behind_the_end_of_a_padded_sample(seqlen: int) -> None:
    """7278: of 7 tokens in 8 places six have a later one and five the one behind that, wherever shards end."""
    sample = Sample(sample_id=3, seqlen=seqlen)
    values = reference.read_sample(sample)
    bucket = Bucket(first_lane=0, cp_size=2, samples=(sample,))
    found: dict[str, Any] = {}
    for lane in range(2):
        shard = shard_positions(8, 2, lane)
        columns = micro_batches.read_shard(bucket, [shard], [shard], lambda _: values, 2)
        for name, column in columns.items():
            found.setdefault(name, np.zeros(8, column.dtype))[shard] = column
    for depth in (1, 2):
        later = max(0, seqlen - depth)
        for name in ("labels", "tokens", "loss_mask"):
            wanted = np.zeros(8)
            wanted[:later] = getattr(values, name)[depth:]
            assert found[f"{name} {depth}"].tolist() == wanted.tolist(), (name, depth)
        assert math.isclose(found[f"loss_mask {depth}"].sum(), later)
