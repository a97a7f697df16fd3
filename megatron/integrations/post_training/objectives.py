"""Losses of post-training, each a few lines, and those of their columns that the host computes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from dynamic_cp.errors import DataError
from megatron.integrations.post_training.losses import Mean, ResponseLoss, TokenLoss, Values


def sft(*, mean: Mean = "tokens") -> TokenLoss:
    """Return the cross entropy of each token times its "weights"."""
    return TokenLoss(of_tokens=lambda of: -of["log_probs"] * of["weights"], needs=("log_probs", "weights"), mean=mean)


def ppo_clip(
    *, low: float = 0.2, high: float = 0.2, kl: float = 0.0, entropy: float = 0.0, mean: Mean = "tokens"
) -> TokenLoss:
    """Return PPO's clipped loss, which GRPO uses with `group_advantages`. Its columns are "advantages",
    "old_log_probs", and with `kl` "reference_log_probs".

    Source: Schulman et al. 2017 (arXiv 1707.06347); Shao et al. 2024 (arXiv 2402.03300) with its estimate of the KL.

    Args:
        low, high: how far below and above 1 a ratio of probabilities may go.
        kl, entropy: factors of the divergence from the reference, and of the entropy, which lowers the loss.
    """

    def of_tokens(of: Values) -> Tensor:
        ratio = torch.exp(of["log_probs"] - of["old_log_probs"])
        losses = clipped(ratio, of["advantages"], low, high)
        if kl:
            back = of["reference_log_probs"] - of["log_probs"]
            losses = losses + kl * (torch.exp(back) - back - 1)
        return losses - entropy * of["entropies"] if entropy else losses

    needs = ("log_probs", "advantages", "old_log_probs")
    needs += ("reference_log_probs",) * bool(kl) + ("entropies",) * bool(entropy)
    return TokenLoss(of_tokens=of_tokens, needs=needs, mean=mean)


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> ResponseLoss:
    """Return the clipped loss of a response's mean ratio; columns "advantages" and "old_log_probs". `low` and `high`:
    how far below and above 1 the ratio may go. Source: Zheng et al. 2025 (arXiv 2507.18071)."""

    def of_responses(of: Values) -> Tensor:
        return clipped(torch.exp(of["log_ratio"] / of["num_tokens"]), of["advantages"], low, high)

    return ResponseLoss(
        terms=lambda of: {"log_ratio": of["log_probs"] - of["old_log_probs"]},
        of_responses=of_responses,
        needs=("log_probs", "advantages", "old_log_probs"),
    )


def dpo(*, beta: float = 0.1) -> ResponseLoss:
    """Return the loss of preference pairs: the first response of a sample is chosen, the second rejected. Its column
    "reference" has the reference's log-probs summed over each response. Source: Rafailov et al. 2023 (arXiv
    2305.18290)."""

    def of_responses(of: Values) -> Tensor:
        gains = (of["sum"] - of["reference"]).unflatten(0, (-1, 2))
        return -logsigmoid(beta * (gains[:, 0] - gains[:, 1])).repeat_interleave(2)

    return ResponseLoss(
        terms=_sum_of("log_probs"), of_responses=of_responses, needs=("log_probs", "reference"), group_size=2
    )


def dpo_apart(*, beta: float = 0.1) -> ResponseLoss:
    """Return the loss of `dpo` for pairs that are two samples, wherever those lie: each knows the other as a number.

    Columns are "reference", "sides" (1 for a chosen and -1 for a rejected sample) and "other_gains" (`of_the_other`):
    the other's log-probs less its reference, from a forward pass with the weights of this step. A sample's loss has
    only its own half of the pair's gradient, so gradients count twice.
    """

    def of_responses(of: Values) -> Tensor:
        gains = of["sum"] - of["reference"]
        losses = -logsigmoid(beta * of["sides"] * (gains - of["other_gains"]))
        return 2 * losses - losses.detach()

    return ResponseLoss(
        terms=_sum_of("log_probs"),
        of_responses=of_responses,
        needs=("log_probs", "reference", "sides", "other_gains"),
        needs_all=True,
    )


def value_regression(*, clip: float | None = None, mean: Mean = "tokens") -> TokenLoss:
    """Return half the squared distance of values from "returns"; a value that goes further than `clip` from
    "old_values" gains nothing by that, as in PPO."""

    def of_tokens(of: Values) -> Tensor:
        losses = (of["values"] - of["returns"]).square()
        if clip is not None:
            near = of["old_values"] + (of["values"] - of["old_values"]).clamp(-clip, clip)
            losses = torch.maximum(losses, (near - of["returns"]).square())
        return losses / 2

    return TokenLoss(of_tokens=of_tokens, needs=("values", "returns") + ("old_values",) * (clip is not None), mean=mean)


def reward_pairs() -> ResponseLoss:
    """Return the loss of a reward model: the first response of a sample should have a greater reward than the second. A
    reward is the sum of a response's values, so give a loss mask that is 1 at its last token alone."""

    def of_responses(of: Values) -> Tensor:
        rewards = of["sum"].unflatten(0, (-1, 2))
        return -logsigmoid(rewards[:, 0] - rewards[:, 1]).repeat_interleave(2)

    return ResponseLoss(terms=_sum_of("values"), of_responses=of_responses, needs=("values",), group_size=2)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the larger of two losses: with a ratio of probabilities as it is, and with the ratio clipped."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _sum_of(name: str) -> Any:
    return lambda of: {"sum": of[name]}


def group_advantages(rewards: ArrayLike, groups: Sequence[Hashable], *, scales: bool = True) -> NDArray[np.float64]:
    """Return each response's reward less the mean of its group, over the group's standard deviation.

    `groups` names the group of each, such as its prompt. Without `scales` nothing is divided, as in Dr. GRPO.
    DataError: a group of a single response, or another number of groups than of rewards.
    """
    values, numbers, sizes = _grouped(rewards, groups, "group", 2, None)
    means = np.bincount(numbers, values) / sizes
    advantages = values - means[numbers]
    if scales:
        deviations = np.sqrt(np.bincount(numbers, advantages**2) / (sizes - 1))
        advantages /= deviations[numbers] + 1e-6
    return advantages


def of_the_other(values: ArrayLike, pairs: Sequence[Hashable]) -> NDArray[np.float64]:
    """Return for each response the value of the other one of its pair; DataError if one of `pairs` has not two."""
    known, numbers, _ = _grouped(values, pairs, "pair", 2, 2)
    return np.bincount(numbers, known)[numbers] - known


def _grouped(
    values: ArrayLike, groups: Sequence[Hashable], what: str, least: int, most: int | None
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the values, each one's group as a number in the order of appearance, and the groups' sizes. A group,
    called `what` in errors, may have `least` to `most` responses (None: any number)."""
    given = np.asarray(values, np.float64)
    if len(given) != len(groups):
        raise DataError(f"{len(given)} responses have {len(groups)} {what}s: name one for each response")
    number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    numbers = np.array([number_of[group] for group in groups], np.int64)
    sizes = np.bincount(numbers, minlength=len(number_of))
    for group, size in zip(number_of, sizes.tolist(), strict=True):
        if size < least or size > (most or size):
            raise DataError(
                f"{what} {group!r} has {size} response{'s' * (size > 1)}, {'at least ' * (most is None)}{least} are "
                f"needed: complete it, or leave the {what} out"
            )
    return given, numbers, sizes
