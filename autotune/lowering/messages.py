"""The messages of a plan by kind: their variables, and their steps with times.

| symbol | meaning |
|---|---|
| M | messages of the plan, in issue order |
| V | variables, in backward order |
| K | messages of one kind |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.costs.row_traffic import RowTraffic
from autotune.errors import InvalidInput
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.durations import Base, bases_s
from autotune.lowering.kept import Kept
from autotune.lowering.step_times import StepTimes, Timing
from autotune.lowering.steps import Scope, Step, pieces_of, steps_of
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.shares import Shares, shares_of_hosts
from autotune.strategy_space.strategy import ROOTED, Compressor, SparseHandling, Synchronizer
from autotune.workload import Workload

KEPT_BATCHES, KEPT_MESSAGES = 512, 2**14
"""Batches whose steps are kept, and their messages: 20 MB, with 60 numbers for three steps."""


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step on a cluster. `times`: None if it only computes. `group`: key of its process group.

    `bases_s` (B, K): all of its times, by `durations.Base`.
    """

    step: Step
    times: StepTimes | None
    root: int
    group: Hashable
    bases_s: FloatArray

    @cached_property
    def root_computes(self) -> bool:
        return bool(self.bases_s[Base.PREPARE_ROOT].any())

    @cached_property
    def works_beyond(self) -> bool:
        return bool(self.bases_s[Base.BEYOND].any())


@dataclass(frozen=True, eq=False)
class Batch:
    """Messages of one kind: `numbers` (K,) within the plan, ascending.

    Each of the `pieces` of a direct exchange takes all steps by itself. `kind`: equal for batches
    of one lowering whose messages differ only in sizes and times, so that their ops are equal.
    `rows`: the rows of sparse gradients travel, after their counts.
    """

    numbers: IntArray
    steps: tuple[TimedStep, ...]
    kind: Hashable
    pieces: int = 1
    direct: bool = False
    rows: bool = False

    @cached_property
    def owned(self) -> bool:
        """Whether one rank owns all sums, and every transfer is known (`StepTimes.flows`)."""
        collectives = [timed.times for timed in self.steps if timed.times is not None]
        return bool(collectives) and all(times.flows for times in collectives)

    def cut(self, steps: slice, numbers: IntArray) -> Batch:
        """The batch with some of its steps only, and other numbers of its messages."""
        kind = (self.kind, steps.start, steps.stop)
        return replace(self, steps=self.steps[steps], kind=kind, numbers=numbers)


