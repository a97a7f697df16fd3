"""Replaces what the table of `replacements` says; see there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.flags.linear_attention import pattern_of
from megatron.dynamic_cp.repairs import triton_imports
from megatron.integrations.lm_adaptor import flags
from megatron.integrations.lm_adaptor.checkout import (
    SUPPORTED_VERSIONS,
    WITHOUT_TAG,
    Checkout,
    explain_missing_package,
    put_first,
)
from megatron.integrations.lm_adaptor.replacements import SCRIPT, find, replaced_in
from megatron.trainer.ending.exits import global_rank

logger = logging.getLogger(__name__)

_active: _Adaptor | None = None


def activate(checkout: Checkout) -> None:
    """Replace what the table says in the checkout's modules, which are imported; a second call does nothing.

    Raises:
        DynamicCPError: megatron-core came from elsewhere, or a symbol or a package is missing.
    """
    global _active
    if _active is not None:
        return
    put_first(checkout.root)
    triton_imports.install()
    if not checkout.takes_schedulers:
        if checkout.version in WITHOUT_TAG and global_rank() == 0:
            logger.warning(
                "dynamic CP: many commits of Megatron-LM say that they are %s; tried was %s",
                checkout.version,
                SUPPORTED_VERSIONS[checkout.version],
            )
        try:
            _active = _Adaptor(checkout.version)
        except ModuleNotFoundError as error:
            explain_missing_package(error)
            raise
        _active.install()
    else:
        from megatron.integrations.lm_adaptor.scheduler import check_device, register_chosen, take_choice

        sys.argv[1:], ours = take_choice(sys.argv[1:])
        if ours.is_chosen:
            check_device()
        register_chosen(ours)


@contextlib.contextmanager
def _checkpoint_phase(name: str) -> Iterator[None]:
    """As `phase.during`; torch's CheckpointException, which is no Exception, becomes a RuntimeError."""
    from torch.distributed.checkpoint.api import CheckpointException

    with phase.during(name):
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(str(error)) from error


