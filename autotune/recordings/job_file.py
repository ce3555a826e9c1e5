"""`job.json`, which describes a recorded job next to its traces.

With it the traces can be read, aligned, replayed and optimized. A folder holds `job.json` and
`rank<r>.json.gz`, one Kineto trace per rank. Hosts without a shared file system each have a folder
with `job.json` and their own ranks' traces; rank 0's folder has all.

| symbol | meaning | unit |
|---|---|---|
| N | recorded steps | - |
| step_s | time between two step marks on one rank, while recording | s |
| ordinary_s | the same of the steps in between, which are not recorded | s |
| perf_counter_ns | an instant on the process's monotonic clock | ns |
| wall_ns | the same instant on the host's wall clock, which traces use | ns |
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from autotune.canonical import LATER, to_data
from autotune.errors import InvalidInput
from autotune.files import is_file, is_folder
from autotune.parsing import parse, read_json, refuse_newer
from autotune.recordings.recorded_steps import CollectiveRow, StepBreakdown, refuse_negative
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload

SCHEMA = 1
JOB_FILE = "job.json"
ORDINARY_STEPS = "autotune.ordinary_steps"
"""Annotation of a trace over the steps between two recorded ones, of which it has nothing."""


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
    """One process. `step_s` has shape (N,), `ordinary_s` that of the ordinary steps.

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
    ordinary_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        where = f"of rank {self.rank} must be"
        if Path(self.trace).name != self.trace:
            raise InvalidInput(f"the trace {where} a file of the folder, but is {self.trace!r}")
        times_s = (*self.step_s, *self.ordinary_s)
        if not all(math.isfinite(step_s) and step_s >= 0 for step_s in times_s):
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
    - `between`: ordinary steps between two recorded ones.
    - `cross_step_refused`: why the script cannot synchronize across steps, according to its steps
      until the end of the recording; "" for no known reason. `direct_refused`: why its ranks cannot
      exchange directly.
    - `mirrored`: whether it uses MultiWorkerMirroredStrategy, see `strategy_space.mirrored`.
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
    between: int = 0
    schema: int = SCHEMA
    mirrored: bool = field(default=False, metadata=LATER)

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
        return _slowest_s([record.step_s for record in self.ranks])

    @property
    def ordinary_s(self) -> float:
        """The same for the ordinary steps between the recorded ones; 0 without such steps."""
        return _slowest_s([record.ordinary_s for record in self.ranks])

    @property
    def ordinary_pairs(self) -> list[tuple[float, float]]:
        """(a recorded step, the median of the ordinary ones next to it) in seconds.

        Each is the time of the slowest rank.
        """
        recorded_s = _slowest_by_step([record.step_s for record in self.ranks])
        ordinary_s = _slowest_by_step([record.ordinary_s for record in self.ranks])
        pairs = []
        for number, step_s in enumerate(recorded_s):
            first = (number - 1) * self.between
            beside_s = ordinary_s[max(first, 0) : first + 2 * self.between]
            if beside_s and step_s > 0 and (middle_s := median(beside_s)) > 0:
                pairs.append((step_s, middle_s))
        return pairs

    @property
    def recording_cost(self) -> float | None:
        """Time that recording added to recorded and ordinary steps together, relative to them.

        From medians, so below 0 by chance. None without ordinary steps.
        """
        ordinary = min(len(record.ordinary_s) for record in self.ranks)
        if not ordinary or not self.ordinary_s:
            return None
        return (self.iteration_s / self.ordinary_s - 1) * self.steps / (self.steps + ordinary)

    def measured_workload(self, where: Path) -> Workload:
        """The workload, with its device's name. Raises `InvalidInput` if it was not measured.

        `where`: the recording, for the message.
        """
        if self.workload is None:
            reason = "; ".join(self.notes) or "the recording gives no reason"
            raise InvalidInput(
                f"{where}: the model's own times must be known, but could not be recorded: {reason}"
            )
        if self.workload.device == "cpu" or self.workload.device_name:
            return self.workload
        return replace(self.workload, device_name=self.ranks[0].device_name)

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


def recording_at(path: Path) -> Path | None:
    """The folder of the recording that `path` names, also by its `job.json`; None if it is none."""
    if path.name == JOB_FILE:
        return path.parent
    return path if is_file(path / JOB_FILE) else None


def _slowest_s(by_rank: Sequence[Sequence[float]]) -> float:
    """Median over the steps of the slowest rank's time; 0 for no steps."""
    return median(_slowest_by_step(by_rank) or [0.0])


def _slowest_by_step(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time of each step, as far as all ranks have it."""
    return [max(times_s) for times_s in zip(*by_rank, strict=False)]
