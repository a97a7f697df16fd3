"""How does a reinforcement-learning loop (verl, NeMo-RL) split a batch into micro-batches by a plan?

python examples/micro_batch_splitter_verl.py

This does what verl's rearrange_micro_batches and restore_dynamic_batch, or NeMo-RL's shard_by_batch_size and
reorder_data, are for: rows of a batch, jagged or padded, go to ranks and micro-batches, the same number of
micro-batches on every rank, and results come back in the order of the batch. A plan balances predicted time instead of
tokens and, where the attention supports it, spreads a long row over several ranks. The process that has the whole batch
plans: the driver, or every rank for itself.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dynamic_cp import plan_lengths


def plan_of(batch: dict[str, Tensor], num_lanes: int, max_tokens: int, **others):
    """Return the plan of a batch with "input_ids", jagged, or padded by an "attention_mask" [rows, width].

    Memory is not checked: FSDP shards weights and gradients over the ranks, the memory model has all of them on each.
    """
    limits = {"num_lanes": num_lanes, "max_tokens_per_rank": max_tokens, "check_memory": False}
    tokens = batch["input_ids"]
    return plan_lengths(
        tokens.offsets().diff() if tokens.is_nested else batch["attention_mask"].sum(1), **limits, **others
    )


def rows_of(batch: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some rows of every column; for verl's TensorDict its own `index_select_tensor_dict` does that."""

    def chosen(column: Tensor) -> Tensor:
        if not column.is_nested:
            return column[rows]
        parts = column.unbind()
        return jagged([parts[row] for row in rows.tolist()])

    return {name: chosen(column) for name, column in batch.items()}


def split(batch: dict[str, Tensor], plan, lane: int, rows_of: Callable = rows_of) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a lane (its data-parallel rank), equally many for every lane.

    Each has the columns of the batch and "row_weight" [rows]: 0 for the one row that an empty place computes to stay in
    step; multiply losses by it. All lanes of a CP group get the same rows, and their attention shares them.
    """
    micro_batches = []
    for index in range(plan.num_microbatches):
        rows = plan.samples_of(lane, index)
        weights = torch.ones(len(rows)) if len(rows) else torch.zeros(1)
        chosen = torch.from_numpy(rows.copy()) if len(rows) else torch.tensor([int(plan.sample_order[-1])])
        micro_batches.append(rows_of(batch, chosen))
        micro_batches[-1]["row_weight"] = weights
    return micro_batches


def restore(results: list[list[Tensor]], plan) -> Tensor:
    """Return results[lane][micro_batch] [rows, ...] in the order of the batch; the first lane of a group reports."""
    restored: dict[int, Tensor] = {}
    for lane, row in enumerate(results):
        for index, result in enumerate(row):
            if plan.is_first(lane, index):
                restored |= zip(plan.samples_of(lane, index).tolist(), result.unbind(), strict=False)
    in_order = [restored[sample] for sample in range(len(restored))]
    return jagged(in_order) if results[0][0].is_nested else torch.stack(in_order)


def jagged(rows: list[Tensor]) -> Tensor:
    """Return rows of any lengths as one tensor."""
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def made_up_batch(num_rows: int, padded: bool = False) -> dict[str, Tensor]:
    """Return rollouts, most of them short: jagged as verl trains on them, or prompts padded left and answers right."""
    random = np.random.default_rng(0)
    prompts = random.integers(16, 257, num_rows)
    answers = random.lognormal(5.5, 1.5, num_rows).clip(8, 16000).astype(int)
    answers[0] = 15000
    columns = np.arange(16384)
    mask = (columns >= 256 - prompts[:, None]) & (columns < 256 + answers[:, None])
    tokens = random.integers(0, 1000, mask.shape) * mask
    if padded:
        return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
    return {"input_ids": jagged([torch.from_numpy(row[real]) for row, real in zip(tokens, mask, strict=True)])}


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
        tokens = [[one["input_ids"].values().numel() for one in part] for part in parts]
        print(f"CP up to {max_cp_size}: {plan.num_microbatches} micro-batches on each of 8 ranks")
        print(f"  predicted {plan.predicted_s:.3f} s, slowest rank over mean {plan.imbalance:.2f}")
        print(f"  CP sizes {plan.cp_size.tolist()}, tokens {tokens}")


if __name__ == "__main__":
    main()
