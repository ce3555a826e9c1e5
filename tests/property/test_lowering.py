"""Lowered graphs of sampled plans: folding is exact, and a message alone costs its fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import FREE, cluster, costs

from autotune.cluster import Bend, Cluster, CollectiveFit, PairLink, Where
from autotune.costs.issue_order import MessageTimes
from autotune.dfg.graph import Dfg
from autotune.dfg.replay import replay
from autotune.lowering.lower import Lowering
from autotune.lowering.traffic import Collective, Ports
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

CROWDED = costs(
    hand_out_s_per_byte=1e-9,
    fill_s=1.3e-4,
    bucket_s=1.3e-4,
    pack_s_per_byte=5.9e-11,
    cast_s_per_byte=1.1e-10,
    issue_s=1e-4,
    lane_s=1.3e-4,
    lane_first_s=2e-4,
    defer_s=1.2e-4,
    settle_s=2.4e-4,
    settle_each_s=2e-5,
    settle_s_per_byte=5e-11,
    write_s=1.9e-5,
    unpack_s_per_byte=6.3e-11,
    real_update=1.0,
    rows_take_s=0.0,
    rows_take_s_per_byte=0.0,
    rows_add_s=0.0,
    rows_add_s_per_byte=0.0,
    rows_write_s=0.0,
    rows_write_s_per_byte=0.0,
)
"""Costs of a machine with busy cores, fixed so that new defaults change no case.

