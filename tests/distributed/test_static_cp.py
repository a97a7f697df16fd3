"""Our `static` policy equals megatron-core's own static context parallelism on 4 ranks.

megatron-core's side is built with context_parallel_size=4 and keeps its own CP group, sharding of the batch, rotary
embedding, gradient scaling and reduction. Only the attention kernel is ours on both sides: its own needs
TransformerEngine under CP.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import PlanOptions, Sample
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.step.loss import sum_of_losses
from tests.distributed import reference
from tests.distributed.harness import run_ranks
from tests.distributed.parity import TOLERANCE, Case, Layout, assert_all_equal_to_reference, samples_of

CP_SIZE = 4


def shard_of_this_rank(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of a sequence in the static CP group, cut by megatron-core."""
    from_0_18 = "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(whole, **{"is_hybrid_cp": False} if from_0_18 else {}, cp_group=group)


class StaticGroupAttention(TorchTHDAttention):
    """Our kernel, told of megatron-core's static CP group."""

    def forward(
        self, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: PackedSeqParams, **kw: Any
    ) -> Any:
        params = DynamicPackedSeqParams.build(
            (packed_seq_params.max_seqlen_q,),
            torch.zeros(len(query), dtype=torch.int64),
            parallel_state.get_context_parallel_group(),
            cp_comm_type="p2p",
            label="static",
            stats=ExchangeStats(),
        )
        return super().forward(query, key, value, *args, packed_seq_params=params, **kw)


def megatron_static_cp_step(samples: tuple[Sample, ...], initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's {"gradients", "losses": (sample_id, position) -> loss}; one sample per micro-batch."""
    parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    variant = reference.LLAMA
    config = reference.transformer_config(variant, num_layers=Layout(CP_SIZE).num_layers, context_parallel_size=CP_SIZE)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = StaticGroupAttention
    chunk = reference.gpt_model(config, variant, spec)
    chunk.load_state_dict(initial, strict=False)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    config.finalize_model_grads_func = finalize_model_grads
    losses = {}

    def micro_batches() -> Any:
        for sample in samples:
            values = reference.read_sample(sample)
            (seqlen,) = padded_seqlens((sample.seqlen,), CP_SIZE)
            padding = seqlen - sample.seqlen
            whole = {
                name: torch.nn.functional.pad(torch.from_numpy(column), (0, padding))[None]
                for name, column in vars(values).items()
            }
            whole["position_ids"] = torch.arange(seqlen)[None]
            boundaries = torch.tensor([0, seqlen], dtype=torch.int32)
            params = PackedSeqParams("thd", boundaries, boundaries, boundaries, boundaries, seqlen, seqlen)
            yield sample.sample_id, shard_of_this_rank(whole), params

    def forward_step(data_iterator: Any, gpt: Any) -> Any:
        sample_id, batch, params = next(data_iterator)
        output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)

        def loss_func(token_losses: torch.Tensor) -> Any:
            kept = batch["loss_mask"].flatten().bool()
            positions = batch["position_ids"].flatten()[kept].tolist()
            for position, value in zip(positions, token_losses.flatten()[kept].tolist(), strict=True):
                losses[sample_id, position] = value
            return sum_of_losses(batch["loss_mask"], token_losses)

        return output, loss_func

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=micro_batches(),
        model=model,
        num_microbatches=len(samples),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    return {"gradients": {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, "losses": losses}


def test_static_policy_equals_static_context_parallelism() -> None:
    samples = samples_of(801, 700, 600)
    layout = Layout(CP_SIZE)
    single = run_ranks(1, reference.reference_step, "llama", samples, layout.num_layers)[0]
    ranks = run_ranks(CP_SIZE, megatron_static_cp_step, samples, single["initial"])
    by_token = {token: value for rank in ranks for token, value in rank["losses"].items()}
    losses = {s.sample_id: torch.tensor([by_token[s.sample_id, i] for i in range(s.seqlen)]) for s in samples}
    assert len(by_token) == single["num_tokens"]
    static = {**single, "gradients": ranks[0]["gradients"], "losses": losses}
    plan = plan_global_batch(
        samples,
        topology=layout.topology,
        model=load_model("llama-3-8b"),
        hardware=load_hardware("cpu"),
        options=PlanOptions(max_tokens_per_rank=208, static_cp_size=CP_SIZE, cp_comm_types=("p2p",)),
        policy="static",
    ).plan
    # Two samples never fit together: one per micro-batch, as megatron-core's side runs them.
    assert [(bucket.cp_size, len(bucket.samples)) for bucket in plan.buckets] == [(CP_SIZE, 1)] * 3
    assert_all_equal_to_reference({"static": Case(layout, samples, plan, static)})
    # ... and both are right, not merely alike.
    for name in ("gradients", "losses"):
        for key, wanted in single[name].items():
            assert (static[name][key] - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), key
