"""Small moves from one strategy to a neighbouring one, for local search around the best strategies so far.

A move changes one or two messages of a strategy, or how all of them are ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.moves.draft import Draft, DraftMessage, Member
from autotune.strategy_space.moves.ring import random_ring, swapped_ring
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_COMPRESSORS,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    SparseHandling,
    Strategy,
)
from autotune.workload import Workload


def mutate(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    space: SearchSpace,
    rng: np.random.Generator,
) -> Strategy:
    """A random neighbour of `strategy`, which must lie inside `space`; so does the result.

    A kind of move is drawn uniformly; where it is impossible another is, and where none is possible (one variable
    and one synchronizer, say) the strategy itself comes back. Raises `InvalidStrategy` if it cannot be planned.
    """
    draft = Draft(strategy, workload, cluster, space, rng)
    for kind in rng.permutation(len(MOVES)):
        if MOVES[kind](draft):
            neighbour = draft.written()
            if neighbour != strategy:
                return neighbour
            draft = Draft(strategy, workload, cluster, space, rng)
    return strategy


def _move_boundary(draft: Draft) -> bool:
    """Shards at the boundary of two consecutive messages change sides; neither message becomes empty."""
    pairs = [
        pair for pair in draft.neighbouring() if len(pair[0].members) + len(pair[1].members) > 2
    ]
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


def _merge(draft: Draft) -> bool:
    """Two consecutive messages become one, synchronized as the first was."""
    pairs = draft.neighbouring()
    if not pairs:
        return False
    first, second = pairs[draft.pick(len(pairs))]
    second.members, second.shard = sorted(first.members + second.members), first.shard
    draft.messages = [message for message in draft.messages if message is not first]
    return True


def _split(draft: Draft) -> bool:
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


def _switch_message(draft: Draft) -> bool:
    """A message gets another synchronizer; sparse gradients in it travel dense then."""
    message = draft.messages[draft.pick(len(draft.messages))]
    others = [kind for kind in draft.space.synchronizers if kind is not message.shard.synchronizer]
    if not others:
        return False
    message.shard = draft.with_synchronizer(
        message.shard, others[draft.pick(len(others))], message.members
    )
    draft.make_dense(message.members)
    return True


def _switch_variable(draft: Draft) -> bool:
    """A variable leaves its messages; each of its shards is sent alone, by another synchronizer than the first's was."""
    position = draft.pick(len(draft.partitions))
    others = [
        kind
        for kind in draft.space.synchronizers
        if kind is not draft.holder(position).shard.synchronizer
    ]
    if not others:
        return False
    holder = draft.take_out(position)
    draft.make_dense([(position, 0)])
    draft.send_alone(position, holder, others[draft.pick(len(others))], holder.shard)
    return True


def _repartition(draft: Draft) -> bool:
    """A variable is cut evenly or made whole again.

    Whole, it joins the message that held its first shard. Cut, collective shards are spread over that
    message and a new one after it, and shards on servers are placed one by one.
    """
    axes = [draft.space.axes_for(variable) for variable in draft.workload.variables]
    changeable = [
        position
        for position, partition in enumerate(draft.partitions)
        if partition or axes[position]
    ]
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
    count = round(
        2 * (most / 2) ** draft.rng.random()
    )  # log-uniform: each shard may cost a message
    draft.partitions[position] = even_partition(variable, axis, count)
    members = [(position, number) for number in range(count)]
    if holder.shard.synchronizer in ROOTED:
        for member in members:
            draft.insert(
                DraftMessage(
                    [member],
                    draft.with_synchronizer(holder.shard, holder.shard.synchronizer, [member]),
                    holder.dtype,
                )
            )
    else:
        kept = 1 + draft.pick(count - 1)
        _rejoin(draft, holder, members[:kept])
        draft.insert(DraftMessage(members[kept:], holder.shard, holder.dtype))
    return True


def _rejoin(draft: Draft, holder: DraftMessage, members: list[Member]) -> None:
    """Put members into the message that their variable was taken out of, which may have become empty thereby."""
    if holder.members:
        holder.members = sorted(holder.members + members)
    else:
        draft.insert(replace(holder, members=members))


