"""How passes change a strategy: its messages, taken apart and written down again (`strategy_space.draft`).

Messages are named by their number in the plan's issue order. What these functions return is in normal form, so that equal results are
equal strategies. Nothing here draws at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autotune.optimizer.coarsen import block_pattern
from autotune.optimizer.state import Problem, State, planned
from autotune.rng import generator
from autotune.strategy_space.builders.partitions import even_partition
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
    """The state's messages, to be changed; what many edits of one state share is worked out once."""
    known = state.known
    if known.draft is None or known.drafted_for is not problem:
        made = planned(state, problem)
        known.draft = Draft(
            state.strategy,
            problem.workload,
            problem.cluster,
            problem.space,
            generator(0, "unused"),
            made,
        )
        known.drafted_for = problem
    return known.draft.copy()


def can_merge(one: Message, other: Message) -> bool:
    """Whether two messages travel alike, so that they may be one; sparse rows travel alone."""
    if SparseHandling.DENSE is not one.sparse or SparseHandling.DENSE is not other.sparse:
        return False
    kinds = [
        (m.synchronizer, m.compressor, m.dtype, m.owner, m.hierarchical, m.ratio, m.rank)
        for m in (one, other)
    ]
    return kinds[0] == kinds[1]


def joined(messages: Sequence[Message]) -> Message:
    """What several messages that can merge are together."""
    return replace(
        messages[0], slices=tuple(part for message in messages for part in message.slices)
    )


def merged(state: State, problem: Problem, pairs: Iterable[tuple[int, int]]) -> Strategy:
    """Every pair becomes one message, at the place of the second; pairs may share members and then become one together."""
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


def _root(into: Sequence[int], number: int) -> int:
    while into[number] != number:
        number = into[number]
    return number


def split(state: State, problem: Problem, cuts: Mapping[int, Sequence[int]]) -> Strategy:
    """Messages are cut before the members of these numbers, each part issued at once behind the one before."""
    draft = draft_of(state, problem)
    found: list[DraftMessage] = []
    for number, message in enumerate(draft.messages):
        bounds = [0, *sorted(set(cuts.get(number, ()))), len(message.members)]
        parts = [message.members[a:b] for a, b in pairwise(bounds) if b > a]
        found.extend(replace(message, members=part) for part in parts)
    draft.messages = found
    return draft.written()


def reordered(state: State, problem: Problem, order: Sequence[int]) -> Strategy:
    """The messages in this order of their numbers."""
    draft = draft_of(state, problem)
    draft.messages = [draft.messages[number] for number in order]
    draft.in_ready_order = False
    return draft.written()


def replanned(state: State, problem: Problem) -> Strategy:
    """Across steps the order that the closed form finds best for these messages."""
    draft = draft_of(state, problem)
    draft.order_by_need()
    return draft.written()


def like(state: State, problem: Problem, kinds: Mapping[int, Shard]) -> Strategy:
    """Messages synchronized and compressed as these shards are; rooted ones on the server that would be done first.

    Messages of sparse rows stay as they are.
    """
    draft = draft_of(state, problem)
    for number, shard in kinds.items():
        message = draft.messages[number]
        if draft.sparse_of(message) is SparseHandling.DENSE:
            plain = replace(shard, placement=None) if shard.synchronizer not in ROOTED else shard
            message.shard = draft.with_synchronizer(plain, shard.synchronizer, message.members)
    return draft.written()


def cut_variables(state: State, problem: Problem, shards: Mapping[int, int]) -> Strategy:
    """Variables that travel alone and whole or evenly cut, by position, cut into so many shards (1: whole), a message each."""
    draft = draft_of(state, problem)
    for position, count in shards.items():
        variable = problem.workload.variables[position]
        own = [m for m in draft.messages if any(member[0] == position for member in m.members)]
        holder, place = own[0], next(n for n, m in enumerate(draft.messages) if m is own[0])
        draft.messages = [m for m in draft.messages if all(m is not other for other in own)]
        draft.partitions[position] = partition_of(problem, position, count)
        assert count == 1 or draft.partitions[position] is not None, variable.name
        for number in range(draft.shards_of(position)):
            member: Member = (position, number)
            shard = draft.with_synchronizer(holder.shard, holder.shard.synchronizer, [member])
            draft.messages.insert(
                min(place + number, len(draft.messages)),
                DraftMessage([member], shard, holder.dtype),
            )
    return draft.written()


def partition_of(problem: Problem, position: int, count: int) -> Partition | None:
    """An even cut along the longest axis that the space allows; None for one shard, or where it cannot be cut so often."""
    variable = problem.workload.variables[position]
    axes = problem.space.axes_for(variable)
    if count < 2 or not axes:
        return None
    axis = max(axes, key=lambda candidate: (variable.shape[candidate], -candidate))
    if variable.shape[axis] < count or count > problem.space.max_shards:
        return None
    return even_partition(variable, axis, count)


def shards_alone(problem: Problem, shard: Shard, position: int, count: int) -> list[Message] | None:
    """The messages that a variable cut into `count` would be; None where it cannot be."""
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
    """Equal for messages at the same place of repeated blocks: names but for their numbers, sizes and everything but who owns them."""
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
    )
