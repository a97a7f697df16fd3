"""Which CP size is best for which length: the time of one sample alone, and its share of peak FLOP/s.

More lanes make a long sample faster, but every rank's chunks S / 2cp get shorter: kernels fill worse, and at the knee
the exchange no longer hides behind computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.flops import batch_flops, length_sums
from dynamic_cp.pricing.lengths import squared_tokens
from dynamic_cp.report.drawing import FONT_PT, MEDIUM_IN, add_handles, format_tokens, new_figure
from dynamic_cp.report.theme import Theme
from dynamic_cp.types import Hardware, ModelShape, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_SEQLENS = tuple(1 << power for power in range(10, 19))
_MAX_CURVES = 8


class KneePoint(NamedTuple):
    """One sample alone on `cp_size` lanes: seconds of forward and backward on all stages, model FLOPs utilisation."""

    seqlen: int
    cp_size: int
    seconds: float
    mfu: float
    fits: bool


def knee_points(
    model: ModelShape, hardware: Hardware, cost_model: CostModel, seqlens: Sequence[int] = DEFAULT_SEQLENS
) -> tuple[KneePoint, ...]:
    """Return a point for every length and CP size that an exchange of the options can serve.

    A point `fits` where the token limit of the options lets the CP size hold the sample; the first lanes are used.
    """
    topology = cost_model.topology
    points = []
    for k, capacity in enumerate(cost_model.table.capacities.tolist()):
        cp_size = 1 << k
        if not capacity:
            continue
        for seqlen in seqlens:
            padded = -(-seqlen // (2 * cp_size)) * 2 * cp_size if cp_size > 1 else seqlen
            sample = Sample(sample_id=0, seqlen=seqlen)
            cost = cost_model.cost(cp_size, 0, padded, squared_tokens([sample], [padded], model))
            seconds = topology.pp_size * (cost.forward_s + cost.backward_s)
            seconds += cost.embedding_forward_s + cost.embedding_backward_s + cost.head_forward_s + cost.head_backward_s
            flops = batch_flops(model, *length_sums([sample], model)).model_flops
            rank_seconds = seconds * cp_size * topology.tp_size
            points.append(
                KneePoint(
                    seqlen, cp_size, seconds, flops / rank_seconds / hardware.peak_flops_per_s, seqlen <= capacity
                )
            )
    return tuple(points)


def knee(points: Sequence[KneePoint], theme: Theme, *, width_in: float = MEDIUM_IN, title: str = "") -> Figure:
    """Return the picture of `knee_points`: MFU against length, a curve per CP size; dots where it fits the limit."""
    figure = new_figure(width_in, (3.3 if width_in > 4.5 else 3.6) + (0.3 if title else 0.0))
    panel = figure.subplots()
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_PT + 2, fontweight="bold")
    _draw_mfu(panel, points, theme)
    handles = [handle for handle in panel.lines if not str(handle.get_label()).startswith("_")]
    about = "CP size (filled: fits the token limit; broad: best of these)"
    add_handles(figure, handles, width_in=width_in, title=about)
    return figure


def _efficiency(point: KneePoint) -> float:
    return point.mfu


def _draw_mfu(panel: Axes, points: Sequence[KneePoint], theme: Theme) -> None:
    sizes = sorted({point.cp_size for point in points})[:_MAX_CURVES]
    for cp_size in sizes:
        color = theme.cp_color(cp_size)
        curve = [point for point in points if point.cp_size == cp_size]
        panel.plot([point.seqlen for point in curve], [100 * point.mfu for point in curve], color=color, linewidth=1.6)
        for fits in (True, False):
            marked = [point for point in curve if point.fits == fits]
            face = color if fits else theme.background
            panel.plot(
                [point.seqlen for point in marked], [100 * point.mfu for point in marked], linestyle="none",
                marker="o", markersize=4.5, color=color, markerfacecolor=face, label=f"{cp_size}" if fits else None,
            )  # fmt: skip
    seqlens = sorted({point.seqlen for point in points})
    best = [
        max((one for one in points if one.seqlen == seqlen and one.fits), key=_efficiency, default=None)
        for seqlen in seqlens
    ]
    envelope = [point for point in best if point is not None]
    panel.plot(
        [point.seqlen for point in envelope], [100 * point.mfu for point in envelope], color=theme.grid, linewidth=9,
        solid_capstyle="round", zorder=1,
    )  # fmt: skip
    panel.set_xscale("log", base=2)
    step = -(-len(seqlens) // 9)
    panel.set_xticks(seqlens[::step], [format_tokens(seqlen) for seqlen in seqlens[::step]])
    panel.minorticks_off()
    panel.grid()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("length of a sample alone (tokens)")
    panel.set_ylabel("model FLOPs utilisation (% of peak)")
