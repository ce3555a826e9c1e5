"""Names of process groups that only their members make.

torch names such a group after its ranks and the number of groups that the process has. Its members must agree on the name; and
none may come twice in a job, also after its group is gone: what gloo put under it into the store, the addresses of connections
that are closed, stays there. So every process keeps in the store which numbers it has used.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def next_count() -> int:
    """The smallest number of groups that this process may name a new group after. Local."""
    return max(len(dist.distributed_c10d._world.pg_names), _used())


@contextmanager
def named_after(count: int) -> Iterator[None]:
    """A group that is made meanwhile gets the name of one in a process that has `count` groups, at least `next_count()`."""
    assert count >= next_count(), "a name that was used before"
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    absent = [object() for _ in range(count - len(names))]  # torch only counts them
    names.update(dict.fromkeys(absent, ""))
    try:
        yield
    finally:
        for one in absent:
            del names[one]
        _used(count + 1 - _used())


def _used(more: int = 0) -> int:
    """One more than the largest number that this process has used, after `more` were added."""
    used: int = dist.distributed_c10d._get_default_store().add(
        f"autotune/groups/{dist.get_rank()}", more
    )
    return used
