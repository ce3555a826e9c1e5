"""Lanes: run the steps of many messages at once, in the same order on all ranks of a process group.

A message is a few collectives, its steps, one after the other. Step k of all messages runs on
lane k, which has its own process groups. Within each group every rank issues in plan order, and a
late step never blocks an earlier lane.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.hosts import hosts_of
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups, destroy_groups

Step = Callable[[], dist.Work | None]
"""Starts a message's next collective, once the earlier ones have completed. None: no work to wait
for."""

Collective = Callable[[dist.ProcessGroup], dist.Work | None]
"""Starts a collective over a process group of which this rank is a member."""

Gather = Callable[[Tensor, Tensor, dist.ProcessGroup], dist.Work | None]
"""Called with (received, sent, process group): fills `received` with all ranks' `sent`, in rank
order."""

Around = Callable[[int, int, Step], dist.Work | None]
"""Called with (message number, lane, step) on the thread that starts the step; calls it and returns
its result."""

_VOTES, _NORMS = -1, -2
"""Lanes without messages."""

KEPT_GROUPS = 32
KEPT_GROUPS_ON_DEVICE = 8
"""Tuning tries many rings and owners and returns to few of them. Every group has threads, and
connections to all its members. An NCCL group also holds memory of the device."""


class Flight:
    """One message under way. Its steps run by ascending lane.

    `rows`: it has the rows of a sparse gradient, after their counts.
    """

    def __init__(
        self,
        steps: Sequence[tuple[int, Step]],
        device: Device,
        number: int | None = 0,
        around: Around | None = None,
        rows: bool = False,
    ) -> None:
        self._steps = dict(steps)
        self.rows = rows
        self._device, self._number, self._around = device, number, around
        self._work: dist.Work | None = None
        # Works stay here until the end: one may own memory that another stream still reads.
        self._works: list[dist.Work | None] = []
        self._fence: torch.cuda.Event | None = None
        self._started: dict[int, tuple[dist.Work | None, torch.cuda.Event | None]] = {}
        self.last_lane = steps[-1][0]
        self.next_lane: Future[object] | None = None
        """The future of the next lane's step. Its result is the future of the lane after, or
        None."""

    def begin(self) -> None:
        """Order the first step, if on another stream, after the packing on this thread's stream."""
        self._fence = self._device.fence()

    def advance(self, lane: int) -> None:
        """Start this lane's step, if there is one, once the earlier steps have completed."""
        step = self._steps.get(lane)
        if step is None:
            return
        self.follow()
        if self._around is None or self._number is None:
            self._work = step()
        else:
            self._work = self._around(self._number, lane, step)
        self._works.append(self._work)
        self._fence = self._device.fence()
        self._started[lane] = self._work, self._fence

    def follow(self, lane: int | None = None) -> None:
        """Wait for the step of `lane`, or for the last one that was started."""
        work, fence = (self._work, self._fence) if lane is None else self._started[lane]
        if work is not None:
            work.wait()
        self._device.follow(fence)

    def wait_for_rows(self) -> None:
        """Wait until all rows have arrived, behind which the last step only adds them.

        Call it on another lane's thread than theirs.
        """
        future = self.next_lane
        for _ in range(self.last_lane):
            assert future is not None, "lane 0 has a thread, and rows take every lane"
            future = _future(future.result())
        self.follow(self.last_lane - 1)

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
        """Wait for every step. Raises what a step raised: `RuntimeError` if a rank is gone or
        late."""
        future = self.next_lane
        while future is not None:
            future = _future(future.result())
        self.follow()


def _future(result: object) -> Future[object] | None:
    assert result is None or isinstance(result, Future)
    return result


