"""Judges events by the trace event format, and by what Perfetto needs to show them."""

from collections import Counter, defaultdict
from itertools import pairwise

PHASES = {"X", "M", "C", "i", "s", "t", "f"}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def nanoseconds(us):
    return round(us * 1000)


def check_events(events):
    """Raise AssertionError where `events` break a rule; return how many of each phase there are."""
    slices, arrows, named = defaultdict(list), defaultdict(list), set()
    counters = defaultdict(list)
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        assert event["ts"] == nanoseconds(event["ts"]) / 1000 or event["ph"] in "stf", event
        if event["ph"] != "C":
            assert isinstance(event["tid"], int), event
        if event["ph"] == "M":
            value = event["args"][METADATA[event["name"]]]
            assert isinstance(value, str if event["name"].endswith("name") else int), event
            if event["name"].endswith("_name"):
                key = (event["pid"], event["tid"] if event["name"] == "thread_name" else None)
                assert key not in named, event
                named.add(key)
        elif event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert isinstance(event["cat"], str), event
            start = nanoseconds(event["ts"])
            slices[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"]), event))
        elif event["ph"] == "C":
            assert event["args"], event
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values()), event
            counters[event["pid"], event["name"]].append(event["ts"])
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        else:
            arrows[event["cat"], event["name"], event["id"]].append(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    first_other = next((i for i, event in enumerate(events) if event["ph"] != "M"), len(events))
    assert all(event["ph"] != "M" for event in events[first_other:]), "metadata stands first"
    for place, found in slices.items():
        assert place in named, f"thread {place} has no name"
        assert (place[0], None) in named, f"process {place[0]} has no name"
        found.sort(key=lambda one: one[:2])
        for (_, end, one), (start, _, other) in pairwise(found):
            assert end <= start, f"{one} overlaps {other}"
    for at in counters.values():
        assert len(at) == len(set(at)), "a counter has one value at a time"
    for name, chain in arrows.items():
        assert [event["ph"] for event in chain] == ["s", *["t"] * (len(chain) - 2), "f"], name
        assert chain[-1]["bp"] == "e"
        for event in chain:
            at = round(1000 * event["ts"], 3)
            inside = [one for one in slices[event["pid"], event["tid"]] if one[0] <= at < one[1]]
            assert len(inside) == 1, f"{event} points at {len(inside)} slices"
    return Counter(event["ph"] for event in events)
