"""Small moves from one strategy to a neighbouring one, for local search around the best strategies so far.

A strategy is taken apart into its messages, as `plan()` issues them; a move changes one or two of them; then
it is written down again in one normal form: messages of two or more shards are groups numbered in issue order,
and priorities are 0 unless the issue order differs from the gradient-ready order. So a move never
changes more than it says, and equal results are equal strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import server_bandwidths, server_ranks
from autotune.strategy_space.plan import plan, slices_of
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import ROOTED, Partition, Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import DTYPE_BYTES, Workload

Member = tuple[int, int]
"""A shard: (position of its variable in gradient-ready order, number of the shard in its variable)."""


@dataclass
class _Message:
    """Shards that travel together. `shard` has the shared fields; its group and priority carry no meaning here."""

    members: list[Member]
    shard: Shard
    dtype: str

    @property
    def ready(self) -> tuple[int, Member]:
        """The sort key of gradient-ready order: when its last gradient is ready, then its first shard."""
        return self.members[-1][0], self.members[0]


def mutate(strategy: Strategy, workload: Workload, cluster: Cluster, space: SearchSpace, rng: np.random.Generator) -> Strategy:
    """A random neighbour of `strategy`, which must lie inside `space`; so does the result.

    A kind of move is drawn uniformly; where it is impossible another is, and where none is possible (one variable
    and one synchronizer, say) the strategy itself comes back. Raises `InvalidStrategy` if it cannot be planned.
    """
    for kind in rng.permutation(len(MOVES)):
        draft = _Draft(strategy, workload, cluster, space, rng)
        if MOVES[kind](draft):
            neighbour = draft.written()
            if neighbour != strategy:
                return neighbour
    return strategy


class _Draft:
    """A strategy taken apart, to be changed by one move. Messages stand in issue order, members sorted."""

    def __init__(self, strategy: Strategy, workload: Workload, cluster: Cluster, space: SearchSpace, rng: np.random.Generator) -> None:
        self.strategy, self.workload, self.space, self.rng = strategy, workload, space, rng
        self.hierarchy = space.hierarchy_for(cluster)
        self.ranks = server_ranks(cluster)
        self.bandwidths: list[float] = server_bandwidths(cluster, self.ranks).tolist()
        self.partitions: list[Partition | None] = [strategy.by_name[variable.name].partition for variable in workload.variables]
        members = self._members_by_slice()
        self.messages: list[_Message] = []
        for message in plan(strategy, workload, cluster.world_size).messages:
            own = sorted(members[part.variable, part.start] for part in message.slices)
            position, number = own[0]
            shard = strategy.by_name[workload.variables[position].name].shards[number]
            self.messages.append(_Message(own, replace(shard, group=None, priority=0), message.dtype))
        self.in_ready_order = self.messages == sorted(self.messages, key=lambda message: message.ready)

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
        for position, (variable, partition) in enumerate(zip(self.workload.variables, self.partitions, strict=True)):
            own = tuple(shards[position, number] for number in range(len(partition.sizes) if partition else 1))
            choices.append(VariableStrategy(variable.name, own, partition, self.strategy.by_name[variable.name].sparse))
        return replace(self.strategy, variables=tuple(choices))

    def shard_bytes(self, member: Member) -> int:
        variable, partition = self.workload.variables[member[0]], self.partitions[member[0]]
        if partition is None:
            return variable.grad_bytes
        rows = partition.sizes[member[1]]
        return rows * (variable.elements // variable.shape[partition.axis]) * DTYPE_BYTES[variable.dtype]

    def insert(self, message: _Message) -> None:
        """Issue a new message before the first one that is ready later."""
        later = (index for index, other in enumerate(self.messages) if other.ready > message.ready)
        self.messages.insert(next(later, len(self.messages)), message)

    def take_out(self, position: int) -> _Message:
        """Remove all shards of a variable from their messages; returns the message that held the first."""
        holder = next(message for message in self.messages if (position, 0) in message.members)
        for message in self.messages:
            message.members = [member for member in message.members if member[0] != position]
        self.messages = [message for message in self.messages if message.members]
        return holder

    def with_synchronizer(self, shard: Shard, synchronizer: Synchronizer, members: list[Member]) -> Shard:
        """`shard` under another synchronizer; where that is rooted, on the server that would be done first."""
        placement = None
        if synchronizer in ROOTED:
            taken = set(members)
            loads = dict.fromkeys(self.ranks, 0)
            for message in self.messages:
                if message.shard.placement in loads:
                    loads[message.shard.placement] += sum(self.shard_bytes(member) for member in message.members if member not in taken)
            size = sum(self.shard_bytes(member) for member in members)
            placement = self.ranks[least_loaded(list(loads.values()), self.bandwidths, size)]
        return replace(shard, synchronizer=synchronizer, placement=placement)

    def pick(self, count: int) -> int:
        return int(self.rng.integers(count))

    def neighbouring(self) -> list[tuple[_Message, _Message]]:
        """Pairs of messages of one dtype that are issued one after the other."""
        pairs: list[tuple[_Message, _Message]] = []
        for dtype in sorted({message.dtype for message in self.messages}):
            same = [message for message in self.messages if message.dtype == dtype]
            pairs.extend(pairwise(same))
        return pairs

    def _members_by_slice(self) -> dict[tuple[str, int], Member]:
        return {
            (variable.name, part.start): (position, number)
            for position, variable in enumerate(self.workload.variables)
            for number, part in enumerate(slices_of(variable, self.strategy.by_name[variable.name]))
        }


def _move_boundary(draft: _Draft) -> bool:
    """Shards at the boundary of two consecutive messages change sides; neither message becomes empty."""
    pairs = [pair for pair in draft.neighbouring() if len(pair[0].members) + len(pair[1].members) > 2]
    if not pairs:
        return False
    first, second = pairs[draft.pick(len(pairs))]
    forward = len(first.members) > 1 and (len(second.members) == 1 or draft.pick(2) == 1)
    count = 1 + draft.pick(len((first if forward else second).members) - 1)
    if forward:
        moved, first.members = first.members[-count:], first.members[:-count]
        second.members = sorted(moved + second.members)
    else:
        moved, second.members = second.members[:count], second.members[count:]
        first.members = sorted(first.members + moved)
    return True


def _merge(draft: _Draft) -> bool:
    """Two consecutive messages become one, synchronized as the first was."""
    pairs = draft.neighbouring()
    if not pairs:
        return False
    first, second = pairs[draft.pick(len(pairs))]
    second.members, second.shard = sorted(first.members + second.members), first.shard
    draft.messages = [message for message in draft.messages if message is not first]
    return True


def _split(draft: _Draft) -> bool:
    """A message is cut in two, unless there are as many groups as the space allows."""
    several = [message for message in draft.messages if len(message.members) > 1]
    if not several or len(several) >= draft.space.max_groups:
        return False
    message = several[draft.pick(len(several))]
    cut = 1 + draft.pick(len(message.members) - 1)
    index = next(index for index, other in enumerate(draft.messages) if other is message)
    draft.messages.insert(index, replace(message, members=message.members[:cut]))
    message.members = message.members[cut:]
    return True


def _switch_message(draft: _Draft) -> bool:
    """A message gets another synchronizer."""
    message = draft.messages[draft.pick(len(draft.messages))]
    others = [kind for kind in draft.space.synchronizers if kind is not message.shard.synchronizer]
    if not others:
        return False
    message.shard = draft.with_synchronizer(message.shard, others[draft.pick(len(others))], message.members)
    return True


def _switch_variable(draft: _Draft) -> bool:
    """A variable leaves its messages; each of its shards is sent alone, by another synchronizer than the first's was."""
    position = draft.pick(len(draft.partitions))
    partition = draft.partitions[position]
    holder = draft.take_out(position)
    others = [kind for kind in draft.space.synchronizers if kind is not holder.shard.synchronizer]
    if not others:
        return False
    synchronizer = others[draft.pick(len(others))]
    for number in range(len(partition.sizes) if partition else 1):
        member = (position, number)
        draft.insert(_Message([member], draft.with_synchronizer(holder.shard, synchronizer, [member]), holder.dtype))
    return True


