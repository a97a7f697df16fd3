"""Fits the coefficients of a hardware file to measured seconds, and reports how far off the cost model then is.

Each part is fitted to its own measurements alone, with the formula by which the cost model prices it:

    linear      overhead + tokens * FLOPs / rate; backward has an overhead and a rate of its own
    attention   overhead + a * sum of (L^2 + extra_tokens * L); causal tiles and those without a mask apart
    states      overhead + tokens * FLOPs of linear attention / rate, both passes together
    edges       FLOPs of the head / rate + bytes / memory bandwidth
    links       latency + bytes / bandwidth
    host        a layer and rings of next to no tokens; rows that take little longer say nothing of a device

One factor then scales the rates and overheads of layers, attention and edges to random whole packs. The remaining time
of tiny micro-batches is the overhead of a bucket, and with CP the latency of an exchange, which includes waiting for
other ranks. Nothing is fitted to `held_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.decide.calibration.measurements import Calibration, FitError, Measurement, Measurements, Point, Setup
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.edges import LOSS_BACKWARD_BYTES_PER_LOGIT, LOSS_FORWARD_BYTES_PER_LOGIT
from dynamic_cp.pricing.linear_prices import BACKWARD_OVER_FORWARD
from dynamic_cp.types import Hardware, PlanOptions, Problem, Topology

BUCKET_LAYERS = 2
"""Layers of the model that runs micro-batches."""
_RATES = (
    "linear_flops_per_s",
    "head_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    *(f"attention{tile}{way}_flops_per_s" for tile in ("", "_full") for way in ("", "_backward")),
)
_OVERHEADS = ("forward_overhead_s_per_layer", "backward_overhead_s_per_layer")
_MOST_WEIGHT = 2.0
_GROWTH = 0.01
"""Least share of the longest layers' time that must depend on tokens; with less, no rate can be fitted."""
_DIGITS = 4
_BUSY = 1.3
"""A row measures the device, not the host, if it takes at least this many times its host's seconds."""
_TRANSFER_LAUNCH_S = 40e-6
"""Host time of a grouped send and receive: an estimate, because one rank cannot measure it."""
_MOST_OVER_LAYERS = 1.65
"""Limit of the head's rate over that of layers; on an H200 the largest matrix product was 1.55 times as fast."""
_BACKWARD_FLOPS = 2.5
"""FLOPs of attention backward over forward, as in `dynamic_cp.mechanisms.stage_attention`."""
_HUBER = 1.345
"""Tuning constant, in robust standard deviations of the residuals (Huber 1964)."""
_MAD_TO_SIGMA = 1.4826
_SMALLEST_SPREAD = 0.002
_ROUNDS = 20


def calibrate(base: Hardware, measurements: Measurements, *, name: str) -> Calibration:
    """Return `base` with a new name and every coefficient that `measurements` determine. InvalidInputError: too few
    rows of layers or attention, or seconds that cannot be fitted."""
    _check_seconds(measurements)
    return _Fit(base, measurements, name).run()


