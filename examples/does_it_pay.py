"""Does dynamic CP pay off for my lengths on my cluster?

python examples/does_it_pay.py

Four global batches of GitHub files, Llama-3-8B, 32 H100 as 8 lanes x TP 2 x PP 2. Put your own lengths, model and
layout into the lines with a comment. Every second is predicted by the cost model, none is measured.
"""

from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model
from dynamic_cp.decide.comparison import compare_policies, verdict_of
from dynamic_cp.decide.workloads import draw_lengths

MAX_SEQLEN = 65536


def main() -> None:
    """Print the seconds of each policy, and what to conclude."""
    batches = []
    for seed in range(4):
        lengths = draw_lengths("github", 128, seed, MAX_SEQLEN)  # or any list of integers
        batches.append([Sample(sample_id=i, seqlen=int(n)) for i, n in enumerate(lengths)])
    comparison = compare_policies(
        batches,
        topology=Topology(num_lanes=8, tp_size=2, pp_size=2, sequence_parallel=True),  # your layout
        model=load_model("llama-3-8b"),  # or the path of a Hugging Face config.json
        hardware=load_hardware("h100"),  # `dynamic-cp simulate --help` lists the others
        options=PlanOptions(max_tokens_per_rank=1, recompute="full"),  # the limit is replaced by the next line
        limit_from_memory=True,
        policies=("dynamic", "static", "balanced"),
    )
    for one in comparison.policies:
        cp = f"CP {one.static_cp_size}" if one.static_cp_size else "CP chosen per bucket"
        print(f"{one.policy:<9} {one.iteration_s:6.3f} s per global batch, {cp}")
    verdict = verdict_of(comparison)
    assert verdict is not None
    print(verdict.text)


if __name__ == "__main__":
    main()
