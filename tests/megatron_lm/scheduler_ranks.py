"""Runs a dev checkout's own wrap_data_iterator with our scheduler on gloo ranks; prints JSON. A process of its own:

    python -m tests.megatron_lm.scheduler_ranks CHECKOUT VP_GROUP MAX_SEQUENCES

megatron.core must come from the checkout, so nothing of it may be imported before.
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

NUM_LANES, SAMPLES_PER_LANE, LIMIT = 4, 10, 96


def seqlens() -> list[list[tuple[int, int]]]:
    """Return for each lane the (real, padded) lengths of its samples."""
    import numpy as np

    generator = np.random.default_rng(3)
    real = np.clip(generator.lognormal(3.5, 1, (NUM_LANES, SAMPLES_PER_LANE)), 5, NUM_LANES * LIMIT - 8).astype(int)
    multiple = 2 * NUM_LANES
    return [[(int(s), -(-int(s) // multiple) * multiple) for s in lane] for lane in real]


def items(lane: int) -> Any:
    """Yield a lane's samples as the checkout's varlen data set does; token ids tell sample and position."""
    import torch

    for number, (real, padded) in enumerate(seqlens()[lane]):
        tokens = torch.arange(padded) + 1000 * (lane * SAMPLES_PER_LANE + number)
        yield {
            "tokens": tokens, "labels": tokens + 1, "loss_mask": (torch.arange(padded) < real).float(),
            "position_ids": torch.arange(padded), "original_seq_len": torch.tensor([real], dtype=torch.int32),
            "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
        }  # fmt: skip


def config(vp_group: int | None, max_sequences: int | None) -> SimpleNamespace:
    """Return what the data path reads of TransformerConfig; the real one asks for TransformerEngine."""
    return SimpleNamespace(
        sequence_packing_scheduler="dynamic_cp_planner", max_seqlen_per_dp_cp_rank=LIMIT,
        min_dynamic_context_parallel_size=1, virtual_pipeline_model_parallel_size=None if vp_group is None else 2,
        microbatch_group_size_per_vp_stage=vp_group, thd_max_packed_sequences=max_sequences, mtp_num_layers=None,
        pipeline_model_parallel_layout=None, sequence_parallel=False, num_moe_experts=None, bf16=True, fp16=False,
        num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=4, kv_channels=16,
        gated_linear_unit=False,
    )  # fmt: skip


def run_rank(vp_group: int | None, max_sequences: int | None) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule

    from megatron.integrations.scheduler.job import job_of
    from megatron.integrations.scheduler.register import register

    chosen = register(job_of(hardware="cpu"), as_theirs=False)
    parallel_state.initialize_model_parallel(context_parallel_size=1)
    settings = config(None, max_sequences)
    if vp_group is None:
        iterators, *counts = data_schedule.wrap_data_iterator(items(dist.get_rank()), settings, SAMPLES_PER_LANE)
    else:  # one stage has no chunks, so the class is given the group size that interleaving would give it
        groups = (parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group())
        pipeline, lanes = parallel_state.get_pipeline_model_parallel_group(), groups[0]
        scheduler = chosen(LIMIT, 1, NUM_LANES, vp_group, max_num_seqs=max_sequences)
        import torch

        iterators, *counts = scheduler.run(
            items(dist.get_rank()), SAMPLES_PER_LANE, *groups, pipeline, lanes, torch.device("cpu"), settings
        )
    packs = []
    for _ in range(int(counts[0])):
        pack = next(iterators)
        packs.append(
            {
                "cp_size": int(pack["local_cp_size"]),
                "samples": [int(t) // 1000 for t in pack["tokens"].reshape(-1)[pack["cu_seqlens_padded"][:-1].long()]],
                "tokens": pack["tokens"].reshape(-1).tolist(),
                "real": int((pack["loss_mask"] > 0).sum()),
            }
        )
    return {
        "packs": packs, "counts": [float(c) for c in counts], "core": data_schedule.__file__, "name": chosen.__name__,
    }  # fmt: skip


def main() -> None:
    checkout, vp_group, max_sequences = sys.argv[1], *(int(a) or None for a in sys.argv[2:])
    sys.path.insert(0, checkout)
    from megatron.dynamic_cp.repairs import triton_imports

    triton_imports.install()
    from tests.distributed.harness import run_ranks

    with contextlib.redirect_stdout(sys.stderr):  # where the checkout logs
        found = run_ranks(NUM_LANES, run_rank, vp_group, max_sequences)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