class _Fit:
    """Fits one part after the other; a part may use the coefficients of those before it."""

    def __init__(self, base: Hardware, measurements: Measurements, name: str) -> None:
        self._base, self._rows, self._name = base, measurements, name
        self._setup: Setup = measurements.setup
        self._values: dict[str, float] = {}
        self._how: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._errors: list[FitError] = []
        self._points: list[Point] = []
        self._notes: list[str] = []
        self._host_s = dict.fromkeys(("linear", "causal", "full"), (0.0, 0.0))
        self._attention_constants = (0.0, 0.0)

    def run(self) -> Calibration:
        self._host()
        overheads = np.array(self._linear()) + np.array(self._attention())
        self._set("forward_overhead_s_per_layer", overheads[0], "constants of a layer and of its attention")
        self._set("backward_overhead_s_per_layer", overheads[1], "the same, backward")
        self._set("linear_extra_tokens", 0.0, "0: what a short pack costs more is in the overhead of a layer")
        self._ring()
        self._linear_attention()
        self._edges()
        self._links()
        self._overheads()
        self._weigh()
        self._overheads()
        for section, fitted in (("buckets", True), ("packs", True), ("held_out", False)):
            if rows := self._rows.of(section):
                both = [("both", np.array([_total(one) for one in rows]), self._buckets_s(rows))]
                self._compared(section, rows, both, fitted=fitted)
        return Calibration(
            hardware=self._hardware(),
            changed=tuple(self._values),
            kept=self._kept,
            errors=tuple(self._errors),
            points=tuple(self._points),
            notes=tuple(self._notes),
        )

    # -- parts ------------------------------------------------------------------------------------------------------

    def _host(self) -> None:
        """Fit what the host needs for a layer and for one more ring step."""
        rings = self._rows.of("host", "attention")
        if not rings:
            for name in (field.name for field in fields(Hardware) if field.name.startswith("host_")):
                self._set(name, 0.0, "0: what the host takes is in the overheads that were measured")
            return
        columns = np.array([[1.0, one.cp_size - 1.0] for one in rings])
        (alone, step), (back_alone, back_step) = (fit_seconds(columns, seconds).tolist() for seconds in _both(rings))
        layer, linear = (self._rows.of("host", kind)[0] for kind in ("layer", "linear"))
        self._host_s = {
            "linear": (linear.forward_s, linear.backward_s),
            "causal": (alone, back_alone),
            "full": (step, back_step),
        }
        about = f"a layer of {layer.tokens} tokens"
        self._set("host_forward_s_per_layer", layer.forward_s, about)
        self._set("host_backward_s_per_layer", layer.backward_s, f"{about}, backward")
        step_s = (step + back_step) / 2 + _TRANSFER_LAUNCH_S
        how = f"rings of up to {rings[-1].cp_size} lanes emulated on one, mean of both passes"
        how += f", and an estimate of {1e6 * _TRANSFER_LAUNCH_S:.0f} us for a transfer"
        self._set("host_ring_step_s_per_layer", step_s, how)
        self._kept["host_message_s_per_layer"] = "placed attention is not measured"

    def _solve(
        self, section: str, columns: Floats, rows: Sequence[Measurement], solve: Callable[[Floats, Floats], Floats]
    ) -> tuple[list[Floats], list[Floats]]:
        """Return, for each pass, terms fitted to rows that keep the device busy, and all rows' predicted seconds."""
        terms, predicted = [], []
        for seconds, host_s in zip(_both(rows), self._host_s[section], strict=True):
            busy = seconds > _BUSY * host_s
            if busy.sum() < columns.shape[1]:
                busy[:] = True
            terms.append(solve(columns[busy], seconds[busy]))
            predicted.append(np.maximum(columns @ terms[-1], host_s))
        return terms, predicted

    def _linear(self) -> tuple[float, float]:
        rows = self._at_least("linear", 2)
        tokens = np.array([one.tokens for one in rows], np.float64)
        columns = np.stack([np.ones_like(tokens), tokens], axis=1)
        (forward, backward), predicted = self._solve("linear", columns, rows, fit_seconds)
        if min(part[1] * tokens.max() / (part[0] + part[1] * tokens.max()) for part in (forward, backward)) < _GROWTH:
            raise InvalidInputError(
                f"layers of {tokens.min():.0f} to {tokens.max():.0f} tokens took equally long: "
                "raise --max-tokens, the device is not busy"
            )
        flops = 2 * self._setup.shard.linear_weights_per_layer
        about = f"{tokens.min():.0f} to {tokens.max():.0f} tokens"
        self._set("linear_flops_per_s", flops / forward[1], f"layers without core attention, {about}")
        self._set("linear_backward_over_forward", backward[1] / forward[1], f"the same layers, {about}")
        self._compare("linear", rows, *predicted)
        return float(forward[0]), float(backward[0])

    def _attention(self) -> tuple[float, float]:
        flops = self._setup.shard.layer.attention_flops_per_token2
        overheads: list[float] = []
        for section, infix in (("causal", ""), ("full", "_full")):
            rows = self._at_least(section, 3)
            columns = np.array([[1.0, one.tokens, one.tokens_squared] for one in rows])
            solved, predicted_s = self._solve(section, columns, rows, _attention_terms)
            for direction, times, part in (("", 1.0, solved[0]), ("_backward", _BACKWARD_FLOPS, solved[1])):
                if not part[2] > 0:
                    raise InvalidInputError(
                        f"attention{infix}{direction} does not grow with the squared length up to "
                        f"{max(max(one.seqlens) for one in rows)} tokens: raise --max-tokens"
                    )
                about = f"{section} tiles of {min(min(one.seqlens) for one in rows)} to "
                about += f"{max(max(one.seqlens) for one in rows)} tokens"
                prefix = f"attention{infix}{direction}"
                self._set(f"{prefix}_flops_per_s", times * flops / part[2], about)
                self._set(f"{prefix}_extra_tokens", part[1] / part[2], about)
            self._compare(section, rows, *predicted_s)
            if section == "causal":
                overheads = [float(part[0]) for part in solved]
                self._attention_constants = overheads[0], overheads[1]
                ratio = solved[1][2] / solved[0][2]
                self._set("attention_backward_over_forward", ratio, "squared length, causal")
                self._note_sequences(rows)
            else:  # backward is priced with twice the forward overhead; a third of the sum keeps the sum
                self._set(
                    "ring_step_overhead_s_per_layer", (solved[0][0] + solved[1][0]) / 3, "constant of a ring step"
                )
        return overheads[0], overheads[1]

    def _note_sequences(self, rows: Sequence[Measurement]) -> None:
        """Note what each further sequence of a pack costs; the cost model has no such term."""
        columns = np.array([[1.0, one.tokens, one.tokens_squared, len(one.seqlens)] for one in rows])
        if len({len(one.seqlens) for one in rows}) > 1 and len(rows) > 4:
            each = [fit_seconds(columns, seconds)[3] for seconds in _both(rows)]
            self._notes.append(
                f"a further sequence in a pack costs {1e6 * each[0]:.0f} us forward and {1e6 * each[1]:.0f} us "
                "backward per layer; the cost model has no such term, its extra tokens stand for it"
            )

    def _ring(self) -> None:
        """Compare whole rings with the sum of their fitted parts."""
        rows = self._rows.of("ring")
        if not rows:
            return
        hardware, flops = self._hardware(), self._setup.shard.layer.attention_flops_per_token2
        predicted = np.zeros((2, len(rows)))
        for index, (times, direction, launches) in enumerate(((1.0, "", 1.0), (_BACKWARD_FLOPS, "_backward", 2.0))):
            for place, one in enumerate(rows):
                seconds = self._attention_constants[index]
                for infix, steps in (("", 1), ("_full", one.cp_size - 1)):
                    rate = getattr(hardware, f"attention{infix}{direction}_flops_per_s")
                    extra = getattr(hardware, f"attention{infix}{direction}_extra_tokens")
                    seconds += steps * times * flops / rate * (one.tokens_squared + extra * one.tokens)
                overhead = launches * hardware.ring_step_overhead_s_per_layer
                host_s, step_s = (self._host_s[part][index] for part in ("causal", "full"))
                predicted[index, place] = max(
                    seconds + (one.cp_size - 1) * overhead, host_s + (one.cp_size - 1) * step_s
                )
        self._compare("ring", rows, predicted[0], predicted[1], fitted=False)

    def _linear_attention(self) -> None:
        sizes, rows = self._setup.linear_attention, self._rows.of("linear_attention")
        if sizes is None or not rows:
            return
        columns = np.array([[1.0, one.tokens] for one in rows])
        terms = [fit_seconds(columns, seconds) for seconds in _both(rows)]
        slope = float(terms[0][1] + terms[1][1])
        if slope <= 0:
            self._kept["linear_attention_flops_per_s"] = "its seconds do not grow with tokens: raise --max-tokens"
            return
        flops = (1 + BACKWARD_OVER_FORWARD) * sizes.core_flops
        lengths = [seqlen for one in rows for seqlen in one.seqlens]
        about = f"{sizes.kind}, samples of {min(lengths)} to {max(lengths)} tokens, both passes"
        self._set("linear_attention_flops_per_s", flops / slope, about)
        self._compare("linear_attention", rows, *(columns @ part for part in terms))

    def _edges(self) -> None:
        heads, embeddings = self._rows.of("edges", "head"), self._rows.of("edges", "embedding")
        if len(heads) < 2 or len(embeddings) < 2:
            self._kept["head_flops_per_s, memory_bandwidth_bytes_per_s"] = "not measured"
            return
        shard, element = self._setup.shard, self._setup.element_bytes
        head_f, head_b = self._slopes(heads)
        embedding = sum(self._slopes(embeddings))
        flops = 2.0 * shard.hidden_size * shard.vocab_size
        moved = np.array([LOSS_FORWARD_BYTES_PER_LOGIT, LOSS_BACKWARD_BYTES_PER_LOGIT]) * float(shard.vocab_size)
        row = float(shard.hidden_size)
        ratio = self._values["linear_backward_over_forward"]
        columns = np.array([[flops, moved[0]], [ratio * flops, moved[1]], [0.0, row * (3 * element + 8)]])
        seconds = np.array([head_f, head_b, embedding])
        # Fitted to absolute errors: with relative ones the cheap embedding would spoil the costly head.
        scale = np.abs(columns).max(axis=0)
        solved = np.linalg.lstsq(columns / scale, seconds, rcond=None)[0] / scale
        least = 1 / (_MOST_OVER_LAYERS * self._values["linear_flops_per_s"])
        of_loss = seconds - columns[:, 0] * least
        if 0 < solved[0] < least and (moved_s := float(columns[:, 1] @ of_loss)) > 0:
            # A loss that moves more bytes than are counted would look like a fast head.
            solved = np.array([least, moved_s / float(columns[:, 1] @ columns[:, 1])])
            self._notes.append(
                f"the LM head is taken to be {_MOST_OVER_LAYERS} times as fast as layers, and its loss to move its "
                f"bytes at {1e-12 / solved[1]:.2g} TB/s: it moves more than is counted"
            )
        if solved[0] <= 0:
            solved = np.array([0.0, float(columns[:, 1] @ seconds / (columns[:, 1] @ columns[:, 1]))])
        if solved[1] <= 0:
            solved = np.array([float(columns[:, 0] @ seconds / (columns[:, 0] @ columns[:, 0])), 0.0])
        for name, inverse in zip(("head_flops_per_s", "memory_bandwidth_bytes_per_s"), solved.tolist(), strict=True):
            what = "LM head, loss and embedding by tokens"
            self._set(name, 1 / inverse if inverse > 0 else 0.0, what if inverse > 0 else f"0: no share of {what}")
        per_token = columns @ solved
        tokens = np.array([one.tokens for one in heads], np.float64)
        sides = []
        for seconds_of, slope in zip(_both(heads), per_token[:2].tolist(), strict=True):
            weights = seconds_of**-2.0
            left = float(weights @ (seconds_of - slope * tokens) / weights.sum())
            constant = max(0.0, left)  # part of a bucket's overhead
            sides.append(constant + slope * tokens)
        self._compare("edges", heads, sides[0], sides[1])

    def _slopes(self, rows: Sequence[Measurement]) -> tuple[float, float]:
        columns = np.array([[1.0, one.tokens] for one in rows])
        forward, backward = (float(fit_seconds(columns, seconds)[1]) for seconds in _both(rows))
        return forward, backward

    def _links(self) -> None:
        rows = self._rows.of("links")
        if not rows:
            self._kept["bandwidths and latency of links"] = "one rank measured: run under torchrun to measure links"
            return
        for kind, across, coefficient in (
            ("ring_shift", False, "bandwidth_in_node_bytes_per_s"),
            ("ring_shift", True, "bandwidth_across_nodes_bytes_per_s"),
            ("hop", None, "p2p_bandwidth_bytes_per_s"),
            ("all_reduce", False, "collective_bandwidth_in_node_bytes_per_s"),
        ):
            chosen = [one for one in rows if one.kind == kind and across in (None, one.across_nodes)]
            if kind == "hop" and any(one.across_nodes for one in chosen):
                chosen = [one for one in chosen if one.across_nodes]
            fitted = self._line(chosen)
            if fitted is None:
                self._kept[coefficient] = "no rank on another node" if across else f"no {kind} was measured"
                continue
            about = f"{kind} among {chosen[0].cp_size} ranks, {chosen[0].num_bytes} to {chosen[-1].num_bytes} bytes"
            self._set(coefficient, 1 / fitted[1], about)
            if kind == "ring_shift":
                self._set("exchange_latency_s_per_layer", fitted[0], f"{about}, without attention")
        if "bandwidth_across_nodes_bytes_per_s" not in self._values and self._setup.num_ranks > 1:
            self._kept["bandwidth_across_nodes_bytes_per_s"] = "all ranks were on one node"
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            fitted = self._line([one for one in rows if one.kind == kind and not one.across_nodes])
            if fitted is not None:
                speed = 1 / fitted[1] / 1e9
                self._notes.append(f"{kind} in a node: {speed:.3g} GB/s of bus bandwidth (not a coefficient)")

    def _line(self, rows: Sequence[Measurement]) -> tuple[float, float] | None:
        """Return (latency, seconds per byte on the wire); None with fewer than 2 rows or no growth with bytes."""
        if len(rows) < 2:
            return None
        moved = np.array([one.num_bytes * _wire_share(one) for one in rows])
        latency, per_byte = fit_seconds(np.stack([np.ones_like(moved), moved], axis=1), _both(rows)[0]).tolist()
        if per_byte <= 0:
            return None
        predicted = latency + per_byte * moved
        where = " across nodes" if rows[0].across_nodes else ""
        self._compare(f"{rows[0].kind}{where}", rows, predicted, np.zeros(len(rows)))
        return latency, per_byte

    def _weigh(self) -> None:
        """Scale rates and overheads to whole packs: parts that run in turns find colder caches than one alone."""
        rows = [one for one in self._rows.of("packs") if one.cp_size == 1]
        if len(rows) < 3:
            return
        measured = np.array([_total(one) for one in rows])
        factor = float(np.clip(np.median(measured / self._buckets_s(rows)), 1 / _MOST_WEIGHT, _MOST_WEIGHT))
        for name in _RATES + _OVERHEADS:
            if name in self._values:
                times = factor if name in _OVERHEADS else 1 / factor
                self._set(name, self._values[name] * times, f"{self._how[name]}; x {times:.3g} by whole packs")
        self._notes.append(f"whole packs take {factor:.2f} times what their parts take when each runs alone")

    def _overheads(self) -> None:
        rows = self._rows.of("buckets")
        alone = [one for one in rows if one.cp_size == 1]
        if not alone:
            self._kept["overhead_s_per_bucket_stage"] = "not measured"
            return
        self._values["overhead_s_per_bucket_stage"] = 0.0
        left = np.array([_total(one) for one in alone]) - self._buckets_s(alone)
        overhead_s = max(0.0, float(np.median(left))) / 2
        self._set("overhead_s_per_bucket_stage", overhead_s, "tiny micro-batches, both passes")
        grouped = [one for one in rows if one.cp_size > 1]
        if grouped:
            latency_s = self._latency(grouped)
            self._set("exchange_latency_s_per_layer", latency_s, "tiny micro-batches with CP, waits included")

    def _latency(self, rows: Sequence[Measurement]) -> float:
        """Return the latency that predicts `rows` best. It is searched, because exchanges may hide behind computing."""

        def error(latency_s: float) -> float:
            self._values["exchange_latency_s_per_layer"] = latency_s
            measured = np.array([_total(one) for one in rows])
            return float(np.sum(np.abs(np.log(self._buckets_s(rows) / measured))))

        tried = [0.0, *np.geomspace(1e-7, 1.0, 57).tolist()]
        for _ in range(3):
            best = min(range(len(tried)), key=lambda index: error(tried[index]))
            tried = np.linspace(tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)], 9).tolist()
        return float(min(tried, key=error))

    # -- shared -----------------------------------------------------------------------------------------------------

    def _buckets_s(self, rows: Sequence[Measurement]) -> Floats:
        return buckets_s(self._hardware(), self._setup, rows)

    def _compare(
        self, name: str, rows: Sequence[Measurement], forward: Floats, backward: Floats, *, fitted: bool = True
    ) -> None:
        measured = _both(rows)
        passes = [("forward", measured[0], forward), ("backward", measured[1], backward)]
        self._compared(name, rows, passes, fitted=fitted)

    def _compared(
        self, name: str, rows: Sequence[Measurement], passes: Sequence[tuple[str, Floats, Floats]], *, fitted: bool
    ) -> None:
        """Keep the measured and predicted seconds of each pass, and their error; a pass that took 0 s is left out."""
        points = [
            Point(measurement=one, direction=direction, measured_s=measured, predicted_s=predicted)
            for direction, all_measured, all_predicted in passes
            for one, measured, predicted in zip(rows, all_measured.tolist(), all_predicted.tolist(), strict=True)
            if measured > 0
        ]
        self._points += points
        self._errors.append(FitError.of(name, points, fitted=fitted))

    def _at_least(self, section: str, minimum: int) -> list[Measurement]:
        rows = self._rows.of(section)
        if len(rows) < minimum:
            raise InvalidInputError(f"{len(rows)} rows of section {section} were measured, {minimum} are needed")
        if len({(one.tokens, one.tokens_squared) for one in rows}) < 2:
            raise InvalidInputError(f"all rows of section {section} are of 1 length, 2 are needed: measure it again")
        return rows

    def _set(self, name: str, value: float, how: str) -> None:
        self._values[name] = float(f"{float(value):.{_DIGITS}g}")
        self._how[name] = how

    def _hardware(self) -> Hardware:
        sources = {name: f"{self._setup.words}: {self._how.get(name, '')}" for name in self._values}
        values: dict[str, Any] = self._values
        return replace(self._base, name=self._name, source={**self._base.source, **sources}, **values)


