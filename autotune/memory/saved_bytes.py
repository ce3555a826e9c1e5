"""Bytes that runs of regions save in the segments of a step, for the program of `fitting`.

| symbol | meaning |
|---|---|
| U, S | runs of regions, segments |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import IntArray
from autotune.memory.recomputation import Run
from autotune.recordings.memory_profile import Lifetime, MemoryProfile, touched


def raised_bytes(runs: Sequence[Run], saved: IntArray) -> IntArray:
    """The most bytes that disjoint runs add to every segment with their inputs, shape (S,)."""
    raised = np.zeros(saved.shape[1], dtype=np.int64)
    for first in {run.first for run in runs}:
        same = [number for number, run in enumerate(runs) if run.first == first]
        raised += np.maximum(-saved[same], 0).max(axis=0)
    return raised


def saved_bytes(profile: MemoryProfile, run: Run) -> IntArray:
    """Bytes that the run alone saves in every segment of the profile, shape (S,).

    Negative where the run holds its input longer than the step without it does.
    """
    segments = len(profile.segments)
    absent, held = [], []
    unrelieved_bytes = np.zeros(segments, dtype=np.int64)
    for lifetime in profile.lifetimes:
        until = run.input_until(lifetime, profile.regions)
        if lifetime.dies is not None and until is not None:
            held.append(Lifetime(lifetime.bytes, lifetime.kind, lifetime.dies + 1, until))
            unrelieved_bytes[lifetime.dies] += lifetime.bytes
    for used in run.passes(profile.regions):
        if used.backward <= used.last + 1:
            continue
        for lifetime in profile.lifetimes:
            born, dies = lifetime.born, lifetime.dies
            if not run.drops(lifetime) or born is None or dies is None:
                continue
            if used.first <= born <= used.last and dies >= used.backward:
                gap = (used.last + 1, used.backward - 1)
                absent.append(Lifetime(lifetime.bytes, lifetime.kind, *gap))
    unrelieved_bytes = np.minimum(unrelieved_bytes, profile.relief_bytes)
    saved: IntArray = touched(absent, segments) - touched(held, segments) - unrelieved_bytes
    return saved
