"""Replaces messages by stages that follow each other, each on a link of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import Kind
from autotune.whatif.base import Base
from autotune.whatif.messages.waiting import with_sending
from autotune.whatif.primitives import add, connect


@dataclass(frozen=True, eq=False)
class Stage:
    """`duration_s` (K,): of every message. Stages of one `queue` share its link.

    `name`: of its collective.
    """

    name: str
    queue: str
    duration_s: FloatArray


def staged(base: Base, messages: IntArray, stages: tuple[Stage, ...]) -> Base:
    """Each of `messages` (K,) as a chain of stages: the message itself becomes the first one.

    What waited for a message waits for its last stage. Messages still begin one after the other,
    and their first stage waits for other ranks as they did.
    """
    edges = len(base.parent)
    leaves = np.isin(base.parent, messages) & ~np.isin(base.child, messages)
    base, _ = add(base, stages[0].queue, np.zeros(0), [], Kind.COLLECTIVE)
    queue = base.queue.copy()
    queue[messages] = base.names.queues.index(stages[0].queue)
    ops = list(base.names.ops)
    for number, op in enumerate(messages.tolist()):
        ops[op] = f"{stages[0].name} of message {number}"
    base = replace(base, queue=queue, names=replace(base.names, ops=tuple(ops)))
    base, last = with_sending(base, messages, stages[0].duration_s), messages
    for stage in stages[1:]:
        names = [f"{stage.name} of message {number}" for number in range(len(messages))]
        sizes_bytes = base.size_bytes[messages]
        base, new = add(
            base, stage.queue, stage.duration_s, names, Kind.COLLECTIVE, size_bytes=sizes_bytes
        )
        base = connect(base, last, new)
        last = new
    last_of = np.arange(base.ops)
    last_of[messages] = last
    parent = base.parent.copy()
    parent[:edges] = np.where(leaves, last_of[parent[:edges]], parent[:edges])
    return replace(base, parent=parent)
