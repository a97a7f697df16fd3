"""How do I train by group-relative policy optimization with a CP size for every micro-batch?

torchrun --local-addr localhost --nproc-per-node 4 examples/grpo.py [PICTURE.svg]

A toy task with a verifiable reward: go on counting. The reward is the share of a response's words that are one more
than the word before, modulo 8. A tiny transformer on 4 CPU ranks (gloo, plain PyTorch) samples 8 responses to each of 8
prompts of 6 to 400 words. Two copies of it train on the same rollouts, those of the first: one with dynamic CP, one
with the static CP size that the longest prompt needs. Losses are equal, rewards rise, and a picture (default:
runs/grpo.svg) shows where time goes.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp import Sample
from dynamic_cp.decide.report.curves import part_bars
from dynamic_cp.decide.report.drawing import save
from dynamic_cp.decide.report.theme import LIGHT
from examples.torch_device_mesh import TinyTransformer, problem_for
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.integrations.outside import Lanes
from megatron.integrations.post_training.objectives import group_advantages, ppo_clip
from megatron.integrations.post_training.torch_passes import TorchPasses, label_log_probs

NUM_WORDS, NUM_PROMPTS, GROUP, RESPONSE, NUM_STEPS, NUM_UPDATES = 8, 8, 8, 8, 8, 2
TOLERANCE = 1e-5
"""Of losses: both copies round differently in float32, step after step."""


class Policy(TinyTransformer):
    """The tiny transformer, which returns the scores of each next word."""

    def forward(self, tokens: Tensor, positions: Tensor, packed_seq_params: object = None) -> Tensor:
        """Return logits [B, T, NUM_WORDS]."""
        return self.logits(tokens, positions, packed_seq_params)[..., :NUM_WORDS]


class Clock:
    """Adds up the seconds of the parts of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        began_s = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began_s


def outputs(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """Return what of a micro-batch losses are made of."""
    logits = model(batch["tokens"], batch["position_ids"], batch["packed_seq_params"])
    return label_log_probs(logits, batch["labels"])


class Trainee:
    """A copy of the policy with the lanes, and so the CP sizes, that it trains with."""

    def __init__(self, lanes: Lanes) -> None:
        torch.manual_seed(0)
        self.lanes, self.policy, self.clock = lanes, Policy(), Clock()
        model = DistributedDataParallel(self.policy, process_group=lanes.mesh.get_group())
        self.passes = TorchPasses(lanes=lanes, model=model, outputs=outputs)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)

    def train(self, rollouts: list[SampleTokens], rewards: np.ndarray) -> list[float]:
        """Return the losses of updates on all rollouts of the job."""
        samples = [Sample(sample_id=index, seqlen=len(one.tokens)) for index, one in enumerate(rollouts)]
        with self.clock.part("plan and pack"):
            step = self.lanes.step(samples, rollouts.__getitem__)
        with self.clock.part("old log-probs"):
            old = self.passes.forward(step, samples)
        groups = np.repeat(np.arange(NUM_PROMPTS), GROUP)
        columns = {"advantages": group_advantages(rewards, groups), "old_log_probs": old.tokens["log_probs"]}
        losses = []
        for _ in range(NUM_UPDATES):
            with self.clock.part("training passes"):
                losses.append(self.passes.train(step, samples, columns, ppo_clip()).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


@torch.no_grad()
def respond(policy: nn.Module, prompt: list[int]) -> Tensor:
    """Return GROUP sampled responses to a prompt, [GROUP, RESPONSE]."""
    tokens = torch.tensor(prompt).repeat(GROUP, 1)
    for _ in range(RESPONSE):
        seen = tokens[:, -64:]  # the task needs no more, and there is no cache of keys and values here
        logits = policy(seen, torch.arange(seen.shape[1]).expand(seen.shape))[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens[:, -RESPONSE:]


def roll_out(policy: nn.Module, number: int) -> tuple[list[SampleTokens], np.ndarray]:
    """Return the rollouts of all ranks, each of which answers its share of the prompts, and their rewards."""
    random = np.random.default_rng(number)
    lengths = [400, *random.lognormal(3.2, 0.8, NUM_PROMPTS - 1).clip(6, 200).astype(int)]
    prompts = [random.integers(0, NUM_WORDS, length).tolist() for length in lengths]
    torch.manual_seed(1000 * number + dist.get_rank())
    own = torch.stack([respond(policy, prompt) for prompt in prompts[dist.get_rank() :: 4]])
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    responses = torch.stack(of_ranks, dim=1).flatten(0, 1)
    rollouts, rewards = [], []
    for index, prompt in enumerate(prompts):
        for response in responses[index].tolist():
            document = np.array([*prompt, *response])
            mask = np.arange(1, len(document)) >= len(prompt)
            rollouts.append(SampleTokens(tokens=document[:-1], labels=document[1:], loss_mask=mask.astype(np.float32)))
            before, words = document[len(prompt) - 1 : -1], document[len(prompt) :]
            rewards.append(np.mean(words == (before + 1) % NUM_WORDS))
    return rollouts, np.array(rewards)


def main() -> None:
    """Train both copies, and compare."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/grpo.svg")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem = problem_for(mesh.size(), "p2p", "a2a")
    problem = replace(problem, options=replace(problem.options, max_tokens_per_rank=128))
    static = replace(problem, options=replace(problem.options, min_cp_size=4, max_cp_size=4))
    trainees = {name: Trainee(Lanes.build(mesh, one)) for name, one in (("dynamic", problem), ("static", static))}
    furthest, num_tokens, rewards_of = 0.0, 0, []
    for number in range(NUM_STEPS):
        rollouts, rewards = roll_out(trainees["dynamic"].policy, number)
        losses = {name: one.train(rollouts, rewards) for name, one in trainees.items()}
        furthest = max([furthest, *(abs(a - b) for a, b in zip(*losses.values(), strict=True))])
        rewards_of.append(rewards.mean())
        if number == 0:  # warm now
            for one in trainees.values():
                one.clock = Clock()
        else:
            num_tokens += NUM_UPDATES * sum(len(one.tokens) for one in rollouts)
        if dist.get_rank() == 0:
            shown = ", ".join(f"{name} {' '.join(f'{x:.5f}' for x in found)}" for name, found in losses.items())
            print(f"step {number}: mean reward {rewards.mean():.3f}; losses {shown}")
    if dist.get_rank() == 0:
        seconds = {name: sum(one.clock.seconds.values()) for name, one in trainees.items()}
        for name, total_s in seconds.items():
            print(f"{name} CP: {total_s:.2f} s, {num_tokens / total_s:.0f} tokens/s")
        print(f"rewards rose from {rewards_of[0]:.3f} to {rewards_of[-1]:.3f}; losses differ by {furthest:.0e} at most")
        assert rewards_of[-1] > 2 * rewards_of[0]
        assert furthest < TOLERANCE
        path.parent.mkdir(parents=True, exist_ok=True)
        times = [(f"{name} CP", one.clock.seconds) for name, one in trainees.items()]
        save(path, partial(part_bars, times), LIGHT)
        print(f"{path} shows where time goes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
