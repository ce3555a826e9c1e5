"""`memory.json`: the memory of one replica, beside the traces of a recorded job.

A folder that was recorded without it (by an earlier version, or where it could not be recorded) has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_json, refuse_newer
from autotune.recordings.memory_profile import FixedShare, MemoryProfile, Replica

SCHEMA = 2
MEMORY_FILE = "memory.json"


@dataclass(frozen=True)
class RecordedMemory:
    """`profile`: of a replica without synchronization. `ddp`, `bucket_view`: who synchronizes it, as `Replica` says them.

    `batch`: samples of a forward pass, which is the leading dimension that its inputs share; None where they share none. `fixed`: what
    of a pass's time does not shrink with the batch; None where it could not be measured.
    """

    __pydantic_config__ = {"extra": "forbid"}

    profile: MemoryProfile
    ddp: bool = True
    bucket_view: bool = False
    batch: int | None = None
    fixed: FixedShare | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise InvalidInput(f"a forward pass has at least 1 sample, but is to have {self.batch}")

    def replica(self, rank: int = 0, host_of_rank: tuple[int, ...] = ()) -> Replica:
        """That rank of the job."""
        return Replica(rank, self.ddp, self.bucket_view, host_of_rank)

    def write(self, folder: Path) -> Path:
        """Raises `OSError` where it cannot be written."""
        path = folder / MEMORY_FILE
        path.write_text(json.dumps(to_data(self), allow_nan=False), encoding="utf-8")
        return path

    @staticmethod
    def read(folder: Path) -> RecordedMemory | None:
        """None where the folder has none. Raises `InvalidInput` where the file breaks a rule."""
        path = folder / MEMORY_FILE
        if not path.exists():
            return None
        data: Any = read_json(path)
        refuse_newer(data, SCHEMA, "recorded memory", str(path))
        return parse(RecordedMemory, data, str(path))


NOT_RECORDED = "the memory was not recorded"
"""So begins the note of a recorded job without it."""


def why_no_memory(notes: tuple[str, ...]) -> str:
    """Of a recorded job without it, from the job's notes."""
    told = "; ".join(
        note.removeprefix(f"{NOT_RECORDED}: ") for note in notes if note.startswith(NOT_RECORDED)
    )
    return (
        told
        or f"its folder has no {MEMORY_FILE}; record it again with this version (autotune profile --overwrite)"
    )
