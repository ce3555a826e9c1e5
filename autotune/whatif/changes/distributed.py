"""What-ifs of data-parallel training: more workers, and how their messages are sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.lowering import device_costs
from autotune.lowering.traffic import Collective
from autotune.profiling.traces.groups import require_one_group
from autotune.whatif.base import Base
from autotune.whatif.messages.bucket_messages import messages_of
from autotune.whatif.messages.cluster_size import sized, training_cluster
from autotune.whatif.messages.collective_times import CollectiveTimes, collective_of, faster_network
from autotune.whatif.messages.ddp_buckets import buckets_of
from autotune.whatif.messages.row_updates import with_rows_of_all
from autotune.whatif.messages.synchronization import contended, synchronized
from autotune.whatif.messages.waiting import refuse_changed_messages
from autotune.whatif.primitives import select
from autotune.whatif.question import Factor, Question, Reading
from autotune.whatif.registry import what_if

CONTENTION = Factor(
    expected=1 + device_costs.CONTENTION.value,
    optimistic=1.0,
    pessimistic=1.34,
    source=f"{device_costs.CONTENTION.source}, and 34 % more than in theory",
)
"""Time of a message that competes with kernels for the device, over its time alone."""
ASSUMED_ELEMENT_BYTES = 4
"""The bytes of a float32, the usual type of gradients."""


def collectives(base: Base) -> BoolArray:
    """(N,) the messages of a step. Raises `InvalidInput` without any."""
    messages: BoolArray = select(base, kinds=[Kind.COLLECTIVE]) & (base.queue != NONE)
    if not messages.any():
        raise InvalidInput(
            "this what-if changes collectives, but the trace has none; combine it with training on "
            "a cluster, such as distributed+faster_network"
        )
    return messages


def has_collectives(base: Base) -> bool:
    return bool((select(base, kinds=[Kind.COLLECTIVE]) & (base.queue != NONE)).any())


def times_on(base: Base, cluster: Cluster) -> CollectiveTimes:
    """Times of collectives of all ranks, on the network that what-ifs before have made faster.

    Raises `InvalidInput` for collectives of other groups.
    """
    require_one_group(base.groups, base.world_size)
    if base.network != 1:
        cluster = faster_network(cluster, base.network)
    return CollectiveTimes(
        cluster, device_costs.costs_of("cuda" if base.on_device.any() else "cpu", base.device)
    )


def sized_messages(base: Base, messages: BoolArray) -> BoolArray:
    """(N,) those of `messages` whose collective and size the trace states.

    Raises `InvalidInput` if it states the size of none.
    """
    ops = np.flatnonzero(messages)
    known = [op for op in ops.tolist() if collective_of(base.names.ops[op]) is not None]
    stated = np.zeros(base.ops, dtype=np.bool_)
    stated[known] = base.size_bytes[known] > 0
    if known and not stated.any():
        raise InvalidInput(
            "the time of a message on a cluster follows from its size, but the trace states the "
            f"sizes of none of its {len(known)} collectives, such as "
            f"{base.names.ops[known[0]][:80]!r}; record with torch 2.2 or later, or name the "
            "execution trace of the same steps as well"
        )
    return stated


def all_reduces(base: Base) -> IntArray:
    """(K,) the all-reduces whose sizes the trace states. Raises `InvalidInput` if there is none."""
    ops = np.flatnonzero(sized_messages(base, collectives(base)))
    summed = [collective_of(base.names.ops[op]) is Collective.ALL_REDUCE for op in ops.tolist()]
    if not any(summed):
        raise InvalidInput(
            "this what-if changes all-reduces, but the trace has other collectives only"
        )
    chosen: IntArray = ops[np.array(summed, dtype=np.bool_)]
    return chosen


def element_bytes(base: Base, messages: IntArray) -> FloatArray:
    """(K,) bytes of an element of each message; `ASSUMED_ELEMENT_BYTES` if its type is unknown."""
    known = base.element_bytes
    sizes = [known.get(message, ASSUMED_ELEMENT_BYTES) for message in messages.tolist()]
    return np.array(sizes, dtype=np.float64)


def seconds_of(base: Base, messages: BoolArray, times: CollectiveTimes) -> FloatArray:
    """Times of recorded or added collectives on a cluster, shape (K,).

    An op that is none of the `sized_messages` keeps its duration. Raises `InvalidInput` if all are
    unsized.
    """
    ops = np.flatnonzero(messages)
    seconds = base.duration_s[ops].copy()
    kinds = [collective_of(base.names.ops[op]) for op in ops]
    stated = sized_messages(base, messages)[ops]
    for kind in Collective:
        chosen = np.array([one is kind for one in kinds], dtype=np.bool_) & stated
        if chosen.any():
            seconds[chosen] = times.seconds(kind, base.size_bytes[ops[chosen]])
    return seconds


@what_if(
    "distributed",
    title="data-parallel training on the cluster",
    source="Daydream, sec. 5.1 and 6.5, Alg. 6; buckets of torch.nn.parallel",
    enact="model = DistributedDataParallel(model)",
)
def distributed(base: Base, question: Question) -> Base:
    """Every worker of the cluster does this step on a batch of this size and sums the gradients.

    DDP's buckets: the first of 1 MiB, then of 25 MiB, in the order in which gradients become ready.
    A bucket is sent when its last gradient is ready, and read after the backward pass. Of a sparse
    gradient the rows that a step touches are gathered from all workers, and the optimizer updates
    the rows of all. Workers are equally fast.
    Collectives that the trace holds already take the time that they have on the cluster, without
    waiting for others. Messages are longer while kernels run (`CONTENTION`).
    """
    return on_cluster(base, question, training_cluster(question))


@what_if(
    "workers",
    title="another number of workers",
    source="Daydream, sec. 6.5 and Fig. 8",
    enact="torchrun --nnodes NODES --nproc-per-node DEVICES train.py",
)
def workers(base: Base, question: Question) -> Base:
    """As `distributed`, on as many workers as the amount states (`workers=8`).

    They fill the hosts of the cluster in order. Beyond it there are more hosts of the same kind.
    """
    amount = question.amounts.get("workers", question.workers)
    if amount is None or amount != int(amount):
        raise InvalidInput(
            f"another number of workers needs a whole number, but it is {amount}; name it, such as "
            "workers=8"
        )
    return on_cluster(base, question, sized(question.known_cluster(), int(amount)))


def on_cluster(
    base: Base, question: Question, cluster: Cluster, bucket_bytes: int | None = None
) -> Base:
    """The step on every worker of a cluster; one worker alone sends nothing.

    `bucket_bytes`: a limit that the script gives to DDP, which then holds for the first bucket too.
    """
    if has_collectives(base):
        recorded = collectives(base)
        refuse_changed_messages(base)
        sent = sized_messages(base, recorded)
        seconds = seconds_of(base, sent, times_on(base, cluster))
        durations_s = base.duration_s.copy()
        durations_s[sent] = seconds * fit_error(cluster, question.reading)
        notes = (*base.notes, *unsized_notes(recorded, sent))
        base = replace(base, duration_s=durations_s, waits_s={}, notes=notes)
    elif cluster.world_size > 1:
        gradients = question.known_gradients()
        limits = () if bucket_bytes is None else (bucket_bytes, bucket_bytes)
        buckets = buckets_of(gradients, *limits)
        costs = device_costs.costs_of("cuda" if base.on_device.any() else "cpu", base.device)
        messages = messages_of(buckets, times_on(base, cluster), costs)
        seconds = messages.seconds * fit_error(cluster, question.reading)
        messages = replace(messages, seconds=seconds)
        base = with_rows_of_all(base, gradients, cluster.world_size, question.reading)
        base = synchronized(base, gradients, buckets, messages, costs)
        sent = collectives(base)
    else:
        return base
    base = contended(base, sent, CONTENTION.at(question.reading))
    return replace(base, notes=tuple(dict.fromkeys((*base.notes, *_notes(base, cluster)))))


def unsized_notes(messages: BoolArray, sized: BoolArray) -> tuple[str, ...]:
    """A note of how many messages keep their recorded times, if any do."""
    count = int((messages & ~sized).sum())
    return (f"{count} collectives without a stated size keep their times",) if count else ()


def fit_error(cluster: Cluster, reading: Reading) -> float:
    """Factor of the all-reduce's time that the error of its fit allows; 1 without a fit."""
    fit = cluster.fit("all_reduce", cluster.world_size)
    error = 0.0 if fit is None else min(fit.large_error or fit.relative_error, 0.9)
    return {Reading.OPTIMISTIC: 1 - error, Reading.PESSIMISTIC: 1 + error}.get(reading, 1.0)


def _notes(base: Base, cluster: Cluster) -> tuple[str, ...]:
    """What a prediction on this cluster takes for granted, with its source."""
    notes = [f"contention of messages with kernels: {CONTENTION.source}"]
    if cluster.fit("all_reduce", cluster.world_size) is None:
        notes.append(
            f"the all-reduce on {cluster.world_size} workers: from the bandwidths of cluster "
            f"{cluster.name!r} ({cluster.source}), not fitted"
        )
    if base.on_device.any():
        costs = device_costs.costs_of("cuda", base.device)
        notes.append(f"copies into buckets and back: {costs.pack_s_per_byte.source}")
    return tuple(notes)
