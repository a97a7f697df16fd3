"""What was measured on what, section by section, as JSON from which an interrupted `dynamic-cp profile` continues; and
the `Calibration` that follows: the new hardware, and every measured number beside what the cost model predicts."""

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
"""Section -> what is measured there, in the order of measuring."""

EXCHANGES = ("ring_shift", "hop", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds of transfers in the section `links`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one thing.

    Attributes:
        kind: what of the section, such as "head" or "embedding", an exchange, or the shape of a tile.
        seqlens: lengths of a pack in tokens; of the whole CP group in the last three sections, else of a rank.
        cp_size: members of the ring or of the collective.
        num_bytes: what a rank sends (ring_shift, hop), or the whole tensor (collectives).
        backward_s: 0 for transfers.
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
        return sum(self.seqlens)

    @property
    def tokens_squared(self) -> int:
        return sum(seqlen * seqlen for seqlen in self.seqlens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was measured on; measurements of two setups are never mixed.

    Attributes:
        model: the whole model; a rank holds 1 / tp_size of its heads, MLP and vocabulary.
        element_bytes: of an activation, 2 = bf16, 4 = fp32.
        num_ranks: ranks that measured at the same time.
        max_tokens: longest sequence and pack of a rank.
        date: when it began; may differ when measuring goes on, as may the model's `source`, but nothing else.
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
        """One plain layer with heads of the model's width, as a TP rank holds it, with 1 / tp_size of its FLOPs. Rates
        of its kernels and matrix products hold for any model."""
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
        """Linear attention of one layer, as a TP rank holds it; None: the model has none."""
        whole = self.model.linear_attention
        return None if whole is None else whole.of_rank(self.tp_size)

    @property
    def words(self) -> str:
        """The text for the `source` of a coefficient."""
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
        """Return the rows of a section, or those of one kind; [] if nothing was measured."""
        return [one for one in self.sections.get(section, ()) if kind in (None, one.kind)]

    def to_json(self) -> str:
        """Return the text that `load` reads."""
        rows = {name: [asdict(one) for one in found] for name, found in self.sections.items()}
        return json.dumps({"setup": asdict(self.setup), "sections": rows}, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path, setup: Setup | None = None) -> Measurements:
        """Return what `to_json` wrote to `path`. InvalidInputError: unreadable, another version, or of another setup
        than `setup` (None: any will do)."""
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
                    f"{path} was measured with {entry.name} {was}, this is {now}: leave --resume out to measure again"
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
"""Largest median error on held-out packs at which plans may trust a calibration; the goal for whole iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured number and what the calibrated cost model predicts."""

    measurement: Measurement
    direction: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions of a part are from what was measured: median and p95 of |predicted - measured| / measured,
    and the ratio of the sums. If the part is not `fitted` to these numbers, they are a check."""

    name: str
    fitted: bool
    num_points: int
    median: float
    p95: float
    predicted_over_measured: float

    @classmethod
    def of(cls, name: str, points: Sequence[Point], *, fitted: bool) -> FitError:
        """Return the error over `points`, at least one."""
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
    """What a calibration found: the base hardware with the measured coefficients, the names of these (`changed`), why
    others are still those of the base (`kept`), an error for each part, and the points behind the errors."""

    hardware: Hardware
    changed: tuple[str, ...]
    kept: dict[str, str]
    errors: tuple[FitError, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def why_not_good(self) -> str | None:
        """Return what is wrong and what to do; None if held-out packs are predicted well, or were not measured."""
        error = self.error("held_out")
        if error is None or error.median <= GOOD_ERROR:
            return None
        return (
            f"held-out packs are predicted with a median error of {error.median:.1%}, above {GOOD_ERROR:.0%}: measure "
            "again, with nothing else on the machine and without --quick, and look at --plot for the part that is off"
        )

    def error(self, name: str) -> FitError | None:
        return next((one for one in self.errors if one.name == name), None)
