"""Folders of one recording: every host has its own ranks' traces and the same job.json, and rank 0's has copies of all traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from autotune.errors import InvalidInput
from autotune.profiling.traces.rank_trace import RankTrace, Repair


def without_copies(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[Repair]]:
    """Each trace once. A copy has another folder, but the name, rank, begin and number of events of the trace."""
    kept = {
        (PurePosixPath(t.source.replace(":", "/")).name, t.rank, t.origin_ns, t.events): t
        for t in reversed(traces)
    }
    copies = len(traces) - len(kept)
    repairs = (
        [Repair("a trace that was given more than once is taken once", copies)] if copies else []
    )
    return list(kept.values())[::-1], repairs


def same_recording(
    details: dict[str, Any] | None, found: dict[str, Any], where: str
) -> dict[str, Any]:
    """`found`, in the job.json `where`. Raises `InvalidInput` where the one before it was of another recording."""
    if details is not None and details != found:
        raise InvalidInput(
            f"the folders must be of one recording, but {where} is of another one than those before it; name one recording"
        )
    return found