def _repartition(draft: _Draft) -> bool:
    """A variable is cut evenly or made whole again.

    Whole, it joins the message that held its first shard. Cut, collective shards are spread over that
    message and a new one after it, and shards on servers are placed one by one.
    """
    axes = [draft.space.axes_for(variable) for variable in draft.workload.variables]
    changeable = [position for position, partition in enumerate(draft.partitions) if partition or axes[position]]
    if not changeable:
        return False
    position = changeable[draft.pick(len(changeable))]
    variable = draft.workload.variables[position]
    whole = draft.partitions[position] is not None
    holder = draft.take_out(position)
    if whole:
        draft.partitions[position] = None
        _rejoin(draft, holder, [(position, 0)])
        return True
    axis = axes[position][draft.pick(len(axes[position]))]
    most = min(variable.shape[axis], draft.space.max_shards)
    count = round(2 * (most / 2) ** draft.rng.random())  # log-uniform: each shard may cost a message
    draft.partitions[position] = even_partition(variable, axis, count)
    members = [(position, number) for number in range(count)]
    if holder.shard.synchronizer in ROOTED:
        for member in members:
            draft.insert(_Message([member], draft.with_synchronizer(holder.shard, holder.shard.synchronizer, [member]), holder.dtype))
    else:
        kept = 1 + draft.pick(count - 1)
        _rejoin(draft, holder, members[:kept])
        draft.insert(_Message(members[kept:], holder.shard, holder.dtype))
    return True


def _rejoin(draft: _Draft, holder: _Message, members: list[Member]) -> None:
    """Put members into the message that their variable was taken out of, which may have become empty thereby."""
    if holder.members:
        holder.members = sorted(holder.members + members)
    else:
        draft.insert(replace(holder, members=members))


def _recompress(draft: _Draft) -> bool:
    """A message gets another compressor."""
    choices = [
        (message, kind)
        for message in draft.messages
        for kind in draft.space.compressors_for(message.dtype)
        if kind is not message.shard.compressor
    ]
    if not choices:
        return False
    message, compressor = choices[draft.pick(len(choices))]
    message.shard = replace(message.shard, **draft.space.compressor_fields(compressor))
    return True


def _swap_order(draft: _Draft) -> bool:
    """Two messages change places in the issue order."""
    if len(draft.messages) < 2:
        return False
    one, other = draft.rng.choice(len(draft.messages), size=2, replace=False).tolist()
    draft.messages[one], draft.messages[other] = draft.messages[other], draft.messages[one]
    draft.in_ready_order = False
    return True


def _switch_hierarchy(draft: _Draft) -> bool:
    """A message is reduced hierarchically or flat."""
    if not draft.hierarchy:
        return False
    message = draft.messages[draft.pick(len(draft.messages))]
    message.shard = replace(message.shard, hierarchical=not message.shard.hierarchical)
    return True


MOVES: tuple[Callable[[_Draft], bool], ...] = (
    _move_boundary,
    _merge,
    _split,
    _switch_message,
    _switch_variable,
    _repartition,
    _recompress,
    _swap_order,
    _switch_hierarchy,
)
"""Each changes the draft and says whether it could."""
