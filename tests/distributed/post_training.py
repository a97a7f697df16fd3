"""Post-training on the runtime and in a plain loop, and its judge: megatron-core's model, one response at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.types import Sample, SharedQuestion, Tree
from examples.torch_device_mesh import VOCAB_SIZE, TinyTransformer
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, shared_question
from megatron.integrations.post_training.caller_order import PassOutputs
from megatron.integrations.post_training.losses import Loss
from megatron.integrations.post_training.objectives import (
    dpo,
    dpo_apart,
    group_advantages,
    gspo,
    of_the_other,
    ppo_clip,
    reward_pairs,
    sft,
    value_regression,
)
from megatron.integrations.turns import Turn, tree_of_turns
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel

_WORDS = np.random.default_rng(8).integers(1, VOCAB_SIZE, 100)
ROOT = Turn(
    tokens=_WORDS[:30],
    learned=False,
    children=(
        Turn(tokens=_WORDS[30:41], children=(Turn(tokens=_WORDS[41:60]), Turn(tokens=_WORDS[60:62]))),
        Turn(tokens=_WORDS[62:100]),
    ),
)
LENGTHS = (37, 1, 90, 5, 1, 64, 23, 12, 7, 130, 2, 48)
UNLEARNED = Sample(sample_id=1000, seqlen=11)
"""Of which no token has a loss."""
PROMPTS = ((40, (17, 30)), (12, (1, 9)), (75, (20, 8)), (2, (1, 1)), (9, (44, 61)))


def read_sample(sample: Sample) -> SampleTokens:
    """Return random tokens; of a plain sample every fifth has no loss, but the last has one."""
    random = np.random.default_rng(500 + sample.sample_id)
    if isinstance(sample.mask, Tree):
        return tree_of_turns(ROOT)[0]
    if isinstance(sample.mask, SharedQuestion):
        prompt = random.integers(1, VOCAB_SIZE, sample.mask.prompt + 1)
        return shared_question(prompt, [random.integers(1, VOCAB_SIZE, n) for n in sample.mask.answers])[0]
    stream = random.integers(1, VOCAB_SIZE, sample.seqlen + 1)
    loss_mask = ((np.arange(sample.seqlen)[::-1] % 5 != 2) & (sample != UNLEARNED)).astype(np.float32)
    return SampleTokens(tokens=stream[:-1], labels=stream[1:], loss_mask=loss_mask)


def plain_batch() -> tuple[Sample, ...]:
    # In an order that is neither that of ids nor of lengths.
    return tuple(Sample(sample_id=70 - 3 * index, seqlen=seqlen) for index, seqlen in enumerate(LENGTHS))


def batch_of_pairs() -> tuple[Sample, ...]:
    masks = [SharedQuestion(prompt - 1, answers) for prompt, answers in PROMPTS]
    return tuple(
        Sample(sample_id=90 - index, seqlen=mask.prompt + sum(mask.answers), mask=mask)
        for index, mask in enumerate(masks)
    )


def tree() -> Sample:
    """Return a tree of three branches, two of which share a turn with a loss."""
    values, mask = tree_of_turns(ROOT)
    return Sample(sample_id=95, seqlen=len(values.tokens), mask=mask)


class Response(NamedTuple):
    """A response by itself: its tokens as a sequence with all before it, and which of the sample's places they are."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    row: int
    places: np.ndarray


def responses_of(samples: tuple[Sample, ...]) -> list[Response]:
    """Return all responses, each with its prompt before it."""
    found = []
    for row, sample in enumerate(samples):
        values = read_sample(sample)
        ends = [sample.seqlen]
        paths = [[0]]
        if isinstance(sample.mask, SharedQuestion | Tree):
            ends, paths = np.cumsum(sample.mask.shape()[0]), sample.mask.paths()
        parts = np.split(np.arange(sample.seqlen), ends[:-1])
        for path in paths:
            places = np.concatenate([parts[part] for part in path])
            columns = (torch.from_numpy(x[places]) for x in (values.tokens, values.labels, 1 * (values.loss_mask > 0)))
            found.append(Response(*columns, row, places))
    return found


def num_responses(sample: Sample) -> int:
    return len(sample.mask.paths()) if isinstance(sample.mask, SharedQuestion | Tree) else 1