def _check_seconds(measurements: Measurements) -> None:
    """Refuse seconds that are not finite or not above 0; for transfers, rings and micro-batches, backward may be 0."""
    for section, rows in measurements.sections.items():
        smallest = 0.0 if section in ("links", "ring", "buckets", "packs", "held_out") else np.nextafter(0.0, 1.0)
        for one in rows:
            if not (0 < one.forward_s < np.inf and smallest <= one.backward_s < np.inf):
                raise InvalidInputError(
                    f"a row of section {section} took {one.forward_s} s forward and {one.backward_s} s backward: "
                    "nothing can be fitted to that, measure it again (without --resume)"
                )


def buckets_s(hardware: Hardware, setup: Setup, rows: Sequence[Measurement]) -> Floats:
    """Return the seconds, both passes together, that the cost model predicts for rows that are whole micro-batches."""
    cost_model = CostModel(
        Problem(
            topology=Topology(num_lanes=setup.num_ranks, ranks_per_node=setup.ranks_per_node),
            model=replace(setup.shard, num_layers=BUCKET_LAYERS),
            hardware=hardware,
            options=PlanOptions(max_tokens_per_rank=setup.max_tokens, bytes_per_element=setup.element_bytes),
        )
    )
    return np.array([sum(cost_model.cost(one.cp_size, 0, one.tokens, one.tokens_squared, "p2p")) for one in rows])


