"""`memory.json`, which holds the memory of one replica next to the traces of a recorded job.

Folders of earlier versions, and those whose memory could not be recorded, have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.files import is_file
from autotune.parsing import parse, read_json, refuse_newer
from autotune.recordings.memory_profile import FixedShare, MemoryProfile, Replica

SCHEMA = 2
MEMORY_FILE = "memory.json"


@dataclass(frozen=True)
class RecordedMemory:
    """`profile`: the memory of a replica without synchronization.

    - `ddp`, `bucket_view`: its synchronization, as in `Replica`.
    - `batch`: samples of a forward pass, which is the leading dimension of all its inputs; None
      where they differ.
    - `fixed`: share of a pass's time that does not shrink with the batch; None if not measured.
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
            raise InvalidInput(f"a forward pass needs at least 1 sample, but has {self.batch}")

    def replica(self, rank: int = 0, host_of_rank: tuple[int, ...] = ()) -> Replica:
        """One rank of the job."""
        return Replica(rank, self.ddp, self.bucket_view, host_of_rank)

    def write(self, folder: Path) -> Path:
        """Write `memory.json`; return its path. Raises `OSError`."""
        path = folder / MEMORY_FILE
        path.write_text(json.dumps(to_data(self), allow_nan=False), encoding="utf-8")
        return path

    @staticmethod
    def read(folder: Path) -> RecordedMemory | None:
        """None without the file. Raises `InvalidInput` where the file breaks a rule."""
        path = folder / MEMORY_FILE
        if not is_file(path):
            return None
        data: Any = read_json(path)
        refuse_newer(data, SCHEMA, "recorded memory", str(path))
        return parse(RecordedMemory, data, str(path))


NOT_RECORDED = "the memory was not recorded"
"""Prefix of the note of a recorded job without memory."""


def missing_memory_reason(notes: tuple[str, ...]) -> str:
    """Why a recorded job has no memory, from the job's notes."""
    prefix = f"{NOT_RECORDED}: "
    reasons = [note.removeprefix(prefix) for note in notes if note.startswith(NOT_RECORDED)]
    again = "record it again with this version (autotune profile --overwrite)"
    return "; ".join(reasons) or f"its folder has no {MEMORY_FILE}; {again}"
