"""Does dynamic CP pay off for a video diffusion transformer?

python examples/video_planning.py

Wan 2.1 14B has full attention, so work grows with the square of the latent tokens even faster than for text, and clips
mix short and long. Planning only: `video_dit.py` trains a small one. Lengths are synthetic (`dynamic-cp lengths
video_dit`), seconds predicted.
"""

from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model
from dynamic_cp.decide.comparison import compare_policies, verdict_of
from dynamic_cp.decide.workloads import draw_lengths


def main() -> None:
    """Print the seconds of each policy, and what to conclude."""
    batches = []
    for seed in range(4):
        lengths = draw_lengths("video_dit", 64, seed, 131072)
        batches.append([Sample(sample_id=i, seqlen=int(n)) for i, n in enumerate(lengths)])
    longest = max(sample.seqlen for batch in batches for sample in batch)
    print(f"4 global batches of 64 clips, at most {longest} latent tokens; 16 lanes x TP 4 on H100")
    comparison = compare_policies(
        batches,
        topology=Topology(num_lanes=16, tp_size=4, sequence_parallel=True),
        model=load_model("wan2.1-t2v-14b"),
        hardware=load_hardware("h100"),
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
