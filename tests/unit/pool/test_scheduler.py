"""Tasks: all attention once, by even servers, with few bytes, the same for the same documents in any order."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.disaggregated.sent import bytes_of_tasks
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.placement.legal import why_misplaced
from dynamic_cp.placement.programme import programmes_of
from dynamic_cp.placement.sent import TokenBytes
from dynamic_cp.placement.transport import ACROSS, INSIDE, fetches_of
from dynamic_cp.pool.homes import homes_in_nano_batches, quota_homes
from dynamic_cp.pool.scheduler import schedule, work_of
from dynamic_cp.pool.tasks import NANO_BATCH, SERVER, TASKS_PER_DOCUMENT, Tasks, parse_tasks, runs_of
from dynamic_cp.pool.traffic import Servers, fetches_of_tasks, relay_order
from dynamic_cp.types import Sample
from dynamic_cp.types.placement import HOLDER, ROW, START, STOP, Lanes
from tests.unit.pool.instances import NONE, homes_of, random_seqlens, rules, scheduled

ONE_TOKEN = TokenBytes(query=1.0, kv=1.0, lse=0.0)


def work_by_server(tasks: Tasks, num_servers: int) -> Ints:
    rows = tasks.rows.astype(np.float64)
    return np.bincount(tasks.rows[:, SERVER], work_of(rows[:, START], rows[:, STOP], 0.0), num_servers)


@settings(max_examples=120)
@given(st.integers(0, 10**9))
def test_any_documents_on_any_servers_are_computed_once_where_there_is_room(seed: int) -> None:
    rng = random.Random(seed)
    num_lanes, idle = rng.randint(1, 9), rng.choice([0, 0, 1, 5])
    num_servers, num_nano_batches = num_lanes + idle, rng.choice([1, 2])
    tile, tolerance = rng.choice([16, 128]), rng.choice([0.0, 0.1, 0.5])
    seqlens = random_seqlens(rng, rng.choice([1, 300, 9000]))
    homes = homes_of(seqlens, num_lanes, num_nano_batches, tile)
    tasks = scheduled(homes, num_servers, tolerance, num_nano_batches, tile)
    samples = [Sample(sample_id=number, seqlen=int(size)) for number, size in enumerate(seqlens)]
    assert why_misplaced(tasks.placement(), samples, num_servers) is None
    rows = tasks.rows
    # What servers hold is what lanes held.
    assert (
        np.bincount(rows[:, HOLDER], tasks.tokens, num_servers)[:num_lanes].tolist()
        == np.bincount(homes[:, 3], homes[:, 2] - homes[:, 1], num_lanes).tolist()
    )
    # Cuts are on the grid, or where documents or homes end.
    borders = {(int(home[0]), int(home[2])) for home in homes}
    assert all(stop % tile == 0 or (sample, stop) in borders for sample, _, stop, *_ in rows.tolist())
    runs = Counter((sample, server, nano_batch) for sample, _, _, server, nano_batch in runs_of(rows).tolist())
    at_home = Counter((int(home[0]), int(home[3])) for home in homes)
    assert all(number <= max(TASKS_PER_DOCUMENT, at_home[key[:2]]) for key, number in runs.items())
    for nano_batch in range(num_nano_batches):
        own = Tasks(rows[rows[:, NANO_BATCH] == nano_batch])
        before = own.rows.copy()
        before[:, SERVER] = before[:, HOLDER]
        loads, given_to = work_by_server(own, num_servers), work_by_server(Tasks(before), num_servers)
        # Nobody receives more than that; who has more could not give, at most for want of a smaller tile.
        most = (1 + tolerance) * loads.sum() / num_servers
        assert ((loads <= most + 1) | (loads <= given_to)).all()
    assert parse_tasks(str(tasks)) == tasks
    assert len({tasks, parse_tasks(str(tasks))}) == 1


@pytest.mark.parametrize("num_nano_batches", [1, 2])
def test_servers_are_even_to_the_tolerance_and_a_tile(num_nano_batches: int) -> None:
    for seed in range(6):
        seqlens = random_seqlens(random.Random(seed), 60000)
        homes = homes_of(seqlens, 8, num_nano_batches)
        for idle, tolerance in ((0, 0.0), (0, 0.1), (8, 0.1), (24, 0.25)):
            tasks = scheduled(homes, 8 + idle, tolerance, num_nano_batches)
            for nano_batch in range(num_nano_batches):
                loads = work_by_server(Tasks(tasks.rows[tasks.rows[:, NANO_BATCH] == nano_batch]), 8 + idle)
                tile = 128 * 2 * int(seqlens[0])
                assert loads.max() <= (1 + tolerance) * loads.mean() + tile


def test_equal_documents_in_any_order_have_equal_tasks() -> None:
    rng = random.Random(3)
    seqlens = random_seqlens(rng, 30000)
    shuffled = seqlens.copy()
    rng.shuffle(shuffled)
    assert shuffled.tolist() != seqlens.tolist()
    one, other = (scheduled(homes_of(np.sort(lengths)[::-1].copy(), 6), 12) for lengths in (seqlens, shuffled))
    assert one == other
    assert one == scheduled(homes_of(seqlens, 6), 12)


def test_the_least_bytes_are_those_of_the_closed_form() -> None:
    # One document of 64 tiles on server 0, server 1 idle: at least 47.5% of the work has to go.
    seqlen, tile = 64 * 128, 128
    homes = np.array([[0, 0, seqlen, 0]], np.int64)
    (moved,) = (row for row in schedule(homes, homes, NONE, np.zeros(2), rules(0.05)).tolist() if row[3] == 1)
    wanted = 0.475 * work_of(0, seqlen, 0.0)

    def bytes_per_work(start: int, stop: int) -> float:
        return ((stop - start) * 16384.0 + stop * 4096.0) / work_of(start, stop, 0.0)

    possible = [
        bytes_per_work(start, stop)
        for stop in range(tile, seqlen + 1, tile)
        for start in range(0, stop, tile)
        if 0 <= work_of(start, stop, 0.0) - wanted <= 2 * stop * tile
    ]
    assert len(possible) > 10
    assert bytes_per_work(moved[1], moved[2]) <= 1.02 * min(possible) < 0.9 * max(possible)


@pytest.mark.parametrize("node_servers", [1, 4])
@pytest.mark.parametrize("num_nano_batches", [1, 2])
def test_transfers_are_those_of_the_placement_and_of_its_programmes(num_nano_batches: int, node_servers: int) -> None:
    seqlens = random_seqlens(random.Random(5), 20000)
    homes = homes_of(seqlens, 4, num_nano_batches)
    tasks = scheduled(homes, 8, 0.1, num_nano_batches)
    placement = tasks.placement()
    assert placement.num_divisions == tasks.num_nano_batches == num_nano_batches
    order = relay_order(tasks)
    found, expected = fetches_of_tasks(tasks, node_servers), fetches_of(placement, Lanes(8, 0, node_servers), order)
    assert len(found.lane) > 15
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    # What one server sends another one, that one receives: splits are symmetric, as rounds name both sides.
    programmes = programmes_of(placement, (), Lanes(8, 0, node_servers), order)
    sent, received = Counter(), Counter()
    for server, programme in enumerate(programmes):
        for exchange in programme.exchanges:
            for book, sides in ((sent, exchange.sends), (received, exchange.receives)):
                for peer, entries in sides:
                    # Forward, gradients of keys do not return.
                    is_fetch = exchange.round in (ACROSS, INSIDE)
                    tokens = sum(
                        programme.held[number].num_tokens for number, kind in entries if is_fetch or kind == ROW
                    )
                    pair = (server, peer) if book is sent else (peer, server)
                    book[(exchange.division, exchange.round, *pair)] += tokens
    assert sent == received
    total = bytes_of_tasks(tasks, (0,), Servers(8, node_servers, node_servers), ONE_TOKEN)[0]
    assert total[:, 0].sum() == total[:, 1].sum() == sum(sent.values())


def test_quota_spreads_long_documents_over_any_number_of_lanes() -> None:
    seqlens = np.array([9000, 3000, *[700] * 12], np.int64)
    homes = homes_of(seqlens, 6)
    lanes = {document: len(set(homes[homes[:, 0] == document, 3].tolist())) for document in range(3)}
    assert lanes[0] == 6
    assert lanes[1] == lanes[2] == 1
    homes = homes_of(np.array([4096, 4096, 1024], np.int64), 5)
    assert {len(set(homes[homes[:, 0] == document, 3].tolist())) for document in range(2)} == {3}
    # Tokens that have no room are refused, and those that just fit are not.
    assert len(quota_homes(np.array([4096], np.int64), 2, 2048, 128, 1)) == 3
    assert len(quota_homes(np.array([4096], np.int64), 2, 1920, 128, 1)) == 0


def test_nano_batches_share_tokens_and_never_look_ahead() -> None:
    seqlens = random_seqlens(random.Random(8), 50000)
    homes = homes_of(seqlens, 5, 2)
    rows = homes_in_nano_batches(homes, 5, 128)
    for lane in range(5):
        first, second = (rows[(rows[:, 3] == lane) & (rows[:, 4] == nano_batch)] for nano_batch in range(2))
        counts = [int((part[:, 2] - part[:, 1]).sum()) for part in (first, second)]
        assert abs(counts[0] - counts[1]) <= 0.15 * sum(counts)
    for document in range(len(seqlens)):
        of_document = rows[rows[:, 0] == document]
        assert (np.diff(of_document[:, 4]) >= 0).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [("1.2.3", "write sample.start"), ("0.0.9.0.0.0,", "none"), (f"0.0.{2**31}.0.0.0", "at most 2147483647")],
)
def test_a_text_that_is_no_tasks_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        parse_tasks(text)
    with pytest.raises(InvalidInputError, match=r"\[number, 6\]"):
        Tasks(np.zeros((3, 5), np.int32))


def test_what_servers_do_besides_is_evened_out_with_their_tasks() -> None:
    seqlens = np.array([20000, *[1000] * 12], np.int64)
    homes = homes_of(seqlens, 4)
    idle = np.zeros(8)
    work = np.bincount(homes[:, 3], [work_of(one[1], one[2], 0.0) for one in homes.tolist()], 8)
    mean = work.sum() / 8
    busy = np.where(np.arange(8) < 4, 0.5 * mean, 0.0)
    busy[0] = 3 * mean  # more than there is for each: it computes nothing

    def loads(besides: Floats) -> Floats:
        tasks = schedule(homes, homes, NONE, besides, rules(0.05))
        return np.bincount(tasks[:, 3], [work_of(one[1], one[2], 0.0) for one in tasks.tolist()], 8).astype(float)

    tile = 2 * 128 * 20000.0
    even, uneven = loads(idle), loads(busy)
    assert even.sum() == uneven.sum() == work.sum()
    assert even.max() <= 1.05 * mean + tile
    level = (8 * mean + 1.5 * mean) / 7
    assert uneven[0] <= 0.05 * mean
    assert (uneven + busy)[1:].max() <= level + 0.05 * mean + tile
    # Those that do something else get so much less, those that do not that much more.
    assert uneven[1:4].mean() == pytest.approx(level - 0.5 * mean, rel=0.2)
    assert uneven[4:].mean() == pytest.approx(level, rel=0.1)


@pytest.mark.parametrize(("relay_servers", "share", "over_mean"), [(2, 0.7, 3.1), (4, 0.5, 2.5)])
def test_relays_have_the_holder_of_a_long_document_send_it_once_to_each_group(
    relay_servers: int, share: float, over_mean: float
) -> None:
    """All 16 servers need the keys of a document that the four of the first group hold."""
    seqlens = np.array([64 * 1024], np.int64)
    homes = homes_of(seqlens, 4)
    tasks = scheduled(homes, 16, 0.05)
    alone = bytes_of_tasks(tasks, (0,), Servers(16, 1, 1), ONE_TOKEN)[0].sum(axis=0)
    relayed = bytes_of_tasks(tasks, (0,), Servers(16, 1, relay_servers), ONE_TOKEN)[0].sum(axis=0)
    # As much arrives at each, and what nobody sends twice is far less for the busiest.
    assert relayed[1].tolist() == alone[1].tolist()
    assert relayed.max() < share * alone.max()
    assert relayed.max() / relayed.mean() < over_mean < 4.0 < alone.max() / alone.mean()
    fetches = fetches_of_tasks(tasks, relay_servers)
    across = fetches.crosses == 1
    groups = np.stack([fetches.lane // relay_servers, fetches.kind, fetches.home], axis=1)[across]
    assert len(np.unique(groups, axis=0)) == len(groups)
    assert (fetches.lane // relay_servers == fetches.source // relay_servers)[~across].all()
