"""The functions and classes that replace Megatron-LM's, each with its reason; `replacements` has the table.

Each gets the `Adaptor`, what it replaces, and the arguments of that; those for the script get its arguments alone.
Without --dynamic-cp each calls what it replaced. megatron-core is imported only inside functions, because the
checkout's must come first on the path.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.flags.linear_attention import pattern_of
from megatron.integrations.lm_adaptor import flags

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
    from megatron.integrations.lm_adaptor.counts import Samples
    from megatron.integrations.lm_adaptor.session import Session
    from megatron.integrations.lm_adaptor.varlen import VarlenData

logger = logging.getLogger(__name__)

_NO_SEQUENCES = torch.zeros(1, 1, dtype=torch.int32)
_ANY_LENGTH = torch.zeros(1, dtype=torch.int32)


@dataclass(kw_only=True)
class Adaptor:
    """What the replaced functions of a process share.

    Attributes:
        in_script: symbol of the script -> what takes its place.
        forward_step, process_non_loss_data: functions that the script gives to pretrain().
        asked, planned: the flags as `flags.translate` returns them, None without --dynamic-cp; how they plan the run.
        loaders: DataLoaders whose workers end with the run.
        is_logging: Megatron-LM is making a log line.
    """

    get_args: Callable[[], argparse.Namespace]
    in_script: dict[str, Callable[..., Any]] = field(default_factory=dict)
    on_cpu: bool = False
    forward_step: Any = None
    process_non_loss_data: Any = None
    asked: argparse.Namespace | None = None
    planned: flags.Planned | Any = None
    session: Session | Any = None
    samples: Samples | Any = None
    varlen: VarlenData | Any = None
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    elapsed_s: float = 0.0
    is_logging: bool = False

    @property
    def is_on(self) -> bool:
        """Whether the run has --dynamic-cp."""
        return self.asked is not None

    def prepare_script(self) -> None:
        """Put our functions into the script that defines the forward step, once its flags and functions are known;
        refuse one that builds batches in another way than pretrain_gpt.py, or runs the last rank alone."""
        if not self.is_on or self.forward_step is None:
            return
        if self.process_non_loss_data is not None:
            raise UnsupportedFeatureError(
                "the script gives pretrain() a process_non_loss_data_func, for which the last rank runs a schedule of "
                "its own, and a global batch is planned by all ranks: leave it out"
            )
        namespace = getattr(self.forward_step, "__globals__", {})
        for symbol, ours in self.in_script.items():
            if symbol not in namespace or symbol not in self.forward_step.__code__.co_names:
                raise UnsupportedFeatureError(
                    f"the forward step of the script ({self.forward_step}) does not call a {symbol} of its own module, "
                    "which is replaced because it builds batches of one length: use pretrain_gpt.py's form"
                )
            namespace[symbol] = ours


# The command line, and the run as a whole.


def pretrain(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Exchange the script's get_batch before the run, and end the planner after it; scripts import this name."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    adaptor.forward_step = given["forward_step_func"]
    adaptor.process_non_loss_data = given.get("process_non_loss_data_func")
    adaptor.prepare_script()
    try:
        return original(*args, **kwargs)
    finally:
        if adaptor.session is not None:
            adaptor.session.close()
        for loader in adaptor.loaders:
            from megatron.integrations.lm_adaptor.data import end_workers

            end_workers(loader)


def add_megatron_arguments(_adaptor: Adaptor, original: Any, parser: Any) -> Any:
    """The original takes only numbers for --max-seqlen-per-dp-cp-rank; ours also auto, whoever reads the flags."""
    return flags.accept_auto(original(parser))


def parse_args(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the flags, refuse what is not supported, keep --context-parallel-size for the static plan and pass on 1."""
    given = inspect.signature(original).bind(*args, **kwargs)
    if given.arguments.get("ignore_unknown_args"):  # the flags are read for something else first
        return original(*args, **kwargs)
    theirs = given.arguments.get("extra_args_provider")

    def extra_args_provider(parser: Any) -> Any:
        return flags.add_flags(parser if theirs is None else theirs(parser))

    given.arguments["extra_args_provider"] = extra_args_provider
    parsed = original(*given.args, **given.kwargs)
    from megatron.trainer.setup.initialize import choose_backend

    backend = choose_backend(
        "gloo" if parsed.distributed_backend == "gloo" else None,
        num_devices=torch.cuda.device_count(),
        built_for_device=torch.version.cuda is not None or torch.version.hip is not None,
    )
    adaptor.on_cpu = backend == "gloo"
    if adaptor.on_cpu:
        from megatron.integrations.lm_adaptor import cpu

        flags.refuse_on_cpu(parsed)
        parsed.distributed_backend = "gloo"
        cpu.enable(parsed.distributed_timeout_minutes)
    flags.refuse_without_effect(parsed)
    if parsed.dynamic_cp:
        adaptor.asked = flags.translate(parsed)
        if parsed.rank == 0:
            for level, line in flags.overridden(adaptor.asked, sys.argv[1:]):
                logger.log(level, "dynamic CP: %s", line)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron-LM asks of static CP sizes above 1
        adaptor.prepare_script()
    return parsed


