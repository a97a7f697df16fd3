"""What was measured on what, section by section, as JSON to go on from; and what a calibration makes of it.

A `Calibration` holds the new hardware, and every measured number beside what the cost model says of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Hardware, LinearAttention, ModelShape

SECTIONS = {
    "linear": "a transformer layer without core attention",
    "causal": "attention of packs on one rank",
    "full": "a further ring step: tiles without a mask, and merging",
    "ring": "rings with transfers left out",
    "linear_attention": "states of linear attention from token to token, of packs on one rank",
    "host": "a layer and rings of next to no tokens: what the host takes to launch them",
    "edges": "embedding, LM head and loss",
    "links": "messages and collectives between ranks",
    "buckets": "tiny micro-batches through the schedule",
    "packs": "random packs through the schedule, to weigh the parts",
    "held_out": "random packs through the schedule, not fitted",
}
"""Section -> what is measured there, in the order in which it is."""

EXCHANGES = ("ring_shift", "hop", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds of transfers in the section `links`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one thing.

    Attributes:
        section: of SECTIONS.
        kind: what of the section: "head" or "embedding", an exchange, the shape of a tile.
        seqlens: lengths of a pack in tokens; of the whole CP group in the last three sections, else of a rank.
        cp_size: members of the ring or of the collective.
        num_bytes: that a rank sends (ring_shift, hop), or of the whole tensor (collectives).
        across_nodes: the transfer crosses nodes.
        forward_s, backward_s: seconds; backward_s is 0 for transfers.
    """

    section: str
    forward_s: float
    backward_s: float = 0.0
    kind: str = ""
    seqlens: tuple[int, ...] = ()
    cp_size: int = 1
    num_bytes: int = 0
    across_nodes: bool = False

    @property
    def tokens(self) -> int:
        """Sum of the lengths."""
        return sum(self.seqlens)

    @property
    def tokens_squared(self) -> int:
        """Sum of the squared lengths."""
        return sum(seqlen * seqlen for seqlen in self.seqlens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """On what was measured; measurements of two setups are never mixed.

    Attributes:
        device: its name; torch_version: of the kernels.
        model: the whole model; a rank holds 1 / tp_size of its heads, MLP and vocabulary.
        element_bytes: of an activation, 2 = bf16, 4 = fp32.
        num_ranks: that measured at the same time; ranks_per_node: of them on one node.
        max_tokens: longest sequence and pack of a rank.
        quick: fewer points, shorter.
        date: when it began; the one thing that may differ when measuring goes on.
    """

    device: str
    torch_version: str
    model: ModelShape
    tp_size: int
    element_bytes: int
    num_ranks: int
    ranks_per_node: int
    max_tokens: int
    quick: bool
    date: str

    @property
    def shard(self) -> ModelShape:
        """One layer as a TP rank holds it; its FLOPs are 1 / tp_size of the model's.

        Measured are plain layers with heads of the same width: rates of kernels and of matrices are those of any model.
        """
        model, tp_size = self.model, self.tp_size
        return replace(
            model,
            num_layers=1,
            ffn_hidden_size=model.ffn_hidden_size // tp_size,
            num_attention_heads=model.num_attention_heads // tp_size,
            num_query_groups=max(1, model.num_query_groups // tp_size),
            vocab_size=-(-model.vocab_size // tp_size),
            causal_attention=True,
            share_embeddings_and_output_weights=False,
            other_weights_per_layer=0,
            mtp_num_layers=0,
            q_lora_rank=0,
            kv_lora_rank=0,
            qk_head_dim=0,
            qk_pos_emb_head_dim=0,
            v_head_dim=0,
            linear_attention=None,
            linear_attention_freq=0,
            layer_pattern="",
        )

    @property
    def linear_attention(self) -> LinearAttention | None:
        """That of one layer as a TP rank holds it; None: the model has none."""
        whole = self.model.linear_attention
        return None if whole is None else whole.of_rank(self.tp_size)

    @property
    def words(self) -> str:
        """What the `source` of a coefficient says."""
        dtype = "bf16" if self.element_bytes == 2 else "fp32"
        ranks = f", {self.num_ranks} ranks at once" if self.num_ranks > 1 else ""
        return (
            f"measured by dynamic-cp profile on {self.device}{ranks}, torch {self.torch_version} {dtype}, {self.date}"
        )


@dataclass(slots=True, kw_only=True)
class Measurements:
    """All that was measured so far; grows section by section."""

    setup: Setup
    sections: dict[str, tuple[Measurement, ...]] = field(default_factory=dict)

    def of(self, section: str, kind: str | None = None) -> list[Measurement]:
        """Return the rows of a section, or those of one kind; [] if it was not measured."""
        return [one for one in self.sections.get(section, ()) if kind in (None, one.kind)]

    def to_json(self) -> str:
        """Return text for `from_json`."""
        rows = {name: [asdict(one) for one in found] for name, found in self.sections.items()}
        return json.dumps({"setup": asdict(self.setup), "sections": rows}, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path, setup: Setup | None = None) -> Measurements:
        """Return what `to_json` wrote to `path`.

        Raises:
            InvalidInputError: unreadable, another version, or of another setup than `setup` (None: any will do).
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            saved = _setup(data["setup"])
            sections = {
                name: tuple(_measurement(row) for row in rows)
                for name, rows in data["sections"].items()
                if name in SECTIONS
            }
        except OSError as error:
            raise InvalidInputError(f"cannot read {path}: {error.strerror or error}: leave --resume out") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(
                f"{path} is not a file of measurements of this version ({type(error).__name__}: {error}): "
                "leave --resume out to measure again"
            ) from error
        for entry in fields(Setup):
            was, now = getattr(saved, entry.name), getattr(setup or saved, entry.name)
            if entry.name == "model":
                was, now = replace(was, source=""), replace(now, source="")
            if entry.name != "date" and was != now:
                raise InvalidInputError(
                    f"{path} was measured with {entry.name} {was}, this is {now}: leave --resume out to measure again",
                    name=entry.name,
                )
        return cls(setup=saved, sections=sections)


def _setup(data: Mapping[str, Any]) -> Setup:
    return Setup(**{**data, "model": ModelShape(**data["model"])})


def _measurement(row: Mapping[str, Any]) -> Measurement:
    found = Measurement(**{**row, "seqlens": tuple(int(seqlen) for seqlen in row["seqlens"])})
    if not (float(found.forward_s) >= 0 and float(found.backward_s) >= 0):
        raise ValueError(f"seconds below 0 in {found.section}")
    return found


GOOD_ERROR = 0.10
"""Median error of what was not fitted, up to which plans may trust a calibration: the goal for whole iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured number and what the calibrated cost model says."""

    measurement: Measurement
    direction: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions are from what was measured.

    Attributes:
        name: of the part.
        fitted: whether the numbers were used for the fit; False is a check.
        num_points: numbers compared, > 0.
        median, p95: of |predicted - measured| / measured.
        predicted_over_measured: of the sums.
    """

    name: str
    fitted: bool
    num_points: int
    median: float
    p95: float
    predicted_over_measured: float

    @classmethod
    def of(cls, name: str, points: Sequence[Point], *, fitted: bool) -> FitError:
        """Return the error of `points`, at least one."""
        measured = np.array([one.measured_s for one in points])
        predicted = np.array([one.predicted_s for one in points])
        relative = np.abs(predicted - measured) / measured
        return cls(
            name=name,
            fitted=fitted,
            num_points=len(points),
            median=float(np.median(relative)),
            p95=float(np.percentile(relative, 95)),
            predicted_over_measured=float(predicted.sum() / measured.sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found.

    Attributes:
        hardware: the base with the measured coefficients in place of its own.
        changed: names of the coefficients that were measured.
        kept: group of coefficients -> why they are still those of the base.
        errors: part by part.
        points: behind the errors.
        notes: what a reader should know.
    """

    hardware: Hardware
    changed: tuple[str, ...]
    kept: dict[str, str]
    errors: tuple[FitError, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def why_not_good(self) -> str | None:
        """Return what is wrong and what to do, None where it predicts what it was not fitted to."""
        error = self.error("held_out")
        if error is None or error.median <= GOOD_ERROR:
            return None
        return (
            f"held-out packs are predicted with a median error of {error.median:.1%}, above {GOOD_ERROR:.0%}: measure "
            "again, with nothing else on the machine and without --quick, and look at --plot for the part that is off"
        )

    def error(self, name: str) -> FitError | None:
        """Return the error of a part; None if it was not measured."""
        return next((one for one in self.errors if one.name == name), None)
