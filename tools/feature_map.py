"""Writes the table "Where a feature lives" of docs/extend.md: its page, its files in the core and in leaves, its tests.

python -m tools.feature_map

A file belongs to a feature if its path matches one pattern of the feature, or the first paragraph of its docstring
another. A folder of which every file matches is listed as a folder. tests/unit/test_docs.py compares the page with what
this writes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extend.md"
BEGIN = "<!-- begin features: `python -m tools.feature_map` -->"
END = "<!-- end features -->"


class Feature(NamedTuple):
    """A row: its name, its page with an anchor, and the patterns of its files' paths and docstrings."""

    name: str
    page: str
    paths: str
    says: str = "(?!)"  # nothing


FEATURES = (
    Feature("plan of a batch", "planner.md#the-five-steps", r"(dynamic_cp|unit)/(search|packing|plans|pipeline)/"),
    Feature("price of a bucket", "cost-model.md", r"(dynamic_cp|unit)/(pricing|models)/"),
    Feature("refinement by measured times", "cost-model.md#refinement", r"/learning/|refin|bucket_times|/measuring"),
    Feature("memory, the token limit", "cost-model.md#memory", r"dynamic_cp/memory/|memory"),
    Feature("exchanges", "mechanisms.md#four-exchanges", r"/mechanisms/|exchange"),
    Feature("placed attention, masks", "mechanisms.md#placed-attention", r"/placement/|placed|/blocks|mask"),
    Feature("attention in a pool of stages", "mechanisms.md#disaggregated-attention", r"pool|test_ticks|nano_batch"),
    Feature(
        "linear attention",
        "features.md#linear-attention",
        r"/linear/|linear_(attention|layers|homes)|/gated|mamba|hybrid|stretches|linear_prices|/states",
    ),
    Feature("experts", "features.md#experts", r"expert|router|(?<!re)routing", r"\bexperts\b"),
    Feature("multi-latent attention", "features.md#multi-latent-attention", r"latent", r"\b(multi-)?latents?\b"),
    Feature(
        "multi-token prediction",
        "features.md#multi-token-prediction",
        r"multi_token|distributed/test_features",
        r"multi-token",
    ),
    Feature("windows and sinks", "how-to/decide.md#layers-with-windows", r"window|sink", r"\b[Ww]indows?\b"),
    Feature("TransformerEngine, FP8", "GPU.md#transformerengine", r"/te/|fp8|transformer_engine|engine_import"),
    Feature("attention kernels", "GPU.md#attention-without-transformerengine", r"attention/kernels/|kernels|triton"),
    Feature(
        "groups, agreement", "design.md#the-runtime", r"/groups/|/agreement/|test_(agreement|messages|process_groups)"
    ),
    Feature(
        "micro-batches, a step",
        "design.md#one-sample-from-loader-to-loss",
        r"megatron/dynamic_cp/(data|step)/|packed_seq_params|test_(wrapper|prefetch|sharding|pipeline_p2p|parity)",
    ),
    Feature("dump and replay", "how-to/operate.md#dump-and-replay", r"plan_dump|replay|test_dump"),
    Feature("flags", "flags.md", r"/flags/|/test_(arguments|settings|refused_flags)"),
    Feature("repairs, releases", "releases.md", r"/repairs/|upstream_faults"),
    Feature("training data, chats", "how-to/data.md", r"trainer/data/|lengths/|unit/data/|test_sft"),
    Feature(
        "several responses, trees of turns",
        "how-to/data.md#several-responses-to-one-prompt",
        r"sample_tokens|questions|turns|branches|data/lines",
    ),
    Feature(
        "checkpoints", "how-to/operate.md#resume", r"/checkpoints/|test_(checkpoint|async_save|interchange|safe_load)"
    ),
    Feature("endings and faults", "how-to/operate.md#when-something-fails", r"/ending/|/faults/"),
    Feature("the trainer's loop", "index.md#train-see-it-run", r"trainer/(loop|setup|reporting)/|test_training"),
    Feature(
        "the command dynamic-cp", "command.md", r"decide/(cli|comparison|sweep|report|bounds)/|unit/(command|report)/"
    ),
    Feature("calibration, first day", "cost-model.md#calibrate", r"calibration/|first_day"),
    Feature("Megatron-LM checkouts", "how-to/megatron-lm.md", r"lm_adaptor/|tests/megatron_lm/"),
    Feature(
        "Megatron-Core's scheduler: verl",
        "how-to/other-loops.md",
        r"integrations/scheduler/|unit/scheduler/|frameworks",
    ),
    Feature("loops with an own iterator", "how-to/other-loops.md", r"/foreign/|foreign"),
    Feature("PyTorch, Hugging Face, TRL", "how-to/other-loops.md", r"/outside/|outside|test_trainers"),
    Feature("post-training", "how-to/fine-tune.md#post-training", r"post_training"),
    Feature("published weights, adapters", "how-to/fine-tune.md", r"weights/|test_weights|adapters"),
)
LEAVES = (
    "dynamic_cp/decide/",
    "dynamic_cp/pool/",
    "megatron/decide/",
    "megatron/dynamic_cp/pool/",
    "megatron/integrations/",
)


def files_below(*tops: str) -> list[str]:
    """Return the paths of all Python files below some folders, without __init__.py."""
    paths = (path.relative_to(ROOT).as_posix() for top in tops for path in sorted((ROOT / top).rglob("*.py")))
    return [path for path in paths if not path.endswith("/__init__.py")]


def says(path: str) -> str:
    """Return the first paragraph of a file's docstring."""
    return (ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or "").partition("\n\n")[0]


def listed(paths: Sequence[str], everything: Sequence[str]) -> str:
    """Return paths as Markdown: a folder in the place of its files where all of them are there."""
    names: list[str] = []
    for path in paths:
        name = path
        for folder in (above.as_posix() for above in Path(path).parents if len(above.parts) > 1):
            below = {one for one in everything if one.startswith(f"{folder}/")}
            if len(below) > 1 and below <= set(paths):
                name = f"{folder}/"
        if f"`{name}`" not in names:
            names.append(f"`{name}`")
    return ", ".join(names)


def table() -> str:
    """Return the table, one row for each feature."""
    product = files_below("dynamic_cp", "megatron")
    said = {path: says(path) for path in product}
    tests = [path for path in files_below("tests") if "/test_" in path]
    rows = ["| feature | core | leaf | tests |", "| --- | --- | --- | --- |"]
    for feature in FEATURES:
        found = [one for one in product if re.search(feature.paths, one) or re.search(feature.says, said[one])]
        in_leaves = [path for path in found if path.startswith(LEAVES)]
        cells = (
            listed([path for path in found if path not in in_leaves], product),
            listed(in_leaves, product),
            listed([path for path in tests if re.search(feature.paths, path)], tests),
        )
        rows.append(f"| [{feature.name}]({feature.page}) | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """Return the text of the page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write the table into the page; return 0."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
