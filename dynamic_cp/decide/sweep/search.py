"""Finds the fastest setting of each policy, and settings that save memory, without planning all of them.

Each policy runs a race. The first global batch is planned with the settings of one layout after the other, the lowest
lower bound first, until no remaining bound is within SHOWN of the fastest. Settings within SHOWN on that batch are then
planned with all batches. Those that are still close are also tried with other exchanges and fewer CP sizes. The dynamic
policy also tries the settings that the others found, so it is never slower at their settings.

Rounds have a fixed size and ties go to the setting planned first: the result does not depend on the number of
processes.

Limits: a setting that is slower than the fastest by more than SHOWN on the first batch, but fastest on average, is
missed; in 5 cases of 190 to 350 settings and 8 batches the fastest one was within 1.05 of the fastest on that batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.comparison.values import OtherPrice, Speedup, speedup_of
from dynamic_cp.decide.comparison.verdict import judged
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.evaluate import Point, evaluate, evaluate_first, fastest_first, least_s, under_other_prices
from dynamic_cp.decide.sweep.journal import Journal
from dynamic_cp.decide.sweep.space import Refused, Space, exchanges_tried, layouts_of, settings_of, variants, what_helps
from dynamic_cp.decide.sweep.workers import Run, workers
from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.types import POOL_POLICIES, STATIC_POLICIES, CpCommType, RecomputedLayers, Topology

TRAINED_POLICIES = ("dynamic", *POOL_POLICIES, *STATIC_POLICIES)
"""What pretrain_gpt.py can run."""
SHOWN = 1.25
"""Settings that are slower than the fastest by more than this factor are not searched, even if they save memory."""
_WORTH_BYTES = 0.99
"""A slower setting is another point only if it needs less than this share of memory."""
_CLOSE = 1.05
"""A setting this much slower than the fastest is tried with other exchanges and CP sizes."""
_ROUND = 16
"""Settings that are planned before the bounds are looked at again."""

Progress = Callable[[int, int, str], None]
_Layout = tuple[Topology, str, str]
"""Topology, and what backward repeats, in which layers."""
_Bounded = tuple[Topology, str, RecomputedLayers, bool]
"""Topology, what backward repeats, in how many layers; and whether there is a pool."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a sweep found for one policy.

    Attributes:
        best: its fastest setting, of equally fast ones that which needs least memory; None where it has none.
        next_best: the fastest one with another layout, if any was planned.
        num_planned: settings that were planned, with one batch at least; bounds ruled out the others.
        refused: reason -> how many layouts or settings it ruled out, most frequent first.
    """

    best: Point | None
    next_best: Point | None
    num_planned: int
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep found.

    Attributes:
        policies: policy -> its fastest setting, in the order in which they were asked for.
        recommended: the policy to train with: dynamic where it gains enough over the fastest static one, else that.
        front: settings of the recommended policy that no other beats in both time and memory, its `best` first.
        other_prices: the gain of dynamic CP over the fastest static policy where prices are others.
    """

    policies: Mapping[str, Found]
    recommended: str
    front: tuple[Point, ...]
    other_prices: tuple[OtherPrice, ...] = ()

    @property
    def num_planned(self) -> int:
        """Settings that were planned."""
        return sum(one.num_planned for one in self.policies.values())

    @property
    def settings(self) -> list[Setting]:
        """The fastest setting of each policy that has one."""
        return [point.setting for point in self.best.values()]

    @property
    def best(self) -> Mapping[str, Point]:
        """Policy -> its fastest setting, without those that have none."""
        return {name: one.best for name, one in self.policies.items() if one.best is not None}


class SweepEndedError(Exception):
    """Somebody ended the search.

    Attributes:
        cause: what the signal has raised.
        best: policy -> the fastest setting so far; of all batches, or of the first one where none has come further.
    """

    def __init__(self, cause: KeyboardInterrupt | SystemExit, best: Mapping[str, Point]) -> None:
        super().__init__("the search was ended")
        self.cause, self.best = cause, best


