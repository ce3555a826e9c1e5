"""Recordings of `datasets/gpu_traces/h100` that the tests of a file share."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from pathlib import Path

import numpy as np

from autotune.profiling.traces.job import TraceJob, read_job
from autotune.whatif.base import Base
from autotune.whatif.recording.recorded import recorded_base

TRACES = Path(__file__).parents[1] / "datasets" / "gpu_traces" / "h100"


class Recording:
    """A recording, read when it is first used. Its step has arrays that nothing can write into."""

    def __init__(self, name: str) -> None:
        self.folder = TRACES / name

    @cached_property
    def job(self) -> TraceJob:
        return read_job(self.folder)

    @cached_property
    def base(self) -> Base:
        """A step of rank 0."""
        base = recorded_base(self.job, 0)
        for field in fields(base):
            value = getattr(base, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        return base
