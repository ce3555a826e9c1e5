"""The replay of a folded graph of equal workers is exactly the replay of the full graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dfg_twin import graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.dfg.build import DfgBuilder, csr
from autotune.dfg.graph import NONE, Dfg, Discipline, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.execution_graph import parent_csr
from benchmarks.replay_throughput.symmetry import fold

LAYERS = 5


def computation(
    builder: DfgBuilder, worker: int, rng: np.random.Generator
) -> tuple[int, list[int]]:
    """(a worker's device with both passes, its backward ops by layer); equal for all workers."""
    queue = builder.queue(f"device {worker}")
    last: list[int] = []
    for layer in range(LAYERS):
        last = [
            builder.op(f"forward {layer}", queue, rng.uniform(), Kind.FORWARD, last, worker=worker)
        ]
    backward = {}
    for layer in reversed(range(LAYERS)):
        last = [
            builder.op(
                f"backward {layer}", queue, rng.uniform(), Kind.BACKWARD, last, worker=worker
            )
        ]
        backward[layer] = last[0]
    return queue, [backward[layer] for layer in range(LAYERS)]


def ring(workers: int, seed: int, discipline: Discipline, steps: int = 4) -> Dfg:
    """Each gradient goes round a ring; a step waits for the previous worker's."""
    builder = DfgBuilder()
    receive = [builder.queue(f"receive {worker}") for worker in range(workers)]
    sent = {}
    for worker in range(workers):
        rng = np.random.default_rng(seed)
        device, backward = computation(builder, worker, rng)
        send = builder.queue(f"send {worker}", discipline)
        for layer in range(LAYERS):
            step_s = rng.uniform()
            for step in range(steps):
                sent[worker, layer, step] = builder.op(
                    f"send {layer}.{step}",
                    send,
                    step_s,
                    Kind.SEND,
                    [] if step else [backward[layer]],
                    channel=receive[(worker + 1) % workers],
                    priority=layer,
                    worker=worker,
                )
            update = builder.op(f"update {layer}", device, 0.1, Kind.UPDATE, worker=worker)
            sent[worker, layer, steps] = update
    for (worker, layer, step), op in sent.items():
        if step:
            builder.edge(sent[(worker - 1) % workers, layer, step - 1], op)
    return builder.build()


def servers(workers: int, seed: int, shared_link: bool = False) -> Dfg:
    """Two servers update each layer behind its pushes, which use the workers' links."""
    builder = DfgBuilder()
    server = [builder.queue(f"server {number}") for number in range(2)]
    link = builder.queue("servers' link")
    pushed: dict[int, list[int]] = {layer: [] for layer in range(LAYERS)}
    down = []
    for worker in range(workers):
        rng = np.random.default_rng(seed)
        _, backward = computation(builder, worker, rng)
        up = link if shared_link else builder.queue(f"up {worker}")
        down.append(builder.queue(f"down {worker}"))
        for layer in range(LAYERS):
            pushed[layer].append(
                builder.op(
                    f"push {layer}", up, rng.uniform(), Kind.SEND, [backward[layer]], worker=worker
                )
            )
    update = {
        layer: builder.op(
            f"update {layer}", server[layer % 2], 0.3 + layer / 7, Kind.SERVER, pushed[layer]
        )
        for layer in range(LAYERS)
    }
    for worker in range(workers):
        for layer in range(LAYERS):
            builder.op(
                f"pull {layer}",
                down[worker],
                0.2 + layer / 9,
                Kind.RECV,
                [update[layer]],
                worker=worker,
            )
    return builder.build()


def assert_fold_is_exact(dfg: Dfg) -> Dfg:
    folded = fold(dfg)
    full = replay(dfg)
    start_s, end_s = folded.unfold_s(replay(folded.dfg))
    np.testing.assert_array_equal(start_s, full.start_s)
    np.testing.assert_array_equal(end_s, full.end_s)
    return folded.dfg


@pytest.mark.parametrize("discipline", Discipline)
@pytest.mark.parametrize("seed", range(4))
def test_ring_of_equal_workers_folds_to_one(discipline: Discipline, seed: int) -> None:
    sizes = {assert_fold_is_exact(ring(workers, seed, discipline)).ops for workers in (2, 3, 5, 8)}
    assert len(sizes) == 1


@pytest.mark.parametrize("seed", range(4))
def test_servers_of_equal_workers_fold_to_one_worker(seed: int) -> None:
    quotients = [assert_fold_is_exact(servers(workers, seed)) for workers in (1, 2, 3, 8)]
    assert all(quotient.names == quotients[0].names for quotient in quotients)
    assert len({(quotient.ops, quotient.queues) for quotient in quotients}) == 1


@st.composite
def copies(draw: st.DrawFn) -> Dfg:
    """A random graph per worker; some edges and channels lead to the next worker of a ring."""
    one, workers = draw(graphs()), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    duration_s, abroad = rng.uniform(0.1, 1, one.ops), rng.random((2, max(one.ops, 1))) < 0.4
    builder = DfgBuilder()
    queues = [
        [builder.queue(f"q{q} of {w}", Discipline(one.discipline[q])) for q in range(one.queues)]
        for w in range(workers)
    ]
    locks = [
        [builder.lock(int(capacity)) for capacity in one.lock_capacity] for _ in range(workers)
    ]
    start, parent = parent_csr(one)
    for worker in range(workers):
        next_worker = (worker + 1) % workers
        for op in range(one.ops):
            lock = NONE if one.acquires[op] == NONE else locks[worker][one.acquires[op]]
            channel = (
                NONE
                if one.channel[op] == NONE
                else queues[next_worker if abroad[1, op] else worker][one.channel[op]]
            )
            queue = NONE if one.queue[op] == NONE else queues[worker][one.queue[op]]
            gap_s, kind, priority = one.gap_s[op], Kind(one.kind[op]), int(one.priority[op])
            builder.op(
                f"{op}",
                queue,
                duration_s[op],
                kind,
                gap_s=gap_s,
                channel=channel,
                priority=priority,
                worker=worker,
                acquires=lock,
                releases=lock,
            )
    for worker in range(workers):
        for op in range(one.ops):
            source = (worker - 1) % workers if abroad[0, op] else worker
            for above in parent[start[op] : start[op + 1]]:
                builder.edge(source * one.ops + int(above), worker * one.ops + op)
    return builder.build()


def assert_exact_or_refused(dfg: Dfg) -> str:
    """The message of the refusal, "" for none."""
    try:
        folded = fold(dfg)
    except InvalidInput as refusal:
        return str(refusal)
    try:
        full = replay(dfg)
    except InvalidInput:
        return "locks"  # a lock that is not given back: the quotient is stuck, too
    start_s, end_s = folded.unfold_s(replay(folded.dfg))
    np.testing.assert_array_equal(start_s, full.start_s)
    np.testing.assert_array_equal(end_s, full.end_s)
    return ""


@settings(max_examples=150, deadline=None)
@given(copies())
def test_a_fold_is_exact_or_refused(dfg: Dfg) -> None:
    if refusal := assert_exact_or_refused(dfg):
        assert (
            "channel" in refusal
        )  # on one channel the lower index goes first, so two workers differ
        assert np.any(dfg.channel != NONE)


SPOILED = (
    "duration_s",
    "gap_s",
    "priority",
    "queue",
    "channel",
    "acquires",
    "releases",
    "kind",
    "layer",
    "edge",
    "discipline",
    "capacity",
)


def spoiled(dfg: Dfg, what: str, rng: np.random.Generator) -> Dfg:
    """Change one property of one op, queue or lock."""
    if what == "edge":
        keep = np.arange(dfg.edges) != rng.integers(max(dfg.edges, 1))
        origin = np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start))
        start, child = csr(dfg.ops, origin[keep], dfg.child[keep])
        return replace(dfg, child_start=start, child=child)
    column = {"capacity": "lock_capacity"}.get(what, what)
    values = getattr(dfg, column).copy()
    at = rng.integers(len(values))
    limits = {
        "queue": dfg.queues,
        "channel": dfg.queues,
        "acquires": dfg.locks,
        "releases": dfg.locks,
    }
    if what in limits:
        values[at] = rng.integers(NONE, limits[what])
    elif what in ("discipline", "layer"):
        values[at] = 1 - abs(values[at])
    else:
        values[at] += 1
    names = replace(dfg.names, layers=("one", "two"))
    return replace(dfg, **{column: values}, names=names)


