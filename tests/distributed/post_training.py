"""Post-training on the real runtime and in a plain loop, and its judge: megatron-core's model, one response at a time.

The losses of the judge are written out here, for samples as they are; nothing of the package but the names of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.types import Sample, SharedQuestion
from examples.torch_device_mesh import VOCAB_SIZE, TinyTransformer
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.data.shared_question import shared_question
from megatron.dynamic_cp.post_training.losses import Loss
from megatron.dynamic_cp.post_training.objectives import dpo, gspo, ppo_clip, sft
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel

LENGTHS = (37, 1, 90, 5, 1, 64, 23, 12, 7, 130, 2, 48)
PROMPTS = ((40, (17, 30)), (12, (1, 9)), (75, (20, 8)), (2, (1, 1)), (9, (44, 61)))


def read_sample(sample: Sample) -> SampleTokens:
    """Return random tokens; of a plain sample every fifth has no loss, but the last has one."""
    random = np.random.default_rng(500 + sample.sample_id)
    if isinstance(sample.mask, SharedQuestion):
        prompt = random.integers(1, VOCAB_SIZE, sample.mask.prompt + 1)
        return shared_question(prompt, [random.integers(1, VOCAB_SIZE, n) for n in sample.mask.answers])[0]
    stream = random.integers(1, VOCAB_SIZE, sample.seqlen + 1)
    loss_mask = (np.arange(sample.seqlen)[::-1] % 5 != 2).astype(np.float32)
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


class Response(NamedTuple):
    """A response by itself: its tokens as a sequence, and which of the sample's places its last ones are."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    row: int
    places: slice


def responses_of(samples: tuple[Sample, ...]) -> list[Response]:
    """Return all responses, each with its prompt before it."""
    found = []
    for row, sample in enumerate(samples):
        values = read_sample(sample)
        tokens, labels, mask = (torch.from_numpy(x) for x in (values.tokens, values.labels, values.loss_mask))
        if not isinstance(sample.mask, SharedQuestion):
            found.append(Response(tokens, labels, mask, row, slice(0, sample.seqlen)))
            continue
        prompt = slice(0, sample.mask.prompt)
        first = sample.mask.prompt
        for length in sample.mask.answers:
            place = slice(first, first + length)
            first = place.stop
            parts = (torch.cat([column[prompt], column[place]]) for column in (tokens, labels, mask))
            found.append(Response(*parts, row, place))
    return found


def columns_of(samples: tuple[Sample, ...]) -> dict[str, list[Any]]:
    """Return columns of all kinds: for each token, for each response, for each sample."""
    random = np.random.default_rng(3)
    numbers = [len(s.mask.answers) if isinstance(s.mask, SharedQuestion) else 1 for s in samples]

    def tokens(mean: float, deviation: float) -> list[Any]:
        return [random.normal(mean, deviation, sample.seqlen).astype(np.float32) for sample in samples]

    def responses(mean: float, deviation: float) -> list[Any]:
        return [random.normal(mean, deviation, number) for number in numbers]

    return {
        "weights": tokens(1, 0.5),
        "old_log_probs": tokens(-5.6, 0.2),
        "reference_log_probs": torch.nested.nested_tensor(list(map(torch.from_numpy, tokens(-5.6, 0.2)))).unbind(),
        "advantages": [float(one[0]) if len(one) == 1 else one for one in responses(0, 1)],
        "reference": responses(-60, 8),
        "returns": tokens(0, 1),
        "old_values": tokens(0, 1),
    }


Terms = Mapping[str, Tensor]
Judged = Callable[[list[Terms]], Tensor]


def _clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantage, -torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def judge_sft(responses: list[Terms]) -> Tensor:
    total = sum((-one["log_probs"] * one["weights"] * one["mask"]).sum() for one in responses)
    return total / sum(one["mask"].sum() for one in responses)


def judge_ppo(responses: list[Terms]) -> Tensor:
    means = []
    for one in responses:
        losses = _clip(torch.exp(one["log_probs"] - one["old_log_probs"]), one["advantages"], 0.1, 0.3)
        gap = one["reference_log_probs"] - one["log_probs"]
        losses = losses + 0.2 * (gap.exp() - gap - 1) - 0.05 * one["entropies"]
        means.append((losses * one["mask"]).sum() / one["mask"].sum())
    return torch.stack(means).mean()


