"""Names of process groups that only their members create.

torch names such a group after its ranks and the number of groups in the process. The members must
agree on the name, and no name may repeat in a job, even after its group is gone: gloo leaves the
addresses of closed connections in the store under it. Every process therefore keeps the numbers
that it has used in the store.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def next_count() -> int:
    """The smallest group count after which this process may name a new group. Local."""
    return max(len(dist.distributed_c10d._world.pg_names), _used())


@contextmanager
def named_after(count: int) -> Iterator[None]:
    """Name a group created inside as if the process had `count` groups, at least `next_count()`."""
    assert count >= next_count(), "a name that was used before"
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    placeholders = [object() for _ in range(count - len(names))]  # torch only counts them
    names.update(dict.fromkeys(placeholders, ""))
    try:
        yield
    finally:
        for placeholder in placeholders:
            del names[placeholder]
        _used(count + 1 - _used())


def _used(more: int = 0) -> int:
    """Add `more` to one plus the largest number that this process has used, and return it."""
    used: int = dist.distributed_c10d._get_default_store().add(
        f"autotune/groups/{dist.get_rank()}", more
    )
    return used
