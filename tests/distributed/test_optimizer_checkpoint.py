"""Without fused Adam, a distributed optimizer that has not stepped cannot load; with the repairs it can."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs import patches
from tests.distributed import reference
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks
from tests.distributed.parity import Layout, build_chunks

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def ask_a_fresh_optimizer_what_to_load(repaired: bool) -> tuple[int, int]:
    """Return (number of parameters with state, number of distinct step tensors after loading its own state)."""
    if repaired:
        patches.repair_optimizer_checkpoint()
        patches.repair_optimizer_checkpoint()  # a second call changes nothing
    initialize_model_parallel()
    config, (chunk,) = build_chunks(Layout(2), reference.LLAMA)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, chunk)
    chained = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    (optimizer,) = chained.chained_optimizers
    weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    optimizer.sharded_state_dict(chunk.sharded_state_dict(), is_loading=True, metadata=RESHARDABLE)
    assert all(torch.equal(weights[name], p) for name, p in chunk.named_parameters()), "asking changed the weights"
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    steps = [state["step"].data_ptr() for state in optimizer.optimizer.state.values()]
    return len(steps), len(set(steps))


@pytest.mark.skipif(patches.HAVE_APEX_OR_TE, reason="a fused Adam is installed: nothing to repair")
def test_loading_needs_the_repairs_and_works_with_them() -> None:
    with pytest.raises(RankError, match="len\\(steps\\) == 1"):
        run_ranks(2, ask_a_fresh_optimizer_what_to_load, False)
    for num_states, num_steps in run_ranks(2, ask_a_fresh_optimizer_what_to_load, True):
        assert num_states == num_steps > 5, "parameters share a step counter"


def test_halves_are_not_taken_for_weights() -> None:
    """Integers of 16 bits; a norm's ones and a bias's zeros are weights."""
    halves = torch.randint(-(2**15), 2**15, (1000,)).float()
    with pytest.raises(UnsupportedFeatureError, match="lower halves of the optimizer's weights"):
        patches._check_are_weights(halves)
    for weights in (torch.ones(8), torch.zeros(8), torch.empty(0), torch.randn(1000) * 3):
        patches._check_are_weights(weights)
