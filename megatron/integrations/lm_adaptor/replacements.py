"""The table of what is replaced in a checkout, where, and why.

A replacement is made only when its symbol is there: a checkout that was changed is refused before anything is built,
naming the symbol. Without --dynamic-cp every replaced function calls what it replaced.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs.releases import Difference
from megatron.integrations.lm_adaptor import differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One symbol that is replaced.

    Attributes:
        module, symbol: where; module "the script" is the one that is run.
        reason: why.
        since, until: checkouts with the one difference and without the other have it; None: all.
        ours: the function or class that takes its place; "": the one of the same name.
    """

    module: str
    symbol: str
    reason: str
    since: Difference | None = None
    until: Difference | None = None
    ours: str = ""

    @property
    def name(self) -> str:
        """Of the function or class that takes its place."""
        return self.ours or self.symbol.lstrip("_")

    def is_in(self, version: str) -> bool:
        """Return whether a checkout of that version has it."""
        return (self.since is None or self.since.is_in(version)) and not (
            self.until is not None and self.until.is_in(version)
        )

    @property
    def releases(self) -> str:
        """Which checkouts have it, as text."""
        bounds = [
            f"{word} {one.since}" for word, one in (("from", self.since), ("before", self.until)) if one is not None
        ]
        return ", ".join(bounds) or "all"

    @property
    def where(self) -> str:
        """The full name."""
        return f"{self.module}.{self.symbol}" if self.module != SCRIPT else f"{self.symbol} of the script"


SCRIPT = "the script"
_TRAINING = "megatron.training.training"
_VARIANT_SPEC = "get_transformer_block_with_experimental_attention_variant_spec"
_LAYERS = "ours builds layers whose attention and RoPE use the group of the micro-batch"
_VARIANTS = (
    "the original asks for TransformerEngine's layers and for kernels of linear attention; our GPTModel has its own "
    "layers"
)
_CHATS = (
    "the original takes what apply_chat_template returns for tokens, but transformers 5 returns a dict unless told "
    "otherwise"
)
_BATCH = "ours returns the plan's micro-batch with its PackedSeqParams, on every pipeline stage"


