"""Tokenizers made here and now: a byte-level BPE of a few hundred tokens, saved as Hugging Face saves them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "The river runs past the old mill and under the stone bridge.",
    "What runs past the mill? The river runs past the mill.",
    "Ask a short question and you get a short answer about the bridge.",
    "def add(a, b):\n    return a + b\n",
) * 8
# As several models have it: without {% generation %}, and with a newline behind the end of a turn.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n"
    "    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}\n"
    "    {{- '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(special: Sequence[str], vocab_size: int = 320) -> Tokenizer:
    """Return a tokenizer whose first ids are the `special` tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    return made


def write_tokenizer(folder: Path, template: str | None = PLAIN_TEMPLATE, vocab_size: int = 320) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(SPECIAL, vocab_size).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