def columns_of(samples: tuple[Sample, ...]) -> dict[str, list[Any]]:
    """Return columns of all kinds: for each token, for each response, for each sample."""
    random = np.random.default_rng(3)
    numbers = list(map(num_responses, samples))

    def tokens(mean: float, deviation: float) -> list[Any]:
        return [random.normal(mean, deviation, sample.seqlen).astype(np.float32) for sample in samples]

    def responses(mean: float, deviation: float) -> list[Any]:
        return [random.normal(mean, deviation, number) for number in numbers]

    rewards = np.concatenate(responses(0, 1))
    groups = groups_of(samples)
    means = {group: np.mean([r for r, g in zip(rewards, groups, strict=True) if g == group]) for group in groups}
    deviations = {
        group: np.std([r for r, g in zip(rewards, groups, strict=True) if g == group], ddof=1) for group in groups
    }
    advantages = [
        (reward - means[group]) / (deviations[group] + 1e-6) for reward, group in zip(rewards, groups, strict=True)
    ]
    return {
        "rewards": np.split(rewards, np.cumsum(numbers)[:-1]),
        "weights": tokens(1, 0.5),
        "old_log_probs": tokens(-5.6, 0.2),
        "reference_log_probs": torch.nested.nested_tensor(list(map(torch.from_numpy, tokens(-5.6, 0.2)))).unbind(),
        "advantages": np.split(np.array(advantages), np.cumsum(numbers)[:-1]),
        "reference": [float(one[0]) if len(one) == 1 else one for one in responses(-60, 8)],
        "returns": tokens(0, 1),
        "old_values": tokens(0, 1),
    }


def groups_of(samples: tuple[Sample, ...]) -> list[int]:
    """Return the group of each response: those of a prompt, and of plain samples every fourth."""
    groups = []
    for row, sample in enumerate(samples):
        groups += [row % 4] if sample.mask is None else [100 + row] * num_responses(sample)
    return groups


