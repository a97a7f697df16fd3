"""Placed attention: a lane computes the tiles that its programme names, with rows and columns that it holds or fetches.

A lane works on its own tokens and, behind them, on buffers for fetched queries of rows, keys and values of columns.
Rows are summed in float32 where they are computed; the lane that holds them merges what comes back by log-sum-exp.
Backward runs the same programme, and gradients of rows and columns are given back. Every transfer belongs to a round
with one message per other lane, so both sides have the same order. What later divisions need travels meanwhile.
Shapes: T tokens that a lane holds, S those and what it fetches, H heads, D channels of a head, 2 keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE
from megatron.dynamic_cp.attention.mechanisms.collectives import HeadsAround
from megatron.dynamic_cp.attention.mechanisms.executor import ShardExecutor
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected, LaneMessages, Transfer
from megatron.dynamic_cp.attention.merge import SUM_DTYPE, RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import Pack
from megatron.dynamic_cp.attention.placed_packs import Message, PlacedPacks, Round
from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class Blocks(ShardExecutor):
    """This lane's programme as an `executor.Executor`; q, k and v stay what the lane holds."""

    grows_with_group = True

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        # The shift creates the group; lanes of two nodes connect at their first message.
        return (("shift", params.cp_group), ("messages", params.cp_group))

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lane's queries, and its keys and values as kv_2THD."""
        return q_THD, torch.stack((k_THD, v_THD))

    def attend(self, sums: RowSums, kv_2THD: Tensor) -> None:
        """Add up all tiles of this lane, and what other lanes computed for its rows."""
        packs = placed_packs(self._params, kv_2THD.device)
        one = ForwardPass(sums, kv_2THD, packs)
        run(one, packs, self._params)
        sums.take(one.sums)

    def attend_backward(self, rows: RowGradients, kv_2THD: Tensor) -> Tensor:
        packs = placed_packs(self._params, kv_2THD.device)
        one = BackwardPass(rows, kv_2THD, packs)
        run(one, packs, self._params)
        rows.take(one.rows)
        return one.grad_2SHD[:, : kv_2THD.shape[1]].to(kv_2THD.dtype)

    def leave_gradients(self, grad_q_THD: Tensor, grad_2THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad_q_THD, grad_2THD[0], grad_2THD[1]


def placed_packs(params: DynamicPackedSeqParams, device: torch.device) -> PlacedPacks:
    """Return the lane's programme with its tensors, made by the first layer with this mask."""
    packs: PlacedPacks = params.once("placed", lambda: params.placed.packs(device, params.mask))
    return packs


class _Pass(Protocol):
    """One direction of one layer, on tensors over all tokens that the lane works with. `fetched` holds the row and the
    column tensors that travel: sending lanes read them, fetching lanes write them."""

    fetched: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]

    def clear(self, one: Message) -> None:
        """Zero the sums of fetched tokens: their buffers held other tokens before."""

    def given_back(self, one: Message) -> list[Tensor]:
        """Return the sums that go back, in the dtypes in which they travel."""

    def to_come_back(self, one: Message) -> list[Expected]:
        """Return shapes and dtypes of another lane's `given_back`."""

    def add(self, one: Message, came: Sequence[Tensor], *, is_collected: bool) -> None:
        """Add sums that came back; `is_collected`: from a lane of this node."""

    def attend(self, pack: Pack) -> None:
        """Add the rectangles of a pack."""


class Fetched(NamedTuple):
    """Tensors that a forward pass fetched and its backward pass reuses: queries [S, heads, dim], kv_2SHD."""

    queries: Tensor
    kv_2SHD: Tensor


