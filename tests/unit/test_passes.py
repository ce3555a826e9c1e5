"""Proposals of single passes, and the partial replay by which they judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_worlds import sent
from synthetic_cluster import FREE, cluster

from autotune.cluster import PairLink
from autotune.costs.timing import ready_times_s
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.passes.compression import ErrorFeedback, MixedPrecision
from autotune.optimizer.passes.issue_order import CrossStep
from autotune.optimizer.passes.partition import Partition
from autotune.optimizer.passes.tensor_fusion import TensorSplit
from autotune.optimizer.replays import Replays
from autotune.optimizer.state import Pass, Problem, State
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    CASTS,
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

MIXED = cluster((1, 2000), (1, 1000), (1, 1000), (1, 500))
OWNERS = (0.4, 0.3, 0.3, 0.0)
PIECES = 8
WORKLOAD = Workload(
    "m",
    tuple(Variable(f"v{n}", (1024, 1024)) for n in range(1, 5)),
    forward_s=0.02,
    backward_s=0.05,
    update_s=0.001,
)


def proposals(one: Pass, strategy: Strategy, problem: Problem) -> list[Strategy]:
    state = State(strategy)
    return [each.strategy for each in one.propose(state, Replays(problem).path(state))]


def direct() -> Strategy:
    """Each variable in a message of uneven owners and several pieces."""
    shard = Shard(Synchronizer.DIRECT_EXCHANGE, shares=OWNERS, pieces=PIECES)
    return Strategy(
        tuple(VariableStrategy(one.name, (shard,)) for one in WORKLOAD.variables), in_flight=4
    )


@pytest.mark.parametrize(
    ("one", "pieces"), [(MixedPrecision(), PIECES), (ErrorFeedback(), 1)], ids=["casts", "feedback"]
)
def test_compression_leaves_the_owners_of_direct_exchanges_and_pieces_that_it_can_send(
    one: Pass, pieces: int
) -> None:
    proposed = proposals(one, direct(), Problem(WORKLOAD, MIXED, SearchSpace.default(lossy=True)))
    shards = {shard for each in proposed for choice in each.variables for shard in choice.shards}
    compressed = {shard for shard in shards if shard.compressor is not Compressor.NONE}
    assert compressed and all(
        (shard.compressor in CASTS) is isinstance(one, MixedPrecision) for shard in compressed
    )
    assert {shard.shares for shard in shards} == {direct().variables[0].shards[0].shares}
    assert {shard.pieces for shard in compressed} == {pieces}
    assert {shard.pieces for shard in shards - compressed} <= {PIECES}


def test_a_plan_that_goes_across_the_step_may_keep_its_pieces_in_flight() -> None:
    proposed = proposals(CrossStep(), direct(), Problem(WORKLOAD, MIXED, SearchSpace.default()))
    assert all(each.cross_step for each in proposed)
    assert sorted(each.in_flight for each in proposed) == [1, 2, 4]


def test_a_message_is_cut_by_the_positions_of_gradients_whose_times_are_unmeasured() -> None:
    unmeasured = replace(WORKLOAD, backward_s=0.5)
    pairs = zip(WORKLOAD.variables, ready_times_s(unmeasured).tolist(), strict=True)
    measured = replace(unmeasured, variables=tuple(replace(v, ready_s=s) for v, s in pairs))
    fast = cluster(*[(1, 10_000)] * 4)
    cuts = [
        [
            sent(each, workload)
            for each in proposals(
                TensorSplit(),
                single_bucket(workload),
                Problem(workload, fast, SearchSpace.default()),
            )
        ]
        for workload in (unmeasured, measured)
    ]
    assert cuts[0] == cuts[1] == ["v1 v2 v3|v4", "v1 v2|v3 v4"]


@pytest.mark.parametrize(
    "uncuttable",
    [
        Variable("blocks.1.w", (30_000,), "float16"),  # fewer bytes than a part may have
        Variable("blocks.1.w", (2, 15_000), sparse=True),  # fewer rows than parts
    ],
    ids=["float16", "two rows"],
)
def test_a_cut_is_not_repeated_where_the_space_forbids_it(uncuttable: Variable) -> None:
    workload = replace(WORKLOAD, variables=(uncuttable, Variable("blocks.0.w", (30_000,))))
    network = cluster(*[(1, 100)] * 4)
    problem = Problem(workload, network, SearchSpace.default())
    proposed = proposals(Partition(), parameter_server(workload, network), problem)
    assert any(len(each.by_name["blocks.0.w"].shards) > 2 for each in proposed)
    for each in proposed:
        assert problem.space.violation(each, workload, network) is None


def test_partial_replay_takes_the_ring_of_the_plan() -> None:
    """Its twin replays a step of these messages alone."""
    idle = replace(WORKLOAD, forward_s=0.0, backward_s=0.0, update_s=0.0)
    slow_pair = PairLink(("h0", "h1"), link_bytes_per_s=1e7, latency_s=1e-3)
    problem = Problem(idle, cluster(*[(1, 1000)] * 4, pairs=[slow_pair]), SearchSpace.default())
    replays = Replays(
        problem,
        lambda model, hosts, symmetric, _: LoweredSteps(model, hosts, symmetric, costs=FREE),
    )
    times_s = {}
    for ring in (None, (0, 2, 1, 3), (1, 0, 3, 2)):
        path = replays.path(State(replace(single_bucket(idle), ring_order=ring)))
        assert path.sync_s(path.plan.messages) == pytest.approx(path.step_s)
        times_s[ring] = path.step_s
    assert times_s[0, 2, 1, 3] < 0.5 * min(times_s[None], times_s[1, 0, 3, 2])