def _flag_function(symbol: str, reason: str) -> tuple[Replacement, Replacement]:
    """Return the rows of a function that is called from the script, and looked up elsewhere, since one release."""
    changed = differences.FLAGS_BEFORE_PRETRAIN
    return (
        Replacement(module="megatron.training.initialize", symbol=symbol, reason=reason, until=changed),
        Replacement(module="megatron.training.arguments", symbol=symbol, reason=reason, since=changed),
    )


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        module="megatron.training",
        symbol="pretrain",
        reason="ours replaces the script's get_batch and ends the planner; scripts import this name",
    ),
    *_flag_function(
        "parse_args",
        reason="ours adds the flags, refuses what is not supported, keeps --context-parallel-size for the static plan "
        "and passes on 1",
    ),
    Replacement(
        module="megatron.training.arguments",
        symbol="add_megatron_arguments",
        reason="the original takes only numbers for --max-seqlen-per-dp-cp-rank, ours also auto, even for "
        "callers that read the flags without the added ones",
    ),
    *_flag_function(
        "validate_args",
        reason="the original resets variable_seq_lengths; ours sets it and the DDP bucket size, and checks CP sizes "
        "and limits",
    ),
    Replacement(
        module="megatron.training.global_vars",
        symbol="init_num_microbatches_calculator",
        reason="the original asserts global batch % (micro-batch size x data-parallel size) == 0; in ours the "
        "plan decides",
    ),
    Replacement(
        module=_TRAINING,
        symbol="initialize_megatron",
        reason="ours builds and warms up the CP groups and starts the planner once the model-parallel groups are there",
    ),
    Replacement(
        module=_TRAINING,
        symbol="set_jit_fusion_options",
        reason="the original warms up fused kernels with --seq-length / CP tokens, which at CP 1 is C times what "
        "a rank computes",
    ),
    Replacement(
        module="megatron.core.models.gpt",
        symbol="GPTModel",
        reason=_LAYERS,
    ),
    Replacement(
        module="megatron.training.models.gpt",
        symbol="GPTModel",
        reason=_LAYERS,
        since=differences.MODEL_FROM_CONFIG,
    ),
    Replacement(
        module="megatron.core.models.gpt.experimental_attention_variant_module_specs",
        symbol=_VARIANT_SPEC,
        reason=_VARIANTS,
        ours="variant_spec",
    ),
    Replacement(
        module="megatron.training.models.gpt",
        symbol=_VARIANT_SPEC,
        reason=_VARIANTS,
        since=differences.MODEL_FROM_CONFIG,
        ours="variant_spec",
    ),
    Replacement(
        module="megatron.core.models.hybrid.hybrid_model",
        symbol="HybridModel",
        reason=_LAYERS,
        since=differences.BATCH_OF_FIELDS,
        until=differences.MODEL_FROM_CONFIG,
    ),
    Replacement(
        module="megatron.training.models.hybrid",
        symbol="HybridModel",
        reason=_LAYERS,
        since=differences.MODEL_FROM_CONFIG,
    ),
    Replacement(
        module="megatron.training.checkpointing",
        symbol="_maybe_setup_gpt_to_hybrid_load",
        reason="the original takes models of other classes than its own for models without a pattern",
        since=differences.MODEL_FROM_CONFIG,
        ours="gpt_to_hybrid_load",
    ),
    Replacement(
        module=_TRAINING,
        symbol="build_train_valid_test_datasets",
        reason="with --use-varlen-dataset ours builds samples of their own lengths; otherwise the original runs",
    ),
    Replacement(
        module=_TRAINING,
        symbol="build_pretraining_data_loader",
        reason="ours reads samples one by one and uncollated, in global batches of any size, without trailing "
        "padding; on CPU ranks it also keeps the loader from drawing its seed from the generator of "
        "dropout",
    ),
    Replacement(
        module=_TRAINING,
        symbol="build_train_valid_test_data_iterators",
        reason="ours names the iterators, and gives one to ranks that read nothing, so that all ranks know which "
        "is meant",
    ),
    Replacement(
        module="megatron.training.tokenizer.tokenizer",
        symbol="SFTTokenizer",
        reason=_CHATS,
        until=differences.TOKENIZERS_OF_CORE,
    ),
    Replacement(
        module="megatron.core.tokenizers.text.libraries",
        symbol="SFTTokenizer",
        reason=_CHATS,
        since=differences.TOKENIZERS_OF_CORE,
        until=differences.TOKENIZER_TAKES_DICTS,
    ),
    Replacement(
        module=_TRAINING,
        symbol="get_forward_backward_func",
        reason="ours draws, plans and re-routes a global batch, then runs the schedule with the plan's micro-batches",
    ),
    Replacement(
        module=_TRAINING,
        symbol="train_step",
        reason="ours advances the learning rate and consumed samples by the samples of the global batch, and "
        "notes the iteration for errors",
    ),
    Replacement(
        module=_TRAINING,
        symbol="training_log",
        reason="ours prints the samples of the global batch and a line about the plan, and ends the step: dump, "
        "refinement",
    ),
    Replacement(
        module=_TRAINING,
        symbol="evaluate_and_print_results",
        reason="ours notes for errors that the run is evaluating",
    ),
    Replacement(
        module=_TRAINING,
        symbol="load_checkpoint",
        reason="ours notes for errors that the run is loading",
    ),
    Replacement(
        module=_TRAINING,
        symbol="save_checkpoint",
        reason="ours notes for errors that the run is saving, and at which iteration; what was written is told by a "
        "file in memory, as the original's manager process outlives a rank that ends with an error",
    ),
    Replacement(
        module=_TRAINING,
        symbol="maybe_finalize_async_save",
        reason="ours notes for errors that the run is naming a checkpoint, or waiting for its files",
    ),
    Replacement(
        module="megatron.training.checkpointing",
        symbol="get_rng_state",
        reason="the original has the random states of the first lane only; with --hidden-dropout ours adds those of "
        "all lanes, which differ because their shapes do",
    ),
    Replacement(
        module="megatron.training.checkpointing",
        symbol="_load_base_checkpoint",
        reason="ours takes the random states of its lane, and what --dynamic-cp-refine found, from the saved arguments",
    ),
    Replacement(
        module=_TRAINING,
        symbol="num_floating_point_operations",
        reason="ours counts the true lengths of the samples instead of --seq-length each",
    ),
    Replacement(
        module=_TRAINING,
        symbol="report_theoretical_memory",
        reason="the original's figure is for packs of --seq-length / CP tokens; here the token limit decides",
    ),
    Replacement(
        module=SCRIPT,
        symbol="get_batch",
        reason=_BATCH,
        until=differences.BATCH_OF_FIELDS,
    ),
    Replacement(
        module=SCRIPT,
        symbol="get_batch",
        reason=_BATCH,
        since=differences.BATCH_OF_FIELDS,
        ours="get_batch_of_fields",
    ),
    Replacement(
        module=SCRIPT,
        symbol="PackedSeqParams",
        reason="ours are those of the micro-batch; the original cannot say more than the ten fields",
        since=differences.BATCH_OF_FIELDS,
        ours="take_packed_seq_params",
    ),
    # These do what Megatron-LM does, except on CPU ranks.
    Replacement(
        module="megatron.training.initialize",
        symbol="_initialize_distributed",
        reason="the original builds model-parallel groups only when it sees a device",
    ),
    Replacement(
        module="megatron.training.initialize",
        symbol="_set_random_seed",
        reason="the original seeds the generators of tensor parallelism only when it sees a device",
    ),
    Replacement(
        module=_TRAINING,
        symbol="setup_model_and_optimizer",
        reason="the original lets schedules free an output once it is sent; interleaved schedules do so while "
        "gloo still reads it",
    ),
    Replacement(
        module="megatron.training.initialize",
        symbol="_compile_dependencies",
        reason="the original needs CUDA's compiler and writes into the checkout; ours uses the helpers of the "
        "installed megatron-core",
    ),
    Replacement(
        module="megatron.training.arguments",
        symbol="get_device_arch_version",
        reason="the original asks a device for its architecture",
    ),
)


def replaced_in(version: str) -> list[Replacement]:
    """Return the rows that a checkout of that version has."""
    return [replacement for replacement in REPLACEMENTS if replacement.is_in(version)]


def find(replacement: Replacement) -> Any:
    """Return what a replacement takes the place of.

    Raises:
        UnsupportedFeatureError: it is not there; the message names it.
    """
    assert replacement.module != SCRIPT
    try:
        module = importlib.import_module(replacement.module)
        if hasattr(module, replacement.symbol):
            return getattr(module, replacement.symbol)
        missing = replacement.where
    except ModuleNotFoundError as error:
        if error.name is None or not replacement.module.startswith(error.name):
            raise  # a package that Megatron-LM itself needs
        missing = f"the module {replacement.module}"
    raise UnsupportedFeatureError(
        f"this Megatron-LM checkout has no {missing}, which is replaced ({replacement.reason}): use "
        "an unchanged checkout of a supported version"
    )