@settings(max_examples=200, deadline=None)
@given(copies(), st.sampled_from(SPOILED), st.integers(0, 2**32 - 1))
def test_a_fold_of_nearly_equal_workers_is_exact_or_refused(dfg: Dfg, what: str, seed: int) -> None:
    assume(dfg.ops and (what != "capacity" or dfg.locks))
    try:
        odd = spoiled(dfg, what, np.random.default_rng(seed))
    except InvalidInput:
        return  # a channel that is the queue
    assert_exact_or_refused(odd)


def test_workers_that_follow_each_other_on_one_link_are_refused() -> None:
    with pytest.raises(InvalidInput, match="queue or channel"):
        fold(servers(3, 0, shared_link=True))


@pytest.mark.parametrize("name", ["duration_s", "gap_s", "priority", "size_bytes", "kind"])
def test_one_op_that_differs_is_refused(name: str) -> None:
    dfg = ring(3, 0, Discipline.FIFO)
    values = getattr(dfg, name).copy()
    values[-1] += 1
    with pytest.raises(InvalidInput, match=f"'update 4' has another {name}"):
        fold(replace(dfg, **{name: values}))


def test_one_edge_that_differs_is_refused() -> None:
    dfg = ring(3, 0, Discipline.FIFO)
    with_children = int(np.flatnonzero(np.diff(dfg.child_start))[-1])
    without_last = dfg.child_start - (np.arange(dfg.ops + 1) > with_children)
    with pytest.raises(InvalidInput, match="follow"):
        fold(replace(dfg, child_start=without_last, child=dfg.child[:-1]))


