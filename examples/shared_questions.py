"""How much faster do several responses to one prompt train, or branches of a tree, if what they share is there once?

torchrun --local-addr localhost --nproc-per-node 4 examples/shared_questions.py [trees]

Prompts of 100 to 800 tokens with 4 responses of 20 to 200 each, as for preference pairs or group-relative policy
optimization; with trees 2 answers of 100 to 300 tokens to each prompt, which go on in 4 ways of 20 to 200 each, as in
the rollouts of an agent: 8 branches at 3 levels. Trained twice on CPU ranks (gloo): each branch by itself, and all of a
prompt as one sample in which they do not see each other. Losses and gradients are equal; Megatron is not needed.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from examples.torch_device_mesh import VOCAB_SIZE, TinyTransformer, loss_sum, problem_for
from megatron.integrations.outside import Lanes, PlannedCollator, train_step

NUM_PROMPTS, NUM_ANSWERS, NUM_RESPONSES, NUM_STEPS = 8, 2, 4, 4
Features = list[dict]


def together(step: int) -> Features:
    """Return a global batch of prompts, each with all that goes on from it."""
    random = np.random.default_rng(step)

    def words(shortest: int, longest: int) -> list[int]:
        return (random.geometric(0.15, random.integers(shortest, longest)).clip(max=VOCAB_SIZE) - 1).tolist()

    def responses() -> list[dict]:
        return [{"tokens": words(20, 200)} for _ in range(NUM_RESPONSES)]

    def answers() -> list[dict]:
        return [{"tokens": words(100, 300), "children": responses()} for _ in range(NUM_ANSWERS)]

    goes_on = answers if "trees" in sys.argv else responses
    turns = [{"tokens": words(100, 800), "learned": False, "children": goes_on()} for _ in range(NUM_PROMPTS)]
    return [{"turns": one} for one in turns]


def apart(step: int) -> Features:
    """Return the same branches, each with what it goes on from by itself."""

    def branches(turn: dict, tokens: list[int], labels: list[int]) -> Features:
        tokens = tokens + turn["tokens"]
        labels = labels + (turn["tokens"] if turn.get("learned", True) else [-100] * len(turn["tokens"]))
        children = turn.get("children", [])
        own = [] if children else [{"input_ids": tokens, "labels": labels}]
        return own + [branch for child in children for branch in branches(child, tokens, labels)]

    return [branch for one in together(step) for branch in branches(one["turns"], [], [])]


class Trained(NamedTuple):
    """Losses, the first step's gradients, and learned tokens that all ranks train in a second after that step."""

    losses: list[float]
    gradients: list[torch.Tensor]
    tokens_per_s: float


def train(lanes: Lanes, batches: Callable[[int], Features]) -> Trained:
    """Return what training on the batches came to; the tokens are those of the branches apart."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyTransformer(), process_group=lanes.mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    collator = PlannedCollator(lanes.problem, lanes.lane)
    losses, gradients, num_tokens, began_s = [], [], 0, 0.0
    for index, step in enumerate(lanes.agreed(collator(batches(index)) for index in range(NUM_STEPS))):
        result = train_step(lanes, model, step, loss_sum, label=f"step {index}")
        if index == 0:
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if index == 0:
            began_s = time.perf_counter()
        else:
            num_tokens += result.num_tokens
    dist.barrier()
    return Trained(losses, gradients, num_tokens / (time.perf_counter() - began_s))


def main() -> None:
    """Train both ways and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem = problem_for(mesh.size(), "p2p", "a2a")
    lanes = Lanes.build(mesh, replace(problem, options=replace(problem.options, max_tokens_per_rank=1024)))
    found = {batches.__name__: train(lanes, batches) for batches in (apart, together)}
    if dist.get_rank() == 0:
        for name, one in found.items():
            losses = " ".join(f"{loss:.5f}" for loss in one.losses)
            print(f"{name:9} losses {losses}; {one.tokens_per_s:.0f} learned tokens per s")
        alone, shared = found.values()
        furthest = max(abs(a - b) / a for a, b in zip(alone.losses, shared.losses, strict=True))
        gradients = zip(alone.gradients, shared.gradients, strict=True)
        error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in gradients)
        print(f"{shared.tokens_per_s / alone.tokens_per_s:.2f} times as fast")
        print(f"largest difference of losses {furthest:.0e}, of gradients {error:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
