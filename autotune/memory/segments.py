"""Segments of a memory profile in which variables are read, gradients are ready, and passes end."""

from __future__ import annotations

from autotune.recordings.memory_profile import MemoryProfile, Phase


def ready_segments(profile: MemoryProfile) -> dict[str, int]:
    """Variable -> the last segment in which its gradient becomes ready."""
    return {name: at for at, segment in enumerate(profile.segments) for name in segment.readies}


def read_segments(profile: MemoryProfile) -> dict[str, int]:
    """Variable -> the first segment that reads it."""
    first: dict[str, int] = {}
    for at, segment in enumerate(profile.segments):
        for name in segment.reads:
            first.setdefault(name, at)
    return first


def first_backward(profile: MemoryProfile) -> int:
    """The segment in which the backward pass begins; the number of segments if there is none."""
    return min(_backward(profile), default=len(profile.segments))


def last_backward(profile: MemoryProfile) -> int:
    """The segment in which the backward pass ends and waits for messages in flight."""
    return max(_backward(profile), default=len(profile.segments) - 1)


def _backward(profile: MemoryProfile) -> list[int]:
    return [at for at, segment in enumerate(profile.segments) if segment.phase is Phase.BACKWARD]
