"""Lowered graphs of sampled plans: folding is exact, and a message alone costs its fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import FREE

from autotune.cluster import Bend, Cluster, CollectiveFit, Host, PairLink, Where
from autotune.costs.issue_order import MessageTimes
from autotune.dfg.replay import replay
from autotune.lowering.costs import Constant, RuntimeCosts
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

CROWDED = replace(
    RuntimeCosts(),
    **{
        name: Constant(value, "test")
        for name, value in {
            "hand_out_s_per_byte": 1e-9,
            "fill_s": 1.3e-4,
            "bucket_s": 1.3e-4,
            "pack_s_per_byte": 5.9e-11,
            "cast_s_per_byte": 1.1e-10,
            "issue_s": 1e-4,
            "lane_s": 1.3e-4,
            "defer_s": 1.2e-4,
            "settle_s": 2.4e-4,
            "settle_each_s": 2e-5,
            "settle_s_per_byte": 5e-11,
            "write_s": 1.9e-5,
            "unpack_s_per_byte": 6.3e-11,
            "real_update": 1.0,
            "rows_take_s_per_byte": 0.0,
            "rows_add_s_per_byte": 0.0,
            "rows_write_s_per_byte": 0.0,
        }.items()
    },
)
"""Costs of a machine with busy cores, fixed so that new defaults change no case.

