"""Which CP size for which length?

python examples/which_cp_size.py

Prices one sample alone on CP groups of every size, each with its fastest exchange: seconds, and the share of the GPUs'
peak. A larger group is faster for a long sample and wastes little. For a short one it is hardly faster, as the host
still launches every layer, and wastes most of the GPUs. Where the sample no longer fits, a larger group is the only
way. Predicted by the cost model.
"""

from dynamic_cp import CostModel, PlanOptions, Problem, Topology, load_hardware, load_model
from dynamic_cp.decide.report.curves import knee_points

SEQLENS = (1024, 4096, 16384, 65536, 131072)
CP_SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    """Print a table lengths x CP sizes."""
    model, hardware = load_model("llama-3-8b"), load_hardware("h100")
    topology = Topology(num_lanes=16)  # 16 GPUs in nodes of 8: CP 16 crosses the network
    options = PlanOptions(max_tokens_per_rank=16384, recompute="full")
    cost_model = CostModel(Problem(topology=topology, model=model, hardware=hardware, options=options))
    points = {(one.seqlen, one.cp_size): one for one in knee_points(model, hardware, cost_model, SEQLENS)}
    print("ms and share of peak FLOP/s (model FLOPs) of one sample alone, Llama-3-8B, full recomputation, H100")
    print("   tokens " + "".join(f"{f'CP {cp_size}':>15}" for cp_size in CP_SIZES))
    for seqlen in SEQLENS:
        cells = []
        for cp_size in CP_SIZES:
            point = points[seqlen, cp_size]
            cells.append(f"{point.seconds * 1e3:8.0f} {point.mfu:5.1%}" if point.fits else "too long")
        print(f"{seqlen:9d} " + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