Rows cost no CPU time: a later lane could overtake a message that others wait for (Graham's
anomalies)."""
PROBED = (
    "direct_exchange all_reduce push_pull reduce_scatter_all_gather reduce_scatter all_gather "
    "broadcast reduce"
)


def with_cores(*hosts: tuple[int, float], pairs: tuple[PairLink, ...] = ()) -> Cluster:
    """A cluster whose hosts have 1, 2, 3 and so on cores."""
    built = cluster(*hosts, inner_bytes_per_s=5e9, pairs=pairs)
    numbered = enumerate(built.hosts)
    return replace(built, hosts=tuple(replace(host, cores=1 + i) for i, host in numbered))


def fitted(cluster: Cluster) -> Cluster:
    """The cluster with a different fit for every synchronizer, some of them bent."""
    sizes = {Where.WORLD: cluster.world_size, Where.HOST: 2, Where.ACROSS: len(cluster.hosts)}
    fits = []
    for number, name in enumerate(PROBED.split()):
        bends = (Bend(65536.0, (4 + number) * 1e-9), Bend(1e6, 2e-8)) if number % 2 else ()
        line = ((1 + number) * 1e-3, 1.3e-8 + number * 1e-9, 0.0, 4096, 2**24)
        cpu: dict[str, Any] = {"cpu_alpha_s": 3e-4, "cpu_beta_s_per_byte": 2e-9}
        for where, size in sizes.items():
            fits.append(CollectiveFit(name, size, *line, where=where, **cpu, bends=bends))
    return cluster.with_fits(tuple(fits))


SLOW_AND_FAST = PairLink(("h0", "h1"), 1e7, 1e-3), PairLink(("h1", "h2"), 1e9, 1e-5)
CLUSTERS = {
    "even": with_cores(*[(1, 1000)] * 4),
    "uneven": with_cores((1, 1000), (1, 1000), (1, 1000), (1, 250)),
    "devices": with_cores((2, 1000), (2, 1000)),
    "pair": with_cores((2, 1000), (1, 500), (1, 1000), pairs=SLOW_AND_FAST),
    "one": with_cores((4, 1000)),
}
SEEDS = st.integers(0, 10**6)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 8))
    forward_s, backward_s = draw(st.floats(0, 0.1)), draw(st.floats(0.001, 0.2))
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
    shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))
    variables = []
    for number, at in enumerate(ready):
        shape, sparse = draw(shapes), draw(st.booleans())
        touched = draw(st.none() | st.floats(0, shape[0])) if sparse else None
        times_s = (at * backward_s, forward_s * draw(st.floats(0, 1)))
        script_read_s = draw(st.none() | st.floats(0, 0.01))
        variables.append(
            Variable(f"v{number}", shape, "float32", sparse, *times_s, touched, script_read_s)
        )
    update_s, threads = draw(st.floats(0, 0.01)), draw(st.integers(0, 1))
    step = (forward_s, backward_s, update_s)
    return Workload("m", tuple(variables), (), *step, threads=threads)


ALL = replace(
    SearchSpace.default(lossy=True), min_partition_bytes=0, synchronizers=tuple(Synchronizer)
)
ONE_STEP = SearchSpace(
    (Synchronizer.ALL_REDUCE,), min_partition_bytes=0, cross_step=True, most_in_flight=1
)


def sampled(workload: Workload, cluster: Cluster, space: SearchSpace, seed: int) -> Plan:
    strategy = sample(workload, cluster, space, generator(seed, "test"))
    return plan(strategy, workload, cluster.world_size)


@st.composite
def cases(draw: st.DrawFn, space: SearchSpace = ALL) -> tuple[Workload, Cluster, Plan]:
    """A plan that the sampler draws."""
    workload, cluster = draw(workloads()), CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    cluster = fitted(cluster) if draw(st.booleans()) else cluster
    return workload, cluster, sampled(workload, cluster, space, draw(SEEDS))


def close(one: float, other: float) -> bool:
    return bool(np.isclose(one, other, rtol=1e-9))


def without_reads(workload: Workload) -> Workload:
    return replace(
        workload,
        variables=tuple(replace(variable, script_read_s=None) for variable in workload.variables),
    )


def full_step_s(lowering: Lowering, plan: Plan) -> float:
    """The step in a graph of every rank."""
    return replay(lowering.period(plan, symmetric=False)).makespan_s


@settings(max_examples=examples(120), deadline=None)
@given(cases())
def test_reads_of_the_script_cost_time_only_across_the_step(case) -> None:
    """Flushing is free here: of messages that are read together, it begins when all are there."""
    workload, cluster, plan = case
    step_s = Lowering(workload, cluster, FREE).step_s(plan)
    unread_s = Lowering(without_reads(workload), cluster, FREE).step_s(plan)
    if plan.cross_step:
        assert step_s >= unread_s * (1 - 1e-9)
    else:
        assert step_s == unread_s


@settings(max_examples=examples(120), deadline=None)
@given(cases(), st.sampled_from([0.0, 0.5]))
def test_sampled_plans_take_as_long_in_the_folded_as_in_the_full_graph(case, taken_share) -> None:
    workload, cluster, plan = case
    lowering = Lowering(workload, cluster, CROWDED, taken_share)
    folded_s = lowering.step_s(plan)
    assert folded_s >= workload.compute_s - 1e-12
    assert close(folded_s, full_step_s(lowering, plan))


def has_tie(graph: Dfg, seed: int) -> bool:
    """Whether the makespan depends on the last bits of the durations.

    Two ops become ready at the same time, and rounding decides which one a queue takes first.
    """
    factors = 1 + 1e-12 * generator(seed, "tie").standard_normal((10, graph.ops))
    makespans_s = [replay(graph, graph.duration_s * each).makespan_s for each in factors]
    return not np.allclose(makespans_s, replay(graph).makespan_s, rtol=1e-9, atol=0.0)


@settings(max_examples=examples(40), deadline=None)
@given(cases(), SEEDS)
def test_a_further_step_takes_the_period(case, seed) -> None:
    workload, cluster, plan = case
    lowering = Lowering(workload, cluster)
    # A later step starts at a later time, which rounds differently.
    assume(not has_tie(lowering.period(plan), seed))
    two_s, three_s = (replay(lowering.graph(plan, steps)).makespan_s for steps in (2, 3))
    assert close(three_s - two_s, lowering.step_s(plan))


def table_plan(handling: str, touched: float | None, cross_step: bool) -> tuple[Workload, Plan]:
    """A plan of one table of rows for four ranks, and its workload."""
    variable = Variable("v", (40_000, 64), "float32", True, 0.0, 0.0, touched)
    workload = Workload("m", (variable,), (), 0.0, 0.0, 0.0)
    shard = Shard(Synchronizer.ALL_REDUCE)
    if handling == "gather_scatter":
        shard = Shard(Synchronizer.PARAMETER_SERVER, placement=0)
    choice = VariableStrategy("v", (shard,), None, SparseHandling(handling))
    return workload, plan(Strategy((choice,), cross_step), workload, 4)


ROWS = pytest.mark.parametrize("handling", ["all_gather", "gather_scatter"])


@ROWS
@pytest.mark.parametrize("cross_step", [False, True])
@pytest.mark.parametrize("name", ["even", "uneven", "devices"])
def test_fewer_touched_rows_are_faster(handling, name, cross_step) -> None:
    def step_s(touched: float | None) -> float:
        workload, plan = table_plan(handling, touched, cross_step)
        return Lowering(workload, CLUSTERS[name]).step_s(plan)

    assert step_s(400.0) < step_s(4000.0) < step_s(None) == step_s(40_000.0)


@ROWS
@pytest.mark.parametrize("part", ["take", "add", "write"])
def test_sparse_rows_take_the_cpu_time_of_their_processing(handling, part) -> None:
    workload, plan = table_plan(handling, 4000.0, cross_step=False)
    row_bytes, per_byte = 4000 * (4 * 64 + 4), 1e-8
    handled = {"take": row_bytes, "add": 4 * row_bytes, "write": row_bytes * (1 - 0.9**4) / 0.1}
    expensive = costs(FREE, **{f"rows_{part}_s_per_byte": per_byte})
    free_s, expensive_s = (
        Lowering(workload, CLUSTERS["even"], each).step_s(plan) for each in (FREE, expensive)
    )
    assert close(expensive_s - free_s, per_byte * handled[part])


@pytest.mark.parametrize(
    ("handling", "takes"), [("all_gather", 1), ("gather_scatter", 3), ("direct", 4)]
)
def test_each_message_of_sparse_rows_costs_its_calls(handling, takes) -> None:
    """Rows are packed before every send, and joined behind a direct exchange."""
    workload, plan = table_plan(handling.replace("direct", "gather_scatter"), 400.0, False)
    if handling == "direct":
        (message,) = plan.messages
        message = replace(message, synchronizer=Synchronizer.DIRECT_EXCHANGE, owner=None)
        plan = replace(plan, messages=(message,))
    calls = {"rows_take_s": takes, "rows_add_s": 1, "rows_write_s": 1}
    free_s = Lowering(workload, CLUSTERS["even"], FREE).step_s(plan)
    for name, count in calls.items():
        step_s = Lowering(workload, CLUSTERS["even"], costs(FREE, **{name: 1e-3})).step_s(plan)
        assert close(step_s - free_s, 1e-3 * count)


@ROWS
@pytest.mark.parametrize("cross_step", [False, True])
def test_rows_take_as_long_with_hierarchy_as_without(handling, cross_step) -> None:
    """All ranks send them, so no step has the sizes of one rank per host."""
    workload, flat = table_plan(handling, 4000.0, cross_step)
    (message,) = flat.messages
    two_level = replace(flat, messages=(replace(message, hierarchical=True),))
    for name in ("devices", "pair"):
        lowering = Lowering(workload, CLUSTERS[name])
        assert lowering.step_s(two_level) == lowering.step_s(flat)


def messages(
    names: str, elements: int, synchronizer: Synchronizer, owner: int | None, cross_step: bool
) -> tuple[Workload, Plan]:
    """A plan of one message for each variable, and its workload; the computation takes no time."""
    variables = tuple(Variable(name, (elements,), ready_s=0.0, needed_s=0.0) for name in names)
    workload = Workload("m", variables, (), 0.0, 0.0, 0.0)
    how = (synchronizer, Compressor.NONE, "float32", owner)
    sent = tuple(Message((TensorSlice(name, elements),), *how) for name in names)
    return workload, Plan(workload.id, 4, sent, cross_step)


@pytest.mark.parametrize("cross_step", [False, True])
@pytest.mark.parametrize("name", ["even", "uneven", "devices"])
@pytest.mark.parametrize("synchronizer", list(Synchronizer))
@pytest.mark.parametrize("elements", [1, 5_000, 100_000, 10_000_000])
def test_a_message_alone_costs_its_fit(synchronizer, elements, name, cross_step) -> None:
    cluster, root, parts = fitted(CLUSTERS[name]), None, [synchronizer.operation]
    if synchronizer in (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST):
        root = 0
    if synchronizer is Synchronizer.REDUCE_BROADCAST:
        parts = ["reduce", "broadcast"]
    workload, plan = messages("v", elements, synchronizer, root, cross_step)
    fits = [cluster.fit(part, 4) for part in parts]
    expected_s = sum(fit.seconds(4 * elements) for fit in fits if fit is not None)
    assert close(Lowering(workload, cluster, FREE).step_s(plan), expected_s)


@settings(max_examples=examples(80), deadline=None)
@given(workloads(), SEEDS)
def test_one_message_in_flight_across_the_step_is_one_channel(workload, seed) -> None:
    cluster, idle = fitted(CLUSTERS["even"]), replace(workload, threads=0)
    plan = replace(sampled(idle, cluster, ONE_STEP, seed), cross_step=True)
    period_s = MessageTimes.of(plan, idle, cluster).period_s
    assert close(Lowering(idle, cluster, FREE).step_s(plan), period_s)


def test_a_server_returns_one_message_while_it_receives_the_next() -> None:
    def step_s(names: str) -> float:
        workload, plan = messages(names, 100_000, Synchronizer.PARAMETER_SERVER, 0, True)
        return Lowering(workload, fitted(CLUSTERS["even"]), FREE).step_s(plan)

    assert close(step_s("vw"), 1.5 * step_s("v"))


@settings(max_examples=examples(40), deadline=None)
@given(cases(), st.floats(1.0, 4.0))
def test_more_bandwidth_never_slows_a_single_message(case, factor) -> None:
    """Lanes share ports in order of arrival, with Graham's anomalies; so take one message."""
    workload, cluster, plan = case
    alone = replace(plan, messages=plan.messages[:1], cross_step=True, in_flight=1)

    def faster(link, *names: str):
        return replace(link, **{name: factor * getattr(link, name) for name in names})

    hosts = [faster(host, "link_bytes_per_s", "inner_bytes_per_s") for host in cluster.hosts]
    links = [faster(link, "link_bytes_per_s") for link in cluster.pair_links]
    slow = replace(cluster, fits=())
    fast = replace(slow, hosts=tuple(hosts), pair_links=tuple(links))
    slow_s, fast_s = (Lowering(workload, each).step_s(alone) for each in (slow, fast))
    assert fast_s <= slow_s * (1 + 1e-9)


