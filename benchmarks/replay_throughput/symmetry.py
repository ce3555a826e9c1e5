"""Fold a graph of equal workers to one worker (dPRO, sec. 5.3, symmetry).

Two ops are equivalent if they have equal durations, follow equivalent ops, and compete on their
queues, channels and locks with equivalent ops, in the same order of index. By induction over time,
equivalent ops start and end together, so one of each class is enough: the quotient of the graph.
Examples are a ring of equal workers, and parameter servers that serve equal workers at once.
Workers that follow each other on one queue are not equivalent, and the fold is refused.

If an op without duration makes another op ready at the instant at which a third op is ready for the
same FIFO queue, the full graph may serve these two in either order.

| symbol | meaning |
|---|---|
| N, M | ops of the full graph and of its quotient |
| role | 0 or 1: a resource is the op's queue or its channel; a lock is taken or given back |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autotune.arrays import FloatArray, Int32Array, IntArray
from autotune.dfg.build import csr
from autotune.dfg.graph import NONE, Dfg, Names
from autotune.dfg.replay import Timeline
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.execution_graph import parent_csr

_SAME = ("duration_s", "gap_s", "kind", "priority", "size_bytes", "layer")


@dataclass(frozen=True, eq=False)
class Fold:
    """`dfg`: the quotient of `full`. `member` (N,): its op for each op of the full graph."""

    full: Dfg
    dfg: Dfg
    member: Int32Array

    def unfold_s(self, timeline: Timeline) -> tuple[FloatArray, FloatArray]:
        """Starts and ends of all ops, each of shape (N,), from a timeline of the quotient."""
        if timeline.dfg is not self.dfg:
            raise InvalidInput(
                "a timeline can be unfolded if it is one of the fold's own graph, "
                "and this is one of another graph"
            )
        return timeline.start_s[self.member], timeline.end_s[self.member]


def fold(dfg: Dfg, representative: Int32Array | None = None) -> Fold:
    """The quotient of a graph of equal workers.

    `representative` (N,): the op that represents each op; it represents itself. By default the k-th
    op of the first worker represents the k-th op of every worker, and ops without a worker
    represent themselves. Raises `InvalidInput` for ops that are not equivalent.
    """
    stands = _by_worker(dfg) if representative is None else _checked(dfg, representative)
    for name in _SAME:
        values = getattr(dfg, name)
        _require(dfg, values == values[stands], stands, f"has another {name}")
    queues = _classes(
        dfg.queues, [(takes, takes[stands]) for takes in (dfg.queue, dfg.channel)], dfg, stands
    )
    locks = _classes(
        dfg.locks, [(takes, takes[stands]) for takes in (dfg.acquires, dfg.releases)], dfg, stands
    )
    if np.any(dfg.discipline != dfg.discipline[queues]) or np.any(
        dfg.lock_capacity != dfg.lock_capacity[locks]
    ):
        raise InvalidInput(
            "only graphs of equal workers can be folded, "
            "but their queues or locks differ in discipline or capacity"
        )
    representatives = np.flatnonzero(stands == np.arange(dfg.ops))
    _compare_users(
        dfg, queues, (dfg.queue, dfg.channel), stands, representatives, "queue or channel"
    )
    _compare_users(dfg, locks, (dfg.acquires, dfg.releases), stands, representatives, "lock")
    child, parent = _parents(dfg, stands)
    member = (np.cumsum(stands == np.arange(dfg.ops)) - 1)[stands].astype(np.int32)
    mine = stands[child] == child
    return Fold(
        dfg,
        _quotient(dfg, representatives, queues, locks, member[parent[mine]], member[child[mine]]),
        member,
    )


def _by_worker(dfg: Dfg) -> IntArray:
    stands = np.arange(dfg.ops)
    workers = np.unique(dfg.worker[dfg.worker != NONE])
    if len(workers):
        first = np.flatnonzero(dfg.worker == workers[0])
        for worker in workers[1:]:
            ops = np.flatnonzero(dfg.worker == worker)
            if len(ops) != len(first):
                raise InvalidInput(
                    f"only equal workers can be folded, but worker {worker} has {len(ops)} ops "
                    f"where worker {workers[0]} has {len(first)}"
                )
            stands[ops] = first
    return stands


def _checked(dfg: Dfg, representative: Int32Array) -> IntArray:
    stands = np.asarray(representative, dtype=np.int64)
    if stands.shape != (dfg.ops,) or (
        len(stands) and not (stands.min() >= 0 and stands.max() < dfg.ops)
    ):
        raise InvalidInput(f"every op needs a representative among the {dfg.ops} ops")
    if np.any(stands[stands] != stands):
        raise InvalidInput("a representative must stand for itself")
    return stands


def _require(dfg: Dfg, holds: np.ndarray, stands: IntArray, what: str) -> None:
    wrong = np.flatnonzero(~holds)
    if len(wrong):
        op = int(wrong[0])
        names = dfg.names.ops
        raise InvalidInput(
            f"only equal ops can be folded, but {names[op]!r} {what} "
            f"than {names[int(stands[op])]!r}, which represents it"
        )


def _classes(
    count: int, pairs: Sequence[tuple[Int32Array, Int32Array]], dfg: Dfg, stands: IntArray
) -> IntArray:
    """(count,): the lowest resource of each class, by pairs of equivalent resources."""
    one, two = (np.concatenate([pair[side] for pair in pairs]).astype(np.int64) for side in (0, 1))
    _require(
        dfg,
        ((one == NONE) == (two == NONE)).reshape(len(pairs), -1).all(axis=0),
        stands,
        "takes other resources",
    )
    one, two = one[one != NONE], two[two != NONE]
    if not count:
        return np.zeros(0, dtype=np.int64)
    _, label = connected_components(
        coo_array((np.ones(len(one)), (one, two)), shape=(count, count)), directed=False
    )
    lowest = np.full(count, count, dtype=np.int64)
    np.minimum.at(lowest, label, np.arange(count))
    return lowest[label]


def _users(
    takes: Sequence[Int32Array], ops: IntArray, resource: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """(resource, op, role) of every use by one of `ops`, by resource and then by op.

    `resource` renumbers the resources.
    """
    role = np.concatenate([np.full(len(ops), number) for number in range(len(takes))])
    op = np.tile(ops, len(takes))
    taken = np.concatenate([take[ops] for take in takes])
    used = taken != NONE
    number = resource[taken[used]]
    order = np.lexsort((role[used], op[used], number))
    return number[order], op[used][order], role[used][order]


def _compare_users(
    dfg: Dfg,
    classes: IntArray,
    takes: Sequence[Int32Array],
    stands: IntArray,
    representatives: IntArray,
    what: str,
) -> None:
    """Check that equivalent ops use each resource and its class in the same order."""
    if not len(classes):
        return
    resource, op, role = _users(takes, np.arange(dfg.ops), np.arange(len(classes)))
    model, model_op, model_role = _users(takes, representatives, classes)
    _compare_groups(
        dfg, classes, (resource, stands[op] * 2 + role), (model, model_op * 2 + model_role), what
    )


def _compare_groups(
    dfg: Dfg,
    classes: IntArray,
    groups: tuple[IntArray, IntArray],
    models: tuple[IntArray, IntArray],
    what: str,
) -> None:
    """Check that each group, (number, values in order), equals the model group of its class."""
    sizes = np.bincount(groups[0], minlength=len(classes))
    model_sizes = np.bincount(models[0], minlength=len(classes))
    begins = np.cumsum(model_sizes) - model_sizes
    used = np.flatnonzero(sizes)
    different = used[sizes[used] != model_sizes[classes[used]]]
    if not len(different):
        place = np.arange(len(groups[0])) - (np.cumsum(sizes) - sizes)[groups[0]]
        wrong = np.flatnonzero(models[1][begins[classes[groups[0]]] + place] != groups[1])
        different = groups[0][wrong]
    if len(different):
        number = int(different[0])
        name = f"op {dfg.names.ops[number]!r}" if what == "parents" else f"{what} {number}"
        raise InvalidInput(
            f"only graphs of equal workers can be folded, "
            f"but {name} does not serve or follow equal ops"
        )


def _parents(dfg: Dfg, stands: IntArray) -> tuple[IntArray, IntArray]:
    """(child, representative of a parent) of all edges, each once; checks the parents."""
    start, parent = parent_csr(dfg)
    child = np.repeat(np.arange(dfg.ops), np.diff(start))
    keys = np.unique(child * dfg.ops + stands[parent]) if dfg.ops else np.zeros(0, dtype=np.int64)
    child, parents = keys // max(dfg.ops, 1), keys % max(dfg.ops, 1)
    mine = stands[child] == child
    has_parents = np.bincount(child, minlength=dfg.ops) > 0
    _require(dfg, has_parents == has_parents[stands], stands, "follows other ops")
    _compare_groups(dfg, stands, (child, parents), (child[mine], parents[mine]), "parents")
    return child, parents


def _quotient(
    dfg: Dfg,
    representatives: IntArray,
    queues: IntArray,
    locks: IntArray,
    parents: Int32Array,
    children: Int32Array,
) -> Dfg:
    """The graph of the ops `kept`, with the lowest queue or lock of each class."""
    queue_left, lock_left = np.unique(queues), np.unique(locks)

    def renamed(takes: Int32Array, classes: IntArray, left: IntArray) -> Int32Array:
        taken = takes[representatives]
        return (
            np.where(taken == NONE, NONE, np.searchsorted(left, classes[taken])).astype(np.int32)
            if len(classes)
            else taken
        )

    child_start, child = csr(len(representatives), parents, children)
    columns = {name: getattr(dfg, name)[representatives] for name in (*_SAME, "worker")}
    return Dfg(
        **columns,
        queue=renamed(dfg.queue, queues, queue_left),
        channel=renamed(dfg.channel, queues, queue_left),
        acquires=renamed(dfg.acquires, locks, lock_left),
        releases=renamed(dfg.releases, locks, lock_left),
        child_start=child_start,
        child=child,
        discipline=dfg.discipline[queue_left],
        lock_capacity=dfg.lock_capacity[lock_left],
        names=Names(
            tuple(dfg.names.ops[op] for op in representatives),
            tuple(dfg.names.queues[queue] for queue in queue_left),
            dfg.names.layers,
        ),
    )
