"""How do the policies compare on my own documents?

python examples/my_jsonl.py [DOCUMENTS.jsonl [FIELD]]

Counts the tokens of each line's text (4 bytes a token, a usual value for English; put your tokenizer into
`count_tokens`), draws global batches from them and compares. Without a file it makes one up. Predicted, not measured.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model
from dynamic_cp.decide.comparison import compare_policies, verdict_of

MAX_SEQLEN, GLOBAL_BATCH_SIZE = 32768, 128


def count_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return max(1, len(text.encode()) // 4)


def make_up(path: Path) -> None:
    """Write 500 documents, most short and a few very long."""
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(500):
            words = int(min(generator.lognormvariate(6.5, 1.5), 60_000))
            file.write(json.dumps({"text": "word " * words}) + "\n")


def main() -> None:
    """Print the lengths, the seconds of each policy, and what to conclude."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "documents.jsonl"
        field = sys.argv[2] if len(sys.argv) > 2 else "text"
        if len(sys.argv) == 1:
            make_up(path)
        with path.open(encoding="utf-8") as file:
            lengths = np.array([min(count_tokens(json.loads(line)[field]), MAX_SEQLEN) for line in file])
    print(f"{len(lengths)} documents: median {np.median(lengths):.0f} tokens, longest {lengths.max()}")
    generator = np.random.default_rng(0)
    batches = [
        [Sample(sample_id=i, seqlen=int(n)) for i, n in enumerate(generator.choice(lengths, GLOBAL_BATCH_SIZE))]
        for _ in range(4)
    ]
    comparison = compare_policies(
        batches,
        topology=Topology(num_lanes=16),
        model=load_model("qwen3-8b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=1, recompute="full"),  # the limit is replaced by the next line
        limit_from_memory=True,
        policies=("dynamic", "static", "balanced", "megatron-dev"),
    )
    for one in comparison.policies:
        print(f"{one.policy:<13} {one.iteration_s:6.3f} s per global batch")
    verdict = verdict_of(comparison)
    assert verdict is not None
    print(verdict.text)


if __name__ == "__main__":
    main()
