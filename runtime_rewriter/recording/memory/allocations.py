"""What the allocator of the device gave and took back while some steps ran, in order, together with marks of our own.

torch's profiler with `profile_memory=True` reports every block of the CPU's and of the CUDA caching allocator with its address and its
size (on a GPU as rounded by the allocator). It sees the thread that trains, the autograd engine's threads and those of collectives, but
for what the engine's thread of a GPU gives back (`unreported_frees`); it does not see threads that Python starts, such as the lanes of
`exchange`: so it records a replica without a plan, and what plans allocate is counted by `autotune.memory.plan_buffers`. Where a plan is at
work all the same, what happens between two notes of `apart` is its work and not the replica's.
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
_NOTED = re.compile(rf"({re.escape(_MARK)}|{re.escape(_APART)})(\d+)")


@dataclass(frozen=True)
class Allocation:
    """`bytes` at `address`; negative where they are given back."""

    address: int
    bytes: int


@dataclass(frozen=True)
class Apart:
    """What follows is not the replica's own, or is again: the even numbers begin it, each next one ends it."""

    number: int

    @property
    def begins(self) -> bool:
        return self.number % 2 == 0


Noted = Allocation | Apart | int
"""What happened: an allocation, or one of our own notes; a plain number is a mark's."""


class AllocationLog:
    """Allocations and marks in the order in which they happened; `events` has them once the block of `recording` has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = 0
        self._aparts = 0
        self.events: list[Noted] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Raises `InvalidInput` where a profiler is already at work."""
        if torch.autograd.profiler._is_profiler_enabled:
            raise InvalidInput(
                "memory cannot be recorded while torch's profiler is at work; take the script's own profiler out"
            )
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            yield
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        assert results is not None, "a profiler that has ended has results"
        self.events = list(self._in_order(results.experimental_event_tree()))

    def mark(self) -> int:
        """Note this moment; its number comes back among the events."""
        number = self._marks
        self._marks += 1
        with record_function(f"{_MARK}{number}"):
            return number

    def apart(self) -> None:
        """Note, in turn, that somebody else's work begins and that it ends."""
        with record_function(f"{_APART}{self._aparts}"):
            self._aparts += 1

    def _in_order(self, roots: list[Any]) -> Iterator[Noted]:
        found: list[tuple[int, Noted]] = []
        reported: list[tuple[int, Reported]] = []
        open_nodes = list(roots)
        while open_nodes:
            node = open_nodes.pop()
            open_nodes.extend(node.children)
            if node.name == "[memory]":
                fields = node.extra_fields
                if fields.device.type == self._device.type:
                    reported.append(
                        (
                            node.start_time_ns,
                            Reported(fields.ptr, fields.alloc_size, fields.total_allocated),
                        )
                    )
            elif (noted := _NOTED.fullmatch(node.name)) is not None:
                number = int(noted[2])
                found.append((node.start_time_ns, number if noted[1] == _MARK else Apart(number)))
        reported.sort(key=lambda pair: pair[0])
        events = [event for _, event in reported]
        silent = (
            {} if self._device.type == "cpu" else unreported_frees(events)
        )  # the CPU's total is of what was reported
        before_ns = 0
        for number, (at_ns, event) in enumerate(reported):
            # At once after the event before: the thread gives them back when their operator is done, before it marks anything.
            found += [
                (before_ns, Allocation(address, -size)) for address, size in silent.get(number, ())
            ]
            found.append((at_ns, Allocation(event.address, event.bytes)))
            before_ns = at_ns
        found.sort(key=lambda pair: pair[0])
        return (event for _, event in found)