def validate_args(adaptor: Adaptor, original: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    """The original resets variable_seq_lengths; ours sets it and the DDP bucket size, and checks limits."""
    with flags.any_evaluation_batch(args) if adaptor.is_on else contextlib.nullcontext():
        validated = original(args, *more, **kwargs)
    if adaptor.asked is not None:
        flags.refuse_loaded(args)
        # 0.16.1 needs it for pipeline stages only; without them no lengths are exchanged.
        args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
        adaptor.planned = flags.planned(adaptor.asked, args)
        if args.ddp_bucket_size is None and args.ddp_num_buckets is None:
            from dynamic_cp.pricing.edges import ddp_bucket_size

            args.ddp_bucket_size = ddp_bucket_size(args.data_parallel_size, adaptor.asked.context_parallel_size)
    return validated


def init_num_microbatches_calculator(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> None:
    """The original asserts global batch % (micro-batch size x data-parallel size) == 0; in ours the plan decides."""
    if not adaptor.is_on:
        original(*args, **kwargs)
        return
    from megatron.integrations.lm_adaptor.counts import Samples

    settings = adaptor.get_args()
    calculators = importlib.import_module("megatron.core.num_microbatches_calculator")
    adaptor.samples = Samples(settings.global_batch_size, settings.data_parallel_size)
    calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR = adaptor.samples


def initialize_megatron(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Build and warm up the CP groups and start the planner once the model-parallel groups are there."""
    # The original reads the flags, which say whether these are CPU ranks; where there is a device, it is required.
    result = original(*args, **kwargs, allow_no_cuda=not torch.cuda.is_available())
    if adaptor.is_on:
        from megatron.dynamic_cp.repairs import patches
        from megatron.integrations.lm_adaptor.model import DynamicCPGPTModel
        from megatron.integrations.lm_adaptor.session import Session

        patches.repair_optimizer_checkpoint()
        DynamicCPGPTModel.enabled = True
        adaptor.session = Session(adaptor.get_args(), adaptor.planned)
        DynamicCPGPTModel.transformer_impl = adaptor.session.runtime.layers.impl
        DynamicCPGPTModel.window_sink_tokens = adaptor.get_args().window_sink_tokens
        DynamicCPGPTModel.loss_chunk_tokens = adaptor.session.runtime.settings.loss_chunk_tokens
    return result


def set_jit_fusion_options(adaptor: Adaptor, original: Any, **kwargs: Any) -> None:
    """The original warms up fused kernels with --seq-length / CP tokens: at CP 1, C times what a rank computes."""
    if adaptor.on_cpu:
        return
    args = adaptor.get_args()
    if not adaptor.is_on:
        original(**kwargs)
        return
    seq_length, args.seq_length = args.seq_length, adaptor.session.runtime.options.max_tokens_per_rank
    try:
        original(**kwargs)
    finally:
        args.seq_length = seq_length


# Models.


def gpt_model(_adaptor: Adaptor, _original: type) -> type:
    """Return a class whose layers' attention and RoPE use the group of the micro-batch."""
    from megatron.integrations.lm_adaptor.model import DynamicCPGPTModel

    return DynamicCPGPTModel


def hybrid_model(adaptor: Adaptor, original: Any) -> type:
    """Return a class whose layers' attention and RoPE use the group of the micro-batch."""

    class HybridModel(original):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if not adaptor.is_on:
                return super().__new__(cls)
            from megatron.integrations.lm_adaptor.model import DynamicCPHybridModel

            return DynamicCPHybridModel(*args, **kwargs)

    return HybridModel


def gpt_to_hybrid_load(adaptor: Adaptor, original: Any, args: Any, checkpoint_args: Any, model: Any) -> Any:
    """The original takes models of other classes than its own for models without a pattern."""
    if not (adaptor.is_on and pattern_of(args)):
        return original(args, checkpoint_args, model)
    if not pattern_of(checkpoint_args):
        raise UnsupportedFeatureError(
            "the checkpoint is of a model without --hybrid-layer-pattern, and with --dynamic-cp its layers are not "
            "taken apart: load and save it once without --dynamic-cp"
        )
    return None, False


def variant_spec(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The original asks for TransformerEngine's layers and for kernels of linear attention; ours has its own."""
    return None if adaptor.is_on else original(*args, **kwargs)


def setup_model_and_optimizer(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The original lets schedules free an output once it is sent; interleaved ones do so while gloo still reads it."""
    made = original(*args, **kwargs)
    if adaptor.on_cpu:
        from megatron.core.utils import get_model_config

        for chunk in made[0]:
            get_model_config(chunk).deallocate_pipeline_outputs = False
    return made


# Data.


def sft_tokenizer(_adaptor: Adaptor, original: Any) -> type:
    """The original takes what apply_chat_template returns for tokens; in transformers 5 that is a dict."""

    class SFTTokenizer(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            chats = self._tokenizer
            chats.apply_chat_template = functools.partial(chats.apply_chat_template, return_dict=False)

    return SFTTokenizer


def build_train_valid_test_datasets(adaptor: Adaptor, original: Any, provider: Any, num_samples: Any = None) -> Any:
    """Build samples of their own lengths with --use-varlen-dataset; otherwise the original runs."""
    args = adaptor.get_args()
    if not (adaptor.is_on and args.use_varlen_dataset):
        return original(provider, num_samples)
    training = importlib.import_module("megatron.training.training")
    return adaptor.varlen.data_sets(args, num_samples or training.get_train_valid_test_num_samples())


def build_pretraining_data_loader(adaptor: Adaptor, original: Any, dataset: Any, consumed_samples: int) -> Any:
    """Read samples one by one and uncollated, in global batches of any size, without trailing padding.

    On CPU ranks a loader does not draw its seed from the generator of dropout.
    """
    args = adaptor.get_args()
    if not adaptor.is_on or dataset is None or args.dataloader_type == "external":
        loader = original(dataset, consumed_samples)
        if adaptor.on_cpu:
            from megatron.integrations.lm_adaptor.cpu import keep_random_states

            keep_random_states(loader)
        return loader
    from megatron.integrations.lm_adaptor.data import LaneSampler, build_loader, ignore

    groups = adaptor.session.runtime.groups
    sampler = LaneSampler(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        global_batch_size=args.global_batch_size,
        lane=groups.lane,
        num_lanes=groups.num_lanes,
    )
    outlive = functools.partial(ignore, args.exit_signal) if args.exit_signal_handler else None
    loader = build_loader(dataset, sampler, num_workers=args.num_workers, worker_init=outlive)
    adaptor.loaders.append(loader)
    return loader


def build_train_valid_test_data_iterators(adaptor: Adaptor, original: Any, provider: Any) -> Any:
    """Name the iterators, and give one to ranks that read nothing, so that all ranks know which is meant."""
    if not adaptor.is_on:
        return original(provider)
    from megatron.integrations.lm_adaptor.data import LaneIterator
    from megatron.integrations.lm_adaptor.session import TEST, TRAIN, VALIDATION

    if adaptor.get_args().use_varlen_dataset and adaptor.varlen is None:
        from megatron.dynamic_cp.agreement.verify import collective_device
        from megatron.integrations.lm_adaptor import varlen

        adaptor.varlen = varlen.build_on_all_ranks(adaptor.get_args(), collective_device())
    iterators = original(provider)
    return tuple(LaneIterator(name, items) for name, items in zip((TRAIN, VALIDATION, TEST), iterators, strict=True))


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the next micro-batch in the order of Megatron-LM's get_batch of six values."""
    batch = next(data_iterator)
    return (
        batch["tokens"],
        batch["labels"],
        batch["loss_mask"],
        None,
        batch["position_ids"],
        batch["packed_seq_params"],
    )


def get_batch_of_fields(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the next micro-batch in the order of Megatron-LM's get_batch of ten fields.

    The forward step passes the packing fields on to PackedSeqParams only, so the field of the CP group carries the
    micro-batch's own parameters. A single boundary adds nothing to Megatron-LM's FLOPs, which are ours.
    """
    batch = next(data_iterator)
    return (
        None,  # attention_mask
        _NO_SEQUENCES,  # cu_seqlens
        None,  # cu_seqlens_padded
        batch["packed_seq_params"],  # hybrid_cp_group
        batch["labels"],
        None,  # local_cp_size
        batch["loss_mask"],
        _ANY_LENGTH,  # max_seqlen
        batch["position_ids"],
        batch["tokens"],
    )


def take_packed_seq_params(*, cp_group: DynamicPackedSeqParams, **_fields: Any) -> DynamicPackedSeqParams:
    """Return the micro-batch's parameters; takes the place of a class that would make others of the fields."""
    return cp_group


# Steps.


def get_forward_backward_func(adaptor: Adaptor, original: Any, **kwargs: Any) -> Any:
    """Draw, plan and re-route a global batch, then run the schedule with the plan's micro-batches."""
    return adaptor.session.run_step if adaptor.is_on else original(**kwargs)


def train_step(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Advance learning rate and consumed samples by the samples of the global batch; note the iteration for errors."""
    settings = adaptor.get_args()
    phase.enter(f"iteration {settings.curr_iteration + 1}")
    if not adaptor.is_on:
        return original(*args, **kwargs)
    started_s = time.perf_counter()
    with adaptor.samples.counted(settings):
        outcome = original(*args, **kwargs)
    adaptor.elapsed_s = time.perf_counter() - started_s
    # The loop now adds the product, which is rounded up.
    settings.consumed_train_samples -= adaptor.samples.overcounted
    return outcome


def training_log(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Print the samples of the global batch and a line about the plan, and end the step: dump, refinement."""
    if not adaptor.is_on:
        return original(*args, **kwargs)
    settings, session = adaptor.get_args(), adaptor.session
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    iteration = given["iteration"]
    adaptor.is_logging = True
    try:
        with adaptor.samples.counted(settings):
            session.show_routers(adaptor.samples.num_micro_batches)
            outcome = original(*args, **kwargs)
    finally:
        adaptor.is_logging = False
    record = session.end_step(
        iteration,
        losses=given["loss_dict"],
        learning_rate=given["learning_rate"],
        grad_norm=given["grad_norm"],
        elapsed_s=adaptor.elapsed_s,
    )
    counts = importlib.import_module("megatron.integrations.lm_adaptor.counts")
    if iteration % settings.log_interval == 0:
        importlib.import_module("megatron.training.utils").print_rank_last(counts.plan_line(record))
        session.flops.start_interval()
    if iteration % settings.tensorboard_log_interval == 0:
        counts.write_scalars(record, iteration)
    return outcome


def num_floating_point_operations(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> float:
    """Count the true lengths of the samples instead of --seq-length each."""
    if not adaptor.is_on:
        return original(*args, **kwargs)  # type: ignore[no-any-return]
    # The loop sums up steps, the log divides by the mean time of its interval.
    flops = adaptor.session.flops
    return flops.mean if adaptor.is_logging else flops.latest  # type: ignore[no-any-return]


def report_theoretical_memory(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> None:
    """The original's figure is for packs of --seq-length / CP tokens; here the token limit decides."""
    if not adaptor.is_on:
        original(*args, **kwargs)


def evaluate_and_print_results(_adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> None:
    """Note for errors that the run is evaluating."""
    iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
    with phase.during(f"evaluation after iteration {iteration}"):
        original(*args, **kwargs)


# Checkpoints.


@contextlib.contextmanager
def _checkpoint_phase(name: str) -> Iterator[None]:
    """As `phase.during`, but torch's CheckpointException, which is no Exception, becomes a RuntimeError."""
    from torch.distributed.checkpoint.api import CheckpointException

    with phase.during(name):
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(str(error)) from error


def load_checkpoint(_adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Note for errors that the run is loading."""
    with _checkpoint_phase("loading the checkpoint"):
        return original(*args, **kwargs)


def save_checkpoint(adaptor: Adaptor, original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
    """Note for errors that the run is saving, and at which iteration.

    The writer reports its results in a file in memory: the original's manager process outlives a rank that fails.
    """
    if not getattr(adaptor.get_args(), "use_persistent_ckpt_worker", False):  # that worker already has its queue
        from megatron.trainer.checkpoints.saving import expect_results

        expect_results()
    with _checkpoint_phase(f"iteration {iteration}, saving"):
        original(iteration, *args, **kwargs)


def maybe_finalize_async_save(_adaptor: Adaptor, original: Any, blocking: bool = False, **kwargs: Any) -> None:
    """Note for errors that the run is naming a checkpoint, or waiting for its files."""
    name = "waiting for the files of the last checkpoint" if blocking else "naming the previous checkpoint"
    with _checkpoint_phase(name):
        original(blocking=blocking, **kwargs)


def get_rng_state(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the random states of all lanes with --hidden-dropout: they differ because their shapes do."""
    states = original(*args, **kwargs)
    if adaptor.is_on and adaptor.get_args().hidden_dropout > 0:
        from megatron.core.parallel_state import get_data_parallel_group

        from megatron.integrations.lm_adaptor.session import add_lanes

        add_lanes(states, get_data_parallel_group())
    return states


def load_base_checkpoint(
    adaptor: Adaptor, original: Any, folder: Any, args: Any, rank0: bool = False, *more: Any, **kwargs: Any
) -> Any:
    """Take the random states of this lane, and what --dynamic-cp-refine found, from the saved arguments."""
    found = original(folder, args, rank0, *more, **kwargs)
    state, _, is_release, _ = found
    if adaptor.is_on and state is not None and not (rank0 or is_release or args.finetune):
        adaptor.session.resume(state)
    return found


# CPU ranks.


def told_of_one_device(adaptor: Adaptor, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The original builds model-parallel groups and seeds their generators only where it sees a device."""
    if not adaptor.on_cpu:
        return original(*args, **kwargs)
    from megatron.integrations.lm_adaptor.cpu import with_one_device

    return with_one_device(original)(*args, **kwargs)


def compile_dependencies(adaptor: Adaptor, original: Any) -> None:
    """The original needs CUDA's compiler and writes into the checkout; ours uses the installed helpers."""
    if not adaptor.on_cpu:
        original()
        return
    from megatron.integrations.lm_adaptor.cpu import load_dataset_helpers

    load_dataset_helpers()


def get_device_arch_version(adaptor: Adaptor, original: Any) -> Any:
    """The original asks a device for its architecture."""
    return 0 if adaptor.on_cpu else original()
