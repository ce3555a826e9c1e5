"""Small moves from a strategy to its neighbours, for local search around the best strategies.

A move changes one or two messages, or the order of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.moves.changed_owners import changed_owners
from autotune.strategy_space.moves.choices import Drawn, InTurn
from autotune.strategy_space.moves.draft import Draft, DraftMessage, Member
from autotune.strategy_space.moves.ring import swapped_ring
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.shares import MOST_PIECES
from autotune.strategy_space.space import CompressorSetting, SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_COMPRESSORS,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
)
from autotune.workload import Workload

Move = Callable[[Draft], bool]
"""Changes a draft and returns True, or leaves it unchanged and returns False."""


def mutate(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    space: SearchSpace,
    rng: np.random.Generator,
    known: Plan | None = None,
) -> Strategy:
    """A random neighbour of `strategy`; both lie inside `space`. `known`: its plan, if it exists.

    The kind of move is uniformly random. An impossible move is replaced by another; if none is
    possible (such as with one variable and one synchronizer) `strategy` itself is returned. Raises
    `InvalidStrategy` if it cannot be planned.
    """
    drawn = Drawn(rng)
    draft = Draft(strategy, workload, cluster, space, drawn, known)
    moves = _moves(space)
    for kind in rng.permutation(len(moves)):
        if moves[kind](draft):
            neighbour = draft.written()
            if neighbour != strategy:
                return neighbour
            draft = Draft(strategy, workload, cluster, space, drawn, known)
    return strategy


def neighbourhood(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    space: SearchSpace,
    rng: np.random.Generator,
) -> Iterator[Strategy]:
    """Every strategy that `mutate` can reach in one move, each once, in an order that `rng` draws.

    The kinds of moves take turns, and so do the choices of each kind (`choices.InTurn`). So the
    first neighbours are a fair sample of the kinds and of the places in the strategy.
    """
    known = plan(strategy, workload, cluster.world_size)
    met = {strategy}
    runs = [
        _results(move, strategy, workload, cluster, space, rng, known) for move in _moves(space)
    ]
    while runs:
        for run in list(runs):
            neighbour = next(run, None)
            if neighbour is None:
                runs.remove(run)
            elif neighbour not in met:
                met.add(neighbour)
                yield neighbour


def _results(
    move: Move,
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    space: SearchSpace,
    rng: np.random.Generator,
    known: Plan,
) -> Iterator[Strategy]:
    """The results of all choices of a move; `strategy` itself where a choice changes nothing.

    So a move whose choices change nothing does not hold up the other kinds.
    """
    for choices in InTurn(rng):
        draft = Draft(strategy, workload, cluster, space, choices, known)
        yield draft.written() if move(draft) else strategy


def _moves(space: SearchSpace) -> tuple[Move, ...]:
    direct = (_switch_owners, _switch_pieces) if space.direct else ()
    fusions = (_switch_op_fusion,) if space.op_fusions else ()
    return (*MOVES, *direct, *fusions)


def _move_boundary(draft: Draft) -> bool:
    """Move shards across the boundary of two consecutive messages; neither becomes empty."""
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
    """Merge two consecutive messages into one, synchronized like the first."""
    pairs = draft.neighbouring()
    if not pairs:
        return False
    first, second = pairs[draft.pick(len(pairs))]
    second.members, second.shard = sorted(first.members + second.members), first.shard
    draft.messages = [message for message in draft.messages if message is not first]
    return True


def _split(draft: Draft) -> bool:
    """Cut a message in two, unless the space allows no more groups."""
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
    """Give a message another synchronizer; its sparse gradients become dense if they may."""
    message = draft.messages[draft.pick(len(draft.messages))]
    others = [kind for kind in draft.senders(message) if kind is not message.shard.synchronizer]
    if not others:
        return False
    synchronizer = others[draft.pick(len(others))]
    message.shard = draft.with_synchronizer(message.shard, synchronizer, message.members)
    draft.make_dense(message.members, synchronizer)
    return True


def _switch_variable(draft: Draft) -> bool:
    """Send each shard of a variable alone, by another synchronizer."""
    position = draft.pick(len(draft.partitions))
    others = [
        kind
        for kind in draft.space.carriers_for(draft.workload.variables[position])
        if kind is not draft.holder(position).shard.synchronizer
    ]
    if not others:
        return False
    holder, synchronizer = draft.take_out(position), others[draft.pick(len(others))]
    draft.make_dense([(position, 0)], synchronizer)
    draft.send_alone(position, holder, synchronizer, holder.shard)
    return True


def _repartition(draft: Draft) -> bool:
    """Cut a variable evenly, or make it whole again.

    A whole one joins the message that held its first shard. Collective shards are divided between
    that message and a new one after it; shards on servers are placed one by one.
    """
    axes = [draft.space.axes_for(variable) for variable in draft.workload.variables]
    changeable = [i for i, partition in enumerate(draft.partitions) if partition or axes[i]]
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
    # log-uniform, because each shard may cost a message
    count = round(2 * (most / 2) ** draft.choices.pick_share())
    draft.partitions[position] = even_partition(variable, axis, count)
    members = [(position, number) for number in range(count)]
    # Each part of a variable sent as rows is a message of its own, however they are labelled.
    if holder.shard.synchronizer in ROOTED or draft.sparse[position] is not SparseHandling.DENSE:
        draft.send_alone(position, holder, holder.shard.synchronizer, holder.shard)
    else:
        shards = 1 + draft.pick(count - 1)
        _rejoin(draft, holder, members[:shards])
        draft.insert(DraftMessage(members[shards:], holder.shard, holder.dtype))
    return True


def _rejoin(draft: Draft, holder: DraftMessage, members: list[Member]) -> None:
    """Return members to the message that held their variable, even if it is empty now."""
    if holder.members:
        holder.members = sorted(holder.members + members)
    else:
        draft.insert(replace(holder, members=members))


def _recompress(draft: Draft) -> bool:
    """Give a message another compressor, or another parameter of the same."""
    settings = {kind: draft.space.settings_of(kind) for kind in draft.space.compressors}
    choices = [
        (message, kind)
        for message in draft.messages
        for kind in draft.space.compressors_for(message.dtype)
        if (kind is not message.shard.compressor or settings[kind] != (_setting(message.shard),))
        and (draft.sparse_of(message) is SparseHandling.DENSE or kind in SPARSE_COMPRESSORS)
    ]
    if not choices:
        return False
    message, compressor = choices[draft.pick(len(choices))]
    shard = message.shard
    others = [setting for setting in settings[compressor] if setting != _setting(shard)]
    pieces = 1 if compressor.error_feedback else shard.pieces
    setting = others[draft.pick(len(others))]
    message.shard = replace(shard, pieces=pieces, **setting._asdict())
    return True


def _setting(shard: Shard) -> CompressorSetting:
    return CompressorSetting(shard.compressor, shard.ratio, shard.rank)


def _swap_order(draft: Draft) -> bool:
    """Swap two messages in the issue order."""
    if len(draft.messages) < 2:
        return False
    one, other = draft.choices.pick_two(len(draft.messages))
    draft.messages[one], draft.messages[other] = draft.messages[other], draft.messages[one]
    draft.in_ready_order = False
    return True


def _switch_hierarchy(draft: Draft) -> bool:
    """Reduce a message hierarchically instead of flat, or the reverse."""
    dense = [m for m in draft.messages if draft.sparse_of(m) is SparseHandling.DENSE]
    if not (draft.hierarchy and dense):
        return False
    message = dense[draft.pick(len(dense))]
    message.shard = replace(message.shard, hierarchical=not message.shard.hierarchical)
    return True


def _switch_sparse(draft: Draft) -> bool:
    """Send a sparse variable as rows, alone and by a synchronizer that can, or dense again."""
    positions = [i for i, variable in enumerate(draft.workload.variables) if variable.sparse]
    if not positions:
        return False
    position = positions[draft.pick(len(positions))]
    variable = draft.workload.variables[position]
    current = draft.holder(position).shard.synchronizer
    others = [
        (kind, synchronizer)
        for kind in draft.space.sparse
        for synchronizer in SPARSE_SYNCHRONIZERS.get(kind, (current,))
        if kind is not draft.sparse[position]
        and synchronizer in draft.space.synchronizers
        and (kind is not SparseHandling.DENSE or draft.space.sends_dense(variable))
    ]
    if not others:
        return False
    kind, synchronizer = others[draft.pick(len(others))]
    draft.sparse[position] = kind
    holder = draft.take_out(position)
    shard = holder.shard
    if kind is not SparseHandling.DENSE:
        compressor = shard.compressor if shard.compressor in SPARSE_COMPRESSORS else Compressor.NONE
        shard = replace(
            shard, compressor=compressor, ratio=None, rank=None, pieces=1, hierarchical=False
        )
    draft.send_alone(position, holder, synchronizer, shard)
    return True


def _switch_ring(draft: Draft) -> bool:
    """Swap two hosts along the ring, or draw a new order of all hosts."""
    rooted = all(message.shard.synchronizer in ROOTED for message in draft.messages)
    if rooted or not draft.space.ring_orders_for(draft.cluster):
        return False
    if draft.pick(2) == 1:
        places = draft.choices.pick_two(len(draft.cluster.hosts))
        draft.ring_order = swapped_ring(draft.cluster, draft.ring_order, *places)
    else:
        draft.ring_order = draft.choices.pick_ring(draft.cluster)
    return True


def _switch_cross_step(draft: Draft) -> bool:
    """Switch between synchronization across steps and within the step; either way, reorder."""
    if not draft.space.cross_step:
        return False
    draft.cross_step = not draft.cross_step
    return _plan_order(draft)


def _switch_in_flight(draft: Draft) -> bool:
    """Change the messages in flight across steps, or the pieces of direct exchanges.

    More hide each other's latency, and fewer keep to the order.
    """
    most = draft.space.in_flight_bound(draft.cross_step, bool(draft.direct()))
    others = [count for count in range(1, most + 1) if count != draft.in_flight]
    if not others:
        return False
    draft.in_flight = others[draft.pick(len(others))]
    return True


def _switch_owners(draft: Draft) -> bool:
    """Change the owners of all direct exchanges that have the same ones."""
    direct = draft.direct()
    if not direct:
        return False
    picked = direct[draft.pick(len(direct))].shard
    shares = changed_owners(draft.cluster, picked.shares, picked.hierarchical, draft.pick)
    if shares == picked.shares:
        return False
    for message in direct:
        if message.shard.shares == picked.shares:
            message.shard = replace(message.shard, shares=shares)
    return True


def _switch_pieces(draft: Draft) -> bool:
    """Cut a direct exchange, or all of them, into twice or half as many pieces."""
    direct = [m for m in draft.direct() if draft.has_pieces(m.shard, m.members)]
    if not direct:
        return False
    chosen = direct if draft.pick(2) == 1 else [direct[draft.pick(len(direct))]]
    finer = draft.pick(2) == 1
    changed = False
    for message in chosen:
        pieces = message.shard.pieces
        other = min(2 * pieces, MOST_PIECES) if finer else max(pieces // 2, 1)
        message.shard = replace(message.shard, pieces=other)
        changed |= other != pieces
    return changed


def _switch_op_fusion(draft: Draft) -> bool:
    """Fuse the ops of another choice of sets, or none."""
    others = [sets for sets in ((), *draft.space.op_fusions) if sets != draft.op_fusion]
    if not others:
        return False
    draft.op_fusion = others[draft.pick(len(others))]
    return True


def _plan_order(draft: Draft) -> bool:
    """Plan the issue order anew: by need across steps, else by readiness."""
    if draft.cross_step:
        draft.order_by_need()
    else:
        draft.in_ready_order = True
    return True


MOVES: tuple[Move, ...] = (
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
"""All but those of direct exchanges and choices of op fusion, which few spaces have."""
