"""Measured seconds of buckets, next to what a cost model predicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from dynamic_cp.pipeline.schedule import edges_paid
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import prices_of
from dynamic_cp.types import is_power_of_two

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Observation:
    """What one bucket took on one model chunk of one pipeline stage. Nothing is checked: clocks can say anything, and
    `PricedObservations` leaves out what cannot be.

    Attributes:
        cp_size, first_lane, cp_comm_type, inner_cp_size: as in `Bucket`; inner_cp_size 0 if it is not known.
        tokens, tokens_squared: sums over the padded lengths of the whole group.
        num_states: samples whose states of linear attention its lanes passed on, branches counted by
            `plans.stretches.states_of_sample`; 0: none, or heads were exchanged.
        stage, chunk: pipeline stage, and model chunk on it (0 without interleaving).
        forward_s, backward_s: seconds without waiting for other stages.
    """

    cp_size: int
    first_lane: int
    tokens: int
    tokens_squared: int
    forward_s: float
    backward_s: float
    cp_comm_type: str = "p2p"
    stage: int = 0
    chunk: int = 0
    inner_cp_size: int = 0
    num_states: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """How far predictions of buckets (forward + backward) are from measurements.

    Attributes:
        num_observations: buckets that were compared; the other figures are 0 when none was.
        median, p95: of |predicted - measured| / measured.
        predicted_over_measured: of the sums over all buckets (1 = right on average).
    """

    num_observations: int
    median: float
    p95: float
    predicted_over_measured: float

    def describe(self) -> str:
        if not self.num_observations:
            return "no bucket compared"
        return (
            f"median error {self.median:.1%}, p95 {self.p95:.1%}, predicted/measured {self.predicted_over_measured:.3f}"
        )


class PricedObservations:
    """The observations that a cost model can price, as arrays.

    Args:
        observations: in any order; sorted here, so that no result depends on it.
        cost_model: any with the topology and options of the run; other coefficients may price them later.

    Attributes:
        measured_s: [observation, forward | backward] seconds.
        num_ignored: observations left out: times that are not finite and > 0, buckets that this topology or these
            options cannot have, model chunks without layers.
    """

    def __init__(self, observations: Iterable[Observation], cost_model: CostModel) -> None:
        every = list(observations)
        priced = []
        for one in every:
            row = _row(one, cost_model)
            if row is not None:
                priced.append((one, row))
        priced.sort()
        kept = [one for one, _ in priced]
        pp_size, vp_size = cost_model.topology.pp_size, cost_model.topology.vp_size
        self.num_ignored = len(every) - len(kept)
        self.measured_s: Floats = np.array([[one.forward_s, one.backward_s] for one in kept]).reshape(-1, 2)
        self._rows = np.array([row for _, row in priced], np.int64)
        self._tokens = np.array([one.tokens for one in kept], np.float64)
        self._squares = np.array([one.tokens_squared for one in kept], np.float64)
        self._num_states = np.array([one.num_states for one in kept], np.float64)
        places = [cost_model.place(one.cp_size, one.first_lane) for one in kept]
        self._places = np.array(places, np.int64).reshape(-1, 2)
        self._rank_tokens = self._tokens / np.array([one.cp_size for one in kept], np.float64)
        pays = [edges_paid(one.stage, one.chunk, pp_size, vp_size) for one in kept]
        chunks = [cost_model.model.chunks_of_heaviest(one.stage, one.chunk, vp_size) for one in kept]
        self._chunks: Floats = np.array(chunks, np.float64).reshape(-1, 1)
        self._pays: Floats = np.array(pays, np.float64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.measured_s)

    def predicted_s(self, cost_model: CostModel) -> Floats:
        """Return [observation, forward | backward] seconds; the numbers of `CostModel.cost`, for all of them.
        `cost_model`: with the topology and options of the one given at first."""
        shifts = cost_model.shifts_of_states(self._places[:, 0], self._places[:, 1], self._num_states)
        terms = cost_model.table.level_terms[self._rows] + shifts
        seconds = prices_of(terms, self._tokens[:, None], self._squares[:, None])
        embedding, head = cost_model.table.edges_s_per_token.reshape(2, 2)
        edges = self._pays[:, :1] * embedding + self._pays[:, 1:] * head
        return np.asarray(seconds / self._chunks + self._rank_tokens[:, None] * edges)

    def error(self, cost_model: CostModel) -> PredictionError:
        """Return how far `cost_model` is from what was measured."""
        if not len(self):
            return PredictionError(num_observations=0, median=0.0, p95=0.0, predicted_over_measured=0.0)
        predicted, measured = self.predicted_s(cost_model).sum(axis=1), self.measured_s.sum(axis=1)
        relative = np.abs(predicted - measured) / measured
        return PredictionError(
            num_observations=len(self),
            median=float(np.median(relative)),
            p95=float(np.percentile(relative, 95)),
            predicted_over_measured=float(predicted.sum() / measured.sum()),
        )


def _row(one: Observation, cost_model: CostModel) -> int | None:
    """Return the row of the price table, or None for an observation that cannot be."""
    topology = cost_model.topology
    possible = (
        isfinite(one.forward_s)
        and isfinite(one.backward_s)
        and min(one.forward_s, one.backward_s) > 0
        and is_power_of_two(one.cp_size)
        and one.first_lane >= 0
        and one.first_lane % one.cp_size == 0
        and one.first_lane + one.cp_size <= topology.num_lanes
        and 0 < one.tokens <= one.tokens_squared
        and 0 <= one.stage < topology.pp_size
        and 0 <= one.chunk < topology.vp_size
        and isfinite(cost_model.model.chunks_of_heaviest(one.stage, one.chunk, topology.vp_size))
    )
    if not possible:
        return None
    return cost_model.row_of(one.cp_size, one.first_lane, one.cp_comm_type, one.inner_cp_size or None)
