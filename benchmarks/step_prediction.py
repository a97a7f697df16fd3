"""How well `dynamic-cp profile` predicts whole training steps on CPU ranks: calibrate, train with it, compare.

    python benchmarks/step_prediction.py                 # 2 and 4 ranks, about 10 minutes on 2 quiet cores
    python benchmarks/step_prediction.py --ranks 2 --quick

For each number of ranks: all of them measure at once, a small GPT trains on mock data of lognormal lengths with plans
made from the new file, and the dump says what each iteration was expected to take and took. The optimizer's step,
which the cost model does not price, is in what it took. The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from datetime import date
from pathlib import Path

import numpy as np
from dynamic_vs_static import lognormal, run_ranks

MODEL = {
    "num_layers": 4,
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 48,
    "vocab_size": 384,
    "gated_linear_unit": True,
    "source": "benchmarks/step_prediction.py",
}
MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --lr 1e-3"
)
MAX_TOKENS = 2048
NUM_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--iterations", type=int, default=14, help=f"the first {NUM_WARM_UP} do not count")
    parser.add_argument("--quick", action="store_true", help="calibrate with fewer and shorter measurements")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/step_prediction"), help="folder")
    options = parser.parse_args()
    rows = []
    for num_ranks in options.ranks:
        folder = options.output / f"{num_ranks}_ranks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        hardware = calibrate(num_ranks, folder, quick=options.quick)
        train(num_ranks, folder, hardware, options.iterations)
        rows.append({"ranks": num_ranks, **errors(folder / "dump" / "iterations.jsonl")})
    about = {"date": date.today().isoformat(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    print(json.dumps({"about": about, "rows": rows}, indent=1))


def calibrate(num_ranks: int, folder: Path, *, quick: bool) -> Path:
    """Measure on all ranks at once; return the hardware file."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    files = ["--model", folder / "model.json", "--hardware", "cpu", "--output", folder / "hardware.json"]
    more = ["--max-tokens", MAX_TOKENS, "--plot", folder / "fit.svg", *(["--quick"] if quick else [])]
    words = ["-m", "megatron.dynamic_cp.calibration", "--device", "cpu", *files, *more]
    run_ranks(num_ranks, [str(word) for word in words], timeout_s=1800)
    return folder / "hardware.json"


def train(num_ranks: int, folder: Path, hardware: Path, iterations: int) -> None:
    """Train with plans made from `hardware`, and dump what was expected and what happened."""
    flags = f"{MODEL_FLAGS} --dynamic-cp --distributed-backend gloo --max-seqlen-per-dp-cp-rank {MAX_TOKENS}"
    flags += f" --global-batch-size {8 * num_ranks} --train-iters {iterations} --split 1,0,0 --eval-iters 0"
    files = ["--dynamic-cp-hardware", str(hardware), "--dynamic-cp-dump", str(folder / "dump")]
    data = lognormal(MAX_TOKENS * num_ranks, 768, 1.2)
    run_ranks(num_ranks, ["pretrain_gpt.py", *flags.split(), *files, *data], timeout_s=1800)


def errors(path: Path) -> dict[str, float]:
    """Return how far the iterations of a dump are from what was expected."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][NUM_WARM_UP:]
    measured, predicted = (np.array([one[name] for one in found]) for name in ("measured_s", "predicted_s"))
    relative = np.abs(predicted - measured) / measured
    return {
        "iterations": len(found),
        "median_error": round(float(np.median(relative)), 4),
        "p95_error": round(float(np.percentile(relative, 95)), 4),
        "predicted_over_measured": round(float(predicted.sum() / measured.sum()), 4),
        "mean_measured_s": round(float(measured.mean()), 4),
    }


if __name__ == "__main__":
    main()
