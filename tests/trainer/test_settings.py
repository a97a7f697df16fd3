"""A run's settings are made once from the flags: nobody changes them, and nobody else sees what argparse parsed."""

from __future__ import annotations

import ast
import operator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest

from dynamic_cp.types import AUTO_CHUNK_TOKENS, StateDtypes
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.flags.table import flags_of
from megatron.trainer.flags.arguments import build_parser, parse_args
from megatron.trainer.flags.settings import TABLE, Settings
from tests.trainer.commandline import command_line

MEGATRON = Path(__file__).parents[2] / "megatron"
SEES_PARSED_ARGUMENTS = {
    "trainer/flags/validation.py": "makes settings of them",
    "trainer/checkpoints/interchange.py": "Megatron-LM's checkpoints hold its arguments",
    "integrations/weights/described.py": "the same",
    "integrations/lm_adaptor/counts.py": "Megatron-LM's own arguments",
    "integrations/lm_adaptor/flags.py": "Megatron-LM's own arguments",
    "integrations/lm_adaptor/scheduler.py": "Megatron-LM's own arguments",
    "integrations/lm_adaptor/session.py": "Megatron-LM's own arguments",
    "integrations/lm_adaptor/varlen.py": "Megatron-LM's own arguments",
}
KEPT_IN_PLANNING = {
    "seq_length": "seq_length",
    "expert_model_parallel_size": "topology",
    "tensor_model_parallel_size": "topology",
    "pipeline_model_parallel_size": "topology",
    "sequence_parallel": "topology",
    "use_distributed_optimizer": "data_parallel",
    "overlap_grad_reduce": "data_parallel",
    "overlap_param_gather": "data_parallel",
    **{field.name: "data_parallel" for field in fields(StateDtypes)},
    "distributed_timeout_minutes": "exchange_timeout_s",
    "recompute_granularity": "recompute",
    "recompute_modules": "recompute_modules",
}
ONLY_DECIDE = {
    "group_query_attention",
    "recompute_activations",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "micro_batch_size",
    "ckpt_format",
    "moe_token_dispatcher_type",
}
"""Flags that only decide what others become, that have one value, or that are accepted without effect."""


def groups(settings: Settings) -> list[object]:
    """Return the groups of settings."""
    return [value for field in fields(settings) if is_dataclass(value := getattr(settings, field.name))]


def test_settings_cannot_change() -> None:
    settings = parse_args(command_line(), 4)
    assert len(groups(settings)) == 9
    for group in (settings, *groups(settings)):
        for field in fields(group):  # type: ignore[arg-type]
            with pytest.raises(FrozenInstanceError):
                setattr(group, field.name, None)
    with pytest.raises(TypeError):
        operator.setitem(settings.arguments, "lr", 1.0)  # type: ignore[arg-type]


def test_every_flag_is_a_setting_once() -> None:
    rows = [(settings, row) for settings in TABLE for row in flags_of(settings)]
    destinations = [row.destination for _, row in rows]
    assert len(rows) > 150
    assert len(destinations) == len(set(destinations))
    assert set(destinations) == {action.dest for action in build_parser()._actions if action.help != "==SUPPRESS=="} - {
        "help"
    }
    kept = {settings: {field.name for field in fields(settings)} for settings in TABLE}
    parsed_only = {row.destination for settings, row in rows if row.field not in kept[settings]}
    assert parsed_only == ONLY_DECIDE | set(KEPT_IN_PLANNING)
    assert set(KEPT_IN_PLANNING.values()) <= kept[PlanningSettings]
    assert {type(group) for group in groups(parse_args(command_line(), 4))} == set(TABLE)


def test_what_is_written_down_of_a_run_has_every_flag_completed() -> None:
    words = "--dynamic-cp --cp-comm-type a2a --recompute-activations --lr-warmup-fraction 0.25 --split 90,10,0"
    words += " --loss-chunk-tokens auto"
    line = " ".join(command_line(words)).replace("--lr-warmup-iters 2", "")
    arguments = parse_args(line.split(), 8).arguments
    parsed = {action.dest for action in build_parser()._actions if action.default != "==SUPPRESS=="}
    assert parsed <= set(arguments)
    completed = {
        "max_seqlen_per_dp_cp_rank": 128,
        "max_dynamic_cp_size": 4,
        "dynamic_cp_inner_sizes": None,
        "loss_chunk_tokens": AUTO_CHUNK_TOKENS,
        "recompute_granularity": "selective",
        "lr_warmup_samples": 24,
        "kv_channels": 16,
        "world_size": 8,
        "ranks_per_node": 8,
        "split": "90,10,0",
    }
    assert {name: arguments[name] for name in completed} == completed
    auto = parse_args(command_line("--dynamic-cp --max-seqlen-per-dp-cp-rank auto"), 4)
    assert (auto.planning.max_tokens_per_rank, auto.arguments["max_seqlen_per_dp_cp_rank"]) == (None, "auto")


def test_only_the_command_line_sees_parsed_arguments() -> None:
    seen = set()
    for path in sorted(MEGATRON.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        if "Namespace" in names:
            seen.add(path.relative_to(MEGATRON).as_posix())
    assert seen == set(SEES_PARSED_ARGUMENTS)