def test_an_op_that_follows_another_layer_or_nothing_is_refused() -> None:
    dfg = ring(3, 0, Discipline.FIFO)
    origin = np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start))
    names = np.array(dfg.names.ops)
    own = np.flatnonzero((names[dfg.child] == "send 1.0") & (dfg.worker[dfg.child] == 1))[0]
    other = int(np.flatnonzero((names == "backward 3") & (dfg.worker == 1))[0])
    moved = csr(dfg.ops, np.where(np.arange(dfg.edges) == own, other, origin), dfg.child)
    missing = csr(dfg.ops, np.delete(origin, own), np.delete(dfg.child, own))
    for start, child in (moved, missing):
        with pytest.raises(InvalidInput, match=r"'send 1\.0'"):
            fold(replace(dfg, child_start=start, child=child))


def locked(capacity: tuple[int, int], second: int) -> Dfg:
    """Two workers with a queue, a lock and two ops each; the last op takes lock `second`."""
    builder = DfgBuilder()
    locks = [builder.lock(own) for own in capacity]
    for worker in (0, 1):
        queue = builder.queue(f"q{worker}")
        for number, lock in enumerate(
            (locks[worker], locks[worker] if worker == 0 else locks[second])
        ):
            builder.op(
                f"op {number}", queue, 1.0, Kind.SEND, worker=worker, acquires=lock, releases=lock
            )
    return builder.build()


def test_queues_and_locks_that_differ_are_refused() -> None:
    assert_fold_is_exact(locked((1, 1), 1))
    with pytest.raises(InvalidInput, match="capacity"):
        fold(locked((1, 2), 1))
    with pytest.raises(InvalidInput, match="lock 0 does not serve"):
        fold(locked((1, 1), 0))
    dfg = ring(3, 0, Discipline.FIFO)
    with pytest.raises(InvalidInput, match="discipline"):
        fold(replace(dfg, discipline=np.arange(dfg.queues) == 1))


def test_ops_that_use_a_queue_in_another_order_are_refused() -> None:
    """The lower number goes first: the queue's op on one worker, the channel's on the other."""
    builder = DfgBuilder()
    for worker in (0, 1):
        link, other = builder.queue(f"link {worker}"), builder.queue(f"other {worker}")
        for of_queue in (worker == 0, worker == 1):
            builder.op(
                "queue" if of_queue else "channel",
                link if of_queue else other,
                1.0,
                Kind.SEND,
                channel=NONE if of_queue else link,
            )
    with pytest.raises(InvalidInput, match="queue or channel 2"):
        fold(builder.build(), np.array([0, 1, 1, 0]))


def test_given_representatives_are_checked() -> None:
    dfg = servers(2, 0)
    with pytest.raises(InvalidInput, match="stand for itself"):
        fold(dfg, np.roll(np.arange(dfg.ops, dtype=np.int32), 1))
    with pytest.raises(InvalidInput, match="representative"):
        fold(dfg, np.zeros(3, dtype=np.int32))


def test_a_worker_of_fewer_ops_is_refused() -> None:
    dfg = servers(3, 0)
    worker = dfg.worker.copy()
    worker[np.flatnonzero(worker == 2)[-1]] = NONE
    with pytest.raises(InvalidInput, match="worker 2 has 19 ops where worker 0 has 20"):
        fold(replace(dfg, worker=worker))


def test_a_timeline_of_another_graph_is_not_unfolded() -> None:
    folded = fold(servers(2, 0))
    with pytest.raises(InvalidInput, match="another graph"):
        folded.unfold_s(replay(folded.full))