def _attention_terms(columns: Floats, seconds: Floats) -> Floats:
    """Return [constant, per token, per squared token]; if short sequences hide the squares, the second is 0."""
    found = fit_seconds(columns, seconds)
    if not found[2] > 0:
        found[1] = 0.0
        found[[0, 2]] = fit_seconds(columns[:, [0, 2]], seconds)
    return found


def _wire_share(one: Measurement) -> float:
    """Return the bytes that a rank sends over those of the tensor, as in NCCL's bus bandwidth."""
    others = (one.cp_size - 1) / one.cp_size
    shares = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others}
    return shares.get(one.kind, 1.0)


def _total(one: Measurement) -> float:
    return one.forward_s + one.backward_s


def _both(rows: Sequence[Measurement]) -> tuple[Floats, Floats]:
    return np.array([one.forward_s for one in rows]), np.array([one.backward_s for one in rows])


def fit_seconds(columns: Floats, seconds: Floats) -> Floats:
    """Return x >= 0 [columns] for which columns @ x is near `seconds` (> 0), by relative errors: a row of microseconds
    counts as much as one of a second. Outliers count less.

    Source: iteratively reweighted least squares with Huber's weights. All subsets of the (few) columns are tried. That
    is exact, because the best x >= 0 solves the unconstrained problem of the columns in which it is above 0.
    """
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        previous, found = found, _best_subset(relative * np.sqrt(weights)[:, None], np.sqrt(weights))
        residuals = relative @ found - 1.0
        spread = max(_SMALLEST_SPREAD, _MAD_TO_SIGMA * float(np.median(np.abs(residuals))))
        weights = 1 / np.maximum(1.0, np.abs(residuals) / (_HUBER * spread))
        if np.allclose(found, previous, rtol=1e-6, atol=0.0):
            break
    return found


def _best_subset(columns: Floats, ones: Floats) -> Floats:
    num = columns.shape[1]
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale
    best, best_error = np.zeros(num), float(ones @ ones)
    for size in range(1, num + 1):
        for subset in combinations(range(num), size):
            chosen = list(subset)
            solved = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ solved - ones).sum())
            if (solved >= 0).all() and error < best_error:
                best = np.zeros(num)
                best[chosen] = solved / scale[chosen]
                best_error = error
    return best
