"""What plans of a job depend on besides the samples: from a call, a configuration, the environment or the process.

Frameworks give a scheduler two sizes and a limit, but neither model nor hardware. Where they call no `run()`, TP and PP
come from megatron-core's `parallel_state`, if the process has it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.catalog import load_hardware, load_model, model_from_dict
from dynamic_cp.types import RING_ALONE, SHARDED, DataParallel, Hardware, ModelShape, PlanOptions, Problem, Topology
from megatron.integrations.scheduler import config as of_config

MODEL, HARDWARE, TP, PP = "DYNAMIC_CP_MODEL", "DYNAMIC_CP_HARDWARE", "DYNAMIC_CP_TP", "DYNAMIC_CP_PP"
"""Environment variables of `job_of_environment`."""

LAYOUT = tuple(one.name for one in fields(Topology) if one.name != "num_lanes")
OPTIONS = (
    *("max_cp_size", "recompute", "recompute_modules", "recompute_layers", "tp_comm_overlap"),
    *("bytes_per_element", "fp32_residual", "search"),
)
"""What a call may say of PlanOptions. Frameworks run a ring in aligned groups, so other exchanges and pools cannot be
planned; the limit of tokens and the smallest CP size are theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What plans depend on besides samples, lanes and the limit of tokens.

    Attributes:
        model: None: the framework's configuration says it, in `run()`.
        layout: of `LAYOUT`; what is left out is found by `layout_of_process`.
        options: of `OPTIONS`.
    """

    hardware: Hardware
    model: ModelShape | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    data_parallel: DataParallel = SHARDED

    def with_config(self, config: Any) -> Job:
        """Return the job with what a configuration of megatron-core says, where nobody said it before."""
        return replace(
            self,
            model=self.model or of_config.model_of(config),
            layout=of_config.layout_of(config) | dict(self.layout),
            options=of_config.options_of(config) | dict(self.options),
            data_parallel=of_config.data_parallel_of(config) or self.data_parallel,
        )

    def problem(self, num_lanes: int, max_tokens_per_rank: int, min_cp_size: int = 1) -> Problem:
        """Return what the planner is asked, for the lanes and limits of a scheduler. Raises DynamicCPError: no model,
        or numbers that contradict each other."""
        if self.model is None:
            raise InvalidInputError(
                f"no model to plan for: give one to job_of(), or name one in {MODEL}: a bundled name or a config.json"
            )
        return Problem(
            topology=Topology(num_lanes=num_lanes, **(layout_of_process() | dict(self.layout))),
            model=self.model,
            hardware=self.hardware,
            options=PlanOptions(
                max_tokens_per_rank=max_tokens_per_rank,
                min_cp_size=min_cp_size,
                cp_comm_types=RING_ALONE,  # what frameworks have
                state_exchange="heads",  # what frameworks do with linear attention
                **{"search": "fast", **self.options},
            ),
            data_parallel=self.data_parallel,
        )


def job_of(
    model: Any = None,
    *,
    hardware: str | Path | Hardware = "h100",
    layout: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    data_parallel: DataParallel | None = None,
) -> Job:
    """Return the job of a model.

    Args:
        model: a bundled name, the path of a config.json or of our JSON, the dict in such a file, a configuration of
            transformers or megatron-core, or a ModelShape; None: taken from what `run()` is given.
        hardware: a bundled name, the path of a file, or a Hardware.
        layout: tp_size, pp_size and others of `LAYOUT`; those of the process where they are left out.
        options: recompute, max_cp_size and others of `OPTIONS`.
        data_parallel: how lanes share gradients; a part of the predicted seconds only.

    Raises:
        DynamicCPError: an unknown model or hardware, or a field that is not there.
    """
    _check_names("layout", layout or {}, LAYOUT)
    _check_names("options", options or {}, OPTIONS)
    job = Job(
        hardware=hardware if isinstance(hardware, Hardware) else load_hardware(hardware),
        layout=dict(layout or {}),
        options=dict(options or {}),
        data_parallel=data_parallel or SHARDED,
    )
    if model is None:
        return job
    if isinstance(model, ModelShape):
        return replace(job, model=model)
    if isinstance(model, str | Path):
        return replace(job, model=load_model(model))
    if isinstance(model, Mapping):
        return replace(job, model=model_from_dict("model", model))
    if hasattr(model, "model_type") and callable(getattr(model, "to_dict", None)):
        return replace(job, model=model_from_dict("model", model.to_dict()))
    if of_config.is_config(model):
        return job.with_config(model)
    raise InvalidInputError(
        f"model is a {type(model).__name__}: give a bundled name, the path of a config.json, its dict, a configuration "
        "of transformers or megatron-core, or a ModelShape"
    )


def job_of_environment() -> Job:
    """Return the job that environment variables name. Raises DynamicCPError: an unknown model or hardware, or a size
    that is no number."""
    layout = {"tp_size": _size(TP), "pp_size": _size(PP)}
    return job_of(
        os.environ.get(MODEL) or None,
        hardware=os.environ.get(HARDWARE) or "h100",
        layout={name: size for name, size in layout.items() if size is not None},
    )


def layout_of_process() -> dict[str, Any]:
    """Return the sizes that megatron-core's groups have in this process; {} before they are made, or without it."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    tp_size = state.get_tensor_model_parallel_world_size()
    return {
        "tp_size": tp_size,
        "pp_size": state.get_pipeline_model_parallel_world_size(),
        "vp_size": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "ep_size": state.get_expert_model_parallel_world_size() or 1,
        "sequence_parallel": tp_size > 1,
    }


def _size(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise InvalidInputError(f"{variable} is {text!r}, a number from 1 on is needed: correct it, or leave it out")
    return int(text) if text else None


def _check_names(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise InvalidInputError(f"{what} has no {unknown[0]}: known are {', '.join(known)}")
