"""How does a reinforcement-learning loop (verl, NeMo-RL) split a batch into micro-batches by a plan?

python examples/micro_batch_splitter_verl.py

This does what verl's rearrange_micro_batches and restore_dynamic_batch, or NeMo-RL's shard_by_batch_size and
reorder_data, are for: rows of a padded batch go to ranks and micro-batches, the same number of micro-batches on every
rank, and results come back in the order of the batch. A plan balances predicted time instead of tokens and, where the
attention supports it, spreads a long row over several ranks. The process that has the whole batch plans: the driver, or
every rank for itself.
"""

import numpy as np
import torch
from torch import Tensor

from dynamic_cp import plan_lengths


def plan_of(batch: dict[str, Tensor], num_lanes: int, max_tokens: int, **others):
    """Return the plan of a batch with an "attention_mask" [rows, width], padded left, right or both.

    Memory is not checked: FSDP shards weights and gradients over the ranks, the memory model has all of them on each.
    """
    limits = {"num_lanes": num_lanes, "max_tokens_per_rank": max_tokens, "check_memory": False}
    return plan_lengths(batch["attention_mask"].sum(1), **limits, **others)


def split(batch: dict[str, Tensor], plan, lane: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a lane (its data-parallel rank), equally many for every lane.

    Each has the columns of the batch and "row_weight" [rows]: 0 for the one row that an empty place computes to stay in
    step; multiply losses by it. All lanes of a CP group get the same rows, and their attention shares them.
    """
    micro_batches = []
    for index in range(plan.num_microbatches):
        rows = plan.samples_of(lane, index)
        weights = torch.ones(len(rows)) if len(rows) else torch.zeros(1)
        chosen = torch.from_numpy(rows.copy()) if len(rows) else torch.tensor([int(plan.sample_order[-1])])
        micro_batches.append({name: column[chosen] for name, column in batch.items()} | {"row_weight": weights})
    return micro_batches


def restore(results: list[list[Tensor]], plan) -> Tensor:
    """Return results[lane][micro_batch] [rows, ...] in the order of the batch; the first lane of a group reports."""
    restored = results[0][0].new_zeros(len(plan.sample_order), *results[0][0].shape[1:])
    for lane, row in enumerate(results):
        for index, result in enumerate(row):
            if plan.is_first(lane, index):
                samples = plan.samples_of(lane, index)
                restored[torch.from_numpy(samples.copy())] = result[: len(samples)]
    return restored


def made_up_batch(num_rows: int) -> dict[str, Tensor]:
    """Return prompts padded left and answers padded right, as rollouts are; most answers are short."""
    random = np.random.default_rng(0)
    prompts = random.integers(16, 257, num_rows)
    answers = random.lognormal(5.5, 1.5, num_rows).clip(8, 16000).astype(int)
    answers[0] = 15000
    columns = np.arange(16384)
    mask = (columns >= 256 - prompts[:, None]) & (columns < 256 + answers[:, None])
    tokens = random.integers(0, 1000, mask.shape) * mask
    return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask.astype(np.int64))}


def sum_of_tokens(micro_batch: dict[str, Tensor]) -> Tensor:
    """Stand in for a model: return one number a row."""
    return micro_batch["input_ids"].sum(1)


def main() -> None:
    """Split 64 rows among 8 ranks without and with context parallelism, and put results back in order."""
    batch = made_up_batch(64)
    for max_cp_size in (1, 8):
        plan = plan_of(batch, 8, 16384, model="qwen2.5-7b", hardware="h100", max_cp_size=max_cp_size, recompute="full")
        parts = [split(batch, plan, lane) for lane in range(8)]
        results = [[sum_of_tokens(micro_batch) for micro_batch in part] for part in parts]
        assert torch.equal(restore(results, plan), batch["input_ids"].sum(1))
        tokens = [[int(one["attention_mask"].sum()) for one in part] for part in parts]
        print(f"CP up to {max_cp_size}: {plan.num_microbatches} micro-batches on each of 8 ranks")
        print(f"  predicted {plan.predicted_s:.3f} s, slowest rank over mean {plan.imbalance:.2f}")
        print(f"  CP sizes {plan.cp_size.tolist()}, tokens {tokens}")


if __name__ == "__main__":
    main()
