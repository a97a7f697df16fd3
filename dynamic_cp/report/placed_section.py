"""The part of a comparison's page that shows placed attention: tiles, bytes by link, and what each lane has of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from dynamic_cp.arrays import Ints
from dynamic_cp.placement.sent import Sent
from dynamic_cp.pricing.sent import nodes_of, sent_by_bucket
from dynamic_cp.report.drawing import MEDIUM_IN, WIDE_IN, format_bytes
from dynamic_cp.report.page import picture
from dynamic_cp.report.placed_links import MAX_CELLS, placed_links, placed_shares
from dynamic_cp.report.placed_tiles import MAX_SAMPLES, placed_tiles, samples_by_work
from dynamic_cp.types import Bucket, Mask, Plan, Problem, counted


def placed_section(name: str, plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return the pictures of the placed bucket with most work, and a note; none where no bucket is placed.

    Args:
        name: of the plan.
        plan: any; problem: whose model and options it was made for.
    """
    rows = [
        (sum(sample.squared_tokens for sample in bucket.samples), -index, bucket)
        for index, micro_batch in enumerate(plan.micro_batches)
        for bucket in micro_batch.buckets
        if bucket.placement is not None
    ]
    if not rows:
        return {"placed": [], "placed_note": ""}
    _, index, bucket = max(rows, key=lambda row: row[:2])
    sent, nodes = sent_by_bucket(bucket, problem), nodes_of(plan.topology)[bucket.first_lane : bucket.lanes.stop]
    nodes -= nodes[0]
    model = problem.model
    mask, *windows = model.layer_masks
    windowed = (model.num_windowed_layers / model.num_layers, windows[0]) if windows else None
    pictures = [
        picture(
            partial(placed_tiles, bucket, mask), name="tiles", title="Who computes which tile", width_in=WIDE_IN,
            caption=_of_tiles(bucket, mask, windowed),
        ),
        picture(
            partial(placed_links, sent, nodes, first_lane=bucket.first_lane), name="links",
            title="Bytes from lane to lane", width_in=MEDIUM_IN, caption=_of_links(sent, nodes, problem),
        ),
        picture(
            partial(placed_shares, bucket, mask, sent, nodes, windowed=windowed), name="shares",
            title="What each lane has of it", width_in=MEDIUM_IN,
            caption="Even tokens make linear layers even, even pairs attention. Dashed: the mean of the lanes.",
        ),
    ]  # fmt: skip
    which = f"micro-batch {-index} of {name}" + (", of all placed ones that with most work" if len(rows) > 1 else "")
    return {"placed": pictures, "placed_note": f"{which[0].upper()}{which[1:]}: {_counts(bucket)}."}


def _counts(bucket: Bucket) -> str:
    placement = bucket.placement
    assert placement is not None
    shared = f" that share out heads by {bucket.inner_cp_size}" if bucket.inner_cp_size > 1 else ""
    return f"{counted(len(bucket.samples), 'sample')} on {bucket.cp_size} lanes{shared}, {placement.describe()}"


def _of_tiles(bucket: Bucket, mask: Mask, windowed: tuple[float, Mask] | None) -> str:
    shares = samples_by_work(bucket)
    shown = sum(share for _, share in shares[:MAX_SAMPLES])
    text = (
        "A square is a sample, its rows are queries and its columns keys, as far as the mask allows. The strips are "
        "its homes: who holds these tokens."
    )
    if windowed is not None:
        text += f" Shown is the mask of the layers without a window ({mask}); the others compute where queries are."
    if len(shares) > MAX_SAMPLES:
        text += f" The {MAX_SAMPLES} samples with most work, of {len(shares)}, are {shown:.0%} of it"
        text += ", narrow pages show the first."
    return text


def _of_links(sent: Sent, nodes: Ints, problem: Problem) -> str:
    in_node, across = sent.of_lanes(nodes).sum(axis=(0, 2)).tolist()
    ranks = "" if problem.topology.tp_size == 1 else f" of one of {problem.topology.tp_size} TP ranks"
    lines = " (lines part them)" if len(nodes) <= MAX_CELLS else ""
    between = f", {format_bytes(across)} to other nodes{lines}" if nodes[-1] else ""
    return f"Forward and backward, all layers{ranks}: {format_bytes(in_node)} inside nodes{between}."
