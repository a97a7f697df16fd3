"""How do I train my own PyTorch model with planned micro-batches?

torchrun --local-addr localhost --nproc-per-node 4 examples/torch_device_mesh.py [--fsdp]

A tiny Llama-like transformer on 4 CPU ranks (gloo), a mesh of 2 x 2, wrapped in DistributedDataParallel or sharded by
`fully_shard`. Each step plans 24 documents of 1 to 700 tokens; rank 0 trains the same model alone, one document at a
time, and prints both losses. Megatron is not needed.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp import ModelShape, PlanOptions, Sample, Topology, load_hardware
from dynamic_cp.types import Problem
from megatron.integrations.outside import Lanes, scaled_dot_product_attention, sum_of_losses, train_step

VOCAB_SIZE, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 2, 4, 2, 16
MODEL = ModelShape(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    ffn_hidden_size=2 * HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=KV_HEADS,
    kv_channels=HEAD_DIM,
    vocab_size=VOCAB_SIZE,
)


def rotate(x_BHTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Return x with RoPE at each token's position within its own document."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions_BT[:, None, :, None] * frequencies
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Layer(nn.Module):
    """Attention and MLP. The one change against an ordinary layer: `packed_seq_params` chooses the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x_BTC: Tensor, positions_BT: Tensor, packed_seq_params: object) -> Tensor:
        """Return the layer's output [B, T, HIDDEN]."""
        qkv_BHTD = self.qkv(self.norm1(x_BTC)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        query, key, value = qkv_BHTD.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        query, key = rotate(query, positions_BT), rotate(key, positions_BT)
        if packed_seq_params is None:
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            context = scaled_dot_product_attention(query, key, value, packed_seq_params=packed_seq_params)
        x_BTC = x_BTC + self.out(context.transpose(1, 2).flatten(2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class TinyTransformer(nn.Module):
    """Returns the loss of each token, [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB_SIZE, HIDDEN), nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.RMSNorm(HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, packed_seq_params: object = None) -> Tensor:
        """Return the losses; all inputs [B, T]."""
        logits_BTV = self.logits(tokens, positions, packed_seq_params)
        return F.cross_entropy(logits_BTV.transpose(1, 2), labels, reduction="none")

    def logits(self, tokens: Tensor, positions: Tensor, packed_seq_params: object = None) -> Tensor:
        """Return the scores of each next token, [B, T, VOCAB_SIZE]."""
        x_BTC = self.embedding(tokens)
        for layer in self.layers:
            x_BTC = layer(x_BTC, positions, packed_seq_params)
        return self.head(self.norm(x_BTC))


class Document:
    """Tokens of a document as `Lanes.pack` reads them; a token of it in twenty has no loss."""

    def __init__(self, sample: Sample) -> None:
        random = np.random.default_rng(sample.sample_id)
        stream = random.geometric(0.15, sample.seqlen + 1).clip(max=VOCAB_SIZE) - 1
        self.tokens, self.labels = stream[:-1], stream[1:]
        self.loss_mask = (random.random(sample.seqlen) > 0.05).astype(np.float32)


def documents_of(step: int) -> list[Sample]:
    """Return a global batch of 24 documents, most short, one of 700 tokens."""
    lengths = np.random.default_rng(step).lognormal(3.0, 1.2, 23).clip(1, 500).astype(int).tolist()
    return [Sample(sample_id=1000 * step + i, seqlen=seqlen) for i, seqlen in enumerate([700, *lengths])]


def problem_for(num_lanes: int, *exchanges: str) -> Problem:
    """Return what is planned for: so few tokens on a rank that the longest document needs the largest CP size."""
    topology = Topology(num_lanes=num_lanes)
    return Problem(
        topology=topology,
        model=MODEL,
        hardware=load_hardware("cpu"),
        options=PlanOptions(max_tokens_per_rank=1024 // topology.max_cp_size, cp_comm_types=exchanges or ("p2p",)),
    )


def loss_sum(model: nn.Module, batch: dict) -> Tensor:
    """Return the sum of a micro-batch's losses on this lane."""
    losses = model(batch["tokens"], batch["labels"], batch["position_ids"], batch["packed_seq_params"])
    return sum_of_losses(losses, batch["loss_mask"])


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """Take the same step in one process, one document at a time, and return its loss."""
    documents = [Document(sample) for sample in samples]
    num_tokens = sum(document.loss_mask.sum() for document in documents)
    loss = 0.0
    for document in documents:
        tokens, labels = (torch.from_numpy(x)[None] for x in (document.tokens, document.labels))
        losses = model(tokens, labels, torch.arange(tokens.shape[1])[None])
        part = sum_of_losses(losses, torch.from_numpy(document.loss_mask)[None]) / num_tokens
        part.backward()
        loss += part.item()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    """Train ten steps and print the loss beside that of a single process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    lanes = Lanes.build(mesh, problem_for(num_ranks))
    torch.manual_seed(0)
    model, alone = TinyTransformer(), TinyTransformer()
    alone.load_state_dict(model.state_dict())
    if "--fsdp" in sys.argv:
        for layer in model.layers:
            fully_shard(layer, mesh=lanes.mesh)
        fully_shard(model, mesh=lanes.mesh)
    else:
        model = DistributedDataParallel(model, process_group=lanes.mesh.get_group())
    optimizer, optimizer_alone = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, alone))
    for index in range(10):
        samples = documents_of(index)
        step = lanes.step(samples, {sample.sample_id: Document(sample) for sample in samples}.__getitem__)
        result = train_step(lanes, model, step, loss_sum, label=f"step {index}")
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            expected = train_alone(alone, optimizer_alone, samples)
            sizes = step.plan.facts.cp_histogram
            print(f"step {index}: loss {result.loss:.5f}, alone {expected:.5f}; number of packs of CP sizes {sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
