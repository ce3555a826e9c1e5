"""Logs the device allocator's allocations and frees during some steps, in order, with our marks.

torch's profiler with `profile_memory=True` reports every block of the CPU's and of the CUDA caching
allocator with address and size (on a GPU as rounded by the allocator). It sees the training thread,
the autograd engine's threads and those of collectives, except for frees of the engine's GPU thread
(`unreported_frees`). It does not see threads that Python starts, such as the lanes of `exchange`.
So it records a replica without a plan; `autotune.memory.plan_buffers` counts what plans allocate.
Where a plan is active, the work between two `apart` notes does not belong to the replica.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.errors import InvalidInput
from runtime_rewriter.recording.memory.unreported_frees import Reported, unreported_frees

_MARK = "autotune memory mark "
_APART = "autotune memory apart "
_NOTE = re.compile(rf"({re.escape(_MARK)}|{re.escape(_APART)})(\d+)")


@dataclass(frozen=True)
class Allocation:
    """`bytes` at `address`; negative for a free."""

    address: int
    bytes: int


@dataclass(frozen=True)
class Apart:
    """A change of owner: even numbers begin work that is not the replica's, odd numbers end it."""

    number: int

    @property
    def begins(self) -> bool:
        return self.number % 2 == 0


MemoryEvent = Allocation | Apart | int
"""An allocation, a change of owner, or the number of a mark."""


class AllocationLog:
    """Allocations and marks in order; `events` has them once the block of `recording` has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = 0
        self._aparts = 0
        self.events: list[MemoryEvent] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Raises `InvalidInput` where a profiler is already active."""
        if torch.autograd.profiler._is_profiler_enabled:
            raise InvalidInput(
                "memory cannot be recorded while torch's profiler is active; remove the script's "
                "own profiler"
            )
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            yield
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        assert results is not None, "a profiler that has ended has results"
        self.events = self._in_order(results.experimental_event_tree())

    def mark(self) -> int:
        """Mark this moment; return the mark's number, which appears among the events."""
        number = self._marks
        self._marks += 1
        with record_function(f"{_MARK}{number}"):
            return number

    def apart(self) -> None:
        """Note, in turn, that work of another owner begins and that it ends."""
        with record_function(f"{_APART}{self._aparts}"):
            self._aparts += 1

    def _in_order(self, roots: list[Any]) -> list[MemoryEvent]:
        timed: list[tuple[int, MemoryEvent]] = []
        reported: list[tuple[int, Reported]] = []
        open_nodes = list(roots)
        while open_nodes:
            node = open_nodes.pop()
            open_nodes.extend(node.children)
            if node.name == "[memory]":
                fields = node.extra_fields
                if fields.device.type == self._device.type:
                    block = Reported(fields.ptr, fields.alloc_size, fields.total_allocated)
                    reported.append((node.start_time_ns, block))
            elif (note := _NOTE.fullmatch(node.name)) is not None:
                number = int(note[2])
                timed.append((node.start_time_ns, number if note[1] == _MARK else Apart(number)))
        reported.sort(key=lambda pair: pair[0])
        # the CPU's total counts only reported events
        frees = {}
        if self._device.type != "cpu":
            frees = unreported_frees([event for _, event in reported])
        before_ns = 0
        for number, (at_ns, event) in enumerate(reported):
            # Right after the event before: the thread frees them when their operator is done,
            # before it marks anything.
            for address, size in frees.get(number, ()):
                timed.append((before_ns, Allocation(address, -size)))
            timed.append((at_ns, Allocation(event.address, event.bytes)))
            before_ns = at_ns
        timed.sort(key=lambda pair: pair[0])
        return [event for _, event in timed]
