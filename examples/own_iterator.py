"""How does a training loop that owns its data iterator get dynamic CP?

torchrun --local-addr localhost --nproc-per-node 2 examples/own_iterator.py

A loop in Megatron-LM's style on CPU ranks (gloo): its own iterator, a small GPT, DDP, Adam on the bare gradients. The
three places that change are numbered; the rest is what such a loop has anyway. Ten steps, a few seconds.
"""

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from dynamic_cp import ModelShape, PlanOptions, Topology, load_hardware
from dynamic_cp.types import Problem
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.plans.plan_source import PlanSource
from megatron.dynamic_cp.plans.planner import Planner
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.dynamic_cp.step.schedule import forward_step
from megatron.integrations.foreign.iterator import wrap_data_iterator

SEQ_LENGTH, VOCAB_SIZE, GLOBAL_BATCH_SIZE, NUM_STEPS = 512, 128, 12, 10


def my_iterator(lane: int):
    """Yield one sample after the other, of any length; each lane has its own."""
    generator = np.random.default_rng(lane)
    while True:
        seqlen = int(np.clip(generator.lognormal(4, 1), 8, SEQ_LENGTH))
        start = generator.integers(VOCAB_SIZE)
        yield {"tokens": (start + np.arange(seqlen)) % VOCAB_SIZE}  # labels: the next token


def main() -> None:
    """Train for a few steps and print a line for each."""
    cpu_backend.enable()  # on GPUs: torch.cuda.set_device, and NCCL below
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
    )
    gpt = GPTModel(config, gpt_block_spec(config), VOCAB_SIZE, SEQ_LENGTH, position_embedding_type="learned_absolute")
    config.finalize_model_grads_func = finalize_model_grads
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)]
    optimizer = torch.optim.Adam(gpt.parameters(), lr=3e-3)

    # 1. After the model-parallel groups: CP groups, and a planner on rank 0.
    topology = Topology(num_lanes=parallel_state.get_data_parallel_world_size())
    shape = ModelShape(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=VOCAB_SIZE,
    )
    problem = Problem(
        topology=topology,
        model=shape,
        hardware=load_hardware("cpu"),
        options=PlanOptions(max_tokens_per_rank=SEQ_LENGTH // 2, bytes_per_element=4, cp_comm_types=("p2p",)),
    )
    groups = DynamicCPGroups.build(topology, timeout_s=60, exchanges=problem.options.cp_comm_types)
    planner = Planner(problem, max_seqlen=SEQ_LENGTH, ahead=True) if dist.get_rank() == 0 else None
    plan_source = PlanSource(planner, topology=topology, lane=groups.lane, name="train", lookahead=2)

    # 2. Around the iterator.
    steps = wrap_data_iterator(
        my_iterator(groups.lane), model, plan_source=plan_source, groups=groups, global_batch_size=GLOBAL_BATCH_SIZE
    )

    # 3. One step for each global batch.
    for data_iterators, num_microbatches, seqlen_sum, _ in steps:
        model[0].zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterators[0],
            model=model[0],
            num_microbatches=num_microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        for parameter in gpt.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()  # or the first micro-batch would add to the buffer twice
        total = sum(one["lm loss"] for one in losses)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            sizes = [bucket.cp_size for bucket in steps.plan.buckets]
            loss = total[0] / total[1]
            print(f"step {steps.step}: loss {loss:.3f}, {seqlen_sum} tokens, CP sizes of rank 0's buckets {sizes}")
        if steps.step == NUM_STEPS:
            break
    steps.close()
    if planner is not None:
        planner.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
