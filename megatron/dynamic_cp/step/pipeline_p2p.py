"""Pipeline messages whose shapes come from the plan, instead of a handshake before every tensor.

With `variable_seq_lengths` megatron-core sends an int64[3] ahead of each tensor, for which the host and the GPU wait.
But every stage of a lane knows from the plan the tokens of each micro-batch, and their order. The sender compares every
tensor with the plan before it leaves (shape and dtype, on the host, no waiting). All ranks run the same plan (digests
are compared each step), or, with `check_neighbours`, both ends of every pipe compared the list of all messages of the
step. After the schedule no planned message may be left over.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_all_ranks

Shape = tuple[int, int, int]


class MessageOrders(NamedTuple):
    """Micro-batches in the order in which a stage exchanges their tensors: inputs and outputs of forward, gradients of
    outputs and of inputs of backward."""

    recv_prev: tuple[int, ...]
    send_next: tuple[int, ...]
    recv_next: tuple[int, ...]
    send_prev: tuple[int, ...]


def message_orders(
    stage: int, pp_size: int, num_microbatches: int, vp_size: int, group_size: int, *, forward_only: bool
) -> MessageOrders:
    """Return the order of a stage's messages under megatron-core's schedules, and, in groups of pp_size, in ticks.

    Forward and backward walk the same table of (micro-batch, chunk), backward with the chunks reversed. The first
    virtual stage has nothing before it, the last nothing after it. `group_size` (`microbatch_group_size_per_vp_stage`)
    has no effect at vp_size 1.

    Example: stage 0 of 2 with 2 chunks and 2 micro-batches sends 0 1 0 1 forward and receives 0 1.
    """
    table = get_schedule_table(num_microbatches, vp_size, group_size if vp_size > 1 else 1)
    every = tuple(index for index, _ in table)
    after_first = tuple(index for index, turn in table if turn > 0)
    before_last = tuple(index for index, turn in table if turn < vp_size - 1)
    first, last = stage == 0, stage == pp_size - 1
    return MessageOrders(
        recv_prev=after_first if first else every,
        send_next=before_last if last else every,
        recv_next=() if forward_only else after_first if last else every,
        send_prev=() if forward_only else before_last if first else every,
    )


class PlannedP2PCommunicator(P2PCommunicator):
    """megatron-core's communicator for one pass of one global batch, without its handshake. `pp_group` has at least 2
    stages. `config.variable_seq_lengths` stays set, so that megatron-core asks for shapes here; otherwise it raises
    UnsupportedFeatureError. `rank_tokens` are the lane's padded tokens in each micro-batch, before sequence
    parallelism splits them."""

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        rank_tokens: Sequence[int],
        *,
        forward_only: bool = False,
    ) -> None:
        config = copy.copy(config)
        # After each batch of messages megatron-core also waits for the whole device, against a race that torch has not
        # had since 1.13 (pytorch/pytorch#82450). The stream waits for the messages, and that is enough.
        config.batch_p2p_sync = False
        super().__init__(pp_group, config)
        if not config.variable_seq_lengths:
            raise UnsupportedFeatureError(
                "variable_seq_lengths is False, megatron-core would receive all micro-batches in one shape: set it"
            )
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._shapes: list[Shape] = [(tokens // parts, 1, config.hidden_size) for tokens in rank_tokens]
        orders = message_orders(
            pp_group.rank(),
            pp_group.size(),
            len(rank_tokens),
            self.virtual_pipeline_model_parallel_size or 1,
            config.microbatch_group_size_per_vp_stage,
            forward_only=forward_only,
        )
        self._orders = orders._asdict()
        self._done = dict.fromkeys(self._orders, 0)

    def check_neighbours(self) -> None:
        """Compare the messages of the step with what both neighbours expect; collective over the job. One handshake for
        all messages gives the same guarantee as one per tensor. Raises DisagreementError: the two ends of a pipe
        have different plans; the same on every rank."""
        mine = {name: [self._shapes[index] for index in order] for name, order in self._orders.items()}
        everyone = all_gather_bytes(json.dumps(mine).encode(), collective_device(), self.pp_group)
        run_on_all_ranks(lambda: _check_pipes([_shapes(one) for one in everyone]))

    def finish(self) -> None:
        """Raise DisagreementError unless every planned message was exchanged; every rank counts the same way."""
        for name, order in self._orders.items():
            if self._done[name] != len(order):
                raise DisagreementError(
                    f"pipeline stage {self.pp_group.rank()} is done with {self._done[name]} of {len(order)} messages "
                    f"({name}): megatron-core's schedule is not one that this was written for; "
                    "use a release of docs/releases.md"
                )

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """Return the shapes to receive, as the handshake does, and check what is about to be sent."""
        self._check_sent("send_prev", tensor_send_prev)
        self._check_sent("send_next", tensor_send_next)
        nothing: Shape = (0, 0, 0)
        return (
            self._shapes[self._next("recv_prev")] if recv_prev else nothing,
            self._shapes[self._next("recv_next")] if recv_next else nothing,
        )

    def _next(self, name: str) -> int:
        done, order = self._done[name], self._orders[name]
        if done == len(order):
            raise DisagreementError(
                f"pipeline stage {self.pp_group.rank()} is asked for message {done + 1} ({name}), the plan has "
                f"{len(order)}: the data iterator and the plan differ in their number of micro-batches"
            )
        self._done[name] = done + 1
        return order[done]

    def _check_sent(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        index = self._next(name)
        if tuple(tensor.shape) != self._shapes[index] or tensor.dtype != self.config.pipeline_dtype:
            raise DisagreementError(
                f"pipeline stage {self.pp_group.rank()} has {tuple(tensor.shape)} {tensor.dtype} for micro-batch "
                f"{index} ({name}), the plan says {self._shapes[index]} {self.config.pipeline_dtype}: "
                "the neighbour would read other numbers than were sent; this is a bug",
                micro_batch=index,
            )


def schedule_groups() -> ProcessGroupCollection:
    """Return the groups that megatron-core's schedules take by themselves when no communicator is given."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "embd", "pos_embd", "cp", "dp_cp", "tp_dp_cp"])


def _shapes(message: bytes) -> dict[str, list[Shape]]:
    return {name: [tuple(shape) for shape in shapes] for name, shapes in json.loads(message).items()}


def _check_pipes(everyone: Sequence[dict[str, list[Shape]]]) -> None:
    """Raise DisagreementError unless what each stage sends is what the stage at the other end receives."""
    for stage, sent in enumerate(everyone):
        following = (stage + 1) % len(everyone)
        for source, sends, target, receives in (
            (stage, sent["send_next"], following, everyone[following]["recv_prev"]),
            (following, everyone[following]["send_prev"], stage, sent["recv_next"]),
        ):
            if sends == receives:
                continue
            at = next((i for i, pair in enumerate(zip(sends, receives, strict=False)) if pair[0] != pair[1]), None)
            what = (
                f"message {at} as {sends[at]}, stage {target} expects {receives[at]}"
                if at is not None
                else f"{len(sends)} messages, stage {target} expects {len(receives)}"
            )
            raise DisagreementError(
                f"pipeline stage {source} sends {what}: the stages of a lane have different plans; "
                "all ranks must run the same version with the same settings"
            )
