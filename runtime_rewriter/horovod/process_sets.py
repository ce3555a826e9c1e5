"""The ranks between which a script of Horovod synchronizes."""

from __future__ import annotations

from typing import Any

from autotune.errors import InvalidInput


def check_all_ranks(horovod: Any, synchronizing: str, process_set: Any) -> None:
    """Raise `InvalidInput` if the process set of the `synchronizing` object lacks a rank."""
    members = process_set.ranks
    if members is not None and len(members) != horovod.size():
        raise InvalidInput(
            f"the {synchronizing} must synchronize all ranks, but its process set has ranks "
            f"{', '.join(map(str, members))} of {horovod.size()}; tune with only these ranks"
        )
