"""What to conclude from a comparison, in plain words with numbers: which parts of the iteration change most, at which
CP sizes tokens run, and, if dynamic CP does not pay, what leaves nothing to gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynamic_cp.decide.comparison.parts import PART_LABELS
from dynamic_cp.decide.comparison.settle import Way, what_settles
from dynamic_cp.decide.comparison.values import Comparison, OtherPrice, PlanOutcome, PolicyOutcome, Speedup
from dynamic_cp.types import STATIC_POLICIES

MIN_GAIN = 1.03
"""A gain up to this factor is not worth a change: a cost model is no more exact than that."""
_SMALL_GAIN = 1.05
"""If the interval of such a gain ends below this, no more batches are needed: the gain is small at best."""
_NOTHING = 1.005
"""Up to this factor there is no gain to speak of."""
_NAMED_SHARE = 0.2
"""A part is named if it changes by at least this share of the largest change, ..."""
_SMALL_SECONDS = 0.002
"""... and by at least this share of the iteration."""
_FIXED = ("compute", "tensor_parallel", "gradient_reduction")
"""Parts that are neither waiting nor exchange: CP sizes change them least."""
_MORE_ROOM = "Lower the limit of tokens per rank, recompute more, or use more TP or PP ranks."

Pays = Literal["yes", "no", "unclear"]
_SAYS = {"yes": "gains", "no": "does not pay here: it gains", "unclear": "may pay: it gains"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether dynamic CP pays.

    Attributes:
        pays: "unclear" if the interval holds both gains that are worth it and gains that are not, if only one batch
            has a gain that is, or if other prices decide.
        baseline: the policy it was judged against: the fastest static one that fits in memory.
        saved_s: part -> seconds that dynamic CP saves there (negative: it spends more), largest first.
        other_prices: the gain under other prices, and which of them decide whether it pays; "" if none were tried.
        settled_by: what would settle it if it is "unclear".
    """

    pays: Pays
    baseline: str
    headline: str
    reason: str
    saved_s: tuple[tuple[str, float], ...]
    other_prices: str = ""
    settled_by: tuple[Way, ...] = ()

    @property
    def text(self) -> str:
        """Headline, reason and what other prices say."""
        return "\n".join(filter(None, (self.headline, self.reason, self.other_prices)))


def verdict_of(comparison: Comparison) -> Verdict | None:
    """Return what to conclude; None if dynamic CP was not compared with another planned policy."""
    others = [one for one in comparison.policies if one.policy != "dynamic" and one.parts is not None]
    if "dynamic" not in comparison.names or not others:
        return None
    ours = comparison.policy("dynamic")
    static = [one for one in others if one.policy in STATIC_POLICIES] or others
    baseline = min(static, key=lambda one: (not one.fits_memory, one.iteration_s))
    about: dict[str, Any] = {"baseline": baseline.policy, "saved_s": _saved(ours, baseline)}
    none_of_them = f"no {'static' if baseline.policy in STATIC_POLICIES else 'other'} policy"
    if not ours.fits_memory:
        theirs = f"{none_of_them} fits either: {baseline.name} needs {_lacking(baseline)}"
        if baseline.fits_memory:
            theirs = f"{baseline.name} fits, with {(baseline.peak_bytes or 0) / 1e9:.1f} GB"
        headline = f"the dynamic plan does not fit: {_lacking(ours)}"
        return Verdict(pays="no", headline=headline, reason=f"{_capital(theirs)}. {_MORE_ROOM}", **about)
    if not baseline.fits_memory:
        headline = f"only dynamic CP fits in memory: {none_of_them} does ({baseline.name}: {_lacking(baseline)})"
        return Verdict(pays="yes", headline=headline, reason=_cp_sizes(ours, baseline), **about)
    speedups = {one.baseline: one for one in comparison.speedups}
    speedup = speedups.pop(baseline.policy)
    pays, under_others, decisive = _with_other_prices(judged(speedup), comparison.other_prices)
    fitting = [one for name, one in speedups.items() if comparison.policy(name).fits_memory]
    over = "".join(f", {one.ratio:.2f}x over {one.baseline}" for one in fitting)
    at_their_best = ""
    if comparison.is_tuned:
        at_their_best = f"{_at_its_best(baseline)}, {_at_its_best(ours)}: "
    else:
        is_fastest = any(one.baseline in STATIC_POLICIES for one in fitting)
        over = f" over {baseline.name}{' (the fastest static policy)' * is_fastest}{over}"
    says = "loses here:" if pays == "no" and speedup.ratio <= 0.995 else _SAYS[pays]
    small = ", too small to recommend it" if pays == "no" and speedup.ratio >= _NOTHING else ""
    return Verdict(
        pays=pays,
        headline=f"{at_their_best}dynamic CP {says} {factor(speedup)}{over}{small}",
        reason=" ".join(_reasons(comparison, ours, baseline, speedup)),
        other_prices=under_others,
        settled_by=what_settles(comparison, ours, baseline, decisive) if pays == "unclear" else (),
        **about,
    )


