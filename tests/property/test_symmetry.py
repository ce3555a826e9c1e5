"""The replay of a folded graph of equal workers is exactly the replay of the full graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from dfg_twin import graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.dfg.build import DfgBuilder, csr
from autotune.dfg.graph import NONE, OP_COLUMNS, Dfg, Discipline, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.execution_graph import parent_csr
from benchmarks.replay_throughput.symmetry import Fold, fold

LAYERS = 5


def computation(builder: DfgBuilder, worker: int, rng: np.random.Generator) -> list[int]:
    """A worker's backward ops by layer, behind its forward ops; equal for all workers."""
    queue, last = builder.queue(f"device {worker}"), NONE
    backward = [NONE] * LAYERS
    for layer in range(LAYERS):
        forward = (f"forward {layer}", queue, rng.uniform(), Kind.FORWARD)
        last = builder.op(*forward, [last], worker=worker)
    for layer in reversed(range(LAYERS)):
        op = (f"backward {layer}", queue, rng.uniform(), Kind.BACKWARD)
        last = backward[layer] = builder.op(*op, [last], worker=worker)
    return backward


def ring(workers: int, seed: int, discipline: Discipline, steps: int = 4) -> Dfg:
    """Each gradient goes round a ring; a step waits for the previous worker's."""
    builder = DfgBuilder()
    receive = [builder.queue(f"receive {worker}") for worker in range(workers)]
    sent = {}
    for worker in range(workers):
        rng = np.random.default_rng(seed)
        backward = computation(builder, worker, rng)
        device = builder.queue(f"device {worker}")
        send = builder.queue(f"send {worker}", discipline)
        for layer in range(LAYERS):
            step_s = rng.uniform()
            for step in range(steps):
                transfer = (
                    f"send {layer}.{step}",
                    send,
                    step_s,
                    Kind.SEND,
                    [backward[layer]][step:],
                )
                to = receive[(worker + 1) % workers]
                sent[worker, layer, step] = builder.op(
                    *transfer, channel=to, priority=layer, worker=worker
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
    pushed: list[list[int]] = [[] for _ in range(LAYERS)]
    for worker in range(workers):
        rng = np.random.default_rng(seed)
        backward = computation(builder, worker, rng)
        up = link if shared_link else builder.queue(f"up {worker}")
        for layer in range(LAYERS):
            push = (f"push {layer}", up, rng.uniform(), Kind.SEND, [backward[layer]])
            pushed[layer].append(builder.op(*push, worker=worker))
    update = []
    for layer in range(LAYERS):
        op = (f"update {layer}", server[layer % 2], 0.3 + layer / 7, Kind.SERVER, pushed[layer])
        update.append(builder.op(*op))
    for worker, layer in product(range(workers), range(LAYERS)):
        down = builder.queue(f"down {worker}")
        pull = (f"pull {layer}", down, 0.2 + layer / 9, Kind.RECV, [update[layer]])
        builder.op(*pull, worker=worker)
    return builder.build()


def assert_unfolds_to(folded: Fold, full: Timeline) -> None:
    start_s, end_s = folded.unfold_s(replay(folded.dfg))
    np.testing.assert_array_equal(start_s, full.start_s)
    np.testing.assert_array_equal(end_s, full.end_s)


def exact_fold(dfg: Dfg) -> Dfg:
    folded = fold(dfg)
    assert_unfolds_to(folded, replay(dfg))
    return folded.dfg


@pytest.mark.parametrize("discipline", [Discipline.FIFO, Discipline.PRIORITY])
@pytest.mark.parametrize("seed", range(4))
def test_ring_of_equal_workers_folds_to_one(discipline: Discipline, seed: int) -> None:
    sizes = {exact_fold(ring(workers, seed, discipline)).ops for workers in (2, 3, 5, 8)}
    assert len(sizes) == 1


@pytest.mark.parametrize("seed", range(4))
def test_servers_of_equal_workers_fold_to_one_worker(seed: int) -> None:
    quotients = [exact_fold(servers(workers, seed)) for workers in (1, 2, 3, 8)]
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
    locks = [[builder.lock(int(size)) for size in one.lock_capacity] for _ in range(workers)]
    start, parent = parent_csr(one)
    for worker, op in product(range(workers), range(one.ops)):
        column = {name: int(getattr(one, name)[op]) for name in OP_COLUMNS}
        # One more item: the number NONE, -1, selects it.
        lock = [*locks[worker], NONE][column["acquires"]]
        to = (worker + abroad[1, op]) % workers
        builder.op(
            f"{op}",
            [*queues[worker], NONE][column["queue"]],
            duration_s[op],
            Kind(column["kind"]),
            gap_s=one.gap_s[op],
            channel=[*queues[to], NONE][column["channel"]],
            priority=column["priority"],
            worker=worker,
            acquires=lock,
            releases=lock,
        )
    for worker, op in product(range(workers), range(one.ops)):
        source = (worker - abroad[0, op]) % workers
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
    assert_unfolds_to(folded, full)
    return ""


@settings(max_examples=examples(150), deadline=None)
@given(copies())
def test_a_fold_is_exact_or_refused(dfg: Dfg) -> None:
    """On one channel the lower index goes first, so two workers may differ."""
    if refusal := assert_exact_or_refused(dfg):
        assert "channel" in refusal
        assert np.any(dfg.channel != NONE)


COLUMNS = ("duration_s", "gap_s", "priority", "queue", "channel", "acquires", "releases", "kind")
SPOILED = (*COLUMNS, "layer", "edge", "discipline", "lock_capacity")


def without_edges(dfg: Dfg, dropped: int) -> Dfg:
    origin = np.delete(np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start)), dropped)
    start, child = csr(dfg.ops, origin, np.delete(dfg.child, dropped))
    return replace(dfg, child_start=start, child=child)