class ForwardPass:
    """Attention of all rows that the lane works with."""

    def __init__(self, own: RowSums, kv_2THD: Tensor, packs: PlacedPacks) -> None:
        rows = _with_room(own.queries, packs.row_room)
        self._kv_2SHD = _with_room(kv_2THD, packs.column_room, dim=1)
        self.sums = own.over(rows)
        self.fetched = (rows,), (self._kv_2SHD[0], self._kv_2SHD[1])

    def clear(self, one: Message) -> None:
        self.sums.out_THD.index_fill_(0, one.rows, 0.0)
        self.sums.lse_HT.index_fill_(1, one.rows, -torch.inf)

    def given_back(self, one: Message) -> list[Tensor]:
        out_THD = self.sums.out_THD.index_select(0, one.rows).to(self._kv_2SHD.dtype)
        return [self.sums.lse_HT.index_select(1, one.rows).t(), out_THD]

    def to_come_back(self, one: Message) -> list[Expected]:
        number, (heads, dim) = len(one.rows), self.sums.out_THD.shape[1:]
        return [Expected((number, heads), SUM_DTYPE), Expected((number, heads, dim), self._kv_2SHD.dtype)]

    def add(self, one: Message, came: Sequence[Tensor], *, is_collected: bool) -> None:
        lse_TH, out_THD = came
        if len(one.rows):
            self.sums.add(one.rows, out_THD, lse_TH.t())

    def attend(self, pack: Pack) -> None:
        self.sums.attend(pack, self._kv_2SHD)

    @property
    def kept(self) -> Fetched:
        """What the backward pass of the same layer can reuse."""
        return Fetched(self.sums.queries, self._kv_2SHD)


class BackwardPass:
    """Gradients of all rows and columns that the lane works with.

    Args:
        keeps_apart: add what neighbours give back for columns to a sum of its own. It may arrive while later divisions
            use the column; this way the order of additions never changes.
        kept: queries, keys and values that a forward pass of the same programme has just fetched; None: they travel,
            too.
    """

    def __init__(
        self,
        own: RowGradients,
        kv_2THD: Tensor,
        packs: PlacedPacks,
        *,
        keeps_apart: bool = False,
        kept: Fetched | None = None,
    ) -> None:
        grad, query, out, lse = own.tensors
        brought = [_with_room(tensor, packs.row_room) for tensor in (grad, out, lse)]
        if kept is None:
            query, self._kv_2SHD = _with_room(query, packs.row_room), _with_room(kv_2THD, packs.column_room, dim=1)
            self.fetched = (brought[0], query, *brought[1:]), (self._kv_2SHD[0], self._kv_2SHD[1])
        else:
            query, self._kv_2SHD = kept
            self.fetched = tuple(brought), ()
        self.rows = own.over(brought[0], query, *brought[1:])
        self.grad_2SHD = torch.zeros_like(self._kv_2SHD, dtype=SUM_DTYPE)
        self._collected_2SHD = torch.zeros_like(self.grad_2SHD) if keeps_apart else None

    def clear(self, one: Message) -> None:
        self.rows.grad_q_THD.index_fill_(0, one.rows, 0.0)
        self.grad_2SHD.index_fill_(1, one.columns, 0.0)

    def given_back(self, one: Message) -> list[Tensor]:
        grad_q_THD = self.rows.grad_q_THD.index_select(0, one.rows)
        grad_2SHD = self.grad_2SHD.index_select(1, one.columns)
        if self._collected_2SHD is not None:
            grad_2SHD += self._collected_2SHD.index_select(1, one.columns)
        grad_k_SHD, grad_v_SHD = grad_2SHD
        return [one.to(self._kv_2SHD.dtype) for one in (grad_q_THD, grad_k_SHD, grad_v_SHD)]

    def to_come_back(self, one: Message) -> list[Expected]:
        of_row, of_column = self.rows.grad_q_THD.shape[1:], self.grad_2SHD.shape[2:]
        shapes = (len(one.rows), *of_row), (len(one.columns), *of_column), (len(one.columns), *of_column)
        return [Expected(shape, self._kv_2SHD.dtype) for shape in shapes]

    def add(self, one: Message, came: Sequence[Tensor], *, is_collected: bool) -> None:
        grad_q_THD, grad_k_SHD, grad_v_SHD = came
        self.rows.grad_q_THD.index_add_(0, one.rows, grad_q_THD.to(SUM_DTYPE))
        total_2SHD = self.grad_2SHD if self._collected_2SHD is None or not is_collected else self._collected_2SHD
        total_2SHD.index_add_(1, one.columns, torch.stack((grad_k_SHD, grad_v_SHD)).to(SUM_DTYPE))

    def attend(self, pack: Pack) -> None:
        self.rows.attend(pack, self._kv_2SHD, self.grad_2SHD)

    def grad_of_columns(self, tokens: slice) -> Tensor:
        """Return the gradient of keys and values of some of the lane's own tokens, float32 [2, T, heads, dim]."""
        grad_2THD = self.grad_2SHD[:, tokens]
        return grad_2THD if self._collected_2SHD is None else grad_2THD + self._collected_2SHD[:, tokens]


