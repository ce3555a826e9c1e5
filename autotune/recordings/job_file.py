"""`job.json`, which describes a recorded job next to its traces.

With it the traces can be read, aligned, replayed and optimized. A folder holds `job.json` and
`rank<r>.json.gz`, one Kineto trace per rank. Hosts without a shared file system each have a folder
with `job.json` and their own ranks' traces; rank 0's folder has all.

| symbol | meaning | unit |
|---|---|---|
| N | recorded steps | - |
| step_s | time between two step marks on one rank, while recording | s |
| perf_counter_ns | an instant on the process's monotonic clock | ns |
| wall_ns | the same instant on the host's wall clock, which traces use | ns |
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
from autotune.files import is_file, is_folder
from autotune.parsing import parse, read_json, refuse_newer
from autotune.recordings.recorded_steps import CollectiveRow, StepBreakdown, refuse_negative
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload

SCHEMA = 1
JOB_FILE = "job.json"


def trace_name(rank: int | str) -> str:
    """The file of one rank's trace within the folder."""
    return f"rank{rank}.json.gz"


@dataclass(frozen=True)
class ClockPair:
    """One instant on both clocks.

    Two pairs of a rank, before and after the recording, give the drift of its wall clock.
    """

    __pydantic_config__ = {"extra": "forbid"}

    perf_counter_ns: int
    wall_ns: int


@dataclass(frozen=True)
class RankRecord:
    """One process. `step_s` has shape (N,).

    `device` is torch's name (`cpu`, `cuda:0`). `trace`: a file name in the folder. `untimed`: how
    many of the `collectives` have no start and end in the trace.
    """

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
    times: StepBreakdown = field(default_factory=StepBreakdown)

    def __post_init__(self) -> None:
        where = f"of rank {self.rank} must be"
        if Path(self.trace).name != self.trace:
            raise InvalidInput(f"the trace {where} a file of the folder, but is {self.trace!r}")
        if not all(math.isfinite(step_s) and step_s >= 0 for step_s in self.step_s):
            raise InvalidInput(f"the step times {where} finite and at least 0")
        if not 0 <= self.untimed <= self.collectives:
            raise InvalidInput(
                f"the untimed collectives {where} 0 to all {self.collectives}, but are "
                f"{self.untimed}"
            )


@dataclass(frozen=True)
class RecordedJob:
    """A recorded job; `ranks` are in rank order.

    - `workload`: one replica without communication; None if not measured, `notes` state why.
    - `plan`: the plan that the ranks used; None for DDP's own reducer. `buckets`: the reducer's
      variables in the order sent, where known.
    - `cross_step_refused`: why the script cannot synchronize across steps, according to its steps
      until the end of the recording; "" for no known reason. `direct_refused`: why its ranks cannot
      exchange directly.
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
    direct_refused: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        ranks = [record.rank for record in self.ranks]
        if not ranks or self.world_size != len(ranks) or ranks != list(range(len(ranks))):
            rule = f"one record of each of its {self.world_size} ranks, in their order"
            raise InvalidInput(f"a recorded job needs {rule}, but has {len(ranks)}")
        refuse_negative("a recorded job", self.steps, self.asked_steps, self.warmup_steps)
        counts = [len(record.step_s) for record in self.ranks]
        if any(count != self.steps for count in counts):
            rule = f"every rank must have {self.steps} recorded steps"
            raise InvalidInput(f"{rule}, but they have {counts}")

    @property
    def iteration_s(self) -> float:
        """Median over the steps of the slowest rank's time."""
        if not self.steps:
            return 0.0
        by_rank = [record.step_s for record in self.ranks]
        slowest_s: list[float] = [max(times_s) for times_s in zip(*by_rank, strict=True)]
        return median(slowest_s)

    def write(self, folder: Path) -> Path:
        """Write `job.json`; return its path. Raises `OSError`."""
        path = folder / JOB_FILE
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(to_data(self), indent=1, allow_nan=False), encoding="utf-8")
        partial.replace(path)  # a process that waits for the file finds a whole one
        return path

    @staticmethod
    def read(folder: Path) -> RecordedJob:
        """Raises `InvalidInput` where the folder has no `job.json` or it breaks a rule."""
        path = folder / JOB_FILE
        if not is_file(path):
            problem = "holds none" if is_folder(folder) else "does not exist"
            raise InvalidInput(
                f"a folder of `autotune profile` holds a {JOB_FILE}, but {folder} {problem}; check "
                "the path, or record first"
            )
        data: Any = read_json(path)
        refuse_newer(data, SCHEMA, "recorded job", str(path))
        return parse(RecordedJob, data, str(path))
