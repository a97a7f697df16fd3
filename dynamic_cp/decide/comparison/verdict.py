"""What to conclude from a comparison, in plain words, with the numbers that say why.

Nothing here is a fixed sentence about dynamic CP: the reason names the parts of the iteration that shrank most (or that
leave nothing to gain), how many tokens changed their CP size, and what the lengths are like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dynamic_cp.decide.comparison.parts import PART_LABELS
from dynamic_cp.decide.comparison.values import Comparison, OtherPrice, PlanOutcome, PolicyOutcome, Speedup
from dynamic_cp.setting import STATIC_POLICIES

MIN_GAIN = 1.03
"""Up to this factor dynamic CP is not worth a change: what a cost model says is no more exact than that."""
_SMALL_GAIN = 1.05
"""An interval around a factor that is not worth it needs no more batches if it ends here: the gain is small at best."""
_NOTHING = 1.005
"""Up to this factor there is no gain to speak of."""
_LARGE_SHARE = 0.2
_SMALL_SECONDS = 0.002
"""Parts that change by less than this share of the iteration are not named."""

Pays = Literal["yes", "no", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether dynamic CP pays.

    Attributes:
        pays: "unclear" where the interval holds both a gain that is worth it and one that is not, where one batch has
            a gain that is, or where other prices decide.
        baseline: the policy it was judged against: the fastest static one that fits in memory.
        headline: the judgement with its factor.
        reason: why, one to three sentences.
        saved_s: part -> seconds that dynamic CP saves of it (negative: it spends more), largest first.
        other_prices: the gain under other prices, and which of them decide whether it pays; "" where none were tried.
    """

    pays: Pays
    baseline: str
    headline: str
    reason: str
    saved_s: tuple[tuple[str, float], ...]
    other_prices: str = ""

    @property
    def text(self) -> str:
        """Headline, reason and what other prices say."""
        return "\n".join(filter(None, (self.headline, self.reason, self.other_prices)))


def verdict_of(comparison: Comparison) -> Verdict | None:
    """Return what to conclude; None where dynamic CP was not compared with a planned policy."""
    others = [one for one in comparison.policies if one.policy != "dynamic" and one.parts is not None]
    if "dynamic" not in comparison.names or not others:
        return None
    ours = comparison.policy("dynamic")
    static = [one for one in others if one.policy in STATIC_POLICIES] or others
    baseline = min(static, key=lambda one: (not one.fits_memory, one.iteration_s))
    speedups = {one.baseline: one for one in comparison.speedups}
    speedup = speedups[baseline.policy]
    if not ours.fits_memory:
        return Verdict(
            pays="no",
            baseline=baseline.policy,
            headline=f"the dynamic plan does not fit: {_lacking(ours)}",
            reason=_why_it_does_not_fit(baseline),
            saved_s=_saved(ours, baseline),
        )
    saved_s = _saved(ours, baseline)
    if not baseline.fits_memory:
        kind = "static policy" if baseline.policy in STATIC_POLICIES else "other policy"
        return Verdict(
            pays="yes",
            baseline=baseline.policy,
            headline=f"only dynamic CP fits in memory: no {kind} does ({baseline.name}: {_lacking(baseline)})",
            reason=_moved_tokens(ours, baseline),
            saved_s=saved_s,
        )
    on_batches = judged(speedup)
    pays, under_others = _with_other_prices(on_batches, comparison.other_prices)
    others_that_fit = [
        one for name, one in speedups.items() if name != baseline.policy and comparison.policy(name).fits_memory
    ]
    if comparison.is_tuned:
        at_their_best = f"{_at_its_best(baseline)}, {_at_its_best(ours)}"
        headline = f"{at_their_best}: {_judgement(pays, speedup, '', others_that_fit)}"
    else:
        is_fastest = any(one.baseline in STATIC_POLICIES for one in others_that_fit)
        over = f" over {baseline.name}{' (the fastest static policy)' * is_fastest}"
        headline = _judgement(pays, speedup, over, others_that_fit)
    if on_batches == "yes" or (on_batches == "unclear" and speedup.low is None):
        reason = _why_it_pays(ours, baseline, saved_s)
    else:
        reason = _why_it_does_not(comparison, ours, baseline, saved_s, speedup)
        if on_batches == "unclear":
            reason += f" {len(comparison.batches)} global batches differ too much to tell: compare more of them."
    return Verdict(
        pays=pays,
        baseline=baseline.policy,
        headline=headline,
        reason=reason,
        other_prices=under_others,
        saved_s=saved_s,
    )


def _with_other_prices(pays: Pays, others: Sequence[OtherPrice]) -> tuple[Pays, str]:
    """Return whether a gain pays under all prices, and a sentence with their range and the prices that decide."""
    if not others:
        return pays, ""
    low, high = (choose(others, key=lambda one: one.speedup.ratio) for choose in (min, max))
    text = (
        f"Under other prices the gain is {low.speedup.ratio:.2f}x (with {low.name}) to {high.speedup.ratio:.2f}x "
        f"(with {high.name})."
    )
    decisive = [one for one in others if judged(one.speedup) != "yes"]
    if pays != "yes" or not decisive:
        return pays, text
    least = "; ".join(f"with {one.name} {factor(one.speedup)}" for one in decisive)
    return "unclear", f"{text} Prices decide whether it pays: {least}."


