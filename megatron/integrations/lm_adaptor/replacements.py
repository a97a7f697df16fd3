"""The table of what is replaced in a checkout, and where; the docstrings in `hooks` say why.

If a symbol is missing, the checkout was changed: it is refused before anything is built, and the symbol is named.
Without --dynamic-cp every replaced function calls what it replaced.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs import triton_imports
from megatron.dynamic_cp.repairs.releases import Difference
from megatron.integrations.lm_adaptor import checkout, hooks
from megatron.integrations.lm_adaptor.checkout import SUPPORTED_VERSIONS, WITHOUT_TAG, Checkout
from megatron.trainer.ending.exits import global_rank

logger = logging.getLogger(__name__)

_active: hooks.Adaptor | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """One symbol that is replaced, in a module or in "the script", which is the one that is run. `ours` takes its
    place, or returns the class that does. It is there in checkouts with `since` and without `until`; None: no bound."""

    module: str
    symbol: str
    ours: Callable[..., Any]
    since: Difference | None = None
    until: Difference | None = None

    @property
    def reason(self) -> str:
        """Why, in a sentence or two: the first paragraph of our function's docstring."""
        return str(self.ours.__doc__).split("\n\n")[0].replace("\n   ", "").rstrip(".")

    def is_in(self, version: str) -> bool:
        """Return whether a checkout of that version has it."""
        return (self.since is None or self.since.is_in(version)) and not (
            self.until is not None and self.until.is_in(version)
        )

    @property
    def where(self) -> str:
        """The symbol's full name."""
        return f"{self.module}.{self.symbol}" if self.module != SCRIPT else f"{self.symbol} of the script"


SCRIPT = "the script"
_ARGUMENTS = "megatron.training.arguments"
_CHECKPOINTING = "megatron.training.checkpointing"
_INITIALIZE = "megatron.training.initialize"
_TRAINING = "megatron.training.training"
_VARIANT_SPEC = "get_transformer_block_with_experimental_attention_variant_spec"


def _flag_function(symbol: str, ours: Callable[..., Any]) -> tuple[Replacement, Replacement]:
    """Return the rows of a function that is called from the script, and looked up elsewhere, since one release."""
    changed = checkout.FLAGS_BEFORE_PRETRAIN
    return Replacement(_INITIALIZE, symbol, ours, until=changed), Replacement(_ARGUMENTS, symbol, ours, since=changed)


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement("megatron.training", "pretrain", hooks.pretrain),
    *_flag_function("parse_args", hooks.parse_args),
    Replacement(_ARGUMENTS, "add_megatron_arguments", hooks.add_megatron_arguments),
    *_flag_function("validate_args", hooks.validate_args),
    Replacement(
        "megatron.training.global_vars", "init_num_microbatches_calculator", hooks.init_num_microbatches_calculator
    ),
    Replacement(_TRAINING, "initialize_megatron", hooks.initialize_megatron),
    Replacement(_TRAINING, "set_jit_fusion_options", hooks.set_jit_fusion_options),
    Replacement("megatron.core.models.gpt", "GPTModel", hooks.gpt_model),
    Replacement("megatron.training.models.gpt", "GPTModel", hooks.gpt_model, since=checkout.MODEL_FROM_CONFIG),
    Replacement(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs", _VARIANT_SPEC, hooks.variant_spec
    ),
    Replacement("megatron.training.models.gpt", _VARIANT_SPEC, hooks.variant_spec, since=checkout.MODEL_FROM_CONFIG),
    Replacement(
        "megatron.core.models.hybrid.hybrid_model",
        "HybridModel",
        hooks.hybrid_model,
        since=checkout.BATCH_OF_FIELDS,
        until=checkout.MODEL_FROM_CONFIG,
    ),
    Replacement("megatron.training.models.hybrid", "HybridModel", hooks.hybrid_model, since=checkout.MODEL_FROM_CONFIG),
    Replacement(
        _CHECKPOINTING, "_maybe_setup_gpt_to_hybrid_load", hooks.gpt_to_hybrid_load, since=checkout.MODEL_FROM_CONFIG
    ),
    Replacement(_TRAINING, "build_train_valid_test_datasets", hooks.build_train_valid_test_datasets),
    Replacement(_TRAINING, "build_pretraining_data_loader", hooks.build_pretraining_data_loader),
    Replacement(_TRAINING, "build_train_valid_test_data_iterators", hooks.build_train_valid_test_data_iterators),
    Replacement(
        "megatron.training.tokenizer.tokenizer", "SFTTokenizer", hooks.sft_tokenizer, until=checkout.TOKENIZERS_OF_CORE
    ),
    Replacement(
        "megatron.core.tokenizers.text.libraries",
        "SFTTokenizer",
        hooks.sft_tokenizer,
        since=checkout.TOKENIZERS_OF_CORE,
        until=checkout.TOKENIZER_TAKES_DICTS,
    ),
    Replacement(_TRAINING, "get_forward_backward_func", hooks.get_forward_backward_func),
    Replacement(_TRAINING, "train_step", hooks.train_step),
    Replacement(_TRAINING, "training_log", hooks.training_log),
    Replacement(_TRAINING, "evaluate_and_print_results", hooks.evaluate_and_print_results),
    Replacement(_TRAINING, "load_checkpoint", hooks.load_checkpoint),
    Replacement(_TRAINING, "save_checkpoint", hooks.save_checkpoint),
    Replacement(_TRAINING, "maybe_finalize_async_save", hooks.maybe_finalize_async_save),
    Replacement(_CHECKPOINTING, "get_rng_state", hooks.get_rng_state),
    Replacement(_CHECKPOINTING, "_load_base_checkpoint", hooks.load_base_checkpoint),
    Replacement(_TRAINING, "num_floating_point_operations", hooks.num_floating_point_operations),
    Replacement(_TRAINING, "report_theoretical_memory", hooks.report_theoretical_memory),
    Replacement(SCRIPT, "get_batch", hooks.get_batch, until=checkout.BATCH_OF_FIELDS),
    Replacement(SCRIPT, "get_batch", hooks.get_batch_of_fields, since=checkout.BATCH_OF_FIELDS),
    Replacement(SCRIPT, "PackedSeqParams", hooks.take_packed_seq_params, since=checkout.BATCH_OF_FIELDS),
    # These do what Megatron-LM does, except on CPU ranks.
    Replacement(_INITIALIZE, "_initialize_distributed", hooks.told_of_one_device),
    Replacement(_INITIALIZE, "_set_random_seed", hooks.told_of_one_device),
    Replacement(_TRAINING, "setup_model_and_optimizer", hooks.setup_model_and_optimizer),
    Replacement(_INITIALIZE, "_compile_dependencies", hooks.compile_dependencies),
    Replacement(_ARGUMENTS, "get_device_arch_version", hooks.get_device_arch_version),
)


