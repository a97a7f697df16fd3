"""How do I train on preference pairs on Megatron's runtime, with a CP size for every micro-batch?

torchrun --local-addr localhost --nproc-per-node 4 examples/dpo.py [PICTURE.svg]

Direct preference optimization of a small GPT on 4 CPU ranks (gloo): 24 prompts of 8 to 300 words, each with a chosen
response that goes on counting and a rejected one that does not. A pair is one sample with its prompt there once, as
`PreferencePair.sample` makes it of your records. The whole run is done twice, with dynamic CP and with the static CP
size that the longest pair needs. Losses are equal, the margin grows, and a picture (default: runs/dpo.svg) shows where
time goes.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig

from dynamic_cp import ModelShape, PlanOptions, Sample, Topology, load_hardware
from dynamic_cp.decide.report.curves import part_bars
from dynamic_cp.decide.report.drawing import save
from dynamic_cp.decide.report.theme import LIGHT
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Problem
from examples.grpo import Clock
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.data.sample_tokens import shared_question
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.model.gpt import DynamicCPGPTModel
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.plans.plan_source import FixedPlan
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.integrations.post_training.megatron_passes import MegatronPasses
from megatron.integrations.post_training.objectives import dpo

NUM_WORDS, NUM_PAIRS, NUM_STEPS, SEQ_LENGTH, BETA = 64, 24, 8, 512, 0.1
TOLERANCE = 1e-5
"""Of losses: both runs round differently in float32, step after step."""
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=NUM_WORDS,
)
PROBLEM = Problem(
    topology=Topology(num_lanes=4),
    model=SHAPE,
    hardware=load_hardware("cpu"),
    options=PlanOptions(max_tokens_per_rank=SEQ_LENGTH // 4, bytes_per_element=4, cp_comm_types=("p2p", "a2a")),
)


def pairs():
    """Return the tokens of each pair, and the samples that are planned."""
    random = np.random.default_rng(0)
    values, samples = [], []
    for index, length in enumerate([300, *random.lognormal(3.5, 0.8, NUM_PAIRS - 1).clip(8, 200).astype(int)]):
        prompt = (random.integers(NUM_WORDS) + np.arange(length)) % NUM_WORDS
        chosen = (prompt[-1] + 1 + np.arange(random.integers(4, 40))) % NUM_WORDS
        rejected = random.integers(0, NUM_WORDS, random.integers(4, 40))
        tokens, mask = shared_question(prompt.tolist(), [chosen.tolist(), rejected.tolist()])
        values.append(tokens)
        samples.append(Sample(sample_id=index, seqlen=len(tokens.tokens), mask=mask))
    return values, samples


def new_model() -> tuple[DynamicCPGPTModel, list[torch.nn.Module]]:
    """Return a GPT, the same each time, and the same wrapped."""
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.num_attention_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = gpt_block_spec(config)
    gpt = DynamicCPGPTModel(config, spec, NUM_WORDS, SEQ_LENGTH, position_embedding_type="learned_absolute")
    return gpt, [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)]


def margin(sums: np.ndarray, reference: np.ndarray) -> float:
    """Return how much more a chosen response gained on the reference than the rejected one, on average."""
    gains = (sums - reference).reshape(-1, 2)
    return float((gains[:, 0] - gains[:, 1]).mean())


def train(problem: Problem, groups: DynamicCPGroups) -> tuple[list[float], float, Clock]:
    """Return the losses of all steps, the margin behind them, and where time went after the first step."""
    values, samples = pairs()
    gpt, model = new_model()
    optimizer = torch.optim.Adam(gpt.parameters(), lr=1e-3)
    source = FixedPlan(plan_problem(problem, samples), groups.lane)  # the same pairs in each step
    batches = DataIteratorWrapper(
        plan_source=source, read_sample=values.__getitem__, groups=groups, chunks=[ChunkNeeds.of(gpt)]
    )
    passes = MegatronPasses(model=model, seq_length=SEQ_LENGTH)
    number = 0

    def packed(clock: Clock):
        nonlocal number
        number += 1
        with clock.part("pack"):
            return batches.wrap(number, samples), batches.plan

    clock = Clock()
    with clock.part("reference"):
        reference = passes.forward(*packed(Clock()), samples).sums["log_probs"]
    columns = {"reference": reference}
    losses = []
    for step in range(NUM_STEPS):
        data = packed(clock)
        with clock.part("training passes"):
            model[0].zero_grad_buffer()
            losses.append(passes.train(*data, samples, columns, dpo(beta=BETA)).loss)
            for parameter in gpt.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            optimizer.zero_grad()  # or the first micro-batch would add to the buffer twice
        if step == 0:  # warm now
            clock = Clock()
    with clock.part("last log-probs"):
        last = passes.forward(*packed(Clock()), samples)
    return losses, margin(last.sums["log_probs"], reference), clock


def main() -> None:
    """Train both ways, and compare."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dpo.svg")
    cpu_backend.enable()  # on GPUs: torch.cuda.set_device, and NCCL below
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = DynamicCPGroups.build(PROBLEM.topology, timeout_s=60, exchanges=PROBLEM.options.cp_comm_types)
    static = replace(PROBLEM, options=replace(PROBLEM.options, min_cp_size=4, max_cp_size=4))
    runs = {name: train(problem, groups) for name, problem in (("dynamic", PROBLEM), ("static", static))}
    if dist.get_rank() == 0:
        num_tokens = (NUM_STEPS - 1) * sum(sample.seqlen for sample in pairs()[1])
        for name, (losses, gained, clock) in runs.items():
            shown_s = sum(clock.seconds[part] for part in ("pack", "training passes"))
            print(f"{name} CP: losses {' '.join(f'{loss:.5f}' for loss in losses)}; margin {gained:.4f}")
            print(f"{name} CP: {shown_s:.2f} s, {num_tokens / shown_s:.0f} tokens/s")
        (losses, gained, _), (others, other_gained, _) = runs.values()
        furthest = max(abs(a - b) for a, b in zip([*losses, gained], [*others, other_gained], strict=True))
        print(f"the margin grew from 0 to {gained:.3f}; losses and margins differ by {furthest:.0e} at most")
        assert losses[-1] < losses[0]
        assert gained > 1
        assert furthest < TOLERANCE
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, partial(part_bars, [(f"{name} CP", clock.seconds) for name, (_, _, clock) in runs.items()]), LIGHT)
        print(f"{path} shows where time goes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
