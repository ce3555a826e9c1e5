"""The settings of a recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_json

PROFILE_STEPS = 10
WARMUP_STEPS = 3
WORKLOAD_STEPS = 3
SETTLING_STEPS = 2
"""Steps between the undisturbed ones and the recorded ones.

Buffers are touched again, and the log learns the threads of Gloo. The last one may be traced to
count its events."""


@dataclass(frozen=True)
class RecordSettings:
    """`steps` are recorded into `folder`, after `warmup` ordinary ones and the measured ones.

    `between`: ordinary steps between two recorded ones, None for as many as keep the cost of the
    stretch low (`turns`). `stop`: the script ends when all is written. `reports`: folder for the
    report of each rank, "" without `autotune profile`. `command`: for the record, without secrets.
    The three options make the profiler see more and cost more.
    """

    __pydantic_config__ = {"extra": "forbid"}

    folder: str
    steps: int = PROFILE_STEPS
    warmup: int = WARMUP_STEPS
    between: int | None = None
    workload: bool = True
    stop: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    reports: str = ""
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1:
            rule = "a recording needs at least 1 step and 1 warm-up step"
            raise InvalidInput(f"{rule}, but has {self.steps} and {self.warmup}")
        if self.between is not None and self.between < 0:
            rule = "a recording needs at least 0 ordinary steps between two recorded ones"
            raise InvalidInput(f"{rule}, but has {self.between}")

    @property
    def options(self) -> dict[str, bool]:
        names = ("record_shapes", "profile_memory", "with_stack")
        return {name: getattr(self, name) for name in names}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(to_data(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> RecordSettings:
        return parse(RecordSettings, read_json(path), str(path))