def with_own_columns(samples: tuple[Sample, ...], outputs: PassOutputs) -> dict[str, list[Any]]:
    """Return the columns, with those that the package makes on the host: advantages, and what one of a pair is told."""
    columns = columns_of(samples)
    rewards, reference_sums = np.concatenate(columns["rewards"]), np.hstack(columns["reference"])
    advantages = group_advantages(rewards, groups_of(samples))
    pairs = [number // 2 for number in range(len(rewards))]
    made = {
        "advantages": advantages,
        "other_gains": of_the_other(outputs.sums["log_probs"] - reference_sums, pairs),
        "sides": np.resize([1.0, -1.0], len(rewards)),
    }
    return columns | made


Terms = Mapping[str, Tensor]
Judged = Callable[[list[Terms]], list[Tensor]]
"""Return what each response, or each pair of them, adds to the loss."""


def _clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantage, -torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def judge_sft(responses: list[Terms]) -> list[Tensor]:
    num_tokens = sum(one["mask"].sum() for one in responses)
    return [(-one["log_probs"] * one["weights"] * one["mask"]).sum() / num_tokens for one in responses]


def judge_ppo(responses: list[Terms]) -> list[Tensor]:
    shares = []
    for one in responses:
        losses = _clip(torch.exp(one["log_probs"] - one["old_log_probs"]), one["advantages"], 0.1, 0.3)
        gap = one["reference_log_probs"] - one["log_probs"]
        losses = losses + 0.2 * (gap.exp() - gap - 1) - 0.05 * one["entropies"]
        shares.append((losses * one["mask"]).sum() / one["mask"].sum() / len(responses))
    return shares


def judge_fixed(responses: list[Terms]) -> list[Tensor]:
    losses = [_clip(torch.exp(o["log_probs"] - o["old_log_probs"]), o["advantages"], 0.2, 0.2) for o in responses]
    return [(one * o["mask"]).sum() / 321.0 for one, o in zip(losses, responses, strict=True)]


def judge_gspo(responses: list[Terms]) -> list[Tensor]:
    shares = []
    for one in responses:
        gap = ((one["log_probs"] - one["old_log_probs"]) * one["mask"]).sum() / one["mask"].sum()
        shares.append(_clip(gap.exp(), one["advantages"].reshape(()), 0.05, 0.1) / len(responses))
    return shares


def judge_dpo(responses: list[Terms]) -> list[Tensor]:
    gains = [(one["log_probs"] * one["mask"]).sum() - one["reference"].reshape(()) for one in responses]
    margins = [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    return [torch.log1p(torch.exp(-0.1 * margin)) / len(margins) for margin in margins]


def judge_values(responses: list[Terms]) -> list[Tensor]:
    num_tokens, shares = sum(one["mask"].sum() for one in responses), []
    for one in responses:
        near = torch.clamp(one["values"], one["old_values"] - 0.3, one["old_values"] + 0.3)
        worse = torch.maximum((one["values"] - one["returns"]) ** 2, (near - one["returns"]) ** 2)
        shares.append(0.5 * (worse * one["mask"]).sum() / num_tokens)
    return shares


def judge_rewards(responses: list[Terms]) -> list[Tensor]:
    rewards = [(one["values"] * one["mask"]).sum() for one in responses]
    gaps = [worse - better for better, worse in zip(rewards[::2], rewards[1::2], strict=True)]
    return [torch.log1p(torch.exp(gap)) / len(gaps) for gap in gaps]


LOSSES: dict[str, tuple[Loss, Judged]] = {
    "sft": (sft(), judge_sft),
    "ppo": (ppo_clip(low=0.1, high=0.3, kl=0.2, entropy=0.05, mean="samples"), judge_ppo),
    "fixed": (ppo_clip(mean=321.0), judge_fixed), "gspo": (gspo(low=0.05, high=0.1), judge_gspo),
    "dpo": (dpo(), judge_dpo), "dpo_apart": (dpo_apart(), judge_dpo),
    "values": (value_regression(clip=0.3), judge_values), "rewards": (reward_pairs(), judge_rewards),
}  # fmt: skip


class Known(NamedTuple):
    """The value of a loss, and how large it is about if positive and negative advantages do not cancel out in it."""

    value: float
    terms: float

    def error(self, found: float) -> float:
        return abs(found - self.value) / self.terms


def judged(
    forward: Callable[[Tensor], Sequence[Tensor]], model: torch.nn.Module, samples: tuple[Sample, ...],
    losses: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Return {"tokens": name -> for each response, "losses": see `Known`, "gradients": loss -> name -> tensor}."""
    columns = columns_of(samples)
    kept: list[dict[str, Tensor]] = []
    tokens: dict[str, list[Tensor]] = {}
    number_in_row = [0] * len(samples)
    for one in responses_of(samples):
        logits, *values = forward(one.tokens)
        every = torch.log_softmax(logits, -1)
        found = {
            "log_probs": every[torch.arange(len(every)), one.labels],
            "entropies": -(every.exp() * every).sum(-1),
        } | dict(zip(["values"], values, strict=False))
        terms = {"mask": one.loss_mask} | found
        for name in found:
            tokens.setdefault(name, []).append(terms[name].detach())
        number = number_in_row[one.row]
        number_in_row[one.row] += 1
        for name, values in columns.items():
            value = torch.as_tensor(np.asarray(values[one.row]), dtype=torch.float32)
            is_of_tokens = value.shape == (samples[one.row].seqlen,)
            terms[name] = value[one.places] if is_of_tokens else value.reshape(-1)[min(number, value.numel() - 1)]
        kept.append(terms)
    names, parameters = zip(*model.named_parameters(), strict=True)
    result: dict[str, Any] = {"tokens": tokens, "losses": {}, "gradients": {}}
    for name in losses:
        shares = torch.stack(LOSSES[name][1]([one for one in kept if one["mask"].any()]))
        loss = shares.sum()
        result["losses"][name] = Known(loss.item(), shares.norm().item())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        result["gradients"][name] = dict(zip(names, gradients, strict=True))
    return result


def judge(variant_name: str, samples: tuple[Sample, ...], losses: tuple[str, ...], num_layers: int) -> dict[str, Any]:
    """Return what `judged` does of megatron-core's model, and "initial", its weights."""
    variant = reference.VARIANTS[variant_name]
    initialize_model_parallel()
    config = reference.transformer_config(variant, num_layers=num_layers)
    torch.compiler.set_stance("force_eager")
    model = reference.gpt_model(config, variant, reference.stock_spec(variant, config))
    model.value_head = Values()
    hidden: list[Tensor] = []
    model.decoder.final_layernorm.register_forward_hook(lambda _, __, output: hidden.append(output))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    if variant in reference.HYBRIDS:
        model.double()  # as `reference_step`

    def forward(tokens: Tensor) -> Sequence[Tensor]:
        logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
        return logits, model.value_head(hidden.pop()[:, 0])

    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return judged(forward, model, samples, losses) | {"initial": initial}


class Values(torch.nn.Module):
    """A value of each token, by its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(reference.HIDDEN_SIZE) / 10)
        self.bias = torch.nn.Parameter(torch.randn(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.weight).sum(-1) + self.bias


class LogitsOnly(TinyTransformer):
    """The model of the plain loop, which returns logits."""

    def forward(self, tokens: Tensor, positions: Tensor, packed_seq_params: object = None) -> Tensor:
        return self.logits(tokens, positions, packed_seq_params)


def plain_model() -> LogitsOnly:
    torch.manual_seed(3)
    return LogitsOnly()


def judge_plain_loop(samples: tuple[Sample, ...], losses: tuple[str, ...]) -> dict[str, Any]:
    """Return what `judged` does of the plain loop's model, with torch's attention."""
    model = plain_model()
    return judged(lambda tokens: model(tokens[None], torch.arange(len(tokens))[None]), model, samples, losses)