def sweep(
    space: Space,
    job: SweepJob,
    *,
    policies: Sequence[str] = ("dynamic",),
    num_processes: int = 1,
    with_other_prices: bool = True,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Return the best settings of `space` for `job`; the same for any `num_processes`.

    Args:
        policies: of search.POLICIES and POOL_POLICIES, at least one.
        with_other_prices: plan the fastest settings under other prices, too.
        journal: keeps what is planned, and has what was planned before.
        progress: called with (done, all, what).

    Raises:
        SweepEndedError: by SIGINT or SIGTERM.
        MemoryLimitError: nothing fits; the message counts why.
        InvalidInputError: hardware without a size of memory.
    """
    progress = progress or (lambda done, total, text: None)
    candidates, refused = _candidates(space, job, policies, progress)
    race = _Race(space, job, candidates, refused, progress, journal)
    try:
        return _won(race, space, job, num_processes, with_other_prices)
    except (KeyboardInterrupt, SystemExit) as error:
        raise SweepEndedError(error, race.so_far()) from error


def _won(race: _Race, space: Space, job: SweepJob, num_processes: int, with_other_prices: bool) -> Sweep:
    """Run the race of all policies and return what it found."""
    policies = tuple(race.candidates)
    with workers(job, min(num_processes, sum(map(len, race.candidates.values())))) as run:
        race.start(run)
        # The dynamic policy comes last: it tries what the others have found.
        for policy in sorted(policies, key=lambda name: name == "dynamic"):
            race.run_policy(policy)
        found = {policy: race.found(policy) for policy in policies}
        best = {policy: one.best for policy, one in found.items() if one.best is not None}
        if not best:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in found[policies[0]].refused.items())
            raise MemoryLimitError(
                f"none of the settings can run on {space.num_gpus} GPU{'s' * (space.num_gpus > 1)}: {reasons}; "
                f"{what_helps(race.refused(policies[0]), space)}"
            )
        other_prices = race.other_prices() if with_other_prices else ()
    recommended = _recommended(best)
    return Sweep(
        policies=found,
        recommended=recommended,
        front=race.front(recommended),
        other_prices=other_prices,
    )


def speedup_over(best: Mapping[str, Point], baseline: str) -> Speedup:
    """Return the speed-up of the dynamic policy's best setting over that of another policy."""
    return speedup_of("dynamic", best["dynamic"].batches_s, baseline, best[baseline].batches_s)


def pareto_front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other equals or beats in both time and memory, the fastest first.

    A slower point is kept only if it saves memory that is worth a line.
    """
    front: list[Point] = []
    for point in fastest_first(points):
        if not front or point.peak_bytes < _WORTH_BYTES * front[-1].peak_bytes:
            front.append(point)
    return tuple(front)


def _recommended(best: Mapping[str, Point]) -> str:
    """Return the policy to train with: a pool where it gains over the dynamic policy, each at its own fastest."""
    pools = [name for name in POOL_POLICIES if name in best]
    if pools and "dynamic" in best:
        pool = min(pools, key=lambda name: best[name].iteration_s)
        if judged(speedup_of(pool, best[pool].batches_s, "dynamic", best["dynamic"].batches_s)) != "no":
            return pool
    trained = [name for name in TRAINED_POLICIES if name in best] or list(best)
    static = [name for name in STATIC_POLICIES if name in best]
    baseline = min(static or trained, key=lambda name: best[name].iteration_s)
    if "dynamic" not in best or baseline == "dynamic":
        return baseline
    return baseline if judged(speedup_over(best, baseline)) == "no" else "dynamic"


def _candidates(
    space: Space, job: SweepJob, policies: Sequence[str], progress: Progress
) -> tuple[dict[str, list[Setting]], dict[str, Counter[Refused]]]:
    """Return the settings of each policy, and what cannot run."""
    candidates: dict[str, list[Setting]] = {policy: [] for policy in policies}
    refused: dict[str, Counter[Refused]] = {policy: Counter() for policy in policies}
    layouts = tuple(layouts_of(space, job.model))
    for number, layout in enumerate(layouts):
        progress(number, len(layouts), "memory of layouts")
        known: dict[tuple[str | bool, Any], tuple[Setting, ...] | Refused] = {}
        for policy in policies:
            if isinstance(layout, Refused):
                refused[policy][layout] += 1
                continue
            # What memory holds is the same for all static policies, and for all others without a pool.
            pool = POOL_POLICIES.get(policy)
            kind = pool or policy in STATIC_POLICIES, exchanges_tried(policy, space, job, layout[0])
            found = known.get(kind)
            if found is None:
                found = known[kind] = settings_of(*layout, policy, space, job)
            if isinstance(found, Refused):
                refused[policy][found] += 1
            else:
                candidates[policy] += [replace(setting, policy=policy) for setting in found]
    return candidates, refused


class _Race:
    """What was planned so far."""

    def __init__(
        self,
        space: Space,
        job: SweepJob,
        candidates: Mapping[str, list[Setting]],
        refused: dict[str, Counter[Refused]],
        progress: Progress,
        journal: Journal | None,
    ) -> None:
        self._space, self._job, self._refused = space, job, refused
        self.candidates = candidates
        self._progress, self._journal = progress, journal
        self._first: dict[Setting, Point | Refused] = {}
        self._points: dict[str, dict[Setting, Point]] = {policy: {} for policy in candidates}
        self._seen: dict[tuple[str, int], Point] = {}
        """(policy, batches planned) -> the fastest setting that was planned with so many."""
        self._bounds: dict[_Bounded, float] = {}

    def start(self, run: Run) -> None:
        """Have `run` compute from now on; bounds of the layouts first."""
        self._run = run
        self._bounds = self._bounds_of_layouts()

    @property
    def num_planned(self) -> int:
        """Settings that were planned, with one batch at least."""
        return len(self._first)

    def so_far(self) -> dict[str, Point]:
        """Return policy -> its fastest setting so far, of all batches where one has come so far, else of the first."""
        every = len(self._job.batches)
        found = {name: self._seen.get((name, every)) or self._seen.get((name, 1)) for name in self.candidates}
        return {name: point for name, point in found.items() if point is not None}

    def _see(self, results: Iterable[Any]) -> None:
        """Remember the fastest of settings that were planned."""
        for point in results:
            if isinstance(point, Point):
                key = point.setting.policy, len(point.batches_s)
                best = self._seen.get(key)
                if best is None or point.iteration_s < best.iteration_s:
                    self._seen[key] = point

    def _in_words(self) -> str:
        """Return how far the search is, for who waits."""
        best = min(self.so_far().values(), key=lambda one: one.iteration_s, default=None)
        so_far = "" if best is None else f", best so far {best.iteration_s:.3f} s ({best.setting.policy})"
        return f" ({self.num_planned} settings planned{so_far})"

    def run_policy(self, policy: str) -> None:
        """Plan the settings of `policy` that may be its fastest or close to it."""
        order = sorted(self.candidates[policy], key=lambda setting: self._bounds[_bounded(setting)])
        looks: dict[Setting, float] = {}
        for start in range(0, len(order), _ROUND):
            fastest_s = min(looks.values(), default=float("inf"))
            few = [one for one in order[start : start + _ROUND] if self._may_matter(one, fastest_s)]
            if not few:
                break
            looks |= self._look(few)
        enough_s = SHOWN * min(looks.values(), default=0.0)
        self._plan(policy, [setting for setting in order if looks.get(setting, enough_s + 1) <= enough_s])
        self._plan(policy, self._faster_variants(policy))
        if policy == "dynamic":
            others = [self.found(name).best for name in self._points if name != policy]
            settings = [_as_dynamic(point.setting, self._space) for point in others if point is not None]
            self._plan(policy, [one for one in settings if one.cp_comm_types in self._exchanges(one)])

    def _exchanges(self, setting: Setting) -> Collection[tuple[CpCommType, ...]]:
        return exchanges_tried(setting.policy, self._space, self._job, setting.topology)

    def _may_matter(self, setting: Setting, fastest_s: float) -> bool:
        """Return whether a setting may be shown; one that recomputes some layers only where it may be the fastest."""
        is_block = setting.recompute_layers.method == "block"
        return self._bounds[_bounded(setting)] <= (1.0 if is_block else SHOWN) * fastest_s

    def found(self, policy: str) -> Found:
        points = fastest_first(self._points[policy].values())
        others = [one for one in points if _layout(one.setting) != _layout(points[0].setting)]
        return Found(
            best=points[0] if points else None,
            next_best=others[0] if others else None,
            num_planned=sum(setting.policy == policy for setting in self._first),
            refused={one.reason: number for one, number in self._refused[policy].most_common()},
        )

    def refused(self, policy: str) -> Collection[Refused]:
        """Return why layouts and settings of a policy cannot run."""
        return self._refused[policy]

    def front(self, policy: str) -> tuple[Point, ...]:
        """Return the settings of `policy` that no other beats in time and memory."""
        points = self._points[policy].values()
        enough_s = SHOWN * min(one.iteration_s for one in points)
        return pareto_front([one for one in points if one.iteration_s <= enough_s])

    def other_prices(self) -> tuple[OtherPrice, ...]:
        """Return the gain of dynamic CP under other prices, each policy with the fastest of its settings."""
        return under_other_prices(
            self._job, {name: points.values() for name, points in self._points.items()}, self._counted
        )

    def _look(self, settings: Sequence[Setting]) -> dict[Setting, float]:
        """Plan the first batch; return the seconds of the settings that can run."""
        new = [setting for setting in dict.fromkeys(settings) if setting not in self._first]
        for setting, result in zip(new, self._counted(evaluate_first, new, "first batch"), strict=True):
            self._first[setting] = result
            if isinstance(result, Refused):
                self._refused[setting.policy][result] += 1
        results = {setting: self._first[setting] for setting in settings}
        return {setting: one.iteration_s for setting, one in results.items() if isinstance(one, Point)}

    def _plan(self, policy: str, settings: Sequence[Setting]) -> None:
        """Plan all batches of settings that can run the first one."""
        runnable = list(self._look(settings))
        if len(self._job.batches) == 1:
            results: list[Point | Refused] = [self._first[setting] for setting in runnable]
        else:
            results = self._counted(evaluate, runnable, policy)
        for setting, result in zip(runnable, results, strict=True):
            if isinstance(result, Refused):
                self._refused[policy][result] += 1
            else:
                self._points[policy][setting] = result

    def _counted(
        self, function: Callable[[Setting, SweepJob], _Result], settings: Sequence[Setting], what: str
    ) -> list[_Result]:
        kept = [None if self._journal is None else self._journal.get(function, one) for one in settings]
        results: dict[Setting, Any] = {
            setting: one for setting, one in zip(settings, kept, strict=True) if one is not None
        }
        is_planned = function in (evaluate, evaluate_first)
        self._see(results.values() if is_planned else ())
        done = len(results)

        def on_result(setting: Setting, result: Any) -> None:
            nonlocal done
            done += 1
            if self._journal is not None:
                self._journal.keep(function, setting, result)
            self._see([result] if is_planned else ())
            self._progress(done, len(settings), what + self._in_words())

        self._progress(done, len(settings), what + self._in_words())
        new = [setting for setting in settings if setting not in results]
        results |= zip(new, self._run(function, new, on_result), strict=True)
        return [results[setting] for setting in settings]

    def _bounds_of_layouts(self) -> dict[_Bounded, float]:
        """Return layout -> seconds of the first batch that no setting of it stays below."""
        exchanges = tuple(dict.fromkeys(one for some in self._space.exchanges for one in some))
        loosest: dict[_Bounded, Setting] = {}
        for setting in (one for settings in self.candidates.values() for one in settings):
            before = loosest.get(_bounded(setting))
            if before is None or before.max_tokens_per_rank < setting.max_tokens_per_rank:
                policy = "pool" if setting.has_pool else "dynamic"
                every = replace(setting, policy=policy, static_cp_size=None, max_cp_size=None)
                loosest[_bounded(setting)] = replace(every, cp_comm_types=exchanges)
        return dict(zip(loosest, self._counted(least_s, list(loosest.values()), "lower bounds"), strict=True))

    def _faster_variants(self, policy: str) -> list[Setting]:
        """Return variants of what is close to the fastest that are faster than that on the first batch."""
        points, fastest = self._points[policy].values(), self.found(policy).best
        close = [one for one in points if fastest is not None and one.iteration_s < _CLOSE * fastest.iteration_s]
        before = {
            variant: one.batches_s[0] for one in close for variant in variants(one.setting, self._space, self._job)
        }
        looks = self._look([variant for variant in before if variant not in self._points[policy]])
        return [variant for variant, seconds in looks.items() if seconds < before[variant]]


def _layout(setting: Setting) -> _Layout:
    return setting.topology, setting.recompute, setting.recompute_layers.method


def _bounded(setting: Setting) -> _Bounded:
    return setting.topology, setting.recompute, setting.recompute_layers, setting.has_pool


def _as_dynamic(setting: Setting, space: Space) -> Setting:
    """Return the dynamic setting whose plans contain those of `setting`, as far as its CP sizes may be that large."""
    largest = setting.static_cp_size if setting.is_static else setting.max_cp_size
    if space.max_cp_size is not None:
        largest = min(largest or setting.topology.max_cp_size, space.max_cp_size)
    return replace(setting, policy="dynamic", max_cp_size=largest)