def replaced_in(version: str) -> list[Replacement]:
    """Return the rows that a checkout of that version has."""
    return [replacement for replacement in REPLACEMENTS if replacement.is_in(version)]


def find(replacement: Replacement) -> Any:
    """Return the function or class that is replaced; raise UnsupportedFeatureError, naming it, if it is not there."""
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


def activate(found: Checkout) -> None:
    """Replace what the table says in the checkout's modules, which are imported; once. DynamicCPError if megatron-core
    came from elsewhere, or a symbol or a package is missing."""
    global _active
    if _active is not None:
        return
    checkout.put_first(found.root)
    triton_imports.install()
    if found.takes_schedulers:
        from megatron.integrations.lm_adaptor.scheduler import check_device, register_chosen, take_choice

        sys.argv[1:], ours = take_choice(sys.argv[1:])
        if ours.is_chosen:
            check_device()
        register_chosen(ours)
        return
    if found.version in WITHOUT_TAG and global_rank() == 0:
        logger.warning(
            "dynamic CP: many commits of Megatron-LM say that they are %s; tried was %s",
            found.version,
            SUPPORTED_VERSIONS[found.version],
        )
    rows = replaced_in(found.version)
    try:
        originals = {one: find(one) for one in rows if one.module != SCRIPT}
        get_args = importlib.import_module("megatron.training.global_vars").get_args
    except ModuleNotFoundError as error:
        checkout.explain_missing_package(error)
        raise
    _active = hooks.Adaptor(get_args=get_args, in_script={one.symbol: one.ours for one in rows if one.module == SCRIPT})
    _install(originals, _active)


def _install(originals: dict[Replacement, Any], adaptor: hooks.Adaptor) -> None:
    for replacement, original in originals.items():
        ours: Any = functools.partial(replacement.ours, adaptor, original)
        ours = ours() if isinstance(original, type) else functools.wraps(original)(ours)
        setattr(importlib.import_module(replacement.module), replacement.symbol, ours)
    # Scripts import the package's name `pretrain`, a copy of the module's.
    pretrain = importlib.import_module("megatron.training").__dict__["pretrain"]
    importlib.import_module("megatron.training.training").__dict__["pretrain"] = pretrain
