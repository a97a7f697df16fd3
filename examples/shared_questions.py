"""How much faster do several responses to one prompt train, if the prompt is there once?

torchrun --nproc-per-node 4 examples/shared_questions.py

Prompts of 100 to 800 tokens with 4 responses of 20 to 200 each, as for preference pairs or group-relative policy
optimization. Trained twice by the same plans on CPU ranks (gloo): each response with a prompt of its own, and all of a
prompt as one sample in which they do not see each other. Losses are equal; Megatron is not needed.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from examples.torch_device_mesh import VOCAB_SIZE, TinyTransformer, loss_sum, problem_for
from megatron.dynamic_cp.outside import Lanes, PlannedCollator, train_step

NUM_PROMPTS, NUM_RESPONSES, NUM_STEPS = 8, 4, 4
Features = list[dict]


def together(step: int) -> Features:
    """Return a global batch of prompts, each with its responses."""
    random = np.random.default_rng(step)

    def words(shortest: int, longest: int) -> list[int]:
        return random.geometric(0.15, random.integers(shortest, longest)).clip(max=VOCAB_SIZE).tolist()

    batch = [(words(100, 800), [words(20, 200) for _ in range(NUM_RESPONSES)]) for _ in range(NUM_PROMPTS)]
    return [
        {"prompt_ids": [word - 1 for word in prompt], "response_ids": [[word - 1 for word in one] for one in responses]}
        for prompt, responses in batch
    ]


def apart(step: int) -> Features:
    """Return the same responses, each with a prompt of its own."""
    return [
        {"input_ids": one["prompt_ids"] + response, "labels": [-100] * len(one["prompt_ids"]) + response}
        for one in together(step)
        for response in one["response_ids"]
    ]


def train(lanes: Lanes, batches: Callable[[int], Features]) -> tuple[list[float], float]:
    """Return the losses, and the tokens of responses that all ranks together train in a second after the first step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyTransformer(), process_group=lanes.mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    collator = PlannedCollator(lanes.problem, lanes.lane)
    losses, num_tokens, began_s = [], 0, 0.0
    for index, step in enumerate(lanes.agreed(collator(batches(index)) for index in range(NUM_STEPS))):
        result = train_step(lanes, model, step, loss_sum, label=f"step {index}")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if index == 0:
            began_s = time.perf_counter()
        else:
            num_tokens += result.num_tokens
    dist.barrier()
    return losses, num_tokens / (time.perf_counter() - began_s)


def main() -> None:
    """Train both ways and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem = problem_for(mesh.size(), "p2p", "a2a")
    lanes = Lanes.build(mesh, replace(problem, options=replace(problem.options, max_tokens_per_rank=1024)))
    found = {batches.__name__: train(lanes, batches) for batches in (apart, together)}
    if dist.get_rank() == 0:
        for name, (losses, rate) in found.items():
            print(f"{name:9} losses {' '.join(f'{loss:.5f}' for loss in losses)}; {rate:.0f} tokens of responses per s")
        (expected, slow), (losses, fast) = found.values()
        furthest = max(abs(a - b) / a for a, b in zip(expected, losses, strict=True))
        print(f"{fast / slow:.2f} times as fast")
        print(f"largest difference of losses {furthest:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
