"""Frees that an allocator's log leaves out are found from its totals."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime_rewriter.recording.memory.unreported_frees import Reported, unreported_frees

BEFORE_BYTES = 1000
"""Blocks that were allocated before the log began."""


def random_log(
    seed: int, count: int, silent: float, unlike: bool
) -> tuple[list[Reported], list[int]]:
    """Reported events, and the bytes of the log's own blocks after each. Addresses are reused.

    `unlike`: no two sums of blocks are equal, and at most three frees in a row are unreported.
    """
    draw = random.Random(seed)
    events: list[Reported] = []
    free, alive = list(range(30)), dict[int, int]()
    total, unsaid = BEFORE_BYTES, 0
    for _ in range(count):
        if alive and (not free or draw.random() < 0.5):
            address = draw.choice(sorted(alive))
            size = -alive.pop(address)
            free.append(address)
        else:
            address = free.pop()
            size = alive[address] = 2**address if unlike else 512 * draw.randint(1, 6)
        total += size
        if size < 0 and draw.random() < silent and not (unlike and unsaid == 3):
            unsaid += 1
        else:
            events.append(Reported(address, size, total))
            unsaid = 0
    return events, [event.total_bytes - BEFORE_BYTES for event in events]


def live_totals(events: list[Reported], frees: dict[int, list[tuple[int, int]]]) -> list[int]:
    """By the obvious book-keeping; a block that is given back twice, or is there twice, fails."""
    alive: dict[int, int] = {}
    totals = []
    for number, event in enumerate(events):
        for address, size in frees.get(number, []):
            assert alive.pop(address) == size
        if event.bytes > 0:
            assert event.address not in alive
            alive[event.address] = event.bytes
        else:
            alive.pop(event.address, None)  # perhaps another one of its size was named for it
        totals.append(sum(alive.values()))
    return totals


@given(st.integers(0, 2**32), st.integers(1, 150), st.booleans())
def test_nothing_is_added_where_everything_is_reported(seed: int, count: int, unlike: bool) -> None:
    events, _ = random_log(seed, count, 0.0, unlike)
    assert unreported_frees(events) == {}


@given(st.integers(0, 2**32), st.integers(2, 150))
def test_no_block_is_given_back_twice_and_none_is_there_twice(seed: int, count: int) -> None:
    events, _ = random_log(seed, count, 0.4, unlike=False)
    live_totals(events, unreported_frees(events))


@given(st.integers(0, 2**32), st.integers(2, 150), st.floats(0.0, 0.8))
def test_blocks_of_unlike_sizes_are_found_where_they_went(
    seed: int, count: int, silent: float
) -> None:
    events, truth = random_log(seed, count, silent, unlike=True)
    assert live_totals(events, unreported_frees(events)) == truth


@given(st.integers(4, 8))
def test_many_at_once_are_found_where_theirs_are_the_next_addresses(together: int) -> None:
    count = 20
    events = [Reported(number, 2**number, 2 ** (number + 1) - 1) for number in range(count)]
    left = 2**count - 2**together
    events += [
        Reported(count, 5, left + 5),
        *(Reported(number, 7, left + 5 + 7 * (number + 1)) for number in range(together)),
    ]
    assert unreported_frees(events) == {count: [(number, 2**number) for number in range(together)]}


def test_what_nothing_explains_is_looked_for_again() -> None:
    """Four are freed at once; after one address is reused, the other three explain the rest."""
    gone = (1, 3, 5, 8)
    events = [Reported(number, 2**number, 2 ** (number + 1) - 1) for number in range(10)]
    left = 2**10 - 1 - sum(2**number for number in gone)
    events += [
        Reported(20, 3000, left + 3000),
        Reported(8, 4000, left + 7000),
        Reported(21, 5000, left + 12000),
    ]
    assert unreported_frees(events) == {
        11: [(8, 2**8)],
        12: [(number, 2**number) for number in (1, 3, 5)],
    }
