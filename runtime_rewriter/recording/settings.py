"""What is recorded, how, and where it goes."""

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
"""Between the undisturbed steps and the recorded ones: buffers are touched again, and the threads of Gloo are learned."""


@dataclass(frozen=True)
class RecordSettings:
    """`folder` is where the traces go. `steps` are recorded after `warmup` ordinary ones and those that measure the workload.

    `stop`: the script ends when all is written. `reports`: where each rank of `autotune profile` says how it fared, "" without one.
    Each of the options below makes the profiler see more and cost more.
    """

    __pydantic_config__ = {"extra": "forbid"}

    folder: str
    steps: int = PROFILE_STEPS
    warmup: int = WARMUP_STEPS
    workload: bool = True
    stop: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    reports: str = ""
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1:
            raise InvalidInput(
                f"a recording needs at least 1 step and 1 warm-up step, but has {self.steps} and {self.warmup}"
            )

    @property
    def options(self) -> dict[str, bool]:
        return {
            "record_shapes": self.record_shapes,
            "profile_memory": self.profile_memory,
            "with_stack": self.with_stack,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(to_data(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> RecordSettings:
        return parse(RecordSettings, read_json(path), str(path))
