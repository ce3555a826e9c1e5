"""Small random workloads, clusters and search spaces for the property tests, and what every plan
must fulfil.
"""

from __future__ import annotations

from itertools import groupby, product

import numpy as np
from hypothesis import strategies as st
from synthetic_cluster import cluster

from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    CASTS,
    MOST_DIRECT_IN_FLIGHT,
    MOST_IN_FLIGHT,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    SparseHandling,
    Synchronizer,
)
from autotune.workload import DTYPE_BYTES, Variable, Workload


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 8))
    measured = draw(st.booleans())
    variables = tuple(
        Variable(
            f"layer{number * 7 % 10}.weight",  # names are not in gradient-ready order
            tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            draw(st.sampled_from(["float32", "float32", "float32", *DTYPE_BYTES])),
            draw(st.integers(0, 5)) == 0,
            0.01 * number if measured else None,
        )
        for number in range(count)
    )
    return Workload("model", variables, backward_s=draw(st.sampled_from([0.0, 0.2])))


@st.composite
def clusters(draw):
    devices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    rates = draw(st.lists(st.sampled_from([1e3, 1e4, 4e4]), min_size=5, max_size=5))
    hosts = zip(devices, rates, strict=False)
    return cluster(*hosts, latency_s=1e-5, inner_latency_s=1e-6)


@st.composite
def spaces(draw):
    return SearchSpace(
        tuple(draw(st.lists(st.sampled_from(list(Synchronizer)), min_size=1, unique=True))),
        (Compressor.NONE, *draw(st.lists(st.sampled_from(list(Compressor)[1:]), unique=True))),
        min_partition_bytes=draw(st.sampled_from([0, 50, 100_000])),
        max_shards=draw(st.integers(1, 6)),
        max_groups=draw(st.integers(1, 6)),
        allow_uneven=draw(st.booleans()),
        hierarchical=draw(st.booleans()),
        cross_step=draw(st.booleans()),
        top_k_ratios=draw(st.sampled_from([(0.1,), (0.001, 0.01, 0.1)])),
        power_sgd_ranks=draw(st.sampled_from([(4,), (1, 2, 8)])),
        most_in_flight=draw(st.integers(1, MOST_IN_FLIGHT)),
        ring_orders=draw(st.booleans()),
        sparse=(
            SparseHandling.DENSE,
            *draw(st.lists(st.sampled_from(list(SparseHandling)[1:]), unique=True)),
        ),
    )


def assert_sends_every_byte_once(strategy, workload, world_size):
    """Mark each variable's elements through the plan's slices: every mark must end at exactly 1."""
    result = plan(strategy, workload, world_size)
    marks = {
        variable.name: np.zeros(variable.shape, dtype=np.int64) for variable in workload.variables
    }
    named = set()
    for message in result.messages:
        for part in message.slices:
            where = [slice(None)] * marks[part.variable].ndim
            if part.axis is not None:
                where[part.axis] = slice(part.start, part.stop)
            marks[part.variable][tuple(where)] += 1
            named.add(part.variable)
            assert part.elements == marks[part.variable][tuple(where)].size
            assert message.dtype == workload.variables[workload.index[part.variable]].dtype
        assert message.owner is None or 0 <= message.owner < world_size
    assert named == set(marks)
    assert all((mark == 1).all() for mark in marks.values())
    assert sum(message.grad_bytes for message in result.messages) == workload.grad_bytes


def assert_every_in_flight(strategies):
    """All numbers of messages, or of pieces of direct exchanges, in flight are among these."""
    ways: dict[bool, set[tuple[bool, int | None]]] = {False: set(), True: set()}
    for one in strategies:
        ways[one.direct].add((one.cross_step, one.in_flight))
    assert ways[False] == {(False, 1), (True, 1), (True, 2)}
    assert ways[True] == set(product((False, True), range(1, MOST_DIRECT_IN_FLIGHT + 1)))


def assert_inside(space, strategy, workload, cluster):
    """Plannable in this world, and every choice is one that the space has."""
    assert_sends_every_byte_once(strategy, workload, cluster.world_size)
    assert space.violation(strategy, workload, cluster) is None
    for choice in strategy.variables:
        if choice.sparse is not SparseHandling.DENSE:
            assert workload.variables[workload.index[choice.variable]].sparse
            assert {shard.synchronizer for shard in choice.shards} <= set(
                SPARSE_SYNCHRONIZERS[choice.sparse]
            )
            assert {shard.compressor for shard in choice.shards} <= {Compressor.NONE, *CASTS}
            assert not any(shard.hierarchical for shard in choice.shards)
    if strategy.ring_order is not None:
        hosts = [cluster.host_of_rank[rank] for rank in strategy.ring_order]
        assert space.ring_orders_for(cluster) and len(list(groupby(hosts))) == len(cluster.hosts)