@settings(max_examples=examples(30), deadline=None)
@given(workloads(), SEEDS, st.permutations([0, 1, 2, 3]))
def test_equal_hosts_may_change_places(workload, seed, order) -> None:
    """A ring order keeps torch's reducer from being the backend."""
    space = replace(SearchSpace.default(), min_partition_bytes=0, ring_orders=False)
    plan = replace(sampled(workload, CLUSTERS["even"], space, seed), ring_order=(0, 1, 2, 3))
    owners = {None: None, **dict(enumerate(order))}
    place = [order.index(rank) for rank in range(4)]
    moved = tuple(
        replace(
            message,
            owner=owners[message.owner],
            shares=message.shares and tuple(message.shares[rank] for rank in place),
        )
        for message in plan.messages
    )
    lowering = Lowering(workload, CLUSTERS["even"])
    moved_s = lowering.step_s(replace(plan, messages=moved, ring_order=tuple(order)))
    assert close(lowering.step_s(plan), moved_s)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from(list(Collective)),
    st.integers(0, 3),
    st.permutations([0, 1, 2, 3]),
    st.none() | st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any),
)
def test_port_loads_are_the_sums_of_the_collectives_transfers(
    name, kind, root, members, parts
) -> None:
    cluster = CLUSTERS[name]
    ports, hosts = Ports(cluster), len(cluster.hosts)
    expected, inside = np.zeros(ports.count), np.zeros((2, 4))
    shares = [0.25] * 4 if parts is None else [part / sum(parts) for part in parts]
    for source, to, share in transfers(kind, members, root, shares):
        a, b = cluster.host_of_rank[source], cluster.host_of_rank[to]
        if a == b:
            inside[0, source] += share
            inside[1, to] += share
            continue
        pair = ports.pairs.get((min(a, b), max(a, b)))
        for port in (a, hosts + b) if pair is None else (pair + (a > b),):
            expected[port] += share
    for rank in range(4):
        port = 2 * hosts + cluster.host_of_rank[rank]
        expected[port] = max(expected[port], *inside[:, rank])
    owned = None if parts is None else np.array(shares)[members]
    s_per_byte = ports.traffic(kind, members, root, owned).s_per_byte
    assert np.allclose(s_per_byte, expected * ports.s_per_byte)


