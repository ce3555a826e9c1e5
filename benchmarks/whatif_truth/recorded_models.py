"""The models of a folder of `datasets/gpu_traces`: their recordings and their unrecorded times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import InvalidInput
from autotune.parsing import read_json
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import Base
from autotune.whatif.changes.alone import alone
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base

PLAIN, BF16 = "fp32", "amp_bf16"
HOST_BOUND_SHARE = 0.9
"""Issue time over step time from which on the host may be the bottleneck."""


@dataclass(frozen=True)
class Timed:
    """Measured without a recorder, in seconds: the median step, its deciles, and its issue."""

    variant: Mapping[str, Any]
    step_s: float
    low_s: float
    high_s: float
    issue_s: float

    @property
    def name(self) -> str:
        return str(self.variant["name"])

    @property
    def host_bound(self) -> bool:
        return self.issue_s >= HOST_BOUND_SHARE * self.step_s


@dataclass(frozen=True, eq=False)
class RecordedModel:
    """One model: `timed` in the order of the file; its plain variant may be there several times."""

    name: str
    folder: Path
    timed: tuple[Timed, ...]

    @cached_property
    def plain(self) -> Base:
        """The recorded step in fp32, without DDP."""
        return self._base(PLAIN)

    @cached_property
    def bf16(self) -> Base:
        """The recorded step under autocast, without DDP."""
        return self._base(BF16)

    def _base(self, variant: str) -> Base:
        base = recorded_base(read_job([self.folder / f"{self.name}.{variant}"]), 0)
        try:
            return alone(base, Question())
        except InvalidInput:
            return base

    def times(self, variant: str) -> list[Timed]:
        return [one for one in self.timed if one.name == variant]

    @property
    def plain_s(self) -> float:
        """The median step in fp32, the mean of its repetitions."""
        return float(np.mean([one.step_s for one in self.times(PLAIN)]))

    @property
    def plain_issue_s(self) -> float:
        """The shortest issue in fp32: others may have waited for the device."""
        return min(one.issue_s for one in self.times(PLAIN))


def recorded_models(folder: Path) -> tuple[list[RecordedModel], list[str]]:
    """The models with a plain recording, and the names of those that only have times."""
    rows: dict[str, list[Timed]] = {}
    for row in read_json(folder / "times.json"):
        rows.setdefault(row["model"], []).append(
            Timed(
                row["variant"],
                row["step_ms"] / 1e3,
                row["step_ms_q10"] / 1e3,
                row["step_ms_q90"] / 1e3,
                row["issue_ms"] / 1e3,
            )
        )
    known = {name for name in rows if (folder / f"{name}.{PLAIN}" / "job.json").exists()}
    models = [RecordedModel(name, folder, tuple(rows[name])) for name in rows if name in known]
    return models, [name for name in rows if name not in known]
