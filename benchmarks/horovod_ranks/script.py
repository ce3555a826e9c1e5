"""What a rank runs: a Horovod script of one framework, whose computation is timed waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Workload

PROBE, LATENCY = "probe", "latency"
"""Beginnings of the names of probes, as `profiling.graph.horovod_costs` knows them."""
FEWEST_PROBES, MOST_PROBES, LARGE_BYTES = 4, 8, 2**20


def probes_of(size_bytes: int) -> list[tuple[str, float]]:
    """(name, postscale factor) of the all-reduces of a probe, which have other factors each.

    Horovod does not fuse tensors of different factors.
    """
    count = FEWEST_PROBES if size_bytes > LARGE_BYTES else MOST_PROBES
    return [(f"{PROBE}.{size_bytes}.{number}", 1 + number / 64) for number in range(count)]


class HorovodScript(Protocol):
    """A script after `hvd.init`. Building one is collective."""

    calls: list[HorovodCall]
    """The logged calls of this rank."""

    def logging(self) -> AbstractContextManager[None]:
        """Log the calls of the steps and probes inside."""

    def step(self, number: int) -> list[float]:
        """Begin of the step and of its backward pass, and end of the backward pass and the step.

        In seconds, on one clock for all ranks of a host. `number` is that of the logged step.
        """

    def probe(self, size_bytes: int) -> None:
        """All-reduce the tensors of `probes_of(size_bytes)`, one right after the other."""

    def latency(self, number: int) -> None:
        """All-reduce one element under a name that begins with `LATENCY`."""

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over the ranks."""


class Framework(Protocol):
    """The module of a framework, which is imported before the ranks fork."""

    hvd: Any

    def prepare(self) -> None:
        """Configure the framework in a rank, before `hvd.init`."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def script(self, workload: Workload, case: dict[str, Any]) -> HorovodScript:
        """Build the script of a case (`start.Case.to_data`)."""
