"""After the warm-up of a hybrid no step meets a shape for which a program of flash-linear-attention is tuned.

It is called as in a loop without Megatron, by `Lanes.build`.

Triton is not needed: stand-ins of its functions note the shapes that are part of its programs' keys.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import STATE_EXCHANGES, LinearAttention, PlanOptions, Problem, Topology
from megatron.decide import linear_warm_up
from megatron.decide.linear_warm_up import agree_on_choices, tuned_programs
from megatron.dynamic_cp.attention.linear import kernels, thd
from megatron.integrations.outside import Lanes
from tests.distributed.harness import params_of, run_ranks
from tests.distributed.linear_reference import hybrid_of
from tests.released_linear_kernels import RELEASED

CPU = torch.device("cpu")
LAYERS = {
    "gated_delta_net": LinearAttention(kind="gated_delta_net", num_heads=6, num_groups=3, key_size=8, value_size=4),
    "mamba2": LinearAttention(kind="mamba2", num_heads=4, num_groups=2, key_size=8, value_size=4),
}
LIMIT, BUCKET_ROWS = 96, 64


def shape_of(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the keys of a function's programs have of a call."""
    if name == "causal_conv1d":
        return name, given[0].shape[2], *options["weight"].shape
    if name == "l2norm":
        return name, given[0].shape[-1], -(-given[0].numel() // given[0].shape[-1] // BUCKET_ROWS)
    q, _, v = given[:3]
    return name, q.shape[2], v.shape[2], q.shape[3], v.shape[3], options["initial_state"] is None


def shapes_met(kind: str) -> tuple[set[Any], set[Any], list[str]]:
    """Return the shapes of the warm-up, those of steps behind it, and what the warm-up told."""
    sizes, met, told = LAYERS[kind], set[Any](), list[str]()
    options, h100 = PlanOptions(max_tokens_per_rank=LIMIT, cp_comm_types=("a2a",)), load_hardware("h100")
    problem = Problem(topology=Topology(num_lanes=4), model=hybrid_of(sizes), hardware=h100, options=options)
    warm_up = linear_warm_up.warm_up

    def function(name: str) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            met.add(shape_of(name, given, options))
            return RELEASED[name](*given, **options)

        return called

    fla = mock.Mock(return_value=kernels.FLA)
    with (
        mock.patch.object(thd, "choose_linear_kernel", fla),
        mock.patch.object(linear_warm_up, "choose_linear_kernel", fla),
        mock.patch.object(kernels, "_function", function),
        mock.patch.object(linear_warm_up, "ROWS_OF_A_BUCKET", BUCKET_ROWS),
        mock.patch.object(linear_warm_up, "LANE_TOKENS", (8, 10)),
        mock.patch.object(linear_warm_up, "warm_up", lambda *given: told.append(warm_up(*given)) or told[-1]),
    ):
        groups = Lanes.build(init_device_mesh("cpu", (4,)), problem, timeout_s=60).groups
        warm, met_later = set(met), set[Any]()
        met.clear()
        for first, size in groups.groups:
            for way in STATE_EXCHANGES:
                for lengths in ((LIMIT * size,), (8 * size, 2 * size, 30 * size), (4 * size,)):
                    step(sizes, groups.group(first, size), lengths, way)
        met_later |= met
    return warm, met_later, told


def step(sizes: LinearAttention, group: Any, lengths: tuple[int, ...], way: Any) -> None:
    tokens = sum(lengths) // group.size()
    params = params_of(lengths, torch.zeros(tokens, dtype=torch.int64), group, state_exchange=way)
    x, gate = (torch.ones(tokens, n, requires_grad=True) for n in (sizes.convolved_channels, sizes.num_heads))
    weight, heads = torch.ones(sizes.convolved_channels, 1, sizes.kernel_size), torch.ones(sizes.num_heads)
    if sizes.has_delta_rule:
        out: Tensor = thd.gated_delta_net_thd(x, gate, gate, weight, params, sizes)
    else:
        out = thd.mamba2_thd(x, gate, heads, heads, weight, torch.ones(len(weight)), params, sizes)
    out.sum().backward()


@pytest.mark.parametrize("kind", LAYERS)
def test_steps_meet_no_shape_that_the_warm_up_did_not(kind: str) -> None:
    """Six heads of three groups on four lanes: shares are of one and of two heads, and cut groups."""
    found = run_ranks(4, shapes_met, kind)
    for warm, later, (told,) in found:
        assert later - warm == set(), "would be tuned inside a step"
        assert len(later) > 6
        assert "warm-up: 10 packs" in told, "two numbers of tokens alone, and by each way over two and four lanes"
    heads = {shape[2] for warm, _, _ in found for shape in warm if shape[0].startswith("chunk")}
    assert len(heads) > 2, "programs are tuned for each number of heads"


class Autotuner:
    """As Triton's: `keys` names the parts of keys, `cache` has the configuration of each key."""

    def __init__(self, keys: list[str], chosen: dict[Any, str]) -> None:
        self.keys, self.configs, self.cache = keys, ["small", "large", "wide"], dict(chosen)


class Heuristics:
    def __init__(self, fn: Any) -> None:
        self.fn = fn


def choices_of_ranks() -> tuple[int, dict[Any, str], list[str]]:
    rank = dist.get_rank()
    scan = Autotuner(["H"], {(4,): "large" if rank else "small", (2,): "wide"} | ({(8,): "large"} if rank else {}))
    module: Any = ModuleType("fla.ops.made_up")
    module.scan, module.again, module.other = Heuristics(scan), scan, 3
    with mock.patch.dict(sys.modules, {"fla.ops.made_up": module}):
        changed = agree_on_choices(CPU)
        names = [name for name, _ in tuned_programs()]
    return changed, scan.cache, names


def test_ranks_take_the_choices_of_the_first() -> None:
    """Also where a later rank met a shape that the first did not."""
    (of_first, first, names), (of_second, second, _) = run_ranks(2, choices_of_ranks)
    assert (of_first, of_second) == (0, 1)
    assert first == {(4,): "small", (2,): "wide"}
    assert second == {(4,): "small", (2,): "wide", (8,): "large"}
    assert names == ["fla.ops.made_up.again"], "each program once"
