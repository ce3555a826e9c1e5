"""Priority-based parameter propagation (P3): sliced gradients, the most urgent one first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.distributed import has_collectives, times_on
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.synchronization import ready_ops
from autotune.whatif.primitives import add, connect, schedule
from autotune.whatif.question import Gradient, Question
from autotune.whatif.registry import what_if

SLICE_BYTES = 200_000
"""P3 (SysML 2019), sec. 4: slices of 50,000 parameters."""
MOST_SLICES = 100_000
SEND, RECEIVE = "network out", "network in"


@what_if(
    "p3",
    title="P3: sliced gradients, the first layers' first",
    source="P3 (SysML 2019); Daydream, sec. 6.6, Alg. 7",
    enact="autotune tune --cluster cluster.yaml --address auto -- python train.py  # finds plans "
    "that send into the next step, by urgency",
)
def p3(base: Base, question: Question) -> Base:
    """Every worker is also a server of an equal share of the slices (`p3=BYTES`, usually 200 kB).

    A slice is pushed to its server once its gradient is ready, and pulled once all have pushed it.
    The next step's forward pass reads it (Alg. 7 prints this step's). Both directions of a link
    send the slice first that is read first. A worker's link also receives the pushes of the slices
    that it serves, and sends their sums. Devices of a host share its interface evenly. Servers add
    at the speed of the link. The optimizer's kernels stay, as the time of the updates.
    """
    if has_collectives(base):
        raise InvalidInput(
            "P3 replaces collectives, but the trace has collectives of its own; name a trace of "
            "one worker"
        )
    gradients, cluster = question.known_gradients(), training_cluster(question)
    workers = cluster.world_size
    if workers < 2:
        return base
    rows = [one.name for one in gradients if one.rows_bytes is not None]
    if rows:
        raise InvalidInput(
            f"P3 cuts dense gradients into slices, but {len(rows)} gradients of the trace are "
            f"sparse, such as {rows[0]!r}; use sparse=False"
        )
    if any(one.updates_before for one in gradients):
        raise InvalidInput(
            "P3 sends the gradients of one update in a step, but the trace's steps update several "
            "times; call prof.step() after every update"
        )
    of, sizes_bytes = _slices(gradients, question.amounts.get("p3", SLICE_BYTES))
    times = times_on(base, cluster)
    served_s, latency_s = times.served_s(sizes_bytes)
    if not times.on_one_host:
        served_s = served_s * times.most_on_a_host  # the devices of a host share its interface
    own = np.arange(len(of)) % workers == 0  # the slices that this worker serves
    first, second = (np.empty(len(of), dtype=np.int64) for _ in range(2))
    grown = base
    for chosen, queues, whats, each_s in (
        (~own, (SEND, RECEIVE), ("push", "pull"), served_s / (workers - 1)),
        (own, (RECEIVE, SEND), ("sum", "answer"), served_s),
    ):
        for queue, what, ops in zip(queues, whats, (first, second), strict=True):
            names = [f"{what} {gradients[at].name}" for at in of[chosen]]
            sizes = sizes_bytes[chosen]
            grown, ops[chosen] = add(
                grown, queue, each_s[chosen], names, Kind.SEND, size_bytes=sizes
            )
    grown = connect(grown, ready_ops(base, gradients)[of], first)
    grown = connect(grown, first, second, delay_s=latency_s)
    grown = connect(grown, np.where(own, first, second), _reads(base, gradients)[of], later=1)
    grown = _by_urgency(grown, first, second, _urgency(base, gradients)[of])
    note = f"slices: Eq. 2 on the links of cluster {cluster.name!r} ({cluster.source})"
    return replace(grown, notes=(*grown.notes, note))


def _slices(gradients: Sequence[Gradient], slice_bytes: float) -> tuple[IntArray, FloatArray]:
    """(gradient, bytes) of every slice; the last one of a gradient is the rest."""
    if not slice_bytes >= 1:
        raise InvalidInput(f"a slice needs at least 1 byte, but has {slice_bytes}")
    counts = [max(math.ceil(one.size_bytes / slice_bytes), 1) for one in gradients]
    if sum(counts) > MOST_SLICES:
        raise InvalidInput(
            f"at most {MOST_SLICES} slices can be replayed, but slices of {slice_bytes:.0f} bytes "
            f"are {sum(counts)}; name larger ones, such as p3=1e6"
        )
    of = np.repeat(np.arange(len(counts)), counts)
    sizes_bytes = np.full(len(of), float(slice_bytes))
    last = np.cumsum(counts) - 1
    whole = np.array([one.size_bytes for one in gradients])
    sizes_bytes[last] = whole - slice_bytes * (np.array(counts) - 1)
    return of, sizes_bytes


def _reads(base: Base, gradients: Sequence[Gradient]) -> IntArray:
    """(V,) the op that reads each parameter; where it is unknown, the first op of the step."""
    begin = int(base.launched[0]) if len(base.launched) else _first(base)
    return np.array([begin if one.read == NONE else one.read for one in gradients])


def _first(base: Base) -> int:
    return int(np.flatnonzero(base.queue == base.queue[base.last])[0])


def _urgency(base: Base, gradients: Sequence[Gradient]) -> IntArray:
    """(V,) places in the order of the forward pass; the backward order reversed if unknown."""
    reads = np.array([one.read for one in gradients])
    if (reads == NONE).any():
        return np.arange(len(reads))[::-1]
    called = np.where(base.launch[reads] == NONE, reads, base.launch[reads])
    places: IntArray = np.argsort(np.argsort(called, kind="stable"))
    return places


def _by_urgency(base: Base, first: IntArray, second: IntArray, urgency: IntArray) -> Base:
    priority = np.zeros(base.ops, dtype=np.int64)
    priority[first] = priority[second] = urgency
    slices: BoolArray = np.zeros(base.ops, dtype=np.bool_)
    slices[first] = slices[second] = True
    return schedule(base, slices, priority[slices])
