"""The memory of a replica under what-ifs: its peak, and the largest batch that fits the device.

The memory of a step is a `MemoryProfile`: tensors with lifetimes over segments of the step, from
our recordings (docs/memory.md). A what-if changes the lifetimes. Activations and temporaries grow
with the batch; parameters, gradients and the optimizer's state do not:

    live_i(b) = fixed_i + moving_i * b / batch

| symbol | meaning |
|---|---|
| S | segments of the step |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import IntArray
from autotune.errors import InvalidInput
from autotune.memory.accumulation import accumulated
from autotune.memory.segments import last_backward
from autotune.profiling.formats.kineto import DEVICE_BYTES
from autotune.profiling.traces.job import TraceJob
from autotune.recordings.memory_profile import Lifetime, MemoryProfile, TensorRole, touched

NOT_RECORDED = (
    "the trace does not state which tensors are alive when, so peak memory is unknown; record with "
    "autotune.Recorder (memory.json), or with profile_memory=True and record_shapes=True"
)


@dataclass(frozen=True, eq=False)
class ReplicaMemory:
    """The memory of a step, as recorded or after what-ifs.

    - `batch`: samples of the recorded step; `device_bytes`: of the device. None if unknown.
    - `times`: samples of the step over those of the recorded one. `parts`: its micro-batches.

    Raises `InvalidInput` for numbers below 1.
    """

    profile: MemoryProfile
    batch: int | None = None
    device_bytes: int | None = None
    times: float = 1.0
    parts: int = 1

    def __post_init__(self) -> None:
        for value, what in ((self.batch, "batch"), (self.device_bytes, "device's memory in bytes")):
            if value is not None and value < 1:
                raise InvalidInput(f"a {what} must be at least 1, but is {value}")

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, without synchronization between ranks."""
        return int(self.profile.live_bytes.max())

    @property
    def batch_times(self) -> float | None:
        """How many times the recorded batch fits the device; None if the device is unknown.

        0 if not even a step without samples fits.
        """
        if self.device_bytes is None:
            return None
        fixed_bytes = self._fixed_bytes()
        growing_bytes = self.profile.live_bytes - fixed_bytes
        free_bytes = self.device_bytes - fixed_bytes
        grows = growing_bytes > 0
        if np.any(free_bytes < 0):
            return 0.0
        if not grows.any():
            return None
        return self.times * float((free_bytes[grows] / growing_bytes[grows]).min())

    @property
    def largest_batch(self) -> int | None:
        """The most samples whose step fits the device; None if batch or device are unknown."""
        times = self.batch_times
        return None if self.batch is None or times is None else int(self.batch * times + 1e-9)

    def with_batch(self, factor: float) -> ReplicaMemory:
        """The memory of a step with `factor` times as many samples."""
        profile, fixed_bytes = self.profile, self._fixed_bytes()
        computed = last_backward(profile) + 1
        lifetimes = tuple(
            replace(one, bytes=math.ceil(one.bytes * factor)) if _grows(one, computed) else one
            for one in profile.lifetimes
        )
        moving = [one for one in lifetimes if one.born is not None]
        touched_bytes = touched(moving, len(profile.segments)) + profile.always_bytes
        live_bytes = np.ceil(fixed_bytes + (profile.live_bytes - fixed_bytes) * factor)
        relief_bytes = np.maximum(touched_bytes - live_bytes.astype(np.int64), 0).tolist()
        segments = tuple(
            replace(segment, relief_bytes=relief)
            for segment, relief in zip(profile.segments, relief_bytes, strict=True)
        )
        changed = replace(profile, segments=segments, lifetimes=lifetimes)
        return replace(self, profile=changed, times=self.times * factor)

    def in_parts(self, parts: int) -> ReplicaMemory:
        """The memory of a step whose gradients accumulate over `parts` parts of its batch."""
        return replace(self, profile=accumulated(self.profile, parts), parts=self.parts * parts)

    def _fixed_bytes(self) -> IntArray:
        """(S,) bytes that do not grow with the batch, at most those alive."""
        profile = self.profile
        computed = last_backward(profile) + 1
        moving = [
            one for one in profile.lifetimes if one.born is not None and not _grows(one, computed)
        ]
        fixed = touched(moving, len(profile.segments)) + profile.always_bytes
        fixed[computed:] -= profile.relief_bytes[computed:]
        result: IntArray = np.clip(fixed, 0, profile.live_bytes)
        return result


def _grows(lifetime: Lifetime, computed: int) -> bool:
    """Whether a tensor is of the passes over the batch, as in `memory.accumulation`."""
    return (
        lifetime.born is not None
        and lifetime.born < computed
        and lifetime.kind is not TensorRole.GRADIENT
    )


@dataclass(frozen=True)
class MemoryOutcome:
    """Peaks in bytes before and after, and the batches that fit the device; None where unknown.

    `batch_times`: as multiples of the recorded batch. `largest_batch`: in samples.
    """

    before_bytes: int
    after_bytes: int
    batch_times_before: float | None
    batch_times_after: float | None
    largest_batch_before: int | None
    largest_batch_after: int | None


def outcome(before: ReplicaMemory, after: ReplicaMemory) -> MemoryOutcome:
    """Compare a replica's memory before and after what-ifs."""
    return MemoryOutcome(
        before_bytes=before.peak_bytes,
        after_bytes=after.peak_bytes,
        batch_times_before=before.batch_times,
        batch_times_after=after.batch_times,
        largest_batch_before=before.largest_batch,
        largest_batch_after=after.largest_batch,
    )


def replica_memory(
    job: TraceJob, place: int, profile: MemoryProfile, batch: int | None = None
) -> ReplicaMemory:
    """The memory of rank `place`; the device's memory is that of the smallest one in the trace."""
    device_bytes = job.ranks[place].info.get(DEVICE_BYTES)
    return ReplicaMemory(profile, batch, None if device_bytes is None else int(device_bytes))
