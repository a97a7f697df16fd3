"""What was measured on a GPU beside what the cost model says: a profile of parts, and whole training steps.

    python -m benchmarks.measured                      # seconds on a laptop: nothing is measured here
    python -m benchmarks.measured --write FILE.json    # the hardware file that the profile gives

`h200/profile.json` is what `dynamic-cp profile --model llama-3-8b --tp 2 --hardware h200` measured on one NVIDIA H200
on 2026-11-26, without its last two sections. `h200/steps-*.jsonl` are steps of 4 layers of Llama-3-8B with 32,000 words
on the same GPU, samples of lognormal lengths up to 16,384 tokens, by `pretrain_gpt.py` with local layers
(FlashAttention-2) and with TransformerEngine 2.11.0 (cuDNN): seconds without those that waited for a planner without
numba. The first step, which allocates and compiles, does not count. No step was used in a fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dynamic_cp.decide.calibration import Calibration, Measurements, calibrate
from dynamic_cp.decide.files import write_json
from dynamic_cp.models import catalog
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Hardware, PlanOptions, Problem, Topology

FOLDER = Path(__file__).parent / "h200"
LAYERS, WORDS, MAX_TOKENS = 4, 32000, 16384


class Step(NamedTuple):
    """One training step: what it took, and the lengths of its micro-batches."""

    step_s: float
    packs: list[list[int]]


def profile() -> Calibration:
    """Return the fit to the parts that were measured."""
    measured = Measurements.load(FOLDER / "profile.json")
    return calibrate(catalog.load_hardware("h200"), measured, name="h200-local")


def steps(layers: str) -> list[Step]:
    """Return the steps of a run with `local` or `transformer_engine` layers, without the first one."""
    lines = (FOLDER / f"steps-{layers}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Step(row["step_s"], row["packs"]) for row in map(json.loads, lines)][1:]


def predictions_s(hardware: Hardware, measured: Sequence[Step]) -> list[float]:
    """Return the seconds of all micro-batches of each step; the optimizer has no price."""
    model = replace(catalog.load_model("llama-3-8b"), num_layers=LAYERS, vocab_size=WORDS)
    options = PlanOptions(max_tokens_per_rank=MAX_TOKENS, cp_comm_types=("p2p",))
    cost_model = CostModel(Problem(topology=Topology(num_lanes=1), model=model, hardware=hardware, options=options))

    def pack_s(pack: Sequence[int]) -> float:
        return sum(cost_model.cost(1, 0, sum(pack), sum(seqlen * seqlen for seqlen in pack), "p2p"))

    return [sum(map(pack_s, step.packs)) for step in measured]


def ratios(hardware: Hardware, layers: str) -> tuple[list[float], float]:
    """Return predicted over measured seconds, of each step and of all together."""
    measured = steps(layers)
    predicted = predictions_s(hardware, measured)
    each = [one / step.step_s for one, step in zip(predicted, measured, strict=True)]
    return each, sum(predicted) / sum(step.step_s for step in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", metavar="FILE.json", help="write the hardware file of the profile")
    written = parser.parse_args().write
    found = profile()
    if written:
        write_json(written, catalog.hardware_as_dict(found.hardware))
    print("profile of an NVIDIA H200, local layers, TP 2")
    for error in found.errors:
        what = "fitted" if error.fitted else "check"
        print(f"  {error.name:<8} {what:<7} {error.num_points:>3} numbers, median error {error.median:.1%}")
    print("whole steps, predicted over measured: least, all together, most")
    shipped = catalog.load_hardware("h200")
    for hardware, layers in (
        (found.hardware, "local"),
        (shipped, "local"),
        (shipped, "transformer_engine"),
    ):
        each, together = ratios(hardware, layers)
        print(f"  {hardware.name:<11} {layers:<18} {min(each):.3f} {together:.3f} {max(each):.3f}")


if __name__ == "__main__":
    main()
