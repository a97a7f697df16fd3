"""A tiny Hugging Face model for examples/fine_tune.sh, and what transformers says of it before and after.

python examples/fine_tune.py model DIR [TYPE]        writes one: llama or qwen3_moe, random weights, a token per byte
python examples/fine_tune.py compare DIR ... CHATS   prints the loss of each model on the chats, and what it answers

Both need transformers (extra `hf`). The loss is that of what the assistant says, which fine-tuning learns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

END = 256
"""Token that ends a document, after the 256 byte values."""
QUESTION = "What is 2 plus 3?"
NUM_CHATS, NUM_ANSWERED = 8, 24


MORE = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "norm_topk_prob": True},
}
"""model_type -> what its config says besides."""


def write_model(folder: str, model_type: str = "llama") -> None:
    """Write a model of 0.1 to 0.4 million weights as transformers writes any."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END,
        head_dim=16,
        **MORE[model_type],
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    print(f"{folder}: {model_type}, {model.num_parameters()} random weights")


def chatml(messages: list[dict[str, str]]) -> tuple[bytes, list[bool]]:
    """Return a chat as the template chatml writes it, and which of its bytes the assistant says."""
    text, said = b"", []
    for one in messages:
        head, body = f"<|im_start|>{one['role']}\n".encode(), f"{one['content']}<|im_end|>".encode()
        text += head + body + b"\n"
        said += [False] * len(head) + [one["role"] == "assistant"] * len(body) + [False]
    return text, said


@torch.no_grad()
def mean_loss(folder: str, chats: list[tuple[bytes, list[bool]]]) -> float:
    """Return the mean loss over what the assistant says."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss_sum, num_tokens = 0.0, 0
    for text, said in chats:
        tokens, learned = torch.tensor(list(text)), torch.tensor(said)[1:]
        losses = torch.nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
        loss_sum += float(losses[learned].sum())
        num_tokens += int(learned.sum())
    return loss_sum / num_tokens


@torch.no_grad()
def answer(folder: str) -> str:
    """Return how the model goes on after a question."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    question, _ = chatml([{"role": "user", "content": QUESTION}])
    tokens = torch.tensor([list(question + b"<|im_start|>assistant\n")])
    written = model.generate(tokens, max_new_tokens=NUM_ANSWERED, do_sample=False, pad_token_id=END)
    return bytes(token for token in written[0, tokens.shape[1] :].tolist() if token < END).decode(errors="replace")


def compare(folders: list[str], chats: str) -> None:
    """Print what transformers makes of each model."""
    lines = Path(chats).read_text(encoding="utf-8").splitlines()[:NUM_CHATS]
    read = [chatml(json.loads(line)["messages"]) for line in lines]
    for folder in folders:
        print(f"{folder}: loss {mean_loss(folder, read):.3f} on {len(read)} chats; {QUESTION} {answer(folder)!r}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["model", folder, *model_type] if len(model_type) <= 1:
            write_model(folder, *model_type)
        case ["compare", *folders, chats] if folders:
            compare(folders, chats)
        case _:
            sys.exit(__doc__)
