"""How does a data collator for transformers or TRL return planned packs?

python examples/collator_trl.py

The collator gets a global batch and returns this rank's micro-batches, each in the form of TRL's padding-free collator
and transformers' DataCollatorWithFlattening: one row of several documents, positions that start again, labels of -100
at their first tokens and where completion_mask or assistant_masks are 0, and the boundaries for FlashAttention.
Rows that are packed already, as by SFTTrainer(packing=True), are parted into their documents and packed anew.
No sample is spread over ranks (max_cp_size=1); `examples/accelerate_hugging_face.py` does that, too. Here one process
plays the ranks of a job of 4 one after the other, with a tiny Llama from a local config. Needs `[hf]` and torch.
"""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dynamic_cp import plan_lengths
from megatron.integrations.outside import IGNORED, Document, documents_of

EMPTY_PLACE = Document(tokens=np.zeros(1, np.int64), labels=np.full(1, IGNORED))


class PlannedPacks:
    """Turns a global batch into the packs of one rank, equally many on every rank, and of balanced predicted time."""

    def __init__(self, rank: int, num_ranks: int, max_tokens: int, config: dict, hardware: str = "h100") -> None:
        self.rank = rank
        self.arguments = {"num_lanes": num_ranks, "max_tokens_per_rank": max_tokens, "max_cp_size": 1}
        self.arguments |= {"model": config, "hardware": hardware}

    def __call__(self, features: list[dict]) -> list[dict]:
        """Return the packs; a rank with nothing to do in one has a token without a loss there."""
        documents = [one for index, row in enumerate(features) for one in documents_of(index, row)]
        plan = plan_lengths([len(one.tokens) for one in documents], **self.arguments)
        chosen = (plan.samples_of(self.rank, micro_batch) for micro_batch in range(plan.num_microbatches))
        return [pack_of([documents[index] for index in row] or [EMPTY_PLACE]) for row in chosen]


def pack_of(documents: list[Document]) -> dict:
    """Return one row of documents, with the keys of DataCollatorWithFlattening(return_flash_attn_kwargs=True)."""
    lengths = [len(one.tokens) for one in documents]
    ends = np.cumsum([0, *lengths])
    tokens = np.concatenate([one.tokens for one in documents])
    labels = np.concatenate([one.labels for one in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    boundaries = torch.tensor(ends, dtype=torch.int32)
    row = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    pack = {name: torch.from_numpy(values)[None] for name, values in row.items()}
    return pack | {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def tiny_config() -> LlamaConfig:
    """Return a Llama of one layer."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)


def made_up_features(seed: int) -> list[dict]:
    """Return 16 samples as TRL tokenizes prompts with completions; the last half of each is the completion."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(3.5, 1.0, 16).clip(4, 300).astype(int)
    samples = [random.geometric(0.2, length).clip(max=64) - 1 for length in lengths]
    return [
        {"input_ids": one.tolist(), "completion_mask": (np.arange(len(one)) >= len(one) // 2).tolist()}
        for one in samples
    ]


def main() -> None:
    """Train five steps; the loss of a step is the mean over the tokens of all ranks."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = [PlannedPacks(rank, 4, 320, model.config.to_dict(), "cpu") for rank in range(4)]
    for step in range(5):
        packs = [collator(made_up_features(step)) for collator in ranks]  # on a cluster: each rank calls its own
        num_tokens = sum(int((pack["labels"] != IGNORED).sum()) for row in packs for pack in row)
        loss = 0.0
        for pack in (pack for row in packs for pack in row):
            part = model(
                **pack, num_items_in_batch=num_tokens, use_cache=False
            ).loss  # a sum over the pack / num_tokens
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        tokens = [[pack["input_ids"].numel() for pack in row] for row in packs]
        print(f"step {step}: loss {loss:.4f}; tokens of the packs of each rank {tokens}")


if __name__ == "__main__":
    main()
