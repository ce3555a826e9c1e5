"""Frees that an allocator's log leaves out are found from its totals."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime_rewriter.pytorch.unreported_frees import Reported, unreported_frees


def made_log(seed: int, count: int, silent: float) -> tuple[list[Reported], list[int]]:
    """The events that are reported, and the total after each as its own blocks make it. Addresses are given out again, the last first."""
    draw = random.Random(seed)
    events: list[Reported] = []
    free, alive = list(range(30)), dict[int, int]()
    total = 1000
    for _ in range(count):
        if alive and (not free or draw.random() < 0.5):
            address = draw.choice(sorted(alive))
            size = -alive.pop(address)
            free.append(address)
        else:
            address, size = free.pop(), 512 * draw.randint(1, 60)
            alive[address] = size
        total += size
        if size > 0 or draw.random() >= silent:
            events.append(Reported(address, size, total))
    return events, [event.total_bytes - 1000 for event in events]


def live_totals(events: list[Reported], found: dict[int, list[tuple[int, int]]]) -> list[int]:
    """By the obvious book-keeping; a block that is given back twice, or never was, fails."""
    alive: dict[int, int] = {}
    totals = []
    for number, event in enumerate(events):
        for address, size in found.get(number, []):
            assert alive.pop(address) == size
        if event.bytes > 0:
            assert event.address not in alive
            alive[event.address] = event.bytes
        else:
            alive.pop(event.address, None)  # perhaps another one of its size was named for it
        totals.append(sum(alive.values()))
    return totals


@given(st.integers(0, 2**32), st.integers(1, 150))
def test_nothing_is_added_where_everything_is_reported(seed: int, count: int) -> None:
    events, _ = made_log(seed, count, 0.0)
    assert unreported_frees(events) == {}


@given(st.integers(0, 2**32), st.integers(2, 150))
def test_no_block_is_given_back_twice_and_none_is_alive_twice(seed: int, count: int) -> None:
    events, _ = made_log(seed, count, 0.4)
    live_totals(events, unreported_frees(events))


@given(st.integers(0, 2**32))
def test_single_frees_of_unlike_blocks_are_found_where_they_happened(seed: int) -> None:
    draw = random.Random(seed)
    events, total, alive, silent = [], 0, dict[int, int](), dict[int, int]()
    for number in range(60):
        size = 512 * 2**20 + 512 * 2 ** (number % 16) + number  # no two, and no sums of them, are alike
        total += size
        if alive and draw.random() < 0.5:
            address = draw.choice(sorted(alive))
            total -= alive[address]
            silent[len(events)] = address
            del alive[address]
        events.append(Reported(number, size, total))
        alive[number] = size
    assert {number: [address for address, _ in blocks] for number, blocks in unreported_frees(events).items()} == {
        number: [address] for number, address in silent.items()
    }
