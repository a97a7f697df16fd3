"""What moves between the lanes of a CP group. Every transfer goes through here and is counted.

Shapes: T local tokens, P lanes of the group, H heads, D channels of a head.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

Transfer = Literal["shift", "gather", "all-to-all", "messages"]
"""What connects a group: `RingShift`, `all_gather_tokens` (and its reverse), `all_to_all_heads` or `LaneMessages`."""


class ExchangeError(RuntimeError):
    """A transfer inside a CP group failed or timed out; the message names the group and the place in the run."""


@contextlib.contextmanager
def _failures_named(group: dist.ProcessGroup, params: DynamicPackedSeqParams) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise ExchangeError(
            f"exchange in {group.group_desc} (ranks {ranks}) failed at {params.label}: {error}"
        ) from error


class RingShift:
    """A transfer to the next lane of `group` and from the previous one; `wait()` returns the tensor received.

    It runs beside computation until `wait()`: on gloo's threads, or on NCCL's own CUDA stream, which starts after the
    work queued so far and which `wait()` makes the current stream wait for. `into` is a buffer to receive into, which
    queued work may still use. It saves memory: torch frees a transfer's tensors only when the device, far behind the
    host, is done.
    """

    def __init__(
        self, tensor: Tensor, group: dist.ProcessGroup, params: DynamicPackedSeqParams, into: Tensor | None = None
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        following, preceding = ranks[(group.rank() + 1) % len(ranks)], ranks[(group.rank() - 1) % len(ranks)]
        self._group, self._params = group, params
        self._sent = tensor.contiguous()  # stays referenced until the transfer is done
        self._received = torch.empty_like(self._sent) if into is None else into
        with _failures_named(group, params):
            self._pending = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, following, group),
                    dist.P2POp(dist.irecv, self._received, preceding, group),
                ]
            )
        params.stats.bytes_sent += self._sent.nbytes

    def wait(self) -> Tensor:
        """Return the tensor of the previous lane; the one sent may be overwritten from now on."""
        with _failures_named(self._group, self._params):
            for work in self._pending:
                work.wait()
        return self._received


class Expected(NamedTuple):
    """Shape and dtype of a tensor that is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_POSTING = threading.Lock()
"""The computing thread and that of `chains` send messages; the lock lets one at a time post and count them."""


class LaneMessages:
    """One message to each of some members of a group and one from each of some; `wait()` returns those received.

    A message is bytes, so tensors of several dtypes travel at once. It runs beside computation, as `RingShift`.

    Args:
        sends: (member of the CP group, tensors for it).
        receives: (member of the CP group, what it sends).
        tag: equal on both sides. Messages of two ranks with one tag arrive in the order of sending; with several tags
            only NCCL, which knows no tags, keeps that order.
    """

    def __init__(
        self,
        sends: Sequence[tuple[int, Sequence[Tensor]]],
        receives: Sequence[tuple[int, Sequence[Expected]]],
        params: DynamicPackedSeqParams,
        tag: int = 0,
    ) -> None:
        group, self._params, device = params.cp_group, params, params.positions.device
        ranks = dist.get_process_group_ranks(group)
        self._receives = [expected for _, expected in receives]
        # Stay referenced until the transfer is done.
        self._sent = [torch.cat([_as_bytes(tensor) for tensor in tensors]) for _, tensors in sends]
        self._received = [
            torch.empty(sum(one.nbytes for one in expected), dtype=torch.uint8, device=device)
            for expected in self._receives
        ]
        operations = [
            dist.P2POp(operation, message, ranks[member], group, tag)
            for operation, side, messages in ((dist.isend, sends, self._sent), (dist.irecv, receives, self._received))
            for (member, _), message in zip(side, messages, strict=True)
            if len(message)
        ]
        with _POSTING:
            with _failures_named(group, params):
                self._pending = dist.batch_isend_irecv(operations) if operations else []
            params.stats.bytes_sent += sum(sent.nbytes for sent in self._sent)

    def wait(self) -> list[list[Tensor]]:
        with _failures_named(self._params.cp_group, self._params):
            for work in self._pending:
                work.wait()
        pairs = zip(self._received, self._receives, strict=True)
        return [_of_message(received, expected) for received, expected in pairs]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _from_bytes(content: Tensor, expected: Expected) -> Tensor:
    if content.storage_offset() % expected.dtype.itemsize:
        content = content.clone()  # a view needs its elements aligned
    return content.view(expected.dtype).view(expected.shape)


def _of_message(content: Tensor, expected: Sequence[Expected]) -> list[Tensor]:
    parts = content.split([one.nbytes for one in expected])
    return [_from_bytes(part, one) for part, one in zip(parts, expected, strict=True)]


def all_gather_tokens(x_THD: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return the shards of all lanes, [cp * T, ...], in the order of the group's ranks."""
    group = params.cp_group
    x_THD = x_THD.contiguous()
    gathered = x_THD.new_empty((group.size() * len(x_THD), *x_THD.shape[1:]))
    with _failures_named(group, params), span("gathering keys and values"):
        dist.all_gather_into_tensor(gathered, x_THD, group=group)
    params.stats.bytes_sent += x_THD.nbytes * (group.size() - 1)
    return gathered


def reduce_scatter_tokens(x_THD: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return the sum over lanes, in its dtype, of this lane's slice of x_THD [cp * T, ...], shape [T, ...]."""
    group = params.cp_group
    x_THD = x_THD.contiguous()
    scattered = x_THD.new_empty((len(x_THD) // group.size(), *x_THD.shape[1:]))
    with _failures_named(group, params), span("scattering gradients"):
        dist.reduce_scatter_tensor(scattered, x_THD, group=group)
    params.stats.bytes_sent += scattered.nbytes * (group.size() - 1)
    return scattered


def all_to_all_heads(x_PTHD: Tensor, group: dist.ProcessGroup, params: DynamicPackedSeqParams) -> Tensor:
    """Return the parts that the lanes of `group` send to this one, [P, T, ...], given those that it sends to them."""
    x_PTHD = x_PTHD.contiguous()
    received = torch.empty_like(x_PTHD)
    with _failures_named(group, params), span("exchanging heads"):
        dist.all_to_all_single(received, x_PTHD, group=group)
    params.stats.bytes_sent += x_PTHD.nbytes // group.size() * (group.size() - 1)
    return received


def all_to_all_messages(
    messages: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams
) -> list[list[Tensor]]:
    """Return the tensors that each lane of the CP group sends to this one (`expected`), given those that it sends to
    each. Like `all_to_all_heads`, but messages are bytes, as in `LaneMessages`, and may differ in length or be
    empty."""
    group = params.cp_group
    sent = torch.cat([_as_bytes(tensor) for message in messages for tensor in message])
    lengths = [sum(tensor.nbytes for tensor in message) for message in messages]
    expected_lengths = [sum(one.nbytes for one in message) for message in expected]
    received = sent.new_empty(sum(expected_lengths))
    with _failures_named(group, params), span("exchanging heads or states"):
        dist.all_to_all_single(received, sent, expected_lengths, lengths, group=group)
    params.stats.bytes_sent += len(sent) - lengths[group.rank()]
    pairs = zip(received.split(expected_lengths), expected, strict=True)
    return [_of_message(part, message) for part, message in pairs]
