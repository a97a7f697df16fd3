"""What does a slower network do?

python examples/slower_network.py

The same batches with the network between the nodes at its full speed, a half, a quarter and an eighth. Large CP groups
cross nodes, so a static size suffers on all its samples, dynamic CP on the few that need so many lanes. Each policy has
the fastest exchange for each bucket; a static ring alone would suffer far more. Predicted, as by `dynamic-cp simulate`.
"""

from dataclasses import replace

from dynamic_cp import PlanOptions, Sample, Topology, load_hardware, load_model
from dynamic_cp.decide.comparison import compare_policies
from dynamic_cp.decide.workloads import draw_lengths


def main() -> None:
    """Print the seconds of two policies for each speed of the network."""
    batches = []
    for seed in range(2):
        lengths = draw_lengths("github", 128, seed, 131072)
        batches.append([Sample(sample_id=i, seqlen=int(n)) for i, n in enumerate(lengths)])
    model, hardware = load_model("llama-3-8b"), load_hardware("h100")
    print("network   dynamic  balanced (its CP size)   gain of dynamic")
    for share in (1.0, 0.5, 0.25, 0.125):
        slower = replace(
            hardware, bandwidth_across_nodes_bytes_per_s=hardware.bandwidth_across_nodes_bytes_per_s * share
        )
        comparison = compare_policies(
            batches,
            topology=Topology(num_lanes=32),
            model=model,
            hardware=slower,
            options=PlanOptions(max_tokens_per_rank=1, recompute="full"),  # the limit is replaced by the next line
            limit_from_memory=True,
            policies=("dynamic", "balanced"),
        )
        ours, theirs = comparison.policy("dynamic"), comparison.policy("balanced")
        gigabytes_per_s = slower.bandwidth_across_nodes_bytes_per_s / 1e9
        print(
            f"{gigabytes_per_s:4.0f} GB/s {ours.iteration_s:6.3f} s {theirs.iteration_s:7.3f} s (CP "
            f"{theirs.static_cp_size})  {comparison.speedups[0].ratio:18.2f}x"
        )


if __name__ == "__main__":
    main()