def _recompress(draft: Draft) -> bool:
    """A message gets another compressor, or another parameter of the same."""
    choices = [
        (message, kind)
        for message in draft.messages
        for kind in draft.space.compressors_for(message.dtype)
        if draft.sparse_of(message) is SparseHandling.DENSE or kind in SPARSE_COMPRESSORS
    ]
    message, compressor = choices[draft.pick(len(choices))]
    shard = message.shard
    settings = [
        s
        for s in draft.space.settings_of(compressor)
        if s != (shard.compressor, shard.ratio, shard.rank)
    ]
    if not settings:
        return False
    message.shard = replace(shard, **settings[draft.pick(len(settings))]._asdict())
    return True


def _swap_order(draft: Draft) -> bool:
    """Two messages change places in the issue order."""
    if len(draft.messages) < 2:
        return False
    one, other = draft.rng.choice(len(draft.messages), size=2, replace=False).tolist()
    draft.messages[one], draft.messages[other] = draft.messages[other], draft.messages[one]
    draft.in_ready_order = False
    return True


def _switch_hierarchy(draft: Draft) -> bool:
    """A message is reduced hierarchically or flat."""
    dense = [
        message for message in draft.messages if draft.sparse_of(message) is SparseHandling.DENSE
    ]
    if not (draft.hierarchy and dense):
        return False
    message = dense[draft.pick(len(dense))]
    message.shard = replace(message.shard, hierarchical=not message.shard.hierarchical)
    return True


def _switch_sparse(draft: Draft) -> bool:
    """A sparse variable is sent in another way: as indices and values alone and by the synchronizer that this needs, or dense."""
    positions = [
        position for position, variable in enumerate(draft.workload.variables) if variable.sparse
    ]
    if not positions:
        return False
    position = positions[draft.pick(len(positions))]
    own = draft.holder(position).shard.synchronizer
    others = [
        (kind, synchronizer)
        for kind in draft.space.sparse
        for synchronizer in SPARSE_SYNCHRONIZERS.get(kind, (own,))
        if kind is not draft.sparse[position] and synchronizer in draft.space.synchronizers
    ]
    if not others:
        return False
    kind, synchronizer = others[draft.pick(len(others))]
    draft.sparse[position] = kind
    holder = draft.take_out(position)
    shard = holder.shard
    if kind is not SparseHandling.DENSE:
        compressor = shard.compressor if shard.compressor in SPARSE_COMPRESSORS else Compressor.NONE
        shard = replace(shard, compressor=compressor, ratio=None, rank=None, hierarchical=False)
    draft.send_alone(position, holder, synchronizer, shard)
    return True


def _switch_ring(draft: Draft) -> bool:
    """Two hosts change places along the ring, or the hosts get an order that is unlike the one before."""
    if not draft.space.ring_orders_for(draft.cluster) or all(
        message.shard.synchronizer in ROOTED for message in draft.messages
    ):
        return False
    near = draft.pick(2) == 1
    draft.ring_order = (
        swapped_ring(draft.cluster, draft.ring_order, draft.rng)
        if near
        else random_ring(draft.cluster, draft.rng)
    )
    return True


def _switch_cross_step(draft: Draft) -> bool:
    """Synchronization may run into the next forward pass, in the order that suits it; or it ends within the step, in ready order."""
    if not draft.space.cross_step:
        return False
    draft.cross_step = not draft.cross_step
    if draft.cross_step:
        draft.order_by_need()
    else:
        draft.in_ready_order = True
    return True


def _switch_in_flight(draft: Draft) -> bool:
    """Across steps one message more or fewer is under way at once: more hide each other's latency, fewer keep to the order."""
    if not draft.cross_step or draft.space.most_in_flight < 2:
        return False
    others = [
        count for count in range(1, draft.space.most_in_flight + 1) if count != draft.in_flight
    ]
    draft.in_flight = others[draft.pick(len(others))]
    return True


def _plan_order(draft: Draft) -> bool:
    """The issue order is planned anew: by need across steps, else by readiness."""
    if draft.cross_step:
        draft.order_by_need()
    else:
        draft.in_ready_order = True
    return True


MOVES: tuple[Callable[[Draft], bool], ...] = (
    _move_boundary,
    _merge,
    _split,
    _switch_message,
    _switch_variable,
    _repartition,
    _recompress,
    _swap_order,
    _switch_hierarchy,
    _switch_sparse,
    _switch_ring,
    _switch_cross_step,
    _switch_in_flight,
    _plan_order,
)
"""Each changes the draft, or says that it could not and leaves it as it was."""
