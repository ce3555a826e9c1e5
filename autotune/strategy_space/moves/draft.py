"""A strategy taken apart into its messages, to be changed and written down again in one normal form.

Messages stand as `plan()` issues them. In the normal form messages of two or more shards are groups numbered in issue order,
and priorities are 0 unless the issue order differs from the gradient-ready order. So a change never changes more than it says,
and equal results are equal strategies.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.cluster import Cluster
from autotune.costs.issue_order import MessageTimes
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import servers_of
from autotune.strategy_space.plan import Plan, cut, message_of, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Workload

Member = tuple[int, int]
"""A shard: (position of its variable in gradient-ready order, number of the shard in its variable)."""

ORDER_NODES = 20
"""Orders that one change of the issue order looks at."""


@dataclass
class DraftMessage:
    """Shards that travel together. `shard` has the shared fields; its group and priority carry no meaning here."""

    members: list[Member]
    shard: Shard
    dtype: str

    @property
    def ready(self) -> tuple[int, Member]:
        """The sort key of gradient-ready order: when its last gradient is ready, then its first shard."""
        return self.members[-1][0], self.members[0]


class Draft:
    """Messages stand in issue order, members sorted. All changes keep to what can be planned."""

    def __init__(
        self,
        strategy: Strategy,
        workload: Workload,
        cluster: Cluster,
        space: SearchSpace,
        rng: np.random.Generator,
        made: Plan | None = None,
    ) -> None:
        """`made`: the strategy's plan, where it is known."""
        self.workload, self.cluster, self.space, self.rng = workload, cluster, space, rng
        self.hierarchy = space.hierarchy_for(cluster)
        self.servers = servers_of(cluster)
        self.cross_step, self.in_flight, self.ring_order = (
            strategy.cross_step,
            strategy.in_flight,
            strategy.ring_order,
        )
        choices = [strategy.by_name[variable.name] for variable in workload.variables]
        self.partitions: list[Partition | None] = [choice.partition for choice in choices]
        self.sparse: list[SparseHandling] = [choice.sparse for choice in choices]
        members = {
            (variable.name, part.start): (position, number)
            for position, variable in enumerate(workload.variables)
            for number, part in enumerate(cut(variable, self.partitions[position]))
        }
        self.messages: list[DraftMessage] = []
        for message in (made or plan(strategy, workload, cluster.world_size)).messages:
            own = sorted(members[part.variable, part.start] for part in message.slices)
            position, number = own[0]
            self.messages.append(
                DraftMessage(
                    own,
                    replace(choices[position].shards[number], group=None, priority=0),
                    message.dtype,
                )
            )
        self.in_ready_order = self.messages == sorted(
            self.messages, key=lambda message: message.ready
        )

    def copy(self) -> Draft:
        """The same draft, to be changed apart from this one; both draw from one generator."""
        made = copy(self)
        made.partitions, made.sparse = list(self.partitions), list(self.sparse)
        made.messages = [
            replace(message, members=list(message.members)) for message in self.messages
        ]
        return made

    def written(self) -> Strategy:
        """The strategy in normal form."""
        natural = sorted(self.messages, key=lambda message: message.ready)
        if self.in_ready_order:
            self.messages = natural
        reordered = self.messages != natural
        shards: dict[Member, Shard] = {}
        for number, message in enumerate(self.messages):
            group = number if len(message.members) > 1 else None
            shard = replace(message.shard, group=group, priority=number if reordered else 0)
            shards.update(dict.fromkeys(message.members, shard))
        choices: list[VariableStrategy] = []
        for position, (variable, partition) in enumerate(
            zip(self.workload.variables, self.partitions, strict=True)
        ):
            own = tuple(shards[position, number] for number in range(self.shards_of(position)))
            choices.append(VariableStrategy(variable.name, own, partition, self.sparse[position]))
        return Strategy(
            tuple(choices),
            self.cross_step,
            self.ring_order,
            in_flight=self.in_flight if self.cross_step else 1,
        )

    def pick(self, count: int) -> int:
        return int(self.rng.integers(count))

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
        """Remove all shards of a variable from their messages; returns the message that held the first."""
        holder = self.holder(position)
        for message in self.messages:
            message.members = [member for member in message.members if member[0] != position]
        self.messages = [message for message in self.messages if message.members]
        return holder

    def send_alone(
        self, position: int, holder: DraftMessage, synchronizer: Synchronizer, shard: Shard
    ) -> None:
        """Every shard of a variable that was taken out of `holder` becomes a message of its own, like `shard` but by `synchronizer`."""
        for number in range(self.shards_of(position)):
            member = (position, number)
            self.insert(
                DraftMessage(
                    [member], self.with_synchronizer(shard, synchronizer, [member]), holder.dtype
                )
            )

    def with_synchronizer(
        self, shard: Shard, synchronizer: Synchronizer, members: list[Member]
    ) -> Shard:
        """`shard` under another synchronizer; where that is rooted, on the server that would be done first."""
        placement = None
        if synchronizer in ROOTED:
            taken = set(members)
            loads = dict.fromkeys(self.servers.ranks, 0)
            for message in self.messages:
                if message.shard.placement in loads:
                    loads[message.shard.placement] += sum(
                        self.shard_bytes(member)
                        for member in message.members
                        if member not in taken
                    )
            size = sum(self.shard_bytes(member) for member in members)
            placement = self.servers.ranks[
                least_loaded(list(loads.values()), self.servers.shares, size)
            ]
        return replace(shard, synchronizer=synchronizer, placement=placement)

    def make_dense(self, members: list[Member]) -> None:
        """The variables of these shards travel as they are, which any synchronizer can do."""
        for position, _ in members:
            self.sparse[position] = SparseHandling.DENSE

    def neighbouring(self) -> list[tuple[DraftMessage, DraftMessage]]:
        """Pairs of dense messages of one dtype that are issued one after the other."""
        alike: dict[str, list[DraftMessage]] = {}
        for message in self.messages:
            if self.sparse_of(message) is SparseHandling.DENSE:
                alike.setdefault(message.dtype, []).append(message)
        return [pair for dtype in sorted(alike) for pair in pairwise(alike[dtype])]

    def order_by_need(self) -> None:
        """The issue order that a cross-step plan is predicted to be fastest in."""
        parts = [
            cut(variable, partition)
            for variable, partition in zip(self.workload.variables, self.partitions, strict=True)
        ]
        messages = tuple(
            message_of(
                m.shard,
                [parts[position][number] for position, number in m.members],
                m.dtype,
                self.sparse_of(m),
            )
            for m in self.messages
        )
        made = Plan(self.workload.id, self.cluster.world_size, messages, True, self.ring_order)
        order = MessageTimes.of(made, self.workload, self.cluster).ordered(ORDER_NODES).order
        self.messages = [self.messages[number] for number in order]
        self.in_ready_order = False
