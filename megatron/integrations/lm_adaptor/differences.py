"""What checkouts of newer releases do otherwise: the one place of the adaptor that knows releases.

`replacements` says by these which of its rows a checkout has; docs/how-to/megatron-lm.md has those that users see.
"""

from __future__ import annotations

from megatron.dynamic_cp.repairs.releases import Difference

TOKENIZERS_OF_CORE = Difference(
    since="0.17",
    what="all tokenizers are megatron-core's; `--legacy-tokenizer` is gone",
    why="ids, the end of document and chats come from there",
)
CHATS_WITHOUT_EOD = Difference(
    since="0.17",
    what="`--sft` appends no end of document to a conversation",
    why="samples are a token shorter; nothing has to change",
)
TOKENIZER_TAKES_DICTS = Difference(
    since="0.18",
    what="the tokenizer of chats takes what transformers 5 returns",
    why="nothing has to be replaced there",
)
NULL_TOKENIZER_COUNTS_EOD = Difference(
    since="0.18",
    what="`--vocab-size` of NullTokenizer counts the end of document, whose id is the last one",
    why="a run on mock data has an id less than before; the tokenizer is asked for both, so nothing has to change",
)
FLAGS_BEFORE_PRETRAIN = Difference(
    since="0.18",
    what="the script reads and validates the flags, then calls `pretrain`",
    why="the functions that do so are looked up in another module, and what the script passes is known only later",
)
BATCH_OF_FIELDS = Difference(
    since="0.18",
    what="the script's `get_batch` returns ten fields, of which its forward step makes PackedSeqParams",
    why="the class has to be replaced, too",
)
EVALUATION_BATCH = Difference(
    since="0.18",
    what="evaluation has a global batch of its own (`--eval-global-batch-size`)",
    why="the flag is refused; the original asserts that lanes divide its default, the global batch",
)
TRACKER_OF_ROUTERS = Difference(
    since="0.18",
    what="what routers say for the log is kept by an object",
    why="it is told the figures of our routers there",
)
MODEL_FROM_CONFIG = Difference(
    since="0.19",
    what="`megatron.training.models` builds the model from a configuration, without `gpt_builders.py`",
    why="GPTModel is looked up in one more module",
)
NORMS_RECOMPUTED = Difference(
    since="0.19",
    what="`--recompute-modules gdn_norm_out`: gate and norm of a gated delta net",
    why="earlier TransformerConfigs do not know the word, and it is refused",
)
WEIGHT_SHARDS = Difference(
    since="0.19",
    what="TransformerConfig has the tensor-parallel sizes a second time, as numbers of shards",
    why="two fields more that Megatron-LM sets",
)


def tokenizer_module() -> str:
    """Return the name of the module that has `build_tokenizer`."""
    return f"megatron.core.tokenizers{'' if TOKENIZERS_OF_CORE.here else '.text'}.utils.build_tokenizer"
