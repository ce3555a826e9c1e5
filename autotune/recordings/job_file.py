"""`job.json`: what lies beside the traces of one recorded job, so that they can be read, aligned, replayed and optimized.

A folder holds `job.json` and `rank<r>.json.gz`, one Kineto trace per rank. Where the hosts share no file system each has a folder with
`job.json` and its own ranks' traces, and rank 0's folder has all.

| symbol | meaning | unit |
|---|---|---|
| N | recorded steps | - |
| step_s | time from one step mark to the next on one rank, while recording | s |
| perf_counter_ns, wall_ns | the same instant on the process's monotonic clock and on the host's wall clock, which a trace counts by | ns |
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_json, refuse_newer
from autotune.recordings.recorded_steps import CollectiveRow, StepTimes
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload

SCHEMA = 1
JOB_FILE = "job.json"


def trace_name(rank: int | str) -> str:
    """The file of one rank's trace within the folder."""
    return f"rank{rank}.json.gz"


@dataclass(frozen=True)
class ClockPair:
    """One instant on both clocks. Two of a rank, before and after the recording, give the drift of its wall clock."""

    __pydantic_config__ = {"extra": "forbid"}

    perf_counter_ns: int
    wall_ns: int


@dataclass(frozen=True)
class RankRecord:
    """One process. `device` as torch names it (`cpu`, `cuda:0`), `trace` a file name in the folder, `step_s` of shape (N,)."""

    __pydantic_config__ = {"extra": "forbid"}

    rank: int
    host: str
    device: str
    device_name: str
    process_id: int
    trace: str
    clocks: tuple[ClockPair, ...]
    step_s: tuple[float, ...]
    collectives: int = 0
    untimed: int = 0
    """Of the collectives: those whose start and end the trace does not show."""
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        if Path(self.trace).name != self.trace:
            raise InvalidInput(
                f"the trace of rank {self.rank} must be a file of the folder, but is {self.trace!r}"
            )
        if not all(math.isfinite(step_s) and step_s >= 0 for step_s in self.step_s):
            raise InvalidInput(f"the step times of rank {self.rank} must be finite and at least 0")


@dataclass(frozen=True)
class RecordedJob:
    """A recorded job. `ranks` stand in rank order.

    `workload` is one replica without communication, None where it could not be measured (`notes` says why). `plan` is what the ranks
    sent by; None: DDP's own reducer, whose `buckets` (names of variables, in the order sent) are given where they are known.
    `cross_step_refused`: why the script cannot synchronize across steps, as its steps until the end of the recording tell; empty where
    nothing is known against it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    world_size: int
    ranks: tuple[RankRecord, ...]
    steps: int
    asked_steps: int
    warmup_steps: int
    model_id: str = ""
    workload: Workload | None = None
    plan: Plan | None = None
    plan_id: str = ""
    buckets: tuple[tuple[str, ...], ...] = ()
    backend: str = ""
    collectives: tuple[CollectiveRow, ...] = ()
    software: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    options: dict[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cross_step_refused: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if [record.rank for record in self.ranks] != list(range(self.world_size)):
            raise InvalidInput(
                f"a recorded job needs one record of each of its {self.world_size} ranks, in their order"
            )
        if any(len(record.step_s) != self.steps for record in self.ranks):
            raise InvalidInput(
                f"every rank must have {self.steps} recorded steps, but they have {[len(r.step_s) for r in self.ranks]}"
            )

    @property
    def iteration_s(self) -> float:
        """Median over the steps of the slowest rank's time."""
        return (
            median(
                max(of_step)
                for of_step in zip(*(record.step_s for record in self.ranks), strict=True)
            )
            if self.steps
            else 0.0
        )

    def write(self, folder: Path) -> Path:
        """Raises `OSError` where it cannot be written."""
        path = folder / JOB_FILE
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(to_data(self), indent=1, allow_nan=False), encoding="utf-8")
        partial.replace(path)  # whoever waits for the file finds a whole one
        return path

    @staticmethod
    def read(folder: Path) -> RecordedJob:
        """Raises `InvalidInput` where the folder has no `job.json` or it breaks a rule."""
        path = folder / JOB_FILE
        if not path.exists():
            here = "holds none" if folder.is_dir() else "does not exist"
            raise InvalidInput(
                f"a folder of `autotune profile` holds a {JOB_FILE}, but {folder} {here}; check the path, or record first"
            )
        data: Any = read_json(path)
        refuse_newer(data, SCHEMA, "recorded job", str(path))
        return parse(RecordedJob, data, str(path))