def _with_other_prices(pays: Pays, others: Sequence[OtherPrice]) -> tuple[Pays, str, Sequence[OtherPrice]]:
    """Return whether a gain pays under all prices, a sentence with its range, and the prices that decide."""
    if not others:
        return pays, "", ()
    low, high = (choose(others, key=lambda one: one.speedup.ratio) for choose in (min, max))
    text = (
        f"Under other prices the gain is {low.speedup.ratio:.2f}x (with {low.name}) to {high.speedup.ratio:.2f}x "
        f"(with {high.name})."
    )
    decisive = [one for one in others if judged(one.speedup) != "yes"]
    if pays != "yes" or not decisive:
        return pays, text, ()
    least = "; ".join(f"with {one.name} {factor(one.speedup)}" for one in decisive)
    return "unclear", f"{text} Prices decide whether it pays: {least}.", decisive


def _at_its_best(one: PolicyOutcome) -> str:
    setting = one.setting
    if setting.is_static:
        return f"best static {one.iteration_s:.3f} s ({one.name} at {setting.words})"
    return f"{one.name} {one.iteration_s:.3f} s ({setting.words})"


def judged(speedup: Speedup) -> Pays:
    """Return whether a speed-up is worth a change, by its interval as shown; one batch has none: never "yes"."""
    ratio = round(speedup.ratio, 2)
    if speedup.low is not None and round(speedup.low, 2) > MIN_GAIN:
        return "yes"
    return "no" if ratio <= MIN_GAIN and round(speedup.high or ratio, 2) <= _SMALL_GAIN else "unclear"


def factor(speedup: Speedup) -> str:
    """Return a speed-up with its interval, such as `1.31x (95% 1.27..1.35)`."""
    if speedup.low is None or speedup.high is None:
        return f"{speedup.ratio:.2f}x (one batch, no interval: compare more)"
    return f"{speedup.ratio:.2f}x (95% {speedup.low:.2f}..{speedup.high:.2f})"


def cp_token_shares(policy: PolicyOutcome) -> dict[int, float]:
    """Return CP size -> share of all tokens that run in buckets of that size, ascending; empty without plans."""
    tokens: Counter[int] = Counter()
    for one in policy.batches:
        if isinstance(one, PlanOutcome):
            for bucket in one.planned.plan.buckets:
                tokens[bucket.cp_size] += bucket.num_tokens
    total = sum(tokens.values())
    return {cp_size: tokens[cp_size] / total for cp_size in sorted(tokens) if tokens[cp_size]}