class Lanes:
    """The lanes of one synchronizer.

    Lane k > 0 has its own thread, which lane k - 1 feeds in plan order. Lane 0 runs on the issuing
    thread, or on its own thread if there is a limit.

    Over NCCL there are no threads. The issuing thread queues all steps of a message on the device,
    each lane's on its own stream. NCCL needs all ranks to queue the collectives of all groups in
    one order, which threads would not keep. Here the order is that of message and step. A group's
    collectives run one after the other, so each lane has one message under way in each group.
    """

    def __init__(self, ranks: SynchronizerGroups, device: Device) -> None:
        self.ranks, self.device = ranks, device
        self._queued = device.queues(ranks.base)
        self._groups: dict[tuple[int, RankGroups], list[dist.ProcessGroup]] = {}
        self._asked: set[tuple[int, RankGroups]] = set()
        self._with_communicator: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._under_way: dict[int, deque[weakref.ref[Flight]]] = {}
        self._hosts: RankGroups | None = None
        self._tags = itertools.count()
        self.limit: int | None = None
        """The most messages with a step under way on a lane (`Plan.limit`); set it between two
        steps.

        A message's step starts when the step of the message `limit` before it has completed. None:
        each starts as soon as the library takes it. Messages under way together share the links,
        so an urgent one waits for the others, and many of them make a planned order meaningless.
        With one at a time, nothing is sent while ranks and threads signal the end of a message.
        Behind rows, a message of another kind waits until they have arrived, since lane 0 carries
        only their counts.
        Lanes overlap anyway: a server sends one message back while the next one comes in. NCCL
        ignores the limit, since a communicator runs one collective at a time.
        """
        self.direct_limit: int | None = None
        """The same for direct exchanges, which count pieces; None if the plan has none.

        With a limit, lane 0 has a thread. Then all messages start on it, so that the order within
        its groups stays that of the plan.
        """
        self.around: Around | None = None
        """Called around each step; messages under way keep the one that they started with."""

    def group(self, lane: int, rank_groups: RankGroups) -> dist.ProcessGroup | None:
        """This rank's process group on that lane; None if it is alone or takes no part.

        Collective on first use: call it only while a plan is loaded, in the same order on all
        ranks.
        """
        alone = len(rank_groups.members_of(self.ranks.rank)) < 2
        if rank_groups == RankGroups.world(self.ranks.size) and lane in (0, 1):
            return None if alone else self._connected((self.ranks.first, self.ranks.second)[lane])
        created = self._groups.pop((lane, rank_groups), None) or self.ranks.among(rank_groups)
        self._groups[lane, rank_groups] = created  # ordered by last use
        self._asked.add((lane, rank_groups))
        return None if alone else self._connected(created[-1])

    def _connected(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Let all members create the communicator of a new group.

        NCCL needs all of them for that, but a rank without rows takes no part in sends.
        """
        if self._queued and group not in self._with_communicator:
            dist.all_reduce(torch.zeros(1, device=self.device.device), group=group)
            self._with_communicator.add(group)
        return group

    def all_reduce(self, values: Tensor, rank_groups: RankGroups) -> Collective:
        """The all-reduce of `values` within each group, to be started at any time."""

        def reduce(group: dist.ProcessGroup) -> dist.Work | None:
            work: dist.Work | None = dist.all_reduce(values, group=group, async_op=True)
            return work

        return reduce

    def all_gather(self, rank_groups: RankGroups) -> Gather:
        """The gather of equally long vectors within each group, to be started at any time."""

        def gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
            work: dist.Work | None = dist.all_gather_single(
                received, sent, group=group, async_op=True
            )
            return work

        return gather

    def trim(self) -> None:
        """Destroy the groups unused for longest that the loaded plan does not need. Local.

        A synchronizer over part of the world keeps all: torch would reuse the name of a group.
        """
        most = KEPT_GROUPS_ON_DEVICE if self._queued else KEPT_GROUPS
        unused = len(self._groups) - max(len(self._asked), most)
        self._asked.clear()
        if not self.ranks.is_world:
            return
        for key in list(self._groups)[: max(unused, 0)]:
            destroy_groups(self._groups.pop(key))

    def votes(self) -> dist.ProcessGroup:
        """A group of all ranks that carries no message; collective on first use."""
        return self.group(_VOTES, RankGroups.world(self.ranks.size)) or self.ranks.first

    def norms(self) -> dist.ProcessGroup | None:
        """A group of all ranks for norms, None if this rank is alone; collective on first use."""
        return self.group(_NORMS, RankGroups.world(self.ranks.size))

    def hosts(self) -> RankGroups:
        """One group per host; collective on first use. Raises `InvalidStrategy` if unknown."""
        if self._hosts is None:
            self._hosts = hosts_of(self.ranks)
        return self._hosts

    @property
    def queued(self) -> bool:
        """Whether collectives are queued on the device, as over NCCL."""
        return self._queued

    def new_tag(self) -> int:
        """A tag for sends from rank to rank that no other exchange has.

        Call it only while a plan is loaded, in the same order on all ranks.
        """
        return next(self._tags)

    def run(
        self,
        steps: Sequence[tuple[int, Step]],
        number: int | None = 0,
        direct: bool = False,
        rows: bool = False,
    ) -> Flight:
        """Start message `number`, or a piece of it; `steps` are (lane, step) by ascending lane.

        None: no message. `rows`: as in `Flight`.

        Every rank calls it in plan order, on one thread.
        """
        flight = Flight(steps, self.device, number, self.around, rows)
        if self._queued:
            flight.begin()
            for lane, _ in steps:
                with self.device.side_stream(lane):
                    flight.advance(lane)
            return flight
        first, limit = 0, self.direct_limit if direct else self.limit
        if self.limit is not None or self.direct_limit is not None:
            flight.begin()
        else:
            flight.advance(0)
            first = 1
        if flight.last_lane >= first:
            flight.next_lane = self._submit(flight, first, limit)
        return flight

    def _submit(self, flight: Flight, lane: int, limit: int | None) -> Future[object]:
        return self._thread(lane).submit(self._on_lane, flight, lane, limit)

    def _thread(self, lane: int) -> ThreadPoolExecutor:
        if lane not in self._threads:  # only lane k - 1 starts lane k's thread
            self._threads[lane] = ThreadPoolExecutor(1, f"lane-{lane}", self.device.enter_thread)
        return self._threads[lane]

    def _on_lane(self, flight: Flight, lane: int, limit: int | None) -> Future[object] | None:
        with self.device.side_stream(lane):
            if limit is None or not flight.has(lane):
                flight.advance(lane)
            else:
                under_way = self._room(lane, limit, flight.rows)
                flight.advance(lane)
                under_way.append(weakref.ref(flight))
        # A lane without a step of the message passes it on, too, which keeps the plan's order.
        return self._submit(flight, lane + 1, limit) if lane < flight.last_lane else None

    def _room(self, lane: int, limit: int, rows: bool) -> deque[weakref.ref[Flight]]:
        """Wait until fewer than `limit` messages are under way on the lane, and return them.

        `rows`: those of the message that is to start.

        A message that no longer exists has been waited for. One that failed raises in its own wait.
        """
        under_way = self._under_way.setdefault(lane, deque())
        while len(under_way) >= limit:
            first = under_way.popleft()()
            if first is not None:
                with suppress(RuntimeError, CancelledError):
                    if lane == 0 and first.rows and not rows:
                        first.wait_for_rows()
                    else:
                        first.follow(lane)
        return under_way

    def stop(self) -> None:
        """End the threads, between two steps; the next message starts new ones. Local."""
        for thread in list(self._threads.values()):
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads = {}
        self._under_way = {}

    def close(self) -> None:
        """End the threads and destroy the groups created here. Local."""
        self.stop()
        destroy_groups([group for created in self._groups.values() for group in created])
        self._groups = {}
