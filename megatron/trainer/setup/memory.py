"""The token limit of a run: computes `auto`, and refuses what does not fit into memory before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.allowed import allowed_cp_sizes, capacity_tokens
from dynamic_cp.types import CpCommType, Hardware, ModelShape, Problem
from dynamic_cp.types.counts import counted
from megatron.dynamic_cp.flags.settings import PlanningSettings


def check_memory_is_known(settings: PlanningSettings, hardware: Hardware) -> None:
    """Raise InvalidInputError if the limit is `auto` and the hardware file states no memory."""
    if settings.max_tokens_per_rank is None and not hardware.hbm_bytes:
        raise InvalidInputError(
            f"--max-seqlen-per-dp-cp-rank auto needs hbm_bytes, which hardware {hardware.name!r} does not state: "
            "give the limit in tokens, or a --dynamic-cp-hardware file with hbm_bytes"
        )


def max_tokens_per_rank(
    settings: PlanningSettings,
    model: ModelShape,
    hardware: Hardware,
    left_out: tuple[CpCommType, ...] = (),
    *,
    has_masks: bool = False,
) -> int:
    """Return the limit of padded tokens of a rank in one micro-batch; a pure function of settings and hardware file.

    All micro-batches in flight are assumed to reach the limit, with exchange buffers of the smallest CP size that holds
    a sample of --seq-length. If memory is unknown, a limit in tokens is not checked.

    Args:
        left_out: exchanges that the layers lack.
        has_masks: whether samples have their own masks.

    Raises:
        InvalidInputError: the limit is `auto` and memory is unknown.
        MemoryLimitError: what is asked for does not fit; with both numbers and the remedies.
    """
    check_memory_is_known(settings, hardware)
    limit, topology = settings.max_tokens_per_rank, settings.topology
    if limit is not None and not hardware.hbm_bytes:
        return limit
    options = settings.used(settings.options(limit or 1, left_out, has_masks=has_masks))
    memory = MemoryModel(
        Problem(
            topology=topology,
            model=model,
            hardware=hardware,
            options=options,
            data_parallel=settings.data_parallel,
        )
    )
    try:
        if limit is None:
            return memory.max_tokens_per_rank(settings.seq_length)
        sizes = allowed_cp_sizes(topology, options)
        # A sample that no group holds has its attention placed on all lanes.
        holds = (cp for cp in sizes if capacity_tokens(cp, topology, options) >= settings.seq_length)
        smallest = next(holds, sizes[-1])
        memory.check_limit_fits(limit, smallest)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; if the device has more memory than {hardware.name}, name it with --dynamic-cp-hardware",
            **error.details,
        ) from error
    return limit


def check_state_fits(problem: Problem, ranks: Sequence[int], free_bytes: int | None, num_positions: int = 0) -> None:
    """Refuse a model whose weights, gradients and optimizer states do not fit into a host's memory together.

    Args:
        ranks: those of the host, which share its memory.
        free_bytes: of the host, with swap; None: unknown, and nothing is refused.
        num_positions: rows of the table of learned positions, 0 without one.

    Raises:
        MemoryLimitError: with both numbers and the remedies.
    """
    topology, model = problem.topology, problem.model
    stages = MemoryModel(problem).peak_at(2 * topology.rank_token_multiple)
    of_stage = [one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in stages]
    # Every TP rank of the first stage has the whole table of positions, with gradients and optimizer states.
    table = num_positions * model.hidden_size * problem.options.element_bytes.weight
    of_stage[0] *= 1 + table / stages[0].weights_bytes
    needed = sum(of_stage[rank // (topology.num_lanes * topology.tp_size)] for rank in ranks)
    if free_bytes is not None and needed > free_bytes:
        positions = f", {num_positions} positions (--max-position-embeddings, --seq-length)" if num_positions else ""
        raise MemoryLimitError(
            f"weights, gradients and optimizer states of the {counted(len(ranks), 'rank')} of this host need "
            f"{needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free: make the model smaller (hidden size "
            f"{model.hidden_size}, {counted(model.num_layers, 'layer')}, a vocabulary of {model.vocab_size}{positions})"
            " or use more hosts",
            needed_bytes=needed,
            free_bytes=free_bytes,
        )