class _Adaptor:
    """The replaced functions and what they share.

    Args:
        version: of the checkout.
    """

    def __init__(self, version: str) -> None:
        self._replaced = replaced_in(version)
        self._original = {r.where: find(r) for r in self._replaced if r.module != SCRIPT}
        self._on_cpu = False
        self._is_logging = False
        self._elapsed_s = 0.0
        self._forward_step: Any = None
        self._process_non_loss_data: Any = None
        self._loaders: list[Any] = []
        self._asked: Any = None
        self._planned: Any = None
        self._session: Any = None
        self._samples: Any = None
        self._varlen: Any = None
        self._get_args: Callable[[], Any] = importlib.import_module("megatron.training.global_vars").get_args

    def install(self) -> None:
        """Put a function, or class, of ours in each place of the table."""
        for replacement in self._replaced:
            if replacement.module == SCRIPT:
                continue
            original = self._original[replacement.where]
            ours = getattr(self, f"_{replacement.name}")
            module = importlib.import_module(replacement.module)
            if isinstance(original, type):
                setattr(module, replacement.symbol, ours(original))
            else:
                setattr(module, replacement.symbol, functools.wraps(original)(functools.partial(ours, original)))
        # The package's name for it, which scripts import, is a copy of the module's.
        pretrain = importlib.import_module("megatron.training").__dict__["pretrain"]
        importlib.import_module("megatron.training.training").__dict__["pretrain"] = pretrain

    @property
    def _is_on(self) -> bool:
        return self._asked is not None

    def _GPTModel(self, _original: type) -> type:  # named after what it replaces
        from megatron.integrations.lm_adaptor.model import DynamicCPGPTModel

        return DynamicCPGPTModel

    def _HybridModel(self, original: Any) -> type:  # named after what it replaces
        adaptor = self

        class HybridModel(original):  # type: ignore[misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                if not adaptor._is_on:
                    return super().__new__(cls)
                from megatron.integrations.lm_adaptor.model import DynamicCPHybridModel

                return DynamicCPHybridModel(*args, **kwargs)

        return HybridModel

    def _gpt_to_hybrid_load(self, original: Any, args: Any, checkpoint_args: Any, model: Any) -> Any:
        if not (self._is_on and pattern_of(args)):
            return original(args, checkpoint_args, model)
        if not pattern_of(checkpoint_args):
            raise UnsupportedFeatureError(
                "the checkpoint is of a model without --hybrid-layer-pattern, and with --dynamic-cp its layers are not "
                "taken apart: load and save it once without --dynamic-cp"
            )
        return None, False

    def _variant_spec(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self._is_on else original(*args, **kwargs)  # GPTModel makes its own

    def _SFTTokenizer(self, original: Any) -> type:  # named after what it replaces
        class SFTTokenizer(original):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                chats = self._tokenizer
                chats.apply_chat_template = functools.partial(chats.apply_chat_template, return_dict=False)

        return SFTTokenizer

    def _pretrain(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._forward_step = given["forward_step_func"]
        self._process_non_loss_data = given.get("process_non_loss_data_func")
        self._prepare_script()
        try:
            return original(*args, **kwargs)
        finally:
            if self._session is not None:
                self._session.close()
            self._end_workers()

    def _end_workers(self) -> None:
        if self._loaders:
            from megatron.integrations.lm_adaptor.data import end_workers

            for loader in self._loaders:
                end_workers(loader)

    def _add_megatron_arguments(self, original: Any, parser: Any) -> Any:
        return flags.accept_auto(original(parser))

    def _parse_args(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        if given.arguments.get("ignore_unknown_args"):  # a first look at the flags of something else
            return original(*args, **kwargs)
        theirs = given.arguments.get("extra_args_provider")

        def extra_args_provider(parser: Any) -> Any:
            return flags.add_flags(parser if theirs is None else theirs(parser))

        given.arguments["extra_args_provider"] = extra_args_provider
        parsed = original(*given.args, **given.kwargs)
        import torch

        from megatron.trainer.setup.initialize import choose_backend

        requested = "gloo" if parsed.distributed_backend == "gloo" else None
        built_for_device = torch.version.cuda is not None or torch.version.hip is not None
        self._on_cpu = (
            choose_backend(requested, num_devices=torch.cuda.device_count(), built_for_device=built_for_device)
            == "gloo"
        )
        if self._on_cpu:
            from megatron.integrations.lm_adaptor import cpu

            flags.refuse_on_cpu(parsed)
            parsed.distributed_backend = "gloo"
            cpu.enable(parsed.distributed_timeout_minutes)
        flags.refuse_without_effect(parsed)
        if parsed.dynamic_cp:
            self._asked = flags.translate(parsed)
            if parsed.rank == 0:
                for level, line in flags.overridden(self._asked, sys.argv[1:]):
                    logger.log(level, "dynamic CP: %s", line)
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron-LM asks of static CP sizes above 1
            self._prepare_script()
        return parsed

    def _prepare_script(self) -> None:
        """Check and change the script, once both its flags and its functions are known."""
        if self._is_on and self._forward_step is not None:
            self._check_script()
            self._replace_in_script()

    def _check_script(self) -> None:
        if self._process_non_loss_data is not None:
            raise UnsupportedFeatureError(
                "the script gives pretrain() a process_non_loss_data_func, for which the last rank runs a schedule of "
                "its own, and a global batch is planned by all ranks: leave it out"
            )

    def _replace_in_script(self) -> None:
        """Exchange get_batch, and what belongs to it, in the script that defines the forward step."""
        from megatron.integrations.lm_adaptor import script

        namespace = getattr(self._forward_step, "__globals__", {})
        for replacement in self._replaced:
            if replacement.module != SCRIPT:
                continue
            if replacement.symbol not in namespace or replacement.symbol not in self._forward_step.__code__.co_names:
                raise UnsupportedFeatureError(
                    f"the forward step of the script ({self._forward_step}) does not call a {replacement.symbol} of "
                    "its own module, which is replaced because it builds batches of one length: use pretrain_gpt.py's "
                    "form"
                )
            namespace[replacement.symbol] = getattr(script, replacement.name)

    def _validate_args(self, original: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        with flags.any_evaluation_batch(args) if self._is_on else contextlib.nullcontext():
            validated = original(args, *more, **kwargs)
        if self._is_on:
            flags.refuse_loaded(args)
            # 0.16.1 needs it for pipeline stages only; without them no lengths are exchanged.
            args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
            self._planned = flags.planned(self._asked, args)
            if args.ddp_bucket_size is None and args.ddp_num_buckets is None:
                from dynamic_cp.pricing.reduction import ddp_bucket_size

                args.ddp_bucket_size = ddp_bucket_size(args.data_parallel_size, self._asked.context_parallel_size)
        return validated

    def _init_num_microbatches_calculator(self, original: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_on:
            original(*args, **kwargs)
            return
        from megatron.integrations.lm_adaptor.counts import Samples

        settings = self._get_args()
        calculators = importlib.import_module("megatron.core.num_microbatches_calculator")
        self._samples = Samples(settings.global_batch_size, settings.data_parallel_size)
        calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR = self._samples

    def _initialize_megatron(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # Whether these are CPU ranks is known once the flags were read, inside; where a device is, it is asked for.
        import torch

        result = original(*args, **kwargs, allow_no_cuda=not torch.cuda.is_available())
        if self._is_on:
            from megatron.dynamic_cp.repairs import patches
            from megatron.integrations.lm_adaptor.model import DynamicCPGPTModel
            from megatron.integrations.lm_adaptor.session import Session

            patches.repair_optimizer_checkpoint()
            DynamicCPGPTModel.enabled = True
            self._session = Session(self._get_args(), self._planned)
            DynamicCPGPTModel.transformer_impl = self._session.runtime.layers.impl
            DynamicCPGPTModel.window_sink_tokens = self._get_args().window_sink_tokens
            DynamicCPGPTModel.loss_chunk_tokens = self._session.runtime.settings.loss_chunk_tokens
        return result

    def _set_jit_fusion_options(self, original: Any, **kwargs: Any) -> None:
        if self._on_cpu:
            return
        args = self._get_args()
        if not self._is_on:
            original(**kwargs)
            return
        seq_length, args.seq_length = args.seq_length, self._session.runtime.options.max_tokens_per_rank
        try:
            original(**kwargs)
        finally:
            args.seq_length = seq_length

    def _build_train_valid_test_datasets(self, original: Any, provider: Any, num_samples: Any = None) -> Any:
        args = self._get_args()
        if not (self._is_on and args.use_varlen_dataset):
            return original(provider, num_samples)
        training = importlib.import_module("megatron.training.training")
        return self._varlen.data_sets(args, num_samples or training.get_train_valid_test_num_samples())

    def _build_pretraining_data_loader(self, original: Any, dataset: Any, consumed_samples: int) -> Any:
        args = self._get_args()
        if not self._is_on or dataset is None or args.dataloader_type == "external":
            loader = original(dataset, consumed_samples)
            if self._on_cpu:
                from megatron.integrations.lm_adaptor.cpu import keep_random_states

                keep_random_states(loader)
            return loader
        from megatron.integrations.lm_adaptor.data import LaneSampler, build_loader, ignoring

        sampler = LaneSampler(
            num_samples=len(dataset),
            consumed_samples=consumed_samples,
            global_batch_size=args.global_batch_size,
            lane=self._session.runtime.groups.lane,
            num_lanes=self._session.runtime.groups.num_lanes,
        )
        outlive = ignoring(args.exit_signal) if args.exit_signal_handler else None
        loader = build_loader(dataset, sampler, num_workers=args.num_workers, worker_init=outlive)
        self._loaders.append(loader)
        return loader

    def _build_train_valid_test_data_iterators(self, original: Any, provider: Any) -> Any:
        if not self._is_on:
            return original(provider)
        from megatron.integrations.lm_adaptor.data import LaneIterator
        from megatron.integrations.lm_adaptor.session import TEST, TRAIN, VALIDATION

        if self._get_args().use_varlen_dataset and self._varlen is None:
            from megatron.dynamic_cp.agreement.verify import collective_device
            from megatron.integrations.lm_adaptor import varlen

            self._varlen = varlen.build_on_all_ranks(self._get_args(), collective_device())
        iterators = original(provider)
        return tuple(
            LaneIterator(name, items) for name, items in zip((TRAIN, VALIDATION, TEST), iterators, strict=True)
        )

    def _get_forward_backward_func(self, original: Any, **kwargs: Any) -> Any:
        return self._session.run_step if self._is_on else original(**kwargs)

    def _load_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with _checkpoint_phase("loading the checkpoint"):
            return original(*args, **kwargs)

    def _save_checkpoint(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        if not getattr(self._get_args(), "use_persistent_ckpt_worker", False):  # that worker was given its queue
            from megatron.trainer.checkpoints.writer_process import expect_results

            expect_results()
        with _checkpoint_phase(f"iteration {iteration}, saving"):
            original(iteration, *args, **kwargs)

    def _maybe_finalize_async_save(self, original: Any, blocking: bool = False, **kwargs: Any) -> None:
        name = "waiting for the files of the last checkpoint" if blocking else "naming the previous checkpoint"
        with _checkpoint_phase(name):
            original(blocking=blocking, **kwargs)

    def _evaluate_and_print_results(self, original: Any, *args: Any, **kwargs: Any) -> None:
        iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
        with phase.during(f"evaluation after iteration {iteration}"):
            original(*args, **kwargs)

    def _train_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        phase.enter(f"iteration {self._get_args().curr_iteration + 1}")
        if not self._is_on:
            return original(*args, **kwargs)
        started_s = time.perf_counter()
        with self._samples.counted(self._get_args()):
            outcome = original(*args, **kwargs)
        self._elapsed_s = time.perf_counter() - started_s
        # The loop now adds the product, which is rounded up.
        self._get_args().consumed_train_samples -= self._samples.overcounted
        return outcome

    def _training_log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on:
            return original(*args, **kwargs)
        settings = self._get_args()
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        self._is_logging = True
        try:
            with self._samples.counted(settings):
                self._session.show_routers(self._samples.num_micro_batches)
                outcome = original(*args, **kwargs)
        finally:
            self._is_logging = False
        record = self._session.end_step(
            iteration,
            losses=given["loss_dict"],
            learning_rate=given["learning_rate"],
            grad_norm=given["grad_norm"],
            elapsed_s=self._elapsed_s,
        )
        if iteration % settings.log_interval == 0:
            importlib.import_module("megatron.training.utils").print_rank_last(self._session.describe_step(record))
            self._session.flops.start_interval()
        if iteration % settings.tensorboard_log_interval == 0:
            importlib.import_module("megatron.integrations.lm_adaptor.step_log").write_scalars(record, iteration)
        return outcome

    def _get_rng_state(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        states = original(*args, **kwargs)
        if self._is_on and self._get_args().hidden_dropout > 0:
            from megatron.core.parallel_state import get_data_parallel_group

            from megatron.integrations.lm_adaptor.random_states import add_lanes

            add_lanes(states, get_data_parallel_group())
        return states

    def _load_base_checkpoint(
        self, original: Any, folder: Any, args: Any, rank0: bool = False, *more: Any, **kwargs: Any
    ) -> Any:
        found = original(folder, args, rank0, *more, **kwargs)
        state, _, is_release, _ = found
        if self._is_on and state is not None and not (rank0 or is_release or args.finetune):
            self._session.resume(state)
        return found

    def _num_floating_point_operations(self, original: Any, *args: Any, **kwargs: Any) -> float:
        if not self._is_on:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        # The loop sums up steps, the log divides by the mean time of its interval.
        return self._session.flops.mean if self._is_logging else self._session.flops.latest

    def _report_theoretical_memory(self, original: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_on:
            original(*args, **kwargs)

    def _initialize_distributed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._told_of_one_device(original)(*args, **kwargs)

    def _set_random_seed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._told_of_one_device(original)(*args, **kwargs)

    def _told_of_one_device(self, original: Any) -> Any:
        if not self._on_cpu:
            return original
        from megatron.integrations.lm_adaptor.cpu import with_one_device

        return with_one_device(original)

    def _setup_model_and_optimizer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if self._on_cpu:
            from megatron.core.utils import get_model_config

            for chunk in made[0]:
                get_model_config(chunk).deallocate_pipeline_outputs = False
        return made

    def _compile_dependencies(self, original: Any) -> None:
        if not self._on_cpu:
            original()
            return
        from megatron.integrations.lm_adaptor.cpu import load_dataset_helpers

        load_dataset_helpers()

    def _get_device_arch_version(self, original: Any) -> Any:
        return 0 if self._on_cpu else original()