@dataclass(frozen=True, eq=False)
class SliceTable:
    """`variable`, `message`, `elements` of every slice; `last` (M,): last variable of a message."""

    variable: IntArray
    message: IntArray
    elements: IntArray
    last: IntArray

    @staticmethod
    def of(plan: Plan, workload: Workload) -> SliceTable:
        """Raises `InvalidInput` if the plan belongs to another model."""
        if plan.workload_id != workload.id:
            raise InvalidInput(
                f"a plan is lowered with its own model, but it is for {plan.workload_id} "
                f"and the workload is {workload.id}; plan the strategy for this workload"
            )
        index = workload.index
        rows = [
            (index[part.variable], number, part.elements)
            for number, message in enumerate(plan.messages)
            for part in message.slices
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        last = np.full(len(plan.messages), -1, dtype=np.int64)
        np.maximum.at(last, table[:, 1], table[:, 0])
        return SliceTable(table[:, 0], table[:, 1], table[:, 2], last)


@dataclass(frozen=True)
class _Groups:
    """The process groups of a message by scope; `members` ranks sum it."""

    by_scope: dict[Scope, tuple[tuple[int, ...], ...]]
    two_level: bool
    members: int


class MessageTimer:
    """Finds the timed steps of the messages of a workload's plans on one cluster."""

    def __init__(self, timing: Timing, costs: RuntimeCosts, workload: Workload) -> None:
        self.timing = timing
        self.costs = costs
        self.cluster = timing.cluster
        self.traffic = RowTraffic(workload)
        host_of = timing.ports.host_of_rank
        self._hosts = [
            tuple(np.flatnonzero(host_of == host).tolist())
            for host in range(len(self.cluster.hosts))
        ]
        self._world = tuple(range(self.cluster.world_size))
        self._groups: Kept[_Groups] = Kept(KEPT_BATCHES, KEPT_BATCHES)
        self._steps: Kept[tuple[TimedStep, ...]] = Kept(KEPT_BATCHES, KEPT_MESSAGES)

    def batches(
        self, messages: Sequence[Message], ring_order: tuple[int, ...] | None = None
    ) -> list[Batch]:
        """The messages by kind."""
        numbers_of: dict[tuple[Hashable, bool], list[int]] = {}
        served = _server_shares(messages)
        for number, message in enumerate(messages):
            kind = (_kind(message), message.shares is not None and message.shares == served)
            numbers_of.setdefault(kind, []).append(number)
        return [
            self._batch(messages, numbers, ring_order, kind) for kind, numbers in numbers_of.items()
        ]

    def most_owned_bytes(self, batches: Sequence[Batch], plan: Plan) -> float:
        """The most bytes of gradients whose sums one rank owns between the halves of exchanges."""
        owned_bytes = np.zeros(self.cluster.world_size)
        for batch in batches:
            of_kind = [plan.messages[number] for number in batch.numbers.tolist()]
            ranks, shares = self._owned(of_kind[0], plan.ring_order)
            owned_bytes[ranks] += shares * sum(message.grad_bytes for message in of_kind)
        return float(owned_bytes.max())

    def _owned(
        self, message: Message, ring_order: tuple[int, ...] | None
    ) -> tuple[list[int], FloatArray]:
        """The ranks that own parts of a sum after its first steps, and the share of each.

        Without owners, rank 0 counts as one. With an all-reduce, the first rank of the ring does.
        """
        if not has_owners(message):
            return [0], np.ones(1)
        groups = self._groups_of(message, ring_order)
        (members,) = groups.by_scope[Scope.LEADERS if groups.two_level else Scope.WORLD]
        if message.synchronizer is Synchronizer.ALL_REDUCE:
            return [members[0]], np.ones(1)
        if message.synchronizer in ROOTED:
            assert message.owner is not None
            return [message.owner], np.ones(1)
        shares = _shares(message, groups)
        if shares is None:
            return list(members), np.full(len(members), 1 / len(members))
        return list(members), np.array(shares)[list(members)]

    def _batch(
        self,
        messages: Sequence[Message],
        numbers: list[int],
        ring_order: tuple[int, ...] | None,
        message_kind: tuple[Hashable, bool],
    ) -> Batch:
        of_kind = [messages[number] for number in numbers]
        first = of_kind[0]
        sizes = tuple([_size(message) for message in of_kind])
        steps = self._steps.get((message_kind, ring_order, sizes))
        if steps is None:
            groups = self._groups_of(first, ring_order)
            steps = self._timed_steps(of_kind, groups, message_kind[1])
            self._steps.put((message_kind, ring_order, sizes), len(of_kind), steps)
        flags = tuple((step.root_computes, step.works_beyond) for step in steps)
        return Batch(
            numbers=np.array(numbers, dtype=np.int64),
            steps=steps,
            kind=(message_kind, ring_order, flags),
            pieces=pieces_of(first),
            direct=first.synchronizer is Synchronizer.DIRECT_EXCHANGE,
            rows=first.sparse is not SparseHandling.DENSE,
        )

    def _timed_steps(
        self, of_kind: Sequence[Message], groups: _Groups, served: bool
    ) -> tuple[TimedStep, ...]:
        steps = steps_of(
            of_kind,
            self.traffic,
            self.cluster.world_size,
            groups.members,
            groups.two_level,
            self.costs,
            _shares(of_kind[0], groups),
        )
        return tuple(
            self._timed(replace(step, served=served), groups.by_scope[step.scope]) for step in steps
        )

    def _timed(self, step: Step, groups: tuple[tuple[int, ...], ...]) -> TimedStep:
        times = self.timing.of(step, groups) if step.collective is not None else None
        root = step.root
        if root is None:
            root = groups[0][0] if groups and groups[0] else 0
        key = step.scope if step.scope is Scope.HOSTS else (step.scope, groups)
        return TimedStep(step, times, root, key, bases_s(step, times, self.costs))

    def _groups_of(self, message: Message, ring_order: tuple[int, ...] | None) -> _Groups:
        world = message.ranks or ring_order or self._world
        by_host = _sums_by_host(message)
        key = (world, message.owner if by_host else None, by_host)
        groups = self._groups.get(key)
        if groups is None:
            groups = self._new_groups(message, world)
            self._groups.put(key, 1, groups)
        return groups

    def _new_groups(self, message: Message, world: tuple[int, ...]) -> _Groups:
        hosts: tuple[tuple[int, ...], ...] = ()
        if _sums_by_host(message):
            ranks = set(world)
            on_hosts = (tuple(rank for rank in host if rank in ranks) for host in self._hosts)
            hosts = tuple(members for members in on_hosts if members)
        by_scope = {Scope.WORLD: (world,), Scope.HOSTS: hosts}
        if len(hosts) < 2 or max(map(len, hosts)) < 2:
            return _Groups(by_scope, False, len(world))
        leaders = {message.owner if message.owner in host else min(host) for host in hosts}
        by_scope[Scope.LEADERS] = (tuple(rank for rank in world if rank in leaders),)
        return _Groups(by_scope, True, len(by_scope[Scope.LEADERS][0]))


def has_owners(message: Message) -> bool:
    """Whether the first steps leave a complete sum with its owners; else it takes all steps."""
    rows = message.sparse is not SparseHandling.DENSE
    return not (rows or message.compressor.error_feedback or message.dtype.startswith("complex"))


def _sums_by_host(message: Message) -> bool:
    """Whether hosts sum first, if there are several. Rows are timed between all ranks."""
    return message.hierarchical and message.sparse is SparseHandling.DENSE


def _server_shares(messages: Sequence[Message]) -> Shares | None:
    """Those of the direct exchanges with one owner, if it is the same rank in all of them."""
    owners = {
        message.shares
        for message in messages
        if message.shares is not None and sum(share > 0 for share in message.shares) == 1
    }
    return owners.pop() if len(owners) == 1 else None


def _shares(message: Message, groups: _Groups) -> Shares | None:
    """By which the members of a direct exchange own its sums; leaders own those of their hosts."""
    if not groups.two_level:
        return message.shares
    (leaders,) = groups.by_scope[Scope.LEADERS]
    return shares_of_hosts(message.shares, groups.by_scope[Scope.HOSTS], leaders)


def _size(message: Message) -> Hashable:
    """Equal for messages of one kind that take the same time."""
    if message.sparse is SparseHandling.DENSE and message.rank is None:
        return message.elements
    return message.slices


def _kind(message: Message) -> Hashable:
    """Equal for messages that differ only in their sizes."""
    factors: Hashable = None
    if message.compressor is Compressor.NONE:  # sends what the gradient holds
        factors = (None, True)
    elif message.compressor is not Compressor.POWER_SGD or any(p.rows > 1 for p in message.slices):
        factors = (message.rank, message.wire_bytes >= message.grad_bytes)
    return (
        message.synchronizer,
        message.compressor,
        message.owner,
        message.hierarchical,
        message.sparse,
        message.ranks,
        message.dtype,
        message.ratio,
        factors,
        message.shares,
        pieces_of(message),
    )