Rows cost no CPU time: a later lane could overtake a message that others wait for (Graham's
anomalies)."""
PROBED = (
    "all_reduce",
    "push_pull",
    "reduce_scatter_all_gather",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
)


def hosts(*devices_and_mbit: tuple[int, float]) -> tuple[Host, ...]:
    return tuple(
        Host(f"h{i}", d, mbit * 125e3, 5e-5, 5e9, 5e-6, cores=1 + i)
        for i, (d, mbit) in enumerate(devices_and_mbit)
    )


def fitted(cluster: Cluster) -> Cluster:
    """The cluster with a different fit for every synchronizer, some of them bent."""
    fits = []
    for number, name in enumerate(PROBED):
        for where, size in (
            (Where.WORLD, cluster.world_size),
            (Where.HOST, 2),
            (Where.ACROSS, len(cluster.hosts)),
        ):
            bends = (Bend(65536.0, (4 + number) * 1e-9), Bend(1e6, 2e-8)) if number % 2 else ()
            fits.append(
                CollectiveFit(
                    name,
                    size,
                    (1 + number) * 1e-3,
                    1.3e-8 + number * 1e-9,
                    0.0,
                    4096,
                    2**24,
                    where=where,
                    cpu_alpha_s=3e-4,
                    cpu_beta_s_per_byte=2e-9,
                    bends=bends,
                )
            )
    return cluster.with_fits(tuple(fits))


CLUSTERS = {
    "even": Cluster("even", hosts(*[(1, 1000)] * 4)),
    "uneven": Cluster("uneven", hosts((1, 1000), (1, 1000), (1, 1000), (1, 250))),
    "devices": Cluster("devices", hosts((2, 1000), (2, 1000))),
    "pair": Cluster(
        "pair",
        hosts((2, 1000), (1, 500), (1, 1000)),
        (PairLink(("h0", "h1"), 1e7, 1e-3), PairLink(("h1", "h2"), 1e9, 1e-5)),
    ),
    "one": Cluster("one", hosts((4, 1000))),
}


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
        needed_s = forward_s * draw(st.floats(0, 1))
        variables.append(
            Variable(f"v{number}", shape, "float32", sparse, at * backward_s, needed_s, touched)
        )
    threads = draw(st.sampled_from([0, 1]))
    return Workload(
        "m", tuple(variables), (), forward_s, backward_s, draw(st.floats(0, 0.01)), threads=threads
    )


ALL = replace(SearchSpace.default(lossy=True), min_partition_bytes=0)
ONE_STEP = SearchSpace(
    (Synchronizer.ALL_REDUCE,), min_partition_bytes=0, cross_step=True, most_in_flight=1
)


@st.composite
def cases(draw: st.DrawFn, space: SearchSpace = ALL) -> tuple[Workload, Cluster, Plan]:
    """A plan that the sampler draws."""
    workload, cluster = draw(workloads()), CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    cluster = fitted(cluster) if draw(st.booleans()) else cluster
    strategy = sample(workload, cluster, space, generator(draw(st.integers(0, 10**6)), "test"))
    return workload, cluster, plan(strategy, workload, cluster.world_size)


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.5]))
def test_sampled_plans_take_as_long_in_the_folded_as_in_the_full_graph(
    case: tuple[Workload, Cluster, Plan], taken_share: float
) -> None:
    workload, cluster, wanted = case
    lowering = Lowering(workload, cluster, CROWDED, taken_share)
    folded_s = lowering.step_s(wanted)
    assert folded_s >= workload.compute_s - 1e-12
    assert np.isclose(
        folded_s, replay(lowering.period(wanted, symmetric=False)).makespan_s, rtol=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_further_step_takes_the_period(case: tuple[Workload, Cluster, Plan]) -> None:
    workload, cluster, wanted = case
    lowering = Lowering(workload, cluster)
    two_s, three_s = (replay(lowering.graph(wanted, steps)).makespan_s for steps in (2, 3))
    assert np.isclose(three_s - two_s, lowering.step_s(wanted), rtol=1e-9)


@pytest.mark.parametrize("cross_step", [False, True])
@pytest.mark.parametrize("name", ["even", "uneven", "devices"])
@pytest.mark.parametrize(
    ("sparse", "synchronizer"),
    [
        (SparseHandling.ALL_GATHER, Synchronizer.ALL_REDUCE),
        (SparseHandling.GATHER_SCATTER, Synchronizer.PARAMETER_SERVER),
    ],
)
def test_fewer_touched_rows_are_faster(
    sparse: SparseHandling, synchronizer: Synchronizer, name: str, cross_step: bool
) -> None:
    shard = Shard(
        synchronizer, placement=0 if synchronizer is Synchronizer.PARAMETER_SERVER else None
    )
    strategy = Strategy((VariableStrategy("v", (shard,), None, sparse),), cross_step)

    def step_s(touched: float | None) -> float:
        table = Variable("v", (40_000, 64), "float32", True, 0.0, 0.0, touched)
        workload = Workload("m", (table,), (), 0.0, 0.0, 0.0)
        return Lowering(workload, CLUSTERS[name]).step_s(plan(strategy, workload, 4))

    few_s, some_s, all_s = step_s(400.0), step_s(4000.0), step_s(None)
    assert few_s < some_s < all_s == step_s(40_000.0)


@pytest.mark.parametrize(
    "cost", ["rows_take_s_per_byte", "rows_add_s_per_byte", "rows_write_s_per_byte"]
)
@pytest.mark.parametrize(
    ("sparse", "synchronizer"),
    [
        (SparseHandling.ALL_GATHER, Synchronizer.ALL_REDUCE),
        (SparseHandling.GATHER_SCATTER, Synchronizer.PARAMETER_SERVER),
    ],
)
def test_sparse_rows_take_the_cpu_time_of_their_processing(
    sparse: SparseHandling, synchronizer: Synchronizer, cost: str
) -> None:
    shard = Shard(
        synchronizer, placement=0 if synchronizer is Synchronizer.PARAMETER_SERVER else None
    )
    table = Variable("v", (40_000, 64), "float32", True, 0.0, 0.0, 4000.0)
    workload = Workload("m", (table,), (), 0.0, 0.0, 0.0)
    wanted = plan(Strategy((VariableStrategy("v", (shard,), None, sparse),)), workload, 4)
    own_bytes, per_byte = 4000 * (4 * 64 + 4), 1e-8
    handled = {"take": own_bytes, "add": 4 * own_bytes, "write": own_bytes * (1 - 0.9**4) / 0.1}
    dear = replace(FREE, **{cost: Constant(per_byte, "a test")})
    free_s, dear_s = (
        Lowering(workload, CLUSTERS["even"], costs).step_s(wanted) for costs in (FREE, dear)
    )
    assert np.isclose(dear_s - free_s, per_byte * handled[cost.split("_")[1]], rtol=1e-9)


def one_message(
    synchronizer: Synchronizer,
    elements: int,
    cluster: Cluster,
    owner: int | None = None,
    cross_step: bool = False,
) -> tuple:
    workload = Workload(
        "m", (Variable("v", (elements,), ready_s=0.0, needed_s=0.0),), (), 0.0, 0.0, 0.0
    )
    message = Message(
        (TensorSlice("v", elements),), synchronizer, Compressor.NONE, "float32", owner
    )
    return workload, Plan(workload.id, cluster.world_size, (message,), cross_step)


@pytest.mark.parametrize("cross_step", [False, True])
@pytest.mark.parametrize("name", ["even", "uneven", "devices"])
@pytest.mark.parametrize("synchronizer", list(Synchronizer))
@pytest.mark.parametrize("elements", [1, 5_000, 100_000, 10_000_000])
def test_a_message_alone_costs_its_fit(
    synchronizer: Synchronizer, elements: int, name: str, cross_step: bool
) -> None:
    cluster = fitted(CLUSTERS[name])
    rooted = synchronizer in (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST)
    workload, wanted = one_message(
        synchronizer, elements, cluster, 0 if rooted else None, cross_step
    )
    parts = (
        ("reduce", "broadcast")
        if synchronizer is Synchronizer.REDUCE_BROADCAST
        else (synchronizer.operation,)
    )
    fits = [cluster.fit(part, cluster.world_size) for part in parts]
    expected_s = sum(fit.seconds(4 * elements) for fit in fits if fit is not None)
    assert np.isclose(Lowering(workload, cluster, FREE).step_s(wanted), expected_s, rtol=1e-9)


@settings(max_examples=80, deadline=None)
@given(workloads(), st.integers(0, 10**6))
def test_one_message_in_flight_across_the_step_is_one_channel(
    workload: Workload, seed: int
) -> None:
    cluster = fitted(CLUSTERS["even"])
    idle = replace(workload, threads=0)
    wanted = replace(
        plan(sample(idle, cluster, ONE_STEP, generator(seed, "test")), idle, 4), cross_step=True
    )
    assert np.isclose(
        Lowering(idle, cluster, FREE).step_s(wanted),
        MessageTimes.of(wanted, idle, cluster).period_s,
        rtol=1e-9,
    )


def test_a_server_returns_one_message_while_it_receives_the_next() -> None:
    cluster = fitted(CLUSTERS["even"])
    workload, alone = one_message(
        Synchronizer.PARAMETER_SERVER, 100_000, cluster, 0, cross_step=True
    )
    both = replace(
        workload, variables=tuple(replace(workload.variables[0], name=name) for name in ("v", "w"))
    )
    messages = tuple(
        replace(alone.messages[0], slices=(replace(alone.messages[0].slices[0], variable=name),))
        for name in ("v", "w")
    )
    in_then_out_s = Lowering(workload, cluster, FREE).step_s(alone)
    both_s = Lowering(both, cluster, FREE).step_s(
        Plan(both.id, cluster.world_size, messages, cross_step=True)
    )
    assert np.isclose(both_s, 1.5 * in_then_out_s, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases(), st.floats(1.0, 4.0))
def test_more_bandwidth_never_slows_a_single_message(
    case: tuple[Workload, Cluster, Plan], factor: float
) -> None:
    workload, cluster, wanted = case
    # Lanes share ports in order of arrival, with Graham's anomalies; so take one message.
    wanted = replace(wanted, messages=wanted.messages[:1])
    cluster = replace(cluster, fits=())
    faster = replace(
        cluster,
        hosts=tuple(
            replace(
                h,
                link_bytes_per_s=factor * h.link_bytes_per_s,
                inner_bytes_per_s=factor * h.inner_bytes_per_s,
            )
            for h in cluster.hosts
        ),
        pair_links=tuple(
            replace(link, link_bytes_per_s=factor * link.link_bytes_per_s)
            for link in cluster.pair_links
        ),
    )
    alone = replace(wanted, cross_step=True, in_flight=1)
    assert Lowering(workload, faster).step_s(alone) <= Lowering(workload, cluster).step_s(alone) * (
        1 + 1e-9
    )


@settings(max_examples=30, deadline=None)
@given(workloads(), st.integers(0, 10**6), st.permutations([0, 1, 2, 3]))
def test_equal_hosts_may_change_places(workload: Workload, seed: int, order: list[int]) -> None:
    cluster = CLUSTERS["even"]
    space = replace(SearchSpace.default(), min_partition_bytes=0, ring_orders=False)
    drawn = plan(sample(workload, cluster, space, generator(seed, "test")), workload, 4)
    wanted = replace(
        drawn, ring_order=(0, 1, 2, 3)
    )  # the default order, but then torch's reducer is not the backend
    moved = replace(
        wanted,
        messages=tuple(
            replace(m, owner=None if m.owner is None else order[m.owner]) for m in wanted.messages
        ),
        ring_order=tuple(order),
    )
    lowering = Lowering(workload, cluster)
    assert np.isclose(lowering.step_s(wanted), lowering.step_s(moved), rtol=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from(list(Collective)),
    st.integers(0, 3),
    st.permutations([0, 1, 2, 3]),
)
def test_port_loads_are_the_sums_of_the_collectives_transfers(
    name: str, kind: Collective, root: int, members: list[int]
) -> None:
    cluster = CLUSTERS[name]
    ports = Ports(cluster)
    found = ports.traffic(kind, members, root).s_per_byte
    expected, inside = np.zeros(ports.count), np.zeros((2, 4))
    for source, to, share in transfers(kind, members, root):
        a, b = cluster.host_of_rank[source], cluster.host_of_rank[to]
        if a == b:
            inside[0, source] += share
            inside[1, to] += share
            continue
        pair = ports.pairs.get((min(a, b), max(a, b)))
        for port in (a, len(cluster.hosts) + b) if pair is None else (pair + (a > b),):
            expected[port] += share
    for rank in range(4):
        port = 2 * len(cluster.hosts) + cluster.host_of_rank[rank]
        expected[port] = max(expected[port], inside[0, rank], inside[1, rank])
    assert np.allclose(found, expected * ports.s_per_byte)


def transfers(kind: Collective, members: list[int], root: int) -> list[tuple[int, int, float]]:
    """(from, to, share of the tensor), as gloo moves it between four ranks."""
    ring = [(members[i], members[(i + 1) % 4]) for i in range(4)]
    others = [rank for rank in members if rank != root]
    turned = members[members.index(root) :] + members[: members.index(root)]
    return {
        Collective.ALL_REDUCE: [(a, b, 1.5) for a, b in ring],
        Collective.REDUCE_SCATTER: [(a, b, 1.5) for a, b in ring],
        Collective.ALL_GATHER: [(a, b, 0.75) for a, b in ring],
        Collective.ALL_TO_ALL: [(a, b, 0.25) for a in members for b in members if a != b],
        Collective.REDUCE: [(a, b, 0.75) for a, b in ring] + [(a, root, 0.25) for a in others],
        Collective.BROADCAST: [
            (turned[0], turned[2], 1.0),
            (turned[0], turned[1], 1.0),
            (turned[1], turned[3], 1.0),
        ],
        Collective.GATHER: [(a, root, 1.0) for a in others],
        Collective.SCATTER: [(root, a, 1.0) for a in others],
    }[kind]


@settings(max_examples=40, deadline=None)
@given(cases(ONE_STEP), st.integers(1, 8))
def test_more_shared_cores_never_slow_a_step(
    case: tuple[Workload, Cluster, Plan], cores: int
) -> None:
    """One message at a time: concurrent messages may overtake each other (Graham's anomalies)."""
    workload, cluster, wanted = case
    alone = replace(wanted, cross_step=True)
    few, more = (
        Lowering(workload, replace(cluster, machine_cores=count), CROWDED).step_s(alone)
        for count in (cores, 2 * cores)
    )
    assert few >= more - 1e-12


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 4))
def test_on_shared_cores_the_folded_graph_is_close_to_the_full_one(
    case: tuple[Workload, Cluster, Plan], cores: int
) -> None:
    """The full graph has each rank's work apart, so other work may come between."""
    workload, cluster, wanted = case
    lowering = Lowering(workload, replace(cluster, machine_cores=cores), CROWDED)
    assert np.isclose(
        lowering.step_s(wanted),
        replay(lowering.period(wanted, symmetric=False)).makespan_s,
        rtol=0.05,
    )