def _at_its_best(one: PolicyOutcome) -> str:
    """Return the seconds of a policy and the setting that it has of its own."""
    setting = one.setting
    if setting.is_static:
        return f"best static {one.iteration_s:.3f} s ({one.name} at {setting.words})"
    return f"{one.name} {one.iteration_s:.3f} s ({setting.words})"


def judged(speedup: Speedup) -> Pays:
    """Return whether a speed-up is worth a change, by its interval as shown; one batch has none and shows no gain."""
    ratio = round(speedup.ratio, 2)
    if speedup.low is not None and round(speedup.low, 2) > MIN_GAIN:
        return "yes"
    return "no" if ratio <= MIN_GAIN and round(speedup.high or ratio, 2) <= _SMALL_GAIN else "unclear"


def _lacking(one: PolicyOutcome) -> str:
    """Return what memory lacks, such as `139.8 of 70.8 GB at limit 65536`."""
    return (
        f"{(one.peak_bytes or 0) / 1e9:.1f} of {(one.available_bytes or 0) / 1e9:.1f} GB "
        f"at limit {one.max_tokens_per_rank}"
    )


def _why_it_does_not_fit(baseline: PolicyOutcome) -> str:
    remedy = "Lower the limit of tokens per rank, recompute more, or use more TP or PP ranks."
    name = baseline.name
    if baseline.fits_memory:
        return f"{name[0].upper()}{name[1:]} fits, with {(baseline.peak_bytes or 0) / 1e9:.1f} GB. {remedy}"
    kind = "static policy" if baseline.policy in STATIC_POLICIES else "other policy"
    return f"No {kind} fits either: {name} needs {_lacking(baseline)}. {remedy}"


def cp_token_shares(policy: PolicyOutcome) -> dict[int, float]:
    """Return CP size -> share of all tokens that run in buckets of that size, ascending; empty without plans."""
    tokens: Counter[int] = Counter()
    for one in policy.batches:
        if isinstance(one, PlanOutcome):
            for bucket in one.planned.plan.buckets:
                tokens[bucket.cp_size] += bucket.num_tokens
    total = sum(tokens.values())
    return {cp_size: tokens[cp_size] / total for cp_size in sorted(tokens) if tokens[cp_size]}


def _saved(ours: PolicyOutcome, theirs: PolicyOutcome) -> tuple[tuple[str, float], ...]:
    """Return (part, seconds saved), most saved first."""
    assert ours.parts is not None
    assert theirs.parts is not None
    mine = dict(ours.parts)
    return tuple(sorted(((name, seconds - mine[name]) for name, seconds in theirs.parts), key=lambda one: -one[1]))


def _judgement(pays: Pays, speedup: Speedup, over: str, others: list[Speedup]) -> str:
    """Return a clause such as `dynamic CP gains 1.31x (95% 1.27..1.35) over static CP 8, 1.04x over megatron-dev`."""
    over += "".join(f", {one.ratio:.2f}x over {one.baseline}" for one in others)
    start = {
        "yes": "dynamic CP gains",
        "no": "dynamic CP does not pay here: it gains" if speedup.ratio > 0.995 else "dynamic CP loses here:",
        "unclear": "dynamic CP may pay: it gains",
    }[pays]
    small = ", too small to recommend it" if pays == "no" and speedup.ratio >= _NOTHING else ""
    return f"{start} {factor(speedup)}{over}{small}"


def factor(speedup: Speedup) -> str:
    """Return a speed-up with its interval, such as `1.31x (95% 1.27..1.35)`."""
    if speedup.low is None or speedup.high is None:
        return f"{speedup.ratio:.2f}x (one batch, no interval: compare more)"
    return f"{speedup.ratio:.2f}x (95% {speedup.low:.2f}..{speedup.high:.2f})"


def _why_it_pays(ours: PolicyOutcome, baseline: PolicyOutcome, saved_s: tuple[tuple[str, float], ...]) -> str:
    net_s = baseline.iteration_s - ours.iteration_s
    gross_s = sum(seconds for _, seconds in saved_s if seconds > 0)
    named = [one for index, one in enumerate(saved_s) if index == 0 or one[1] >= _LARGE_SHARE * gross_s][:3]
    text = f"Of {baseline.iteration_s:.3f} s it saves {net_s:.3f} s: " + _joined(
        [f"{_change(name, ours, baseline)}" for name, _ in named]
    )
    lost = [one for one in saved_s if -one[1] >= _LARGE_SHARE * net_s]
    if lost:
        text += "; it pays with " + _joined([_change(name, ours, baseline) for name, _ in lost[-2:]])
    return f"{text}. {_moved_tokens(ours, baseline)}"


