"""Lanes: the steps of many messages at a time, each rank in the same order within every process group.

A message is a few collectives that follow each other, its steps.  Step k of all messages runs on lane k, which has process
groups of its own: within each group every rank issues in plan order, and a late step never blocks an earlier lane.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist

from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.hosts import hosts_of
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups, destroy_groups

Step = Callable[[], dist.Work | None]
"""Starts the next collective of a message once its earlier ones have completed; None: nothing to wait for on this rank."""

Around = Callable[[int, int, Step], dist.Work | None]
"""Called with a message's number, a lane and its step there, on the thread that starts it; it calls the step and gives what that gives."""

_VOTES = -1  # a lane without steps

KEPT_GROUPS, KEPT_GROUPS_ON_DEVICE = 32, 8
"""Tuning tries many rings and owners and comes back to few; every group has threads, and connections to all its members. One of NCCL holds
memory of the device, too."""


class Flight:
    """One message under way. Its steps run in ascending order of their lanes."""

    def __init__(
        self,
        steps: Sequence[tuple[int, Step]],
        device: Device,
        number: int = 0,
        around: Around | None = None,
    ) -> None:
        self._steps = dict(steps)
        self._device, self._number, self._around = device, number, around
        self._work: dist.Work | None = None
        self._kept: list[
            dist.Work | None
        ] = []  # until the end: a work may own memory that another stream still copies from
        self._fence: torch.cuda.Event | None = None
        self._started: dict[int, tuple[dist.Work | None, torch.cuda.Event | None]] = {}
        self.last_lane = steps[-1][0]
        self.next_lane: Future[object] | None = (
            None  # its result is the future of the lane after it, or None
        )

    def begin(self) -> None:
        """Where the first step is started on another stream: what was issued to this thread's, the packing, comes before it."""
        self._fence = self._device.fence()

    def advance(self, lane: int) -> None:
        """Once the earlier steps have completed, start the step of this lane, if there is one."""
        step = self._steps.get(lane)
        if step is None:
            return
        self.follow()
        self._work = step() if self._around is None else self._around(self._number, lane, step)
        self._kept.append(self._work)
        self._fence = self._device.fence()
        self._started[lane] = self._work, self._fence

    def follow(self, lane: int | None = None) -> None:
        """Until the step that was started last has completed, or that of `lane`."""
        work, fence = (self._work, self._fence) if lane is None else self._started[lane]
        if work is not None:
            work.wait()
        self._device.follow(fence)

    def has(self, lane: int) -> bool:
        return lane in self._steps

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
        return (self._work is None or self._work.is_completed()) and (
            self._fence is None or self._fence.query()
        )

    def wait(self) -> None:
        """Until every step has completed. Raises what a step raised: `RuntimeError` where a rank is gone or too late."""
        future = self.next_lane
        while future is not None:
            future = _future(future.result())
        self.follow()


def _future(result: object) -> Future[object] | None:
    assert result is None or isinstance(result, Future)
    return result


