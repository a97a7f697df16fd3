"""Small corpora and tokenizers, as users of Megatron-LM have them: preprocessed documents, and chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megatron.integrations.lm_adaptor.checkout import TOKENIZERS_OF_CORE
from tests.unit.data.made_tokenizers import TEXTS, train_tokenizer, write_tokenizer

WORDS = " ".join(TEXTS[:4]).split()
CHAT_TOKENS = ("<unk>", "<|endoftext|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
NUM_DOCUMENTS = {"a": 60, "b": 40}


def say(generator: np.random.Generator, most: int) -> str:
    return " ".join(generator.choice(WORDS, int(generator.integers(1, most))))


def preprocess(checkout: str, folder: Path) -> dict[str, str]:
    """Return prefixes by name, made by the checkout's own tool: with --append-eod, and one without."""
    write_tokenizer(folder / "tokenizer")
    generator = np.random.default_rng(0)
    prefixes = {}
    for name, number in NUM_DOCUMENTS.items():
        lines = [json.dumps({"text": f"{name}{line}: {say(generator, 60)}"}) for line in range(number)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        prefixes[name] = _preprocess(checkout, folder, name, name, "--append-eod")
    return prefixes | {"b without": _preprocess(checkout, folder, "b", "without")}


def _preprocess(checkout: str, folder: Path, source: str, name: str, *more: str) -> str:
    # As in a job: the tool imports megatron.core, and all of Megatron-LM.
    command = [sys.executable, "-W", "ignore", "-m", "megatron.dynamic_cp.run", f"{checkout}/tools/preprocess_data.py"]
    command += ["--input", str(folder / f"{source}.jsonl"), "--output-prefix", str(folder / name), "--workers", "1"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer"), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return str(folder / f"{name}_text_document")


def write_chats(folder: Path) -> list[list[dict[str, str]]]:
    """Write chats.jsonl and their tokenizer; return the messages of each line, of one conversation or several."""
    generator = np.random.default_rng(1)
    train_tokenizer(CHAT_TOKENS).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CHAT_TOKENS[1], "unk_token": CHAT_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    lines = []
    for _ in range(64):
        messages = []
        for _ in range(int(generator.integers(1, 4))):
            messages.append({"role": "system", "content": say(generator, 4)})
            for _ in range(int(generator.integers(1, 3))):
                messages.append({"role": "user", "content": say(generator, 9)})
                messages.append({"role": "assistant", "content": say(generator, 9)})
        lines.append(messages)
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in lines)
    (folder / "chats.jsonl").write_text(text)
    return lines


def chat_tokenizer(version: str, folder: Path) -> str:
    """Return the flags for the tokenizer of `write_chats` in a checkout of that version."""
    flags = "" if TOKENIZERS_OF_CORE.is_in(version) else "--legacy-tokenizer "
    prompts = "--sft-tokenizer-prompt-format nemotron-nano-v2"
    return f"{flags}--tokenizer-type SFTTokenizer --tokenizer-model {folder} {prompts}"


def chat_tokens(
    folder: Path, messages: list[dict[str, str]], *, ends_in_eod: bool
) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each chat in Megatron-LM's nemotron-nano-v2 format, and which are learned, EOD included."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n", "assistant": "<SPECIAL_11>Assistant\n"}
    conversations: list[tuple[list[int], list[bool]]] = []
    for message in messages:
        role = message["role"]
        if role == "system":
            conversations.append(([], []))
        tokens, learned = conversations[-1]
        end = "\n<SPECIAL_12>\n" if role == "assistant" else "\n"
        added = tokenizer.encode(before[role] + message["content"] + end, add_special_tokens=False).ids
        # The format leaves out three tokens, whatever they are.
        learned += [role == "assistant" and place >= 3 for place in range(len(added))]
        tokens += added
    end = [CHAT_TOKENS.index("<|endoftext|>")] * ends_in_eod
    return [([*tokens, *end], [*learned, *[True] * len(end)]) for tokens, learned in conversations]