def spoiled(dfg: Dfg, what: str, rng: np.random.Generator) -> Dfg:
    """Change one property of one op, queue or lock."""
    if what == "edge":
        return without_edges(dfg, int(rng.integers(dfg.edges))) if dfg.edges else dfg
    values = getattr(dfg, what).copy()
    at = rng.integers(len(values))
    limits = {"queue": dfg.queues, "channel": dfg.queues}
    limits |= {"acquires": dfg.locks, "releases": dfg.locks}
    if what in limits:
        values[at] = rng.integers(NONE, limits[what])
    elif what in ("discipline", "layer"):
        values[at] = 1 - abs(values[at])
    else:
        values[at] += 1
    names = replace(dfg.names, layers=("one", "two"))
    return replace(dfg, **{what: values}, names=names)


@settings(max_examples=examples(200), deadline=None)
@given(copies(), st.sampled_from(SPOILED), st.integers(0, 2**32 - 1))
def test_a_fold_of_nearly_equal_workers_is_exact_or_refused(dfg: Dfg, what: str, seed: int) -> None:
    assume(dfg.ops and (what != "lock_capacity" or dfg.locks))
    try:
        odd = spoiled(dfg, what, np.random.default_rng(seed))
    except InvalidInput:
        return  # a channel that is the queue
    assert_exact_or_refused(odd)


def with_change(dfg: Dfg, name: str, at: int, value: float) -> Dfg:
    values = getattr(dfg, name).copy()
    values[at] = value
    return replace(dfg, **{name: values})


@pytest.mark.parametrize("name", ["duration_s", "gap_s", "priority", "size_bytes", "kind"])
def test_one_op_that_differs_is_refused(name: str) -> None:
    dfg = ring(3, 0, Discipline.FIFO)
    with pytest.raises(InvalidInput, match=f"'update 4' has another {name}"):
        fold(with_change(dfg, name, -1, getattr(dfg, name)[-1] + 1))


def test_an_op_that_follows_another_layer_or_nothing_is_refused() -> None:
    dfg = ring(3, 0, Discipline.FIFO)
    origin = np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start))
    names = np.array(dfg.names.ops)
    edge = np.flatnonzero((names[dfg.child] == "send 1.0") & (dfg.worker[dfg.child] == 1))[0]
    origin[edge] = np.flatnonzero((names == "backward 3") & (dfg.worker == 1))[0]
    start, child = csr(dfg.ops, origin, dfg.child)
    moved = replace(dfg, child_start=start, child=child)
    cases = [(moved, r"'send 1\.0'"), (without_edges(dfg, edge), r"'send 1\.0'")]
    for odd, message in [*cases, (without_edges(dfg, dfg.edges - 1), "follow")]:
        with pytest.raises(InvalidInput, match=message):
            fold(odd)


def locked(capacity: tuple[int, int], second: int) -> Dfg:
    """Two workers with a queue, a lock and two ops each; the last op takes lock `second`."""
    builder = DfgBuilder()
    locks = [builder.lock(each) for each in capacity]
    for number, lock in enumerate((locks[0], locks[0], locks[1], locks[second])):
        worker, op = divmod(number, 2)
        queued = (f"op {op}", builder.queue(f"q{worker}"), 1.0, Kind.SEND)
        builder.op(*queued, worker=worker, acquires=lock, releases=lock)
    return builder.build()


def test_ops_that_use_a_queue_in_another_order_are_refused() -> None:
    """The lower number goes first: the queue's op on one worker, the channel's on the other."""
    builder = DfgBuilder()
    for worker in (0, 1):
        link, other = builder.queue(f"link {worker}"), builder.queue(f"other {worker}")
        ops = [("queue", link, NONE), ("channel", other, link)]
        for name, queue, channel in ops if worker == 0 else reversed(ops):
            builder.op(name, queue, 1.0, Kind.SEND, channel=channel)
    with pytest.raises(InvalidInput, match="queue or channel 2"):
        fold(builder.build(), np.array([0, 1, 1, 0]))


def test_graphs_whose_workers_differ_are_refused() -> None:
    exact_fold(locked((1, 1), 1))
    served, gone_round = servers(3, 0), ring(3, 0, Discipline.FIFO)
    last = int(np.flatnonzero(served.worker == 2)[-1])
    other_discipline = replace(gone_round, discipline=np.arange(gone_round.queues) == 1)
    fewer_ops = with_change(served, "worker", last, NONE)
    for odd, message in (
        (servers(3, 0, shared_link=True), "queue or channel"),
        (locked((1, 2), 1), "capacity"),
        (locked((1, 1), 0), "lock 0 does not serve"),
        (other_discipline, "discipline"),
        (fewer_ops, "worker 2 has 19 ops where worker 0 has 20"),
    ):
        with pytest.raises(InvalidInput, match=message):
            fold(odd)


def test_representatives_and_timelines_of_another_graph_are_refused() -> None:
    dfg = servers(2, 0)
    with pytest.raises(InvalidInput, match="stand for itself"):
        fold(dfg, np.roll(np.arange(dfg.ops, dtype=np.int32), 1))
    with pytest.raises(InvalidInput, match="representative"):
        fold(dfg, np.zeros(3, dtype=np.int32))
    with pytest.raises(InvalidInput, match="another graph"):
        fold(dfg).unfold_s(replay(dfg))
