"""Finds the frees that an allocator's log leaves out.

torch's profiler sees frees only on threads that it knows. On a GPU the autograd engine drops a
step's saved tensors on a thread of its own, after the operator. The log misses such a free, and the
address is allocated again as if there were two blocks. But every event carries the allocator's
total, which counts everything. Where the total is less than the earlier events explain, blocks were
freed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_AT_ONCE = 3
"""Largest set of arbitrary blocks that is tried.

Larger sets are found only as the blocks whose addresses are allocated again soonest."""
MOST_CANDIDATES = 40
"""Above this number only single arbitrary blocks are tried: subsets would take too long."""


@dataclass(frozen=True)
class Reported:
    """`bytes` were allocated at `address`, or freed if negative; `total_bytes` remain allocated."""

    address: int
    bytes: int
    total_bytes: int


def unreported_frees(events: Sequence[Reported]) -> dict[int, list[tuple[int, int]]]:
    """Number of an event -> (address, bytes) of the blocks freed before it without a report.

    The search looks for blocks whose sizes explain the total, and tries again at the next event
    where nothing does. Blocks whose address is allocated again without a free come first, the
    soonest first. Any of several equal blocks may be named. A block whose address is allocated
    again was freed by then at the latest, even if no total shows when.
    """
    return dict(_FreeSearch(events).frees())


class _FreeSearch:
    def __init__(self, events: Sequence[Reported]) -> None:
        self._events = events
        self._events_of: dict[int, list[int]] = defaultdict(list)
        for number, event in enumerate(events):
            self._events_of[event.address].append(number)
        self._alive: dict[int, int] = {}

    def frees(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        total = self._events[0].total_bytes - self._events[0].bytes if self._events else 0
        missing = 0
        for number, event in enumerate(self._events):
            missing = max(0, missing + total + event.bytes - event.total_bytes)
            freed = self._explaining(missing, number)
            if event.bytes > 0 and event.address in self._alive and event.address not in freed:
                freed = (*freed, event.address)
            if freed:
                blocks = [(address, self._alive.pop(address)) for address in freed]
                missing -= sum(size for _, size in blocks)
                yield number, blocks
            total = event.total_bytes
            if event.bytes > 0:
                self._alive[event.address] = event.bytes
            else:
                self._alive.pop(event.address, None)

    def _explaining(self, missing_bytes: int, number: int) -> tuple[int, ...]:
        """Addresses of blocks with this sum of bytes; none where nothing fits."""
        if missing_bytes <= 0:
            return ()
        fitting = (address for address, size in self._alive.items() if size <= missing_bytes)
        reused = [(self._allocated_again(address, number), address) for address in fitting]
        candidates = [address for _, address in sorted(pair for pair in reused if pair[0] >= 0)]
        most = MOST_AT_ONCE if len(candidates) <= MOST_CANDIDATES else 1
        for count in range(1, most + 1):
            for chosen in combinations(candidates, count):
                if sum(self._alive[address] for address in chosen) == missing_bytes:
                    return chosen
        together = 0
        for count, address in enumerate(candidates, 1):
            together += self._alive[address]
            if together == missing_bytes:
                return tuple(candidates[:count])
        return ()

    def _allocated_again(self, address: int, number: int) -> int:
        """The event that allocates the address again.

        Later than all others where no event names the address; -1 where the free is reported.
        """
        numbers = self._events_of[address]
        place = bisect_left(numbers, number)
        if place == len(numbers):
            return len(self._events)
        return numbers[place] if self._events[numbers[place]].bytes > 0 else -1