def judge_fixed(responses: list[Terms]) -> Tensor:
    losses = [_clip(torch.exp(o["log_probs"] - o["old_log_probs"]), o["advantages"], 0.2, 0.2) for o in responses]
    return sum((one * o["mask"]).sum() for one, o in zip(losses, responses, strict=True)) / 321.0


def judge_gspo(responses: list[Terms]) -> Tensor:
    losses = []
    for one in responses:
        gap = ((one["log_probs"] - one["old_log_probs"]) * one["mask"]).sum() / one["mask"].sum()
        losses.append(_clip(gap.exp(), one["advantages"].reshape(()), 0.05, 0.1))
    return torch.stack(losses).mean()


def judge_dpo(responses: list[Terms]) -> Tensor:
    gains = [(one["log_probs"] * one["mask"]).sum() - one["reference"].reshape(()) for one in responses]
    margins = [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    return torch.stack([torch.log1p(torch.exp(-0.1 * margin)) for margin in margins]).mean()


LOSSES: dict[str, tuple[Loss, Judged]] = {
    "sft": (sft(), judge_sft),
    "ppo": (ppo_clip(low=0.1, high=0.3, kl=0.2, entropy=0.05, mean="samples"), judge_ppo),
    "fixed": (ppo_clip(mean=321.0), judge_fixed),
    "gspo": (gspo(low=0.05, high=0.1), judge_gspo),
    "dpo": (dpo(), judge_dpo),
}


def judged(
    forward: Callable[[Tensor], Tensor], model: torch.nn.Module, samples: tuple[Sample, ...], losses: tuple[str, ...]
) -> dict[str, Any]:
    """Return {"tokens": name -> for each response, "losses", "gradients": loss -> name -> tensor}.

    Args:
        forward: tokens [n] of a sequence -> logits [n, words].
    """
    columns = columns_of(samples)
    kept: list[dict[str, Tensor]] = []
    tokens: dict[str, list[Tensor]] = {"log_probs": [], "entropies": []}
    number_in_row = [0] * len(samples)
    for one in responses_of(samples):
        every = torch.log_softmax(forward(one.tokens), -1)
        found = {
            "log_probs": torch.stack([row[label] for row, label in zip(every, one.labels, strict=True)]),
            "entropies": -(every.exp() * every).sum(-1),
        }
        length = one.places.stop - one.places.start
        terms = {"mask": one.loss_mask[-length:]} | {name: values[-length:] for name, values in found.items()}
        for name in tokens:
            tokens[name].append(terms[name].detach())
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
        loss = LOSSES[name][1](kept)
        result["losses"][name] = loss.item()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        result["gradients"][name] = dict(zip(names, gradients, strict=True))
    return result


def judge(variant_name: str, samples: tuple[Sample, ...], losses: tuple[str, ...]) -> dict[str, Any]:
    """Return what `judged` does of megatron-core's model, and "initial", its weights."""
    variant = reference.VARIANTS[variant_name]
    initialize_model_parallel()
    config = reference.transformer_config(variant, num_layers=2)
    torch.compiler.set_stance("force_eager")
    spec = reference.stock_layer(config)
    if config.num_moe_experts is not None:
        reference.expert_routing.install()
        spec = reference.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    model = reference.gpt_model(config, variant, spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)

    def forward(tokens: Tensor) -> Tensor:
        return model(tokens[None], torch.arange(len(tokens))[None], None)[0]

    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return judged(forward, model, samples, losses) | {"initial": initial}


class LogitsOnly(TinyTransformer):
    """The model of the plain loop, which returns logits."""

    def forward(self, tokens: Tensor, positions: Tensor, packed_seq_params: object = None) -> Tensor:
        return self.logits(tokens, positions, packed_seq_params)


def plain_model() -> LogitsOnly:
    """Return the model of the plain loop, the same each time."""
    torch.manual_seed(3)
    return LogitsOnly()


def judge_plain_loop(samples: tuple[Sample, ...], losses: tuple[str, ...]) -> dict[str, Any]:
    """Return what `judged` does of the plain loop's model, with torch's attention."""
    model = plain_model()
    return judged(lambda tokens: model(tokens[None], torch.arange(len(tokens))[None])[0], model, samples, losses)
