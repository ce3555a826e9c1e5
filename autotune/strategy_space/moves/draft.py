"""A strategy taken apart into messages, to be changed and written again in normal form.

Messages are in the order of `plan()`. In normal form, messages of two or more shards are groups
numbered in issue order, and priorities are 0 unless the issue order differs from gradient-ready
order. So a change has no side effects, and equal results are equal strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from autotune.cluster import Cluster
from autotune.costs.issue_order import MessageTimes
from autotune.strategy_space.builders.direct import PIECE_BYTES
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import servers_of
from autotune.strategy_space.moves.choices import Choices
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.plan import Plan, cut, message_of, plan
from autotune.strategy_space.shares import MOST_PIECES
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_SYNCHRONIZERS,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Workload

Member = tuple[int, int]
"""A shard: (position of its variable in gradient-ready order, its number in the variable)."""

ORDER_NODES = 20
"""Orders that one change of the issue order tries."""


@lru_cache(maxsize=1 << 14)  # a message's shard is the same in most drafts of a search
def _placed(shard: Shard, group: int | None, priority: int) -> Shard:
    return replace(shard, group=group, priority=priority)


@dataclass
class DraftMessage:
    """Shards sent together. `shard` has the shared fields; its group and priority mean nothing."""

    members: list[Member]
    shard: Shard
    dtype: str

    @property
    def ready(self) -> tuple[int, Member]:
        """Sort key of gradient-ready order: position of its last gradient, then its first shard."""
        return self.members[-1][0], self.members[0]


class Draft:
    """Messages in issue order, members sorted. Every change keeps the strategy plannable."""

    def __init__(
        self,
        strategy: Strategy,
        workload: Workload,
        cluster: Cluster,
        space: SearchSpace,
        choices: Choices,
        known: Plan | None = None,
    ) -> None:
        """`known`: the strategy's plan, if it exists already."""
        self.workload, self.cluster, self.space = workload, cluster, space
        self.choices = choices
        self.hierarchy = space.hierarchy_for(cluster)
        self.servers = servers_of(cluster)
        self.cross_step = strategy.cross_step
        self.in_flight = strategy.in_flight
        self.op_fusion = strategy.op_fusion
        self.local_copies = strategy.local_copies
        self.ring_order = strategy.ring_order
        self._before = strategy.variables
        of_variables = [strategy.by_name[variable.name] for variable in workload.variables]
        self.partitions: list[Partition | None] = [choice.partition for choice in of_variables]
        self.sparse: list[SparseHandling] = [choice.sparse for choice in of_variables]
        member_of = {
            (variable.name, part.start): (position, number)
            for position, variable in enumerate(workload.variables)
            for number, part in enumerate(cut(variable, self.partitions[position]))
        }
        self.messages: list[DraftMessage] = []
        for message in (known or plan(strategy, workload, cluster.world_size)).messages:
            members = sorted(member_of[part.variable, part.start] for part in message.slices)
            position, number = members[0]
            shard = _placed(of_variables[position].shards[number], None, 0)
            self.messages.append(DraftMessage(members, shard, message.dtype))
        self.in_ready_order = self.messages == self._naturally_ordered()

    def copy(self) -> Draft:
        """An independent draft that asks the same choices."""
        other = copy(self)
        other.partitions, other.sparse = list(self.partitions), list(self.sparse)
        other.messages = [
            DraftMessage(list(message.members), message.shard, message.dtype)
            for message in self.messages
        ]
        return other

    def _naturally_ordered(self) -> list[DraftMessage]:
        return sorted(self.messages, key=lambda message: message.ready)

    def written(self) -> Strategy:
        """The strategy in normal form."""
        natural = self._naturally_ordered()
        if self.in_ready_order:
            self.messages = natural
        reordered = self.messages != natural
        whole: dict[int, Shard] = {}  # by position
        parts: dict[Member, Shard] = {}
        for number, message in enumerate(self.messages):
            group = number if len(message.members) > 1 else None
            shard = _placed(message.shard, group, number if reordered else 0)
            for member in message.members:
                if self.partitions[member[0]] is None:
                    whole[member[0]] = shard
                else:
                    parts[member] = shard
        choices: list[VariableStrategy] = []
        index = self.workload.index
        for before in self._before:
            position = index[before.variable]
            partition, sparse = self.partitions[position], self.sparse[position]
            if partition is None:
                shard = whole[position]
                if before.shards[0] is shard and not before.partition and before.sparse is sparse:
                    choices.append(before)
                    continue
                in_order: tuple[Shard, ...] = (shard,)
            else:
                numbers = range(len(partition.sizes))
                in_order = tuple([parts[position, number] for number in numbers])
            choices.append(VariableStrategy(before.variable, in_order, partition, sparse))
        most = self.space.in_flight_bound(self.cross_step, bool(self.direct()))
        return Strategy(
            tuple(choices),
            self.cross_step,
            self.ring_order,
            in_flight=min(self.in_flight, most),
            op_fusion=self.op_fusion,
            local_copies=self.local_copies,
        )

    def pick(self, count: int) -> int:
        return self.choices.pick(count)

    def shards_of(self, position: int) -> int:
        partition = self.partitions[position]
        return len(partition.sizes) if partition else 1

    def shard_bytes(self, member: Member) -> int:
        variable, partition = self.workload.variables[member[0]], self.partitions[member[0]]
        if partition is None:
            return variable.grad_bytes
        return variable.grad_bytes // variable.shape[partition.axis] * partition.sizes[member[1]]

    def sparse_of(self, message: DraftMessage) -> SparseHandling:
        return self.sparse[message.members[0][0]]

    def insert(self, message: DraftMessage) -> None:
        """Issue a new message before the first one that is ready later."""
        later = (index for index, other in enumerate(self.messages) if other.ready > message.ready)
        self.messages.insert(next(later, len(self.messages)), message)

    def holder(self, position: int) -> DraftMessage:
        """The message that holds the first shard of a variable."""
        return next(message for message in self.messages if (position, 0) in message.members)

    def take_out(self, position: int) -> DraftMessage:
        """Remove a variable's shards; return the message that held the first."""
        holder = self.holder(position)
        for message in self.messages:
            message.members = [member for member in message.members if member[0] != position]
        self.messages = [message for message in self.messages if message.members]
        return holder

    def send_alone(
        self, position: int, holder: DraftMessage, synchronizer: Synchronizer, shard: Shard
    ) -> None:
        """Send each shard of a variable taken out of `holder` alone, by `synchronizer`."""
        for number in range(self.shards_of(position)):
            members = [(position, number)]
            placed = self.with_synchronizer(shard, synchronizer, members)
            self.insert(DraftMessage(members, placed, holder.dtype))

    def direct(self) -> list[DraftMessage]:
        """The messages that are exchanged directly."""
        return [m for m in self.messages if m.shard.synchronizer is Synchronizer.DIRECT_EXCHANGE]

    def has_pieces(self, shard: Shard, members: list[Member]) -> bool:
        """Whether a message may be cut into pieces: some compressors and rows need all of it."""
        dense = all(self.sparse[position] is SparseHandling.DENSE for position, _ in members)
        return dense and not shard.compressor.error_feedback

    def server_loads(self, without: Collection[Member] = ()) -> dict[int, int]:
        """Bytes of the messages of each server, without these members."""
        loads = dict.fromkeys(self.servers.ranks, 0)
        for message in self.messages:
            if message.shard.placement in loads:
                others = [member for member in message.members if member not in without]
                loads[message.shard.placement] += sum(map(self.shard_bytes, others))
        return loads

    def with_synchronizer(
        self,
        shard: Shard,
        synchronizer: Synchronizer,
        members: list[Member],
        loads: Mapping[int, int] | None = None,
    ) -> Shard:
        """`shard` with another synchronizer; a rooted one serves where it would finish first.

        A new direct exchange has owners by bandwidth, and pieces by its size. `loads`: the
        `server_loads` without the members, for callers that keep them.
        """
        placement = None
        if synchronizer in ROOTED:
            if loads is None:
                loads = self.server_loads(set(members))
            size = sum(self.shard_bytes(member) for member in members)
            server = least_loaded(list(loads.values()), self.servers.shares, size)
            placement = self.servers.ranks[server]
        shares, pieces = None, 1
        if synchronizer is Synchronizer.DIRECT_EXCHANGE is shard.synchronizer:
            shares, pieces = shard.shares, shard.pieces
        elif synchronizer is Synchronizer.DIRECT_EXCHANGE:
            shares = by_bandwidth(self.cluster, shard.hierarchical)
            if self.has_pieces(shard, members):
                size = sum(self.shard_bytes(member) for member in members)
                pieces = min(max(size // PIECE_BYTES, 1), MOST_PIECES)
        return replace(
            shard, synchronizer=synchronizer, placement=placement, shares=shares, pieces=pieces
        )

    def senders(self, message: DraftMessage) -> tuple[Synchronizer, ...]:
        """The synchronizers by which a message can be sent; rows that must stay rows are alone."""
        position = message.members[0][0]
        variable = self.workload.variables[position]
        if not variable.rows_only:
            return self.space.synchronizers
        carriers = self.space.carriers_for(variable)
        if self.shards_of(position) == 1:
            return carriers
        same = SPARSE_SYNCHRONIZERS.get(self.sparse[position], ())
        return tuple(kind for kind in carriers if kind in same)

    def make_dense(self, members: list[Member], synchronizer: Synchronizer) -> None:
        """Send the variables of these shards dense, which any synchronizer can do.

        Where the space allows rows only, send them as the rows that `synchronizer` carries.
        """
        for position, _ in members:
            variable = self.workload.variables[position]
            if variable.sparse:
                handlings = self.space.handlings_for([synchronizer], variable)
                dense = SparseHandling.DENSE in handlings
                self.sparse[position] = SparseHandling.DENSE if dense else handlings[0]

    def neighbouring(self) -> list[tuple[DraftMessage, DraftMessage]]:
        """Pairs of dense messages of one dtype that are issued one after the other."""
        of_dtype: dict[str, list[DraftMessage]] = {}
        for message in self.messages:
            if self.sparse_of(message) is SparseHandling.DENSE:
                of_dtype.setdefault(message.dtype, []).append(message)
        return [pair for dtype in sorted(of_dtype) for pair in pairwise(of_dtype[dtype])]

    def order_by_need(self) -> None:
        """Use the issue order in which a cross-step plan is predicted to be fastest."""
        parts = [
            cut(variable, partition)
            for variable, partition in zip(self.workload.variables, self.partitions, strict=True)
        ]
        messages = []
        for message in self.messages:
            slices = [parts[position][number] for position, number in message.members]
            sparse = self.sparse_of(message)
            messages.append(message_of(message.shard, slices, message.dtype, sparse))
        crossing = Plan(
            self.workload.id, self.cluster.world_size, tuple(messages), True, self.ring_order
        )
        order = MessageTimes.of(crossing, self.workload, self.cluster).ordered(ORDER_NODES).order
        self.messages = [self.messages[number] for number in order]
        self.in_ready_order = False