def _why_it_does_not(
    comparison: Comparison,
    ours: PolicyOutcome,
    baseline: PolicyOutcome,
    saved_s: tuple[tuple[str, float], ...],
    speedup: Speedup,
) -> str:
    assert baseline.parts is not None
    parts, iteration_s = dict(baseline.parts), baseline.iteration_s
    fixed_s = parts["compute"] + parts["tensor_parallel"] + parts["gradient_reduction"]
    seqlens = [sample.seqlen for batch in comparison.batches for sample in batch]
    sentences = []
    if min(seqlens) == max(seqlens):
        sentences.append(f"All samples have {seqlens[0]} tokens, so one CP size is right for all of them.")
    changes = [name for name, seconds in saved_s if abs(seconds) >= _SMALL_SECONDS * iteration_s]
    avoidable = [one for one in _largest_avoidable(parts) if one[1] >= _SMALL_SECONDS * iteration_s][:2]
    name = baseline.name
    sentences.append(
        f"{name[0].upper()}{name[1:]} spends {fixed_s / iteration_s:.0%} of its {iteration_s:.3f} s in computing, "
        "TP collectives and gradients"
        + ("; the rest is mostly " if avoidable else "")
        + _joined([f"{PART_LABELS[name]} {seconds / iteration_s:.1%}" for name, seconds in avoidable])
        + (
            "; with dynamic CP " + _joined([_change(name, ours, baseline) for name in changes[:2]]) + "."
            if changes
            else "; dynamic CP changes none of it."
        )
    )
    sentences.append(_moved_tokens(ours, baseline))
    is_same_layout = baseline.setting.layout == ours.setting.layout
    if is_same_layout and baseline.max_tokens_per_rank > MIN_GAIN * ours.max_tokens_per_rank:
        sentences.append(
            f"With memory for more groups, dynamic CP has room for {ours.max_tokens_per_rank} tokens per rank, "
            f"{baseline.name} for {baseline.max_tokens_per_rank}."
        )
    over_bound = max(one.time_over_bound for one in ours.batches)
    if over_bound < MIN_GAIN and speedup.ratio >= 1:
        sentences.append(
            f"With {ours.max_tokens_per_rank} tokens per rank no plan can be noticeably better: this one is within "
            f"{over_bound - 1:.1%} of the lower bound."
        )
    return " ".join(sentences)


def _largest_avoidable(parts: dict[str, float]) -> list[tuple[str, float]]:
    names = (
        "launch", "padding", "exchange", "expert_exchange", "pipeline_bubble", "cp_wait", "expert_wait", "dp_wait"
    )  # fmt: skip
    return sorted(((name, parts[name]) for name in names), key=lambda one: -one[1])


def _moved_tokens(ours: PolicyOutcome, baseline: PolicyOutcome) -> str:
    """Return where dynamic CP runs the tokens, against the one size of a static policy."""
    shares = cp_token_shares(ours)
    main = max(shares, key=lambda cp_size: shares[cp_size])
    if baseline.static_cp_size is None:
        return f"{shares[main]:.0%} of the tokens run at CP {main}."
    smaller = sum(share for cp_size, share in shares.items() if cp_size < baseline.static_cp_size)
    larger = sum(share for cp_size, share in shares.items() if cp_size > baseline.static_cp_size)
    same = shares.get(baseline.static_cp_size, 0.0)
    if same > 0.995:
        return f"Dynamic CP, too, runs all tokens at CP {baseline.static_cp_size}."
    moves = [f"{share:.0%} at a {word} one" for share, word in ((smaller, "smaller"), (larger, "larger")) if share > 0]
    most = f" ({shares[main]:.0%} at CP {main})" if main != baseline.static_cp_size else ""
    if same < 0.005:
        where = " and ".join(word for share, word in ((smaller, "smaller"), (larger, "larger")) if share >= 0.005)
        of_them = f"CP {main}" if shares[main] > 0.995 else f"{where} sizes, {shares[main]:.0%} of them at CP {main}"
        name = baseline.policy.capitalize()
        return f"{name} runs all tokens at CP {baseline.static_cp_size}, dynamic CP runs them at {of_them}."
    return (
        f"It runs {same:.0%} of the tokens at CP {baseline.static_cp_size}, as {baseline.policy} does, "
        f"{_joined(moves)}{most}."
    )


def _change(name: str, ours: PolicyOutcome, theirs: PolicyOutcome) -> str:
    assert ours.parts is not None
    assert theirs.parts is not None
    before_s, after_s = dict(theirs.parts)[name], dict(ours.parts)[name]
    if max(before_s, after_s) < 1:
        return f"{PART_LABELS[name]} {1e3 * before_s:.1f} -> {1e3 * after_s:.1f} ms"
    return f"{PART_LABELS[name]} {before_s:.3f} -> {after_s:.3f} s"


def _joined(words: list[str]) -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"
