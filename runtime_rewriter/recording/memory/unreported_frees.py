"""Finds the frees that an allocator's log leaves out.

torch's profiler sees a block given back only on threads that it knows. On a GPU the autograd engine drops what a step saved on a thread
of its own, after the operator: such a free is missing, and the address is given out again as if the block were two. But every
event carries the allocator's total, which counts everything; where it is less than the events before explain, blocks were given back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_AT_ONCE = 3
"""Blocks of any choice that are looked for together; more are found only where they are those soonest given out again."""
MOST_CANDIDATES = 40
"""Beyond them only single blocks of any choice are looked for: subsets would take too long."""


@dataclass(frozen=True)
class Reported:
    """`bytes` were given out at `address`, negative: given back; `total_bytes` are out afterwards, whoever has them."""

    address: int
    bytes: int
    total_bytes: int


def unreported_frees(events: Sequence[Reported]) -> dict[int, list[tuple[int, int]]]:
    """Number of an event -> (address, bytes) of the blocks that were given back before it without a word.

    Looked for are blocks whose sizes explain the total; what nothing explains is looked for again at the next event. Those whose address is
    given out again without having been given back come first, the ones soonest given out again first among them. Of alike blocks any
    may be named. A block whose address is given out again has been given back by then at the latest, even if no total tells when.
    """
    return dict(_Search(events).found())


class _Search:
    def __init__(self, events: Sequence[Reported]) -> None:
        self._events = events
        self._at: dict[int, list[int]] = defaultdict(list)
        for number, event in enumerate(events):
            self._at[event.address].append(number)
        self._alive: dict[int, int] = {}

    def found(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        total = self._events[0].total_bytes - self._events[0].bytes if self._events else 0
        missing = 0
        for number, event in enumerate(self._events):
            missing = max(0, missing + total + event.bytes - event.total_bytes)
            gone = self._explaining(missing, number)
            if event.bytes > 0 and event.address in self._alive and event.address not in gone:
                gone = (*gone, event.address)
            if gone:
                blocks = [(address, self._alive.pop(address)) for address in gone]
                missing -= sum(size for _, size in blocks)
                yield number, blocks
            total = event.total_bytes
            if event.bytes > 0:
                self._alive[event.address] = event.bytes
            else:
                self._alive.pop(event.address, None)

    def _explaining(self, missing_bytes: int, number: int) -> tuple[int, ...]:
        """Addresses of blocks of so many bytes together; none where nothing fits."""
        if missing_bytes <= 0:
            return ()
        fitting = (address for address, size in self._alive.items() if size <= missing_bytes)
        again = {address: self._given_out_again(address, number) for address in fitting}
        candidates = [
            address
            for _, address in sorted(
                (event, address) for address, event in again.items() if event is not None
            )
        ]
        for count in range(1, MOST_AT_ONCE + 1 if len(candidates) <= MOST_CANDIDATES else 2):
            for chosen in combinations(candidates, count):
                if sum(self._alive[address] for address in chosen) == missing_bytes:
                    return chosen
        together = 0
        for count, address in enumerate(candidates, 1):
            together += self._alive[address]
            if together == missing_bytes:
                return tuple(candidates[:count])
        return ()

    def _given_out_again(self, address: int, number: int) -> int | None:
        """The event that does it; after all others where none names the address any more, None where the block's free is reported."""
        numbers = self._at[address]
        place = bisect_right(numbers, number - 1)
        if place == len(numbers):
            return len(self._events)
        return numbers[place] if self._events[numbers[place]].bytes > 0 else None
