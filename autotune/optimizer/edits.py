"""Edits with which passes change a strategy, message by message (`strategy_space.moves.draft`).

A message is named by its number in the plan's issue order. Results are in normal form, so that
equal results are equal strategies. No edit is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autotune.optimizer.coarsen import block_pattern
from autotune.optimizer.state import Problem, State, planned
from autotune.rng import generator
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.moves.choices import Drawn
from autotune.strategy_space.moves.draft import Draft, DraftMessage, Member
from autotune.strategy_space.plan import Message, message_of, slices_of
from autotune.strategy_space.strategy import (
    ROOTED,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    VariableStrategy,
)


def draft_of(state: State, problem: Problem) -> Draft:
    """A copy of the state's messages, to be changed."""
    known = state.known
    if known.draft is None or known.drafted_for is not problem:
        known.draft = Draft(
            state.strategy,
            problem.workload,
            problem.cluster,
            problem.space,
            Drawn(generator(0, "unused")),
            planned(state, problem),
        )
        known.drafted_for = problem
    return known.draft.copy()


def can_merge(one: Message, other: Message) -> bool:
    """Whether two messages differ only in their slices; rows of sparse gradients never merge."""
    if SparseHandling.DENSE is not one.sparse or SparseHandling.DENSE is not other.sparse:
        return False
    kinds = [
        (
            *(m.synchronizer, m.compressor, m.dtype, m.owner, m.hierarchical, m.ratio, m.rank),
            *(m.shares, m.pieces),
        )
        for m in (one, other)
    ]
    return kinds[0] == kinds[1]


def joined(messages: Sequence[Message]) -> Message:
    """The merged message of several messages that can merge."""
    return replace(
        messages[0], slices=tuple(part for message in messages for part in message.slices)
    )


def merged(state: State, problem: Problem, pairs: Iterable[tuple[int, int]]) -> Strategy:
    """Every pair as one message, at the place of the second; pairs with a common message join."""
    draft = draft_of(state, problem)
    into = list(range(len(draft.messages)))
    for first, second in pairs:
        root, target = _root(into, first), _root(into, second)
        if root != target:
            into[min(root, target)] = max(root, target)
    for number, message in enumerate(draft.messages):
        target = _root(into, number)
        if target != number:
            draft.messages[target].members = sorted(
                [*draft.messages[target].members, *message.members]
            )
    draft.messages = [
        message for number, message in enumerate(draft.messages) if _root(into, number) == number
    ]
    return draft.written()


def _root(into: list[int], number: int) -> int:
    while into[number] != number:
        into[number] = into[into[number]]  # halves the path, or thousands of pairs are quadratic
        number = into[number]
    return number


def split(state: State, problem: Problem, cuts: Mapping[int, Sequence[int]]) -> Strategy:
    """Messages cut before the members of these numbers; parts are issued one after the other."""
    draft = draft_of(state, problem)
    split_messages: list[DraftMessage] = []
    for number, message in enumerate(draft.messages):
        bounds = [0, *sorted(set(cuts.get(number, ()))), len(message.members)]
        parts = [message.members[a:b] for a, b in pairwise(bounds) if b > a]
        split_messages.extend(replace(message, members=part) for part in parts)
    draft.messages = split_messages
    return draft.written()


def reordered(state: State, problem: Problem, order: Sequence[int]) -> Strategy:
    """The messages in this order of their numbers."""
    draft = draft_of(state, problem)
    draft.messages = [draft.messages[number] for number in order]
    draft.in_ready_order = False
    return draft.written()


def replanned(state: State, problem: Problem) -> Strategy:
    """The messages in the closed form's best order across steps."""
    draft = draft_of(state, problem)
    draft.order_by_need()
    return draft.written()


