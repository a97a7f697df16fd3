"""Does the model choose the layout that was published? All static layouts of a job, priced and sorted.

Llama-3.1-70B, 64 H100, 128 sequences of 8192 tokens: NVIDIA runs TP 4, PP 4, CP 2 with 5 chunks a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.backtest.runs import Run
from benchmarks.backtest.steps import Modelled, modelled
from benchmarks.planner.report import table

PUBLISHED = "Llama-3.1-70B, 64 GPUs"
SIZES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 5, 10)
RECOMPUTE = ("none", "selective", "full")
NUM_SHOWN = 5


def layouts_of(run: Run) -> Iterator[Run]:
    """Yield the run in every layout of powers of two that its GPUs, batch and model allow."""
    heads = run.model.num_query_groups
    for tp in (size for size in SIZES if heads % size == 0):
        for pp in SIZES:
            for cp in (size for size in SIZES if run.gpus % (tp * pp * size) == 0):
                for vp in CHUNKS if pp > 1 else (1,):
                    if run.model.num_layers % (pp * vp) or run.global_batch_size % (run.gpus // (tp * pp * cp)):
                        continue
                    if vp > 1 and run.global_batch_size // (run.gpus // (tp * pp * cp)) % pp:
                        continue
                    for recompute in RECOMPUTE:
                        yield replace(run, tp=tp, pp=pp, cp=cp, vp=vp, recompute=recompute)


def measure(runs: Sequence[Run]) -> list[Modelled]:
    """Return all layouts of the published run, the fastest first."""
    (run,) = (one for one in runs if one.name == PUBLISHED)
    return sorted((modelled(one) for one in layouts_of(run)), key=lambda one: one.iteration_s)


def rank_of_published(results: Sequence[Modelled]) -> int:
    """Return how many of the layouts that fit are at least as fast as the published one, itself included."""
    fit = [one for one in results if not one.is_refused]
    (seconds,) = {one.iteration_s for one in results if _is_published(one)}
    return sum(one.iteration_s <= seconds for one in fit)


def distance_of_published(results: Sequence[Modelled]) -> float:
    """Return the published layout's seconds over those of the fastest one that fits."""
    fastest = next(one for one in results if not one.is_refused)
    return next(one.iteration_s for one in results if _is_published(one)) / fastest.iteration_s


def _is_published(one: Modelled) -> bool:
    return (one.run.tp, one.run.pp, one.run.cp, one.run.vp, one.run.recompute) == (4, 4, 2, 5, "none")


def markdown(results: Sequence[Modelled]) -> str:
    """Return the fastest layouts that fit, the published one marked."""
    fit = [one for one in results if not one.is_refused]
    shown = [one for index, one in enumerate(fit) if index < NUM_SHOWN or _is_published(one)]
    rows = []
    for one in shown:
        layout = f"**{one.run.layout}** (published)" if _is_published(one) else one.run.layout
        rows.append([layout, fit.index(one) + 1, f"{one.iteration_s:.2f}", f"{one.peak_bytes / 1e9:.0f}"])
    said = f"{len(results)} layouts, of which {len(fit)} fit by the memory model; the published one is number "
    slower = 100 * (distance_of_published(results) - 1)
    said += f"{rank_of_published(results)} of them, {slower:.1f}% slower than the first."
    return f"{said}\n\n{table('layout | place | model s | GB', rows)}"
