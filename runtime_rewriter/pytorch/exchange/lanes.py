"""Lanes: the steps of many messages at a time, each rank in the same order within every process group.

A message is a few collectives that follow each other, its steps.  Step k of all messages runs on lane k, which has process
groups of its own: within each group every rank issues in plan order, and a late step never blocks an earlier lane.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.hosts import hosts_of
from runtime_rewriter.pytorch.exchange.ranks import Circle, Ranks, destroy_groups

Step = Callable[[], dist.Work | None]
"""Starts the next collective of a message once its earlier ones have completed; None: nothing to wait for on this rank."""

_VOTES = -1  # a lane without steps


class Flight:
    """One message under way. Its steps run in ascending order of their lanes."""

    def __init__(self, steps: Sequence[tuple[int, Step]], device: Device) -> None:
        self._steps = dict(steps)
        self._device = device
        self._work: dist.Work | None = None
        self._fence: torch.cuda.Event | None = None
        self.last_lane = steps[-1][0]
        self.next_lane: Future[object] | None = None  # its result is the future of the lane after it, or None

    def advance(self, lane: int) -> None:
        """Once the earlier steps have completed, start the step of this lane, if there is one."""
        step = self._steps.get(lane)
        if step is None:
            return
        self._follow()
        self._work = step()
        self._fence = self._device.fence()

    def _follow(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._device.follow(self._fence)

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return or raise at once; does not block."""
        future = self.next_lane
        while future is not None:
            if not future.done():
                return False
            if future.cancelled() or future.exception() is not None:
                return True
            future = _future(future.result())
        return (self._work is None or self._work.is_completed()) and (self._fence is None or self._fence.query())

    def wait(self) -> None:
        """Until every step has completed. Raises what a step raised: `RuntimeError` where a rank is gone or too late."""
        future = self.next_lane
        while future is not None:
            future = _future(future.result())
        self._follow()


def _future(result: object) -> Future[object] | None:
    assert result is None or isinstance(result, Future)
    return result


class Lanes:
    """Lane 0 runs on the issuing thread; lane k > 0 on one thread of its own, fed in plan order by lane k - 1."""

    def __init__(self, ranks: Ranks, device: Device) -> None:
        self.ranks, self.device = ranks, device
        self._groups: dict[tuple[int, Circle], list[dist.ProcessGroup]] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._hosts: Circle | None = None

    def group(self, lane: int, circle: Circle) -> dist.ProcessGroup | None:
        """The group of this rank's part on that lane; None where it takes no part or is alone.

        Collective on first use, so only while a plan is loaded, in the same order on all ranks.
        """
        alone = len(circle.part_of(self.ranks.rank)) < 2
        if circle == Circle.world(self.ranks.size) and lane in (0, 1):
            return None if alone else (self.ranks.first, self.ranks.second)[lane]
        if (lane, circle) not in self._groups:
            self._groups[lane, circle] = self.ranks.among(circle)
        return None if alone else self._groups[lane, circle][-1]

    def votes(self) -> dist.ProcessGroup:
        """A group of all ranks on which no message travels; collective on first use."""
        return self.group(_VOTES, Circle.world(self.ranks.size)) or self.ranks.first

    def hosts(self) -> Circle:
        """The ranks that share a host; collective on first use. Raises `InvalidStrategy` on every rank where it is unknown."""
        if self._hosts is None:
            self._hosts = hosts_of(self.ranks)
        return self._hosts

    def run(self, steps: Sequence[tuple[int, Step]]) -> Flight:
        """Start a message; `steps` are (lane, step) with ascending lanes. Every rank calls it in plan order, on one thread."""
        flight = Flight(steps, self.device)
        flight.advance(0)
        if flight.last_lane > 0:
            flight.next_lane = self._submit(flight, 1)
        return flight

    def _submit(self, flight: Flight, lane: int) -> Future[object]:
        if lane not in self._threads:  # lane k's thread is only started from lane k - 1
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{lane}")
        return self._threads[lane].submit(self._on_lane, flight, lane)

    def _on_lane(self, flight: Flight, lane: int) -> Future[object] | None:
        with self.device.side_stream(lane):
            flight.advance(lane)
        # A lane on which the message has no step passes it on, too: the order stays the plan's.
        return self._submit(flight, lane + 1) if lane < flight.last_lane else None

    def stop(self) -> None:
        """Local, between two steps: end the threads. The next message starts new ones."""
        for thread in list(self._threads.values()):
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads = {}

    def close(self) -> None:
        """Local: end the threads and give back the groups that were made here."""
        self.stop()
        destroy_groups([group for made in self._groups.values() for group in made])
        self._groups = {}