def like(state: State, problem: Problem, kinds: Mapping[int, Shard]) -> Strategy:
    """Messages with the synchronizers and compressors of these shards; sparse rows stay unchanged.

    A rooted message goes to the server that would finish first.
    """
    draft = draft_of(state, problem)
    served = any(shard.synchronizer in ROOTED for shard in kinds.values())
    loads = draft.server_loads() if served else {}
    for number, shard in kinds.items():
        problem.deadline.check()
        message = draft.messages[number]
        if draft.sparse_of(message) is SparseHandling.DENSE:
            size = sum(map(draft.shard_bytes, message.members))
            if message.shard.placement in loads:
                loads[message.shard.placement] -= size
            plain = replace(shard, placement=None) if shard.synchronizer not in ROOTED else shard
            kind = shard.synchronizer
            message.shard = draft.with_synchronizer(plain, kind, message.members, loads)
            if message.shard.placement is not None:
                loads[message.shard.placement] += size
    return draft.written()


def exchanged(
    state: State, problem: Problem, change: Callable[[Shard], Shard], in_flight: int | None = None
) -> Strategy:
    """Every direct exchange changed, with this many pieces in flight (None: as before).

    Messages that their compressor or rows keep whole stay in one piece.
    """
    draft = draft_of(state, problem)
    for message in draft.direct():
        shard = change(message.shard)
        if not draft.has_pieces(shard, message.members):
            shard = replace(shard, pieces=1)
        message.shard = shard
    draft.in_flight = in_flight or draft.in_flight
    return draft.written()


def cut_variables(state: State, problem: Problem, shards: Mapping[int, int]) -> Strategy:
    """Variables, by position, cut into this many shards with a message each; 1 for uncut.

    The variables share no message, and are uncut or evenly cut.
    """
    draft = draft_of(state, problem)
    for position, count in shards.items():
        problem.deadline.check()
        variable = problem.workload.variables[position]
        parts = [m for m in draft.messages if any(member[0] == position for member in m.members)]
        holder = parts[0]
        place = next(n for n, m in enumerate(draft.messages) if m is holder)
        draft.messages = [m for m in draft.messages if all(m is not part for part in parts)]
        draft.partitions[position] = partition_of(problem, position, count)
        assert count == 1 or draft.partitions[position] is not None, variable.name
        for number in range(draft.shards_of(position)):
            member: Member = (position, number)
            shard = draft.with_synchronizer(holder.shard, holder.shard.synchronizer, [member])
            at = min(place + number, len(draft.messages))
            draft.messages.insert(at, DraftMessage([member], shard, holder.dtype))
    return draft.written()


def partition_of(problem: Problem, position: int, count: int) -> Partition | None:
    """An even cut along the longest axis that the space allows; None for one or too many shards."""
    variable = problem.workload.variables[position]
    axes = problem.space.axes_for(variable)
    if count < 2 or not axes:
        return None
    axis = max(axes, key=lambda candidate: (variable.shape[candidate], -candidate))
    if variable.shape[axis] < count or count > problem.space.max_shards:
        return None
    return even_partition(variable, axis, count)


def shards_alone(problem: Problem, shard: Shard, position: int, count: int) -> list[Message] | None:
    """The messages of a variable that is cut into `count` shards; None if it cannot be."""
    variable = problem.workload.variables[position]
    partition = partition_of(problem, position, count)
    if count > 1 and partition is None:
        return None
    choice = VariableStrategy(variable.name, (shard,) * count, partition)
    return [
        message_of(shard, (part,), variable.dtype, SparseHandling.DENSE)
        for part in slices_of(variable, choice)
    ]


def signature(message: Message) -> tuple[object, ...]:
    """Equal for messages at the same place of repeated blocks, whatever their owners."""
    parts = tuple(
        (block_pattern(part.variable), part.elements, part.stop - part.start)
        for part in message.slices
    )
    return (
        parts,
        message.synchronizer,
        message.compressor,
        message.hierarchical,
        message.ratio,
        message.rank,
        message.shares,
        message.pieces,
    )
