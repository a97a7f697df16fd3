"""One training step of the real runtime on many ranks, compared token by token and gradient by gradient."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import activations, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions import fused_bias_geglu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch.distributed import distributed_c10d

from dynamic_cp.decide.sent import sent_by_plan
from dynamic_cp.models import catalog
from dynamic_cp.models.flags import TransformerImpl
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import (
    STATE_EXCHANGES,
    Bucket,
    CpCommType,
    MicroBatch,
    ModelShape,
    Plan,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    StateExchange,
    Topology,
)
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper, StepData
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.flags import linear_attention
from megatron.dynamic_cp.flags.attention import set_sinks, windows_of
from megatron.dynamic_cp.flags.experts import experts_of
from megatron.dynamic_cp.flags.features import WIDTHS, has_latents
from megatron.dynamic_cp.flags.fp8 import token_alignment
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups, lane_blocks
from megatron.dynamic_cp.model.chunked_head import set_loss_chunk
from megatron.dynamic_cp.model.gpt import DynamicCPGPTModel, mtp_block_spec
from megatron.dynamic_cp.model.layer_parts import quick_gelu, squared_relu
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.self_attention import use_one_rotary_table
from megatron.dynamic_cp.plans.plan_source import FixedPlan
from megatron.dynamic_cp.step.schedule import forward_step
from tests.distributed import reference, token_by_token
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.placements import random_placement
from tests.sent_bytes import placed_bytes, sent_by

TOLERANCE = 5e-6

T = TypeVar("T")

# Owner of a token that is no sample's, yet has a loss.
PADDING = -1


def samples_of(*seqlens: int) -> tuple[Sample, ...]:
    return tuple(Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(seqlens))


BATCHES = {
    # One long, a few medium, many short, some of a single token: 2066 tokens.
    "long_tail": samples_of(37, 701, 1, 16, 255, 24, 9, 128, 30, 1, 12, 7, 333, 64, 20, 18, 101, 5, 77, 48, 179),
    # Fewer samples than lanes.
    "few": samples_of(1100, 903),
    # 2000 tokens in packs of many tiny sequences.
    "tiny": samples_of(*[1 + index % 11 for index in range(336)]),
    # Where one lane cuts samples in two halves of whole 16s: one of a single token, and some of none.
    "cut": samples_of(1981, 1, 2, 17),
}


@dataclass(frozen=True)
class Layout:
    """How a parity case is spread over ranks."""

    lanes: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sp: bool = False
    variant: str = "llama"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    exchange: str = "p2p"  # of every bucket that can have it, if it is not placed; "mixed": all of them
    inner_sizes: tuple[int, ...] = (2, 4)
    states: StateExchange | Literal["mixed"] = (
        "mixed"  # how buckets of several lanes share linear attention: both ways in turn, or one of them
    )
    transformer_impl: TransformerImpl = "local"
    ranks_per_node: int = 8
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Several of a stage where there are stages; a third layer without them would show what the second does."""
        if reference.VARIANTS[self.variant].pattern:
            return len(reference.VARIANTS[self.variant].pattern)
        return self.config.get("num_layers", 4 if self.pp > 1 else 2)

    @property
    def topology(self) -> Topology:
        config = SimpleNamespace(sequence_parallel=self.sp, tensor_model_parallel_size=self.tp, **self.config)
        return Topology(
            num_lanes=self.lanes, tp_size=self.tp, pp_size=self.pp, vp_size=self.vpp, sequence_parallel=self.sp,
            ranks_per_node=self.ranks_per_node, token_alignment=token_alignment(config),
        )  # fmt: skip

    @property
    def model(self) -> ModelShape:
        config = reference.transformer_config(reference.VARIANTS[self.variant])
        windows = windows_of(SimpleNamespace(**{"num_layers": self.num_layers, **self.config}))
        return ModelShape(
            num_layers=self.num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=config.num_attention_heads, num_query_groups=config.num_query_groups,
            kv_channels=config.kv_channels, vocab_size=reference.VOCAB_SIZE,
            gated_linear_unit=config.gated_linear_unit, attention_output_gate=config.attention_output_gate,
            window_tokens=windows.tokens, window_attn_skip_freq=windows.skip_freq,
            window_sink_tokens=windows.sink_tokens, mtp_num_layers=config.mtp_num_layers or 0,
            **({name: getattr(config, name) or 0 for name in WIDTHS} if has_latents(config) else {}),
            **linear_attention.shape_of(config),
            experts=experts_of(config) if linear_attention.pattern_of(config) else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Outcome on one rank: largest relative errors, what was looked at, and what attention sent."""

    loss_error: float
    gradient_errors: dict[str, float]
    tokens_seen: Counter[tuple[int, int]]
    bytes_sent: int

    @property
    def gradient_error(self) -> float:
        return max(self.gradient_errors.values())


def fixed_plan(plan: Plan, groups: DynamicCPGroups) -> FixedPlan:
    """Return the plan source of a test: hands out one plan."""
    busy = (1.0,) * plan.topology.num_lanes
    return FixedPlan(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=busy, reason="test"), groups.lane)


def mixed_plan(samples: tuple[Sample, ...], layout: Layout, seed: int = 0, num_rows: int = 4) -> Plan:
    """Return a random legal plan of many CP sizes, with empty places, packs of several and the largest group."""
    random = np.random.default_rng(seed)
    topology = layout.topology
    num_micro_batches = num_rows if layout.vpp == 1 else num_rows // 2 * topology.pp_size
    cells: list[list[tuple[int, int]]] = []
    for index in range(num_micro_batches):
        lane, row = 0, []
        while lane < topology.num_lanes:
            sizes = [size for first, size in lane_blocks(lane, topology.num_lanes) if first == lane]
            size = sizes[-1] if index == 0 else int(random.choice(sizes))
            row.append((lane, size))
            lane += size
        cells.append(row)
    cells[-1] = [(lane, 1) for lane in range(topology.num_lanes)]
    places = [(index, cell) for index, row in enumerate(cells[:-1]) for cell in row] + [(num_micro_batches - 1, (0, 1))]
    contents: dict[tuple[int, tuple[int, int]], list[Sample]] = {place: [] for place in places}
    longest_first = sorted(samples, key=lambda s: -s.seqlen)
    for sample in longest_first:
        # The longest goes to the largest group; the others anywhere, so packs of one and of many samples arise.
        place = places[0] if sample is longest_first[0] else places[int(random.integers(len(places)))]
        contents[place].append(sample)

    def bucket(index: int, cell: tuple[int, int]) -> list[Bucket]:
        held = contents.get((index, cell), [])
        if not held:
            return [Bucket(first_lane=lane) for lane in range(cell[0], cell[0] + cell[1])]
        exchange, inner = exchange_of(layout, cell[1], used)
        used[exchange] += 1
        return [
            Bucket(
                first_lane=cell[0], cp_size=cell[1], samples=tuple(held), cp_comm_type=exchange, inner_cp_size=inner,
                state_exchange=state_exchange(layout, cell[1], index),
            )
        ]  # fmt: skip

    used: Counter[str] = Counter()
    micro_batches = tuple(
        MicroBatch(buckets=tuple(b for cell in row for b in bucket(index, cell))) for index, row in enumerate(cells)
    )
    return Plan(topology=topology, max_tokens_per_rank=1 << 20, micro_batches=micro_batches, policy="test")


def placed_plan(samples: tuple[Sample, ...], layout: Layout) -> Plan:
    """Return `mixed_plan` with two micro-batches placed at random; four lanes exchange heads by twos in the first."""
    plan, random = mixed_plan(samples, layout), np.random.default_rng(layout.lanes)

    def placed(first_lane: int, buckets: Iterable[Bucket], inner: int = 1) -> Bucket:
        held = tuple(sample for bucket in buckets for sample in bucket.samples)
        num_lanes = layout.lanes - first_lane
        return Bucket(
            first_lane=first_lane, cp_size=num_lanes, cp_comm_type="blocks", inner_cp_size=inner, samples=held,
            placement=random_placement(random, held, num_lanes // inner, 4, *layout.model.layer_masks),
            state_exchange="heads" if layout.model.linear_attention is None else "states",
        )  # fmt: skip

    first, second, third, *others = plan.micro_batches
    shares_heads = layout.lanes == 4 and layout.topology.lanes_per_node % 2 == 0
    whole = MicroBatch(buckets=(placed(0, first.buckets, 2 if shares_heads else 1),))
    alone = [bucket for bucket in third.buckets if bucket.lanes == range(1)] if layout.lanes > 2 else []
    behind = placed(len(alone), [bucket for bucket in third.buckets if bucket not in alone])
    return replace(plan, micro_batches=(whole, second, MicroBatch(buckets=(*alone, behind)), *others))


NO_HOST = catalog.load_hardware("h100", ["host_forward=0s", "host_backward=0s", "host_ring_step=0s", "host_message=0s"])
"""By a host of these tiny layers all placements take as long; by the GPU alone they differ."""


def planned_blocks(samples: tuple[Sample, ...], layout: Layout, max_tokens_per_rank: int) -> Plan:
    options = PlanOptions(max_tokens_per_rank=max_tokens_per_rank, bytes_per_element=4, cp_comm_types=("blocks",))
    return plan_global_batch(
        samples, topology=layout.topology, model=layout.model, hardware=NO_HOST, options=options
    ).plan


def exchange_of(layout: Layout, cp_size: int, used: Counter[str]) -> tuple[CpCommType, int]:
    """Return (exchange, inner size) of a bucket: the layout's where it can be, else a ring; mixed: the least used."""
    heads = reference.transformer_config(reference.VARIANTS[layout.variant]).num_attention_heads // layout.tp
    choices: list[tuple[CpCommType, int]] = [
        ("a2a+p2p", inner) for inner in layout.inner_sizes if inner < cp_size and heads % inner == 0
    ]
    if heads % cp_size == 0:
        choices.append(("a2a", cp_size))
    choices += [("p2p", 1), ("all_gather", 1)]
    choices += [("latent", 1)] if layout.model.has_latents else []
    if layout.exchange != "mixed":
        choices = [choice for choice in choices if choice[0] == layout.exchange] or [("p2p", 1)]
    return min(choices, key=lambda choice: used[choice[0]])


def state_exchange(layout: Layout, cp_size: int, index: int) -> StateExchange:
    """Return how lanes of a bucket of micro-batch `index` share linear attention."""
    if layout.model.linear_attention is None or cp_size == 1:
        return "heads"
    return STATE_EXCHANGES[index % 2] if layout.states == "mixed" else layout.states


def exchanges_of(plan: Plan) -> set[tuple[str, int]]:
    return {(bucket.cp_comm_type, bucket.inner_cp_size) for bucket in plan.buckets if bucket.cp_size > 1}


def planned_bytes(plan: Plan, layout: Layout, lane: int, stage: int = 0) -> float:
    """Return what the planner says that a rank of `lane` sends for attention in the step."""
    is_repeated = "core_attn" in layout.config.get("recompute_modules", ["core_attn"])
    chunk_layers = layout.num_layers / layout.pp / layout.vpp
    is_block = layout.config.get("recompute_method") == "block"
    share = layout.config["recompute_num_layers"] / chunk_layers if is_block else 1.0
    forwards = 1 + share * ("recompute_granularity" in layout.config and is_repeated)
    num_modules = layout.model.mtp_num_layers if stage == layout.pp - 1 else 0
    total = 0.0
    for micro_batch in plan.micro_batches:
        bucket = micro_batch.bucket_of_lane(lane)
        if bucket.placement is not None:
            forward, backward = placed_bytes(bucket, layout.model, plan.topology, 4)[:, lane - bucket.first_lane]
            total += forwards * forward + backward
            continue
        tokens = rank_tokens(bucket, plan.topology.rank_token_multiple)
        sent = sent_by(bucket, tokens, layout.model, layout.tp, 4)
        total += (layout.num_layers / layout.pp + num_modules) * (forwards * sent.forward + sent.backward)
    return total


def static_plan(samples: tuple[Sample, ...], layout: Layout, cp_size: int) -> Plan:
    """Return a plan whose buckets all have `cp_size`, dealt out in turn."""
    topology = layout.topology
    firsts = range(0, topology.num_lanes, cp_size)
    held: dict[int, list[Sample]] = {first: [] for first in firsts}
    for index, sample in enumerate(samples):
        held[firsts[index % len(firsts)]].append(sample)
    exchange, inner = exchange_of(layout, cp_size, Counter())
    buckets = tuple(
        Bucket(
            first_lane=first, cp_size=cp_size, samples=tuple(held[first]), cp_comm_type=exchange, inner_cp_size=inner
        )
        for first in firsts
    )
    rows = (MicroBatch(buckets=buckets),)
    return Plan(topology=topology, max_tokens_per_rank=1 << 20, micro_batches=rows, policy="static")


def build_chunks(layout: Layout, variant: reference.ModelVariant, **overrides: Any) -> tuple[Any, list[Any]]:
    """Return (config, model chunks of this rank); `overrides` are the config's."""
    given = {"num_layers": layout.num_layers, **layout.config, **overrides}
    sink_tokens, chunk_tokens = given.pop("window_sink_tokens", 0), given.pop("loss_chunk_tokens", 0)
    sends_bf16 = given.get("bf16", False) and not given.get("fp32_residual_connection", False)
    own = {fused_bias_geglu.quick_gelu: quick_gelu, activations.squared_relu: squared_relu}
    if variant.config.get("activation_func") in own:
        given["activation_func"] = own[variant.config["activation_func"]]
    config = reference.transformer_config(
        variant, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None, sequence_parallel=layout.sp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1,
        pipeline_dtype=torch.bfloat16 if sends_bf16 else torch.float32, variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall", overlap_p2p_comm=layout.vpp > 1, batch_p2p_comm=layout.vpp == 1,
        **given,
    )  # fmt: skip
    set_sinks(config, sink_tokens)
    set_loss_chunk(config, chunk_tokens)
    chunks = []
    for index in range(layout.vpp):
        vp_stage = index if layout.vpp > 1 else None
        chunks.append(
            reference.gpt_model(
                config,
                variant,
                gpt_block_spec(config, vp_stage, transformer_impl=layout.transformer_impl),
                DynamicCPGPTModel,
                mtp_block_spec=mtp_block_spec(config, vp_stage, transformer_impl=layout.transformer_impl),
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
            )
        )
        use_one_rotary_table(chunks[-1])
    return config, chunks


def reference_name(chunk: Any, name: str) -> str:
    """Return the parameter's name in the unpartitioned model."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    if name.startswith("decoder.layers."):
        local = name.split(".")[2]
        layer = chunk.decoder.layers[int(local)].layer_number - 1
        name = name.replace(f"decoder.layers.{local}.", f"decoder.layers.{layer}.", 1)
    # Experts in one product: their weights are numbered.
    name = re.sub(r"\.experts\.(linear_fc\d)\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2", name)
    if ".local_experts." in name:
        before, local, after = re.split(r"(?<=\.local_experts\.)(\d+)", name)
        first = parallel_state.get_expert_model_parallel_rank() * (
            chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        )
        name = f"{before}{first + int(local)}{after}"
    # TransformerEngine's linear layers have the norm before them inside.
    name = re.sub(r"self_attention\.(linear_qkv|in_proj)\.layer_norm_", "input_layernorm.", name)
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def tensor_parallel_part(parameter: Any, full: torch.Tensor, sections: list[int] | None) -> torch.Tensor:
    """Return this TP rank's part of a full parameter; of one with sections of rows it holds a part of each."""
    if parameter.shape == full.shape:
        return full
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if sections:
        return torch.cat([section.chunk(size)[rank] for section in full.split(sections)])
    return full.chunk(size, dim=parameter.partition_dim)[rank]


def sections_of(name: str, full: torch.Tensor, config: Any) -> list[int] | None:
    """Return the rows of the sections of a full parameter: a gated first MLP matrix has two halves."""
    is_gated = config.gated_linear_unit and "linear_fc1" in name
    return [len(full) // 2] * 2 if is_gated else token_by_token.sections_of(name, config)


def run_stock_schedule(model: list[Any], step: StepData, forward_step_func: Callable[..., Any]) -> list[Any]:
    """Run a step by the schedule of megatron-core, and return what the loss function logged."""
    return get_forward_backward_func()(  # type: ignore[no-any-return]
        forward_step_func=forward_step_func,
        data_iterator=step.data_iterators if len(model) > 1 else step.data_iterators[0],
        model=model if len(model) > 1 else model[0], num_microbatches=step.num_microbatches, seq_length=64,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip


class Case(NamedTuple):
    """A step, and the single-process reference that it must equal."""

    layout: Layout
    samples: tuple[Sample, ...]
    plan: Plan
    expected: dict[str, Any]


def case_of(
    reference_of: Callable[[Layout, str], dict[str, Any]], layout: Layout,
    plan_of: Callable[[tuple[Sample, ...], Layout], Plan] = mixed_plan, batch: str = "long_tail",
) -> Case:  # fmt: skip
    """Return the step of a batch whose plan is what `plan_of` makes of its samples."""
    samples = BATCHES[batch]
    return Case(layout, samples, plan_of(samples, layout), reference_of(layout, batch))


def compare_with_reference(cases: Mapping[str, Case]) -> dict[str, list[Comparison]]:
    """Return what each rank found in each case; cases of equal world size share the start of their ranks."""
    found: dict[str, list[Comparison]] = {}
    by_world_size: dict[int, dict[str, Case]] = defaultdict(dict)
    for name, case in cases.items():
        by_world_size[case.layout.topology.world_size][name] = case
    for world_size, alike in by_world_size.items():
        ranks = run_ranks(world_size, run_steps, alike, timeout_s=60 + 60 * len(alike))
        found |= {name: [rank[name] for rank in ranks] for name in alike}
    return found


def run_steps(cases: Mapping[str, Case]) -> dict[str, Comparison]:
    found = {}
    for name, case in in_jobs_of_their_own(cases):
        if dist.get_rank() == 0:
            print(name, flush=True)  # where all wait for ever, the last one told is the culprit
        try:
            found[name] = run_step(*case)
        except Exception as error:
            raise RuntimeError(f"in {name}") from error
    return found


def in_jobs_of_their_own(cases: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """Yield name and case; between two of them, not after the last, the same ranks join in a new job."""
    for index, (name, case) in enumerate(cases.items()):
        if index:
            _start_again(before=name)
        yield name, case
    dist.barrier()


def _start_again(before: str) -> None:
    """Close all groups, of which a process cannot have any number, and join the same ranks in a new job."""
    store, rank, world_size = distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()  # nobody is still busy with them
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"before {before}", store), rank=rank, world_size=world_size)


class Runtime(NamedTuple):
    """What a step of the real runtime needs on this rank: bare `chunks`, the wrapped `model`, and `counterpart`, a
    parameter's part of the tensors of the whole model."""

    config: Any
    chunks: list[Any]
    model: list[Any]
    groups: DynamicCPGroups
    wrapper: DataIteratorWrapper
    counterpart: Callable[[Any, str, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def build_runtime(
    layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any],
    read_sample: Callable[[Sample], Any] = reference.read_sample, prepare: Callable[[list[Any]], None] | None = None,
    in_fp32: bool = True,
) -> Runtime:  # fmt: skip
    """Return the runtime of `plan` with the weights of `expected["initial"]`; `prepare` is called on bare chunks."""
    variant = reference.VARIANTS[layout.variant]
    initialize_model_parallel(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, layout.ep)
    exchanges = sorted({exchange for exchange, _ in exchanges_of(plan)} | {"p2p"})
    groups = DynamicCPGroups.build(
        layout.topology, timeout_s=60, exchanges=exchanges, inner_sizes=sorted({i for _, i in exchanges_of(plan)}),
        has_pool=plan.extension is not None,
    )  # fmt: skip
    unset = {"init_method": torch.nn.init.zeros_, "output_layer_init_method": torch.nn.init.zeros_}
    config, chunks = build_chunks(layout, variant, **unset)  # `expected` has the weights
    if prepare is not None:
        prepare(chunks)

    def counterpart(chunk: Any, name: str, parameter: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        full = tensors[reference_name(chunk, name)]
        return tensor_parallel_part(parameter, full, sections_of(name, full, config))

    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.copy_(counterpart(chunk, name, parameter, expected["initial"]))
            for name, bias in expert_biases(chunk):
                bias.copy_(expected["expert_biases"][reference_name(chunk, name)][0])
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer, overlap_grad_reduce=layout.overlap_grad_reduce,
        grad_reduce_in_fp32=in_fp32, bucket_size=50_000 if layout.overlap_grad_reduce else None,
    )  # fmt: skip
    rounded = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(rounded)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if layout.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        sum_up_as_after_a_first_step(model)
    by_id = {sample.sample_id: sample for sample in samples}
    wrapper = DataIteratorWrapper(
        plan_source=fixed_plan(plan, groups), read_sample=lambda sample_id: read_sample(by_id[sample_id]),
        groups=groups, chunks=[ChunkNeeds.of(chunk) for chunk in chunks],
    )  # fmt: skip
    return Runtime(config, chunks, model, groups, wrapper, counterpart)


def run_step(
    layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any],
    schedule: Callable[[list[Any], StepData, Callable[..., Any]], Any] = run_stock_schedule,
) -> Comparison:  # fmt: skip
    _, chunks, model, groups, wrapper, counterpart = build_runtime(layout, samples, plan, expected)
    step = wrapper.wrap(0, samples)
    recorded: list[tuple[Any, torch.Tensor]] = []

    def recording_forward_step(data_iterator: Iterator[Any], chunk: Any) -> Any:
        batches: list[Any] = []
        output, loss_func = forward_step((batches.append(b) or b for b in data_iterator), chunk)

        def recording_loss(token_losses: torch.Tensor) -> Any:
            recorded.append((batches[0], token_losses.detach().reshape(-1).clone()))
            return loss_func(token_losses)

        return output, recording_loss

    for chunk in model:
        chunk.zero_grad_buffer()
    schedule(model, step, recording_forward_step)
    if layout.distributed_optimizer:
        gather_owned_gradients(model)
    gradient_errors = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            wanted, known = counterpart(chunk, name, parameter, expected["gradients"]), reference_name(chunk, name)
            terms = (
                counterpart(chunk, name, parameter, expected["terms"]) if known in expected.get("terms", ()) else None
            )
            gradient_errors[known] = relative_error(parameter.main_grad, wanted, terms)
        for name, bias in expert_biases(chunk):
            before, after = expected["expert_biases"][reference_name(chunk, name)]
            gradient_errors[reference_name(chunk, name)] = (
                (bias - after).abs().max() / (after - before).abs().max()
            ).item()
    seen, loss_error = compare_losses(plan, groups, recorded, expected["losses"])
    return Comparison(loss_error, gradient_errors, seen, wrapper.exchange_stats.bytes_sent)


def sum_up_as_after_a_first_step(model: list[Any]) -> None:
    """Let gradients be summed up while backward runs; in a first step they wait for its end, whatever no_sync says."""
    for chunk in model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            group.is_first_batch = False


def expert_biases(chunk: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, values) of what shifts the choice of experts; a step moves it, no gradient does."""
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]


def gather_owned_gradients(model: list[Any]) -> None:
    """Fill every gradient buffer from the shards that the distributed optimizer leaves on each lane."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                bucket.grad_data.zero_()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def compare_losses(
    plan: Plan, groups: DynamicCPGroups, recorded: list[Any], expected: dict[int, torch.Tensor]
) -> tuple[Counter[tuple[int, int]], float]:
    """Return which (sample, position) had an unmasked loss here, and the largest relative loss error."""
    seen: Counter[tuple[int, int]] = Counter()
    worst = 0.0
    if not recorded:
        return seen, worst
    assert len(recorded) == plan.num_microbatches
    for micro_batch, (batch, losses) in zip(plan.micro_batches, recorded, strict=True):
        bucket = micro_batch.bucket_of_lane(groups.lane)
        params = batch["packed_seq_params"]
        mask, positions = batch["loss_mask"].reshape(-1).numpy() != 0, params.positions.numpy()
        held = bucket.samples if params.placed is None else params.placed.samples
        lengths = [padded // bucket.cp_size for padded in params.padded_seqlens]
        if params.placed is not None:
            lengths = [len(shard) for shard in params.placed.shards()]
        owners = [(sample.sample_id, sample.seqlen) for sample in held]
        owners += [(PADDING, 0)] * (len(lengths) - len(owners))
        start = 0
        for (sample_id, seqlen), length in zip(owners, lengths, strict=True):
            rows = np.arange(start, start + length)
            start += len(rows)
            rows = rows[mask[rows]]
            is_real = positions[rows] < seqlen
            seen.update((PADDING, position) for position in positions[rows[~is_real]].tolist())
            real = rows[is_real]
            seen.update((sample_id, position) for position in positions[real].tolist())
            if len(real):
                wanted = expected[sample_id].numpy()[positions[real]]
                error = float((np.abs(losses.numpy()[real] - wanted) / np.abs(wanted)).max())
                worst = max(worst, error if error == error else float("inf"))  # max() would lose a NaN
    return seen, worst


def relative_error(found: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor | None) -> float:
    """Return the largest error over the largest of what is wanted, and of its `terms` if it has some."""
    size = wanted.abs().max() if terms is None else max(wanted.abs().max(), terms.max())
    return float((found - wanted).abs().max() / size)


def assert_equal_to_reference(comparisons: list[Comparison], layout: Layout, expected: dict) -> None:
    errors = {name: error for c in comparisons for name, error in c.gradient_errors.items() if not error <= TOLERANCE}
    if errors and "in_float32" in expected and errors.keys() <= expected["terms"].keys():
        # Sums over tokens that cancel: float32 on one process is as far from float64, more or less by processor.
        gradients, terms = expected["in_float32"]()[0]["gradients"], expected["terms"]
        of_one = {name: relative_error(gradients[name], expected["gradients"][name], terms[name]) for name in errors}
        errors = {name: (error, of_one[name]) for name, error in errors.items() if not error <= 2 * of_one[name]}
    assert not errors, f"gradients differ: {errors}"
    assert max(c.loss_error for c in comparisons) <= TOLERANCE, "losses differ"
    compared = {name for c in comparisons for name in c.gradient_errors}
    assert compared == set(expected["gradients"]) | set(expected["expert_biases"]), "some gradient was not compared"
    seen = sum((c.tokens_seen for c in comparisons), Counter())
    assert len(seen) == expected["num_tokens"] >= 2000
    assert set(seen.values()) == {layout.tp}, "a token was counted more or less than once per TP rank"


def assert_bytes_as_planned(comparisons: list[Comparison], layout: Layout, plan: Plan) -> None:
    """What each rank counted while it sent is what the planner prices (of hybrids: what all ranks together sent)."""
    if layout.model.linear_attention is not None:
        _assert_all_bytes_as_planned(comparisons, layout, plan)
        return
    places = [divmod(rank // layout.tp, layout.lanes) for rank in range(len(comparisons))]
    planned = [planned_bytes(plan, layout, lane, stage) for stage, lane in places]
    assert max(planned) > 0
    assert [c.bytes_sent for c in comparisons] == planned


def _assert_all_bytes_as_planned(comparisons: list[Comparison], layout: Layout, plan: Plan) -> None:
    options = PlanOptions(
        max_tokens_per_rank=plan.max_tokens_per_rank, bytes_per_element=4,
        recompute=layout.config.get("recompute_granularity", "none"), cp_comm_types=("p2p",),
    )  # fmt: skip
    hardware = catalog.load_hardware("h100")
    planned = sent_by_plan(
        plan, Problem(topology=plan.topology, model=layout.model, hardware=hardware, options=options)
    )
    sent = sum(c.bytes_sent for c in comparisons)
    assert math.isclose(sent, sum(planned), rel_tol=1e-12), (sent, planned)


def assert_all_equal_to_reference(cases: Mapping[str, Case], *, bytes_too: bool = False) -> None:
    """Run all cases; what is wrong with any of them is told together."""
    wrong = []
    for name, comparisons in compare_with_reference(cases).items():
        case = cases[name]
        try:
            assert_equal_to_reference(comparisons, case.layout, case.expected)
            if bytes_too:
                assert_bytes_as_planned(comparisons, case.layout, case.plan)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
