"""How many examples the expensive property tests try."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return `count` for new examples (`make test-all`), and a third of it for known ones.

    `make test` repeats the same known examples for every change (`conftest`).
    """
    return count // 3 if settings().derandomize else count
