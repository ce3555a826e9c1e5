"""What-ifs of the messages of a distributed step: their network, their waiting and their overlap.

They change messages that the trace holds, or that `distributed` has added before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.distributed import (
    CONTENTION,
    collectives,
    seconds_of,
    sized_messages,
    times_on,
    unsized_notes,
)
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.synchronization import uncontended
from autotune.whatif.messages.waiting import ratio, refuse_changed_messages, sending_s, with_sending
from autotune.whatif.primitives import connect, disconnect
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import what_if

USUAL_SPEEDUP = 2.0


@what_if(
    "faster_network",
    title="a faster network",
    source="Daydream, sec. 6.5 and Fig. 8",
    enact="(a network of more bandwidth; no change of the script)",
)
def faster_network(base: Base, question: Question) -> Base:
    """The links between hosts have the amount times the bandwidth (`faster_network=4`, usually 2).

    On one host, its inner links. With a cluster, the time per message stays and the time per byte
    falls, by its fits. Without one, the trace does not tell them apart: all of a message's time
    falls, or in the pessimistic reading half of it.
    """
    factor = question.amounts.get("faster_network", USUAL_SPEEDUP)
    if not 0 < factor < np.inf:
        raise InvalidInput(f"a faster network needs a factor above 0, but it is {factor}")
    messages = collectives(base)
    refuse_changed_messages(base)
    faster = replace(base, network=base.network * factor)
    if question.cluster is not None:
        messages = sized_messages(base, messages)
        faster = replace(faster, notes=(*base.notes, *unsized_notes(collectives(base), messages)))
    if question.cluster is not None and question.reading is not Reading.OPTIMISTIC:
        cluster = training_cluster(question)
        before_s, after_s = (
            seconds_of(one, messages, times_on(one, cluster)) for one in (base, faster)
        )
        share = ratio(after_s, before_s)
    else:
        falling = 0.5 if question.reading is Reading.PESSIMISTIC else 1.0
        share = np.full(int(messages.sum()), 1 - falling + falling / factor)
    ops = np.flatnonzero(messages)
    return with_sending(faster, ops, share * sending_s(base, ops))


@what_if(
    "no_stragglers",
    title="no rank waits for another one",
    source="dPRO, sec. 4.1: a collective begins when its last rank has come",
    enact="(equal work, equal devices and equal data loading on every rank)",
)
def no_stragglers(base: Base, question: Question) -> Base:
    """All ranks come to every collective at the same time, so it only takes its transfer.

    The transfer is the duration on the rank that came last, which does not wait. This needs the
    traces of all ranks.
    """
    messages = collectives(base)
    if not base.waits_s:
        raise InvalidInput(
            "waiting for other ranks shows in the traces of all ranks of a job, but this rank "
            "waits for none, or the traces of the others are missing; name all of them"
        )
    durations_s = base.duration_s.copy()
    for op, wait_s in base.waits_s.items():
        durations_s[op] = max(durations_s[op] - wait_s, 0.0) if messages[op] else durations_s[op]
    return replace(base, duration_s=durations_s, waits_s={})


@what_if(
    "sync_before_allreduce",
    title="synchronizing before each all-reduce",
    source="Daydream, sec. 6.5 and Fig. 9",
    enact="torch.cuda.synchronize()  # in a communication hook, before dist.all_reduce",
)
def sync_before_allreduce(base: Base, question: Question) -> Base:
    """The host waits for the device before it issues a message, which then has the device alone.

    Its time falls by what contention with kernels added (`CONTENTION`); the host is late with the
    launches that follow.
    """
    messages = collectives(base)
    refuse_changed_messages(base)
    alone = uncontended(base, messages, CONTENTION.at(question.reading))
    into = messages[alone.child] & ~messages[alone.parent] & (alone.later == 0)
    for message in np.flatnonzero(messages).tolist():
        parents = alone.parent[into & (alone.child == message)]
        kernels = parents[alone.on_device[parents]]
        calls = parents[~alone.on_device[parents] & (alone.queue[parents] != NONE)]
        if len(kernels) and len(calls):
            for call in calls.tolist():
                alone = connect(alone, kernels, call)
                into = np.append(into, np.zeros(len(kernels), dtype=np.bool_))
    return alone


@what_if(
    "perfect_overlap",
    title="all communication hidden",
    source="the bound of ByteScheduler (SOSP 2019) and of AutoSync's cross-step plans",
    enact="autotune tune --cluster cluster.yaml --address auto -- python train.py  # searches for "
    "plans that reach into the next step",
)
def perfect_overlap(base: Base, question: Question) -> Base:
    """No op waits for a message of its own step: what read it reads that of the step before.

    The messages still take their time, so a step is as long as its computation or its messages.
    No schedule is faster without fewer bytes. Training that ignores the wait would be wrong; this
    is a bound.
    """
    messages = collectives(base)
    from_message = messages[base.parent] & ~messages[base.child]
    other = from_message & (base.queue[base.parent] != base.queue[base.child])
    free = disconnect(base, other)
    parent, child, later = base.parent[other], base.child[other], base.later[other]
    for steps in np.unique(later).tolist():
        chosen = later == steps
        free = connect(free, parent[chosen], child[chosen], later=int(steps) + 1)
    return free
