"""Parts of a list whose tensors are moved or compared together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def chunks(sizes_bytes: Sequence[int], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of at most `most_bytes` each, or of one."""
    first = total = 0
    for place, size_bytes in enumerate(sizes_bytes):
        if place > first and total + size_bytes > most_bytes:
            yield first, place
            first, total = place, 0
        total += size_bytes
    if sizes_bytes:
        yield first, len(sizes_bytes)