def _reasons(comparison: Comparison, ours: PolicyOutcome, baseline: PolicyOutcome, speedup: Speedup) -> Iterator[str]:
    """Yield sentences: what changes, at which CP sizes, and what limits the gain if it is not a clear one."""
    on_batches = judged(speedup)
    pays = on_batches == "yes" or (on_batches == "unclear" and speedup.low is None)
    seqlens = {sample.seqlen for batch in comparison.batches for sample in batch}
    if len(seqlens) == 1 and not pays:
        yield f"All samples have {seqlens.pop()} tokens, so one CP size is right for all of them."
    assert baseline.parts is not None
    assert ours.parts is not None
    before, after, iteration_s = dict(baseline.parts), dict(ours.parts), baseline.iteration_s
    saved_s = dict(_saved(ours, baseline))
    least_s = max(_SMALL_SECONDS * iteration_s, _NAMED_SHARE * max(map(abs, saved_s.values())))
    named = [_change(name, before[name], after[name]) for name, seconds in saved_s.items() if abs(seconds) >= least_s]
    both = f"{_capital(baseline.name)} takes {iteration_s:.3f} s, dynamic CP {ours.iteration_s:.3f} s"
    yield f"{both}: {_joined(named)}." if named else f"{both}; no part of it changes."
    if not pays:
        fixed = sum(before[name] for name in _FIXED) / iteration_s
        yield f"Of these {iteration_s:.3f} s {fixed:.0%} are computing, TP collectives and gradients."
    yield _cp_sizes(ours, baseline)
    if pays:
        return
    is_same_layout = baseline.setting.layout == ours.setting.layout
    if is_same_layout and baseline.max_tokens_per_rank > MIN_GAIN * ours.max_tokens_per_rank:
        yield (
            f"With memory for more groups, dynamic CP has room for {ours.max_tokens_per_rank} tokens per rank, "
            f"{baseline.name} for {baseline.max_tokens_per_rank}."
        )
    over_bound = max(one.time_over_bound for one in ours.batches)
    if over_bound < MIN_GAIN and speedup.ratio >= 1:
        yield (
            f"With {ours.max_tokens_per_rank} tokens per rank no plan can be noticeably better: this one is within "
            f"{over_bound - 1:.1%} of the lower bound."
        )
    if on_batches == "unclear":
        yield f"{len(comparison.batches)} global batches differ too much to tell: compare more of them."


def _lacking(one: PolicyOutcome) -> str:
    """Return the memory that is needed and available, such as `139.8 of 70.8 GB at limit 65536`."""
    gb = f"{(one.peak_bytes or 0) / 1e9:.1f} of {(one.available_bytes or 0) / 1e9:.1f} GB"
    return f"{gb} at limit {one.max_tokens_per_rank}"


def _saved(ours: PolicyOutcome, theirs: PolicyOutcome) -> tuple[tuple[str, float], ...]:
    """Return (part, seconds saved), most saved first."""
    assert ours.parts is not None
    assert theirs.parts is not None
    mine = dict(ours.parts)
    return tuple(sorted(((name, seconds - mine[name]) for name, seconds in theirs.parts), key=lambda one: -one[1]))


def _cp_sizes(ours: PolicyOutcome, baseline: PolicyOutcome) -> str:
    """Return at which CP sizes tokens run, such as `Dynamic CP runs its tokens at CP 1 (70%) and 8 (30%), ...`."""
    shares = [f"{cp_size} ({share:.0%})" for cp_size, share in cp_token_shares(ours).items() if share >= 0.005]
    theirs = "" if baseline.static_cp_size is None else f", {baseline.policy} all at CP {baseline.static_cp_size}"
    return f"Dynamic CP runs its tokens at CP {_joined(shares)}{theirs}."


def _change(name: str, before_s: float, after_s: float) -> str:
    if max(before_s, after_s) < 1:
        return f"{PART_LABELS[name]} {1e3 * before_s:.1f} -> {1e3 * after_s:.1f} ms"
    return f"{PART_LABELS[name]} {before_s:.3f} -> {after_s:.3f} s"


def _joined(words: list[str]) -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"