def transfers(
    kind: Collective, members: list[int], root: int, shares: list[float]
) -> list[tuple[int, int, float]]:
    """(from, to, share of the tensor), as gloo moves it between four ranks.

    `shares`: what each rank owns in a direct exchange.
    """
    pairs = [(a, b) for a in members for b in members if a != b]
    ring = [(members[i], members[(i + 1) % 4]) for i in range(4)]
    others = [rank for rank in members if rank != root]
    turned = members[members.index(root) :] + members[: members.index(root)]
    tree = ((0, 2), (0, 1), (1, 3))
    return {
        Collective.ALL_REDUCE: [(a, b, 1.5) for a, b in ring],
        Collective.REDUCE_SCATTER: [(a, b, 1.5) for a, b in ring],
        Collective.ALL_GATHER: [(a, b, 0.75) for a, b in ring],
        Collective.ALL_TO_ALL: [(a, b, 0.25) for a, b in pairs],
        Collective.REDUCE: [(a, b, 0.75) for a, b in ring] + [(a, root, 0.25) for a in others],
        Collective.BROADCAST: [(turned[a], turned[b], 1.0) for a, b in tree],
        Collective.GATHER: [(a, root, 1.0) for a in others],
        Collective.SCATTER: [(root, a, 1.0) for a in others],
        Collective.PUSH: [(a, b, shares[b]) for a, b in pairs],
        Collective.PULL: [(a, b, shares[a]) for a, b in pairs],
    }[kind]


@settings(max_examples=examples(40), deadline=None)
@given(cases(ONE_STEP), st.integers(1, 8))
def test_more_shared_cores_never_slow_a_step(case, cores) -> None:
    """One message at a time: concurrent messages may overtake each other (Graham's anomalies)."""
    workload, cluster, plan = case
    alone = replace(plan, cross_step=True)
    few_s, more_s = (
        Lowering(workload, replace(cluster, machine_cores=count), CROWDED).step_s(alone)
        for count in (cores, 2 * cores)
    )
    assert few_s >= more_s - 1e-12


@settings(max_examples=examples(30), deadline=None)
@given(cases(), st.integers(1, 4))
def test_on_shared_cores_the_folded_graph_is_close_to_the_full_one(case, cores) -> None:
    """The full graph has each rank's work apart, so other work may come between."""
    workload, cluster, plan = case
    lowering = Lowering(workload, replace(cluster, machine_cores=cores), CROWDED)
    assert np.isclose(lowering.step_s(plan), full_step_s(lowering, plan), rtol=0.05)
