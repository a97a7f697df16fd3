"""The lengths and the summary of `table1.sbatch`.

python3 examples/slurm/table1.py draw github_bal 20480 131072 lengths.csv
python3 examples/slurm/table1.py show FOLDER

`show` reads the iteration lines of FOLDER/<lengths>-<arm>.log, leaves the first iteration out (start-up), and prints
means over the others and the ratio of each arm to the static one. Arms that saw other tokens are not compared.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.errors import DataError, DynamicCPError

ARMS = ("static", "balanced", "dynamic")
MIN_SEQLEN = 256  # NVIDIA's script has no shorter samples
PUBLISHED = """NVIDIA's, on lengths and a number of GPUs that are not public: TFLOP/s per GPU on GitHub 195.88 -> 289.32
(1.48x), on CommonCrawl 139.17 -> 174.39 (1.25x)."""
_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/.*?elapsed time per iteration \(ms\): (?P<elapsed_ms>[\d.]+)"
    r".*?TFLOP/s/GPU\): (?P<tflops>[\d.]+).*?\| tokens: (?P<tokens>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One log: means over its iterations after the first.

    Attributes:
        tflops: TFLOP/s per GPU, from true lengths; recomputation does not count.
        elapsed_ms: wall time of an iteration.
        tokens: of each iteration, the first included.
    """

    tflops: float
    elapsed_ms: float
    tokens: tuple[int, ...]


def read_arm(log: Path) -> Arm:
    """Return the means of a log.

    Raises:
        DataError: fewer than two iterations, or some are missing.
    """
    found = [match for line in log.read_text(encoding="utf-8").splitlines() if (match := _LINE.search(line))]
    iterations = [int(one["iteration"]) for one in found]
    if len(found) < 2 or iterations != list(range(1, len(found) + 1)):
        raise DataError(
            f"{log} has {len(found)} iteration lines ({iterations}), at least 2 from iteration 1 on are needed: "
            "look at its end for an error; run with --log-interval 1 and without --load"
        )
    counted = found[1:]
    return Arm(
        tflops=sum(float(one["tflops"]) for one in counted) / len(counted),
        elapsed_ms=sum(float(one["elapsed_ms"]) for one in counted) / len(counted),
        tokens=tuple(int(one["tokens"]) for one in found),
    )


def show(folder: Path) -> str:
    """Return the table of all logs in `folder`.

    Raises:
        DataError: no logs, a log that ended early, or arms with other tokens than the static one.
    """
    logs = [(log, arm) for arm in ARMS for log in sorted(folder.glob(f"*-{arm}.log"))]
    if not logs:
        raise DataError(f"{folder} has 0 logs named <lengths>-<arm>.log, at least 1 is needed: run table1.sbatch first")
    by_lengths: dict[str, dict[str, Arm]] = {}
    for log, arm in logs:
        by_lengths.setdefault(log.name.removesuffix(f"-{arm}.log"), {})[arm] = read_arm(log)
    lines = [f"{'lengths':<16} {'arm':<9} {'TFLOP/s/GPU':>12} {'ms/iteration':>13} {'iterations':>11} {'speed-up':>9}"]
    for lengths, arms in by_lengths.items():
        base = next(iter(arms.values()))
        for name, arm in arms.items():
            if arm.tokens != base.tokens:
                raise DataError(
                    f"{lengths}: the tokens of the iterations are {arm.tokens} in {name}, {base.tokens} in "
                    f"{next(iter(arms))}: run all arms on the same data, seed, batch size and number of iterations"
                )
            lines.append(
                f"{lengths:<16} {name:<9} {arm.tflops:>12.4f} {arm.elapsed_ms:>13.1f} {len(arm.tokens) - 1:>11} "
                f"{base.elapsed_ms / arm.elapsed_ms:>8.2f}x"
            )
    return "\n".join([*lines, "", PUBLISHED])


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="write a length per line, the same for the same arguments")
    draw.add_argument("lengths", help="a bundled name (dynamic-cp lengths lists them) or a file")
    draw.add_argument("num_samples", type=int)
    draw.add_argument("max_seqlen", type=int)
    draw.add_argument("output", type=Path)
    commands.add_parser("show", help="print the table of the logs").add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "draw":
            shortest = min(MIN_SEQLEN, args.max_seqlen)
            drawn = draw_lengths(args.lengths, args.num_samples, 0, args.max_seqlen, shortest)
            args.output.write_text("".join(f"{length}\n" for length in drawn), encoding="utf-8")
        else:
            print(show(args.folder))
    except DynamicCPError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