def run(one: _Pass, packs: PlacedPacks, params: DynamicPackedSeqParams) -> None:
    """Run a programme in one direction, at once on all lanes of the bucket; ExchangeError if another lane failed."""
    rounds = Rounds(one, packs.rounds, params)
    num_divisions = len(packs.divisions)
    rounds.begin(ACROSS, 0)
    rounds.begin(ACROSS, 1)
    rounds.finish(ACROSS, 0)
    rounds.begin(INSIDE, 0)
    for division, computed in enumerate(packs.divisions):
        with span("division %d of %d", division, num_divisions):
            rounds.finish(ACROSS, division + 1)
            rounds.begin(INSIDE, division + 1)
            rounds.begin(ACROSS, division + 2)
            rounds.finish(INSIDE, division)
            for pack in computed:
                one.attend(pack)
            # Meanwhile the sums of the previous division have travelled back.
            rounds.give_back(division - 1)
            rounds.finish(DELIVER, division - 2)
            rounds.begin(COLLECT, division)
    rounds.give_back(num_divisions - 1)
    rounds.finish(DELIVER, num_divisions - 2)
    rounds.finish(DELIVER, num_divisions - 1)


class Rounds:
    """The transfers of a pass; rounds without messages of this lane are skipped. `tag_of` maps (round, division) to the
    tag of its messages; by default messages come in the order of sending."""

    def __init__(
        self,
        one: _Pass,
        rounds: dict[tuple[int, int], Round],
        params: DynamicPackedSeqParams,
        tag_of: Callable[[int, int], int] = lambda which, division: 0,
    ) -> None:
        self._pass, self._rounds, self._params, self._tag_of = one, rounds, params, tag_of
        self._pending: dict[tuple[int, int], LaneMessages] = {}

    def begin(self, which: int, division: int) -> None:
        """Send a round's messages to other lanes, and post the receives."""
        found = self._rounds.get((division, which))
        if found is None:
            return
        back = which in (COLLECT, DELIVER)
        member = self._params.placed.member_of
        sends = [(member(one.lane), self._pass.given_back(one) if back else self._fetched(one)) for one in found.sends]
        receives = [
            (member(one.lane), self._pass.to_come_back(one) if back else self._to_be_fetched(one))
            for one in found.receives
        ]
        self._pending[division, which] = LaneMessages(sends, receives, self._params, self._tag_of(which, division))

    def finish(self, which: int, division: int) -> LaneMessages | None:
        """Wait for a round and store or add what it brought; return its messages, which the device still reads."""
        pending = self._pending.pop((division, which), None)
        if pending is None:
            return None
        for one, came in zip(self._rounds[division, which].receives, pending.wait(), strict=True):
            if which in (COLLECT, DELIVER):
                self._pass.add(one, came, is_collected=which == COLLECT)
                continue
            for (into, tokens), values in zip(self._buffers(one), came, strict=True):
                into.index_copy_(0, tokens, values)
            self._pass.clear(one)
        return pending

    def give_back(self, division: int) -> None:
        """Add what lanes of the node gave back, then send on what goes to other nodes."""
        self.finish(COLLECT, division)
        self.begin(DELIVER, division)

    def _fetched(self, one: Message) -> list[Tensor]:
        return [buffer.index_select(0, tokens) for buffer, tokens in self._buffers(one)]

    def _buffers(self, one: Message) -> list[tuple[Tensor, Tensor]]:
        rows, columns = self._pass.fetched
        return [*((buffer, one.rows) for buffer in rows), *((buffer, one.columns) for buffer in columns)]

    def _to_be_fetched(self, one: Message) -> list[Expected]:
        return [Expected((len(tokens), *buffer.shape[1:]), buffer.dtype) for buffer, tokens in self._buffers(one)]


def _with_room(tensor: Tensor, tokens: int, dim: int = 0) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] += tokens
    larger = tensor.new_zeros(shape)
    larger.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return larger


class HeadsAroundBlocks(HeadsAround, Blocks):
    """The programme of this lane's inner group as an `executor.Executor`, for its share of the heads."""

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        return (("all-to-all", params.heads_group), *Blocks.transfers(params))
