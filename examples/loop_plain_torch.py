"""How does a plain torch loop use plans, with nothing of this project but the planner?

torchrun --local-addr localhost --nproc-per-node 4 examples/loop_plain_torch.py

Every rank is a lane and plans for itself: equal lengths give equal plans. A CP group shares keys and values by torch's
own all-gather, with a mask between documents: short and correct, not fast (`megatron.integrations.outside` has rings
and head exchanges). Printed beside it: the same documents in one process.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dynamic_cp import ModelShape, plan_lengths

VOCAB_SIZE, HIDDEN, HEADS = 64, 32, 4
SIZES = {"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE}
MODEL = ModelShape(num_attention_heads=HEADS, num_query_groups=HEADS, kv_channels=HIDDEN // HEADS, **SIZES)


class Gather(torch.autograd.Function):
    """The rows of all lanes of a group; backward, each lane's rows get the sum of their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x, group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class TinyModel(nn.Module):
    """One attention layer; the keys are those of all lanes of the CP group, lane after lane."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB_SIZE, HIDDEN), nn.Embedding(1024, HIDDEN)
        self.qkv, self.head = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, VOCAB_SIZE)

    def forward(self, pack: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the sum of the losses of this lane's tokens."""
        x_TC = self.embedding(pack["tokens"]) + self.positions(pack["positions"])
        qkv_T3HD = self.qkv(x_TC).unflatten(1, (3, HEADS, -1))
        query_THD, kv_T2HD = qkv_T3HD[:, 0], qkv_T3HD[:, 1:].contiguous()
        if group is not None:
            kv_T2HD = Gather.apply(kv_T2HD, group)
        query_HTD, kv_2HTD = query_THD.transpose(0, 1), kv_T2HD.movedim(0, 2)
        out_HTD = F.scaled_dot_product_attention(query_HTD, *kv_2HTD, attn_mask=pack["mask"])
        logits_TV = self.head(x_TC + out_HTD.transpose(0, 1).flatten(1))
        return (F.cross_entropy(logits_TV, pack["labels"], reduction="none") * pack["has_loss"]).sum()


def pack_of(plan, lane: int, micro_batch: int, documents: list[np.ndarray]) -> dict[str, Tensor]:
    """Return what a lane computes: of each document, padded, the part of 1 / cp_size that is its turn."""
    cp_size, turn = plan.cp_size[micro_batch, lane], lane - plan.first_lane[micro_batch, lane]
    chosen = [documents[row] for row in plan.samples_of(lane, micro_batch)] or [np.zeros(1, int)]  # an empty place
    padded = plan.padded_seqlens_of(lane, micro_batch)
    parts = [[np.arange(p // cp_size) + t * (p // cp_size) for p in padded] for t in range(cp_size)]
    mine, keys = np.concatenate(parts[turn]), np.concatenate([position for part in parts for position in part])
    document_of = np.repeat(np.arange(len(chosen)), padded // cp_size)
    pairs = zip(chosen, padded, parts[turn], strict=True)
    filled = [np.pad(one, (0, p + 1 - len(one)))[[part, part + 1]] for one, p, part in pairs]
    tokens, labels = np.concatenate(filled, axis=1)
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "has_loss": (mine < np.array([len(one) - 1 for one in chosen])[document_of]).astype(np.float32),
        "positions": mine,
        # Documents do not see each other, tokens not the future; padding comes last, so nobody sees it.
        "mask": (document_of[:, None] == np.tile(document_of, cp_size)) & (mine[:, None] >= keys),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def train(model: nn.Module, batches: list, num_lanes: int, lane: int, groups: dict) -> list[tuple[float, list[int]]]:
    """Return (loss, CP sizes of this lane's micro-batches) of each step; one lane is a single process."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.5), []
    limits = {"num_lanes": num_lanes, "max_tokens_per_rank": 1024 >> num_lanes.bit_length()}  # 512 in the largest group
    for documents in batches:
        seqlens = [len(document) - 1 for document in documents]
        plan = plan_lengths(seqlens, model=MODEL, hardware="cpu", cp_comm_types="all_gather", **limits)
        total = torch.zeros(())
        for micro_batch in range(plan.num_microbatches):  # equally many on every lane
            group = groups.get((plan.first_lane[micro_batch, lane], plan.cp_size[micro_batch, lane]))
            loss = model(pack_of(plan, lane, micro_batch, documents), group) / sum(seqlens)
            loss.backward()
            total += loss.detach()
        for value in [total, *(parameter.grad for parameter in model.parameters())] if num_lanes > 1 else ():
            dist.all_reduce(value)  # a sum, because each lane has divided by the tokens of all
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total.item(), plan.cp_size[:, lane].tolist()))
    return steps


def cp_groups(num_lanes: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return (first lane, size) -> group of every aligned block of 2, 4, ... lanes; all ranks make all of them."""
    sizes = [2**k for k in range(1, num_lanes.bit_length())]
    blocks = [(first, size) for size in sizes for first in range(0, num_lanes - size + 1, size)]
    return {(first, size): dist.new_group(range(first, first + size)) for first, size in blocks}


def main() -> None:
    """Train five steps of 12 documents, one of 400 tokens and the rest short; on all ranks, and alone."""
    dist.init_process_group("gloo")
    rank, num_ranks, random = dist.get_rank(), dist.get_world_size(), np.random.default_rng(0)
    lengths = [[400, *random.lognormal(3.0, 1.0, 11).clip(2, 200).astype(int)] for _ in range(5)]
    batches = [[random.geometric(0.2, length + 1).clip(max=VOCAB_SIZE) - 1 for length in row] for row in lengths]
    torch.manual_seed(0)
    model, alone = TinyModel(), TinyModel()
    alone.load_state_dict(model.state_dict())
    steps = train(model, batches, num_ranks, rank, cp_groups(num_ranks))
    for index, (loss, cp_sizes) in enumerate(steps if rank == 0 else ()):
        expected, _ = train(alone, batches[index : index + 1], 1, 0, {})[0]
        print(f"step {index}: loss {loss:.5f}, alone {expected:.5f}; CP sizes of rank 0's micro-batches {cp_sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
