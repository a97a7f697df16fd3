"""How do I train a Hugging Face model with planned micro-batches under accelerate?

torchrun --local-addr localhost --nproc-per-node 4 examples/accelerate_hugging_face.py

A tiny Llama from a local config (nothing is downloaded) on 4 CPU ranks: accelerate wraps it, the collator plans each
global batch, the plan chooses the CP size of every micro-batch. Needs
`pip install "megatron-dynamic-cp[hf]"` and torch.
"""

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from dynamic_cp import PlanOptions
from megatron.integrations.outside import PlannedCollator, train_step
from megatron.integrations.outside.hugging_face import causal_lm_loss, lanes_of, problem_of, use_dynamic_cp

GLOBAL_BATCH_SIZE, VOCAB_SIZE = 16, 128


def tiny_config() -> LlamaConfig:
    """Return a Llama of 2 layers with 4 heads and 2 KV heads."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )


def made_up_samples(number: int) -> list[dict[str, list[int]]]:
    """Return `number` samples of 2 to 500 tokens as a tokenizer gives them; the first tenth of each has no loss."""
    random = np.random.default_rng(0)
    samples = []
    for length in random.lognormal(3.5, 1.2, number).clip(2, 500).astype(int):
        tokens = (random.geometric(0.15, length).clip(max=VOCAB_SIZE) - 1).tolist()
        samples.append({"input_ids": tokens, "labels": [-100] * (length // 10) + tokens[length // 10 :]})
    return samples


def main() -> None:
    """Train one epoch and print the loss of each step."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    use_dynamic_cp(model)
    options = PlanOptions(max_tokens_per_rank=256)
    lanes = lanes_of(accelerator, problem_of(model.config, accelerator.num_processes, options, hardware="cpu"))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = DataLoader(
        made_up_samples(10 * GLOBAL_BATCH_SIZE),
        batch_size=GLOBAL_BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),  # every rank draws the same global batches
        collate_fn=PlannedCollator(lanes.problem, lanes.lane),
    )
    for index, step in enumerate(lanes.agreed(loader)):
        result = train_step(lanes, model, step, causal_lm_loss, backward=accelerator.backward, label=f"step {index}")
        optimizer.step()
        optimizer.zero_grad()
        sizes = step.plan.facts.cp_histogram
        accelerator.print(f"step {index}: loss {result.loss:.4f}; number of packs of CP sizes {sizes}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