class Lanes:
    """Lane k > 0 runs on one thread of its own, fed in plan order by lane k - 1; lane 0 on the issuing thread, with a limit on its own.

    Over NCCL there are no threads: all steps of a message are queued on the device by the issuing thread, each lane's on a stream of its
    own. NCCL needs all ranks to queue the collectives of all groups in one order, which threads would not keep; here it is that of message
    and step. A group's collectives follow each other on its own stream: of a lane's messages one at a time is under way in each group.
    """

    def __init__(self, ranks: SynchronizerGroups, device: Device) -> None:
        self.ranks, self.device = ranks, device
        self._queued = device.queues(ranks.base)
        self._groups: dict[tuple[int, RankGroups], list[dist.ProcessGroup]] = {}
        self._asked: set[tuple[int, RankGroups]] = set()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._under_way: dict[int, deque[weakref.ref[Flight]]] = {}
        self._hosts: RankGroups | None = None
        self.limit: int | None = None
        """Between two steps: how many messages have a step under way on a lane at most (`Plan.limit`). The next one's step starts there
        when that of the one so many before has completed. None: each is started as soon as it can be, as many as the library takes.

        Side by side they share the links, so that what is needed first waits for what is not: with many, a planned order means nothing.
        One by one, nothing is sent while ranks and threads tell each other that a message is over. Between lanes they overlap anyway: a
        server sends one message back while the next one comes in. Over NCCL nothing follows it: a communicator takes one at a time.
        """
        self.around: Around | None = None
        """Who sees the steps of messages start; messages under way keep whom they have."""

    def group(self, lane: int, rank_groups: RankGroups) -> dist.ProcessGroup | None:
        """The group of this rank's part on that lane; None where it takes no part or is alone.

        Collective on first use, so only while a plan is loaded, in the same order on all ranks.
        """
        alone = len(rank_groups.members_of(self.ranks.rank)) < 2
        if rank_groups == RankGroups.world(self.ranks.size) and lane in (0, 1):
            return None if alone else (self.ranks.first, self.ranks.second)[lane]
        made = self._groups.pop((lane, rank_groups), None) or self.ranks.among(rank_groups)
        self._groups[lane, rank_groups] = made  # the last used are the last
        self._asked.add((lane, rank_groups))
        return None if alone else made[-1]

    def trim(self) -> None:
        """Local, when a plan has been loaded: give back groups that it did not ask for, beyond those kept, the longest unused first.

        Those of some ranks of the world are kept: torch would give a later group the name of an earlier one.
        """
        unused = len(self._groups) - max(
            len(self._asked), KEPT_GROUPS_ON_DEVICE if self._queued else KEPT_GROUPS
        )
        self._asked.clear()
        for key in list(self._groups)[: unused if self.ranks.is_world and unused > 0 else 0]:
            destroy_groups(self._groups.pop(key))

    def votes(self) -> dist.ProcessGroup:
        """A group of all ranks on which no message travels; collective on first use."""
        return self.group(_VOTES, RankGroups.world(self.ranks.size)) or self.ranks.first

    def hosts(self) -> RankGroups:
        """The ranks that share a host; collective on first use. Raises `InvalidStrategy` on every rank where it is unknown."""
        if self._hosts is None:
            self._hosts = hosts_of(self.ranks)
        return self._hosts

    def run(self, steps: Sequence[tuple[int, Step]], number: int = 0) -> Flight:
        """Start message `number`; `steps` are (lane, step) with ascending lanes. Every rank calls it in plan order, on one thread."""
        flight = Flight(steps, self.device, number, self.around)
        if self._queued:
            flight.begin()
            for lane, _ in steps:
                with self.device.side_stream(lane):
                    flight.advance(lane)
            return flight
        first = 0
        if self.limit is not None:
            flight.begin()
        else:
            flight.advance(0)
            first = 1
        if flight.last_lane >= first:
            flight.next_lane = self._submit(flight, first, self.limit)
        return flight

    def _submit(self, flight: Flight, lane: int, limit: int | None) -> Future[object]:
        return self._thread(lane).submit(self._on_lane, flight, lane, limit)

    def _thread(self, lane: int) -> ThreadPoolExecutor:
        if lane not in self._threads:  # lane k's thread is only started from lane k - 1
            self._threads[lane] = ThreadPoolExecutor(1, f"lane-{lane}", self.device.enter_thread)
        return self._threads[lane]

    def _on_lane(self, flight: Flight, lane: int, limit: int | None) -> Future[object] | None:
        with self.device.side_stream(lane):
            if limit is None or not flight.has(lane):
                flight.advance(lane)
            else:
                under_way = self._room(lane, limit)
                flight.advance(lane)
                under_way.append(weakref.ref(flight))
        # A lane on which the message has no step passes it on, too: the order stays the plan's.
        return self._submit(flight, lane + 1, limit) if lane < flight.last_lane else None

    def _room(self, lane: int, limit: int) -> deque[weakref.ref[Flight]]:
        """Who is under way on the lane, once they are fewer than `limit`. One that is gone was waited for; why one failed, it tells."""
        under_way = self._under_way.setdefault(lane, deque())
        while len(under_way) >= limit:
            before = under_way.popleft()()
            if before is not None:
                with suppress(RuntimeError):
                    before.follow(lane)
        return under_way

    def stop(self) -> None:
        """Local, between two steps: end the threads. The next message starts new ones."""
        for thread in list(self._threads.values()):
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads = {}
        self._under_way = {}

    def close(self) -> None:
        """Local: end the threads and give back the groups that were made here."""
        self.stop()
        destroy_groups([group for made in self._groups.values() for group in made])
        self._groups = {}
