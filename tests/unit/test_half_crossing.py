"""Plans in which half of the exchange crosses the step, and their replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_cluster import FREE, cluster, costs

from autotune.cluster import Cluster
from autotune.costs.issue_order import half_crossing_period_s
from autotune.dfg.graph import Kind
from autotune.dfg.replay import replay
from autotune.lowering.lower import Lowering
from autotune.lowering.replayed import LoweredSteps
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan, plan, with_messages
from autotune.strategy_space.strategy import ROOTED, Compressor, Shard, Strategy, Synchronizer
from autotune.workload import Variable, Workload

APART_S = 0.01


def model(forward_s: float = 0.05, reads_norms: bool = True) -> Workload:
    """Five variables, ready one after the other, and read in the opposite order."""
    variables = tuple(
        Variable(f"v{i}", (1000, 100), "float32", False, APART_S * (i + 1), forward_s * (4 - i) / 5)
        for i in range(5)
    )
    return Workload(
        "m", variables, (), forward_s, 0.06, 0.002, reads_norms=reads_norms, device="cuda"
    )


def by(kind: Synchronizer, across: bool = True, **choices: object) -> Strategy:
    """A message per variable. Priorities are the reverse of what forward reads need."""
    built = per_variable(model())
    rooted = kind in ROOTED
    shards = [
        Shard(kind, placement=number % 4 if rooted else None, priority=number, **choices)  # type: ignore[arg-type]
        for number in range(5)
    ]
    variables = tuple(
        replace(choice, shards=(shard,))
        for choice, shard in zip(built.variables, shards, strict=True)
    )
    return replace(built, variables=variables, cross_step=across)


RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER
KINDS = (Synchronizer.ALL_REDUCE, RS, Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST)
EVEN = cluster(*[(1, 100)] * 4)


def planned(kind: Synchronizer = RS, across: bool = True) -> Plan:
    return plan(by(kind, across), model(), 4)


def test_sums_are_issued_as_they_are_ready_and_results_as_they_are_read() -> None:
    crossing = planned()
    assert [message.slices[0].variable for message in crossing.messages] == [
        f"v{i}" for i in range(5)
    ]
    assert crossing.results == (4, 3, 2, 1, 0)
    assert refusal_reason(crossing) is None
    assert planned(across=False).results is None
    assert plan(by(RS), model(reads_norms=False), 4).results is None


def test_results_follow_other_messages() -> None:
    fewer = with_messages(planned(), planned().messages[:2], model())
    assert fewer.results == (1, 0)


@pytest.mark.parametrize("results", [(0, 1, 2, 3), (0, 1, 2, 3, 3), None])
def test_results_name_every_message_of_a_plan_across_steps_once(
    results: tuple[int, ...] | None,
) -> None:
    wrong = replace(planned(), results=results)
    if results is None:
        wrong = replace(planned(), cross_step=False)
    assert "results must name each of the 5 messages" in str(refusal_reason(wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_results_wait_for_the_norms_and_the_norms_for_all_sums(kind: Synchronizer) -> None:
    dfg, ops = Lowering(model(), EVEN, FREE).period_with_messages(planned(kind))
    timeline = replay(dfg)
    norms = dfg.names.ops.index("norms")
    sums_s = timeline.end_s[ops.sums].max()
    assert timeline.start_s[norms] >= sums_s
    two = ops.results != ops.starts
    assert two.all() == (kind is not Synchronizer.ALL_REDUCE)
    assert (timeline.start_s[ops.results[two]] >= timeline.end_s[norms]).all()
    assert (timeline.end_s[ops.ends[two]] > timeline.end_s[norms]).all()
    updates = np.flatnonzero(dfg.kind == Kind.UPDATE)
    assert (timeline.start_s[updates] >= timeline.end_s[norms]).all()


OWNED = (
    # one rank owns all of an all-reduce, and of a compressed sum; servers 0 to 3 own five variables
    (EVEN, by(Synchronizer.ALL_REDUCE), 1.0),
    (EVEN, by(RS, compressor=Compressor.INT8), 1.0),
    (EVEN, by(RS), 1 / 4),
    (cluster(*[(2, 100)] * 2), by(RS, hierarchical=True), 1 / 2),
    (EVEN, by(Synchronizer.PARAMETER_SERVER), 2 / 5),
    (EVEN, by(Synchronizer.REDUCE_BROADCAST), 2 / 5),
    (EVEN, by(Synchronizer.DIRECT_EXCHANGE, shares=(0.0, 0.6, 0.2, 0.2)), 0.6),
)


@pytest.mark.parametrize(("on", "strategy", "share"), OWNED)
def test_norms_take_a_pass_over_the_gradients_of_the_rank_that_owns_most(
    on: Cluster, strategy: Strategy, share: float
) -> None:
    def norms_s(s_per_byte: float) -> float:
        lowering = Lowering(model(), on, costs(FREE, pack_s_per_byte=s_per_byte))
        dfg = lowering.period(plan(strategy, model(), 4))
        return float(dfg.duration_s[dfg.names.ops.index("norms")])

    passed_s = norms_s(1e-9) - norms_s(0.0)
    assert passed_s == pytest.approx(share * 1e-9 * model().grad_bytes)


def test_each_op_belongs_to_its_message_in_both_halves() -> None:
    dfg, ops = Lowering(model(), EVEN, FREE).period_with_messages(planned())
    message = ops.of_op(dfg.ops)
    for number in range(5):
        named = [n for n, name in enumerate(dfg.names.ops) if f"message {number} " in name]
        first = [n for n in named if n < ops.results.min()]
        assert (message[first] == number).all()
        assert message[ops.ends[number]] == message[ops.results[number]] == number


def test_half_of_a_slow_exchange_hides_behind_a_long_forward_pass() -> None:
    """Within the step all of it is exposed after the backward pass."""
    steps = LoweredSteps(model(forward_s=0.5), EVEN, costs=FREE)
    across, within = (
        steps.step_s(plan(by(RS, crossing), model(forward_s=0.5), 4)) for crossing in (True, False)
    )
    exchange_s = steps.sync_s(planned(across=False).messages, None)
    assert exchange_s / 4 < within - across < exchange_s


def test_compressed_sums_are_complete_only_at_their_end() -> None:
    strategy = by(RS, compressor=Compressor.INT8)
    dfg, ops = Lowering(model(), EVEN, FREE).period_with_messages(plan(strategy, model(), 4))
    assert (ops.results == ops.starts).all() and (ops.sums == ops.ends).all()
    assert "norms" in dfg.names.ops


def test_scaling_costs_the_host_a_pass_over_each_gradient() -> None:
    on_cpu = replace(model(), device="cpu", threads=1)
    slow, fast = (
        Lowering(on_cpu, EVEN, costs(FREE, unpack_s_per_byte=value)).step_s(planned())
        for value in (1e-8, 0.0)
    )
    assert slow > fast


def test_updates_are_deferred_once_the_norms_are_known() -> None:
    """The script steps behind its clipping, so that work delays the forward pass."""

    def behind_norms_s(defer_s: float) -> float:
        timeline = replay(Lowering(model(), EVEN, costs(FREE, defer_s=defer_s)).period(planned()))
        numbers = {name: number for number, name in enumerate(timeline.dfg.names.ops)}
        begins_s = timeline.start_s[numbers["r0 forward 0"]]
        return float(begins_s - timeline.end_s[numbers["norms"]])

    assert behind_norms_s(0.002) - behind_norms_s(0.0) == pytest.approx(5 * 0.002)


def test_the_closed_form_has_the_barrier() -> None:
    """Two messages of 2 s: sums end at 3 s; results follow in the given order, 1 s each."""
    ready_s, cost_s, needed_s = np.array([1.0, 2.0]), np.array([2.0, 2.0]), np.array([3.0, 0.0])
    parts_s = (2.0, 0.5, 4.0)
    assert half_crossing_period_s(ready_s, cost_s, needed_s, parts_s, (1, 0)) == 3.0 + 1.0 + 4.0
    assert half_crossing_period_s(ready_s, cost_s, needed_s, parts_s, (0, 1)) == 3.0 + 2.0 + 4.0
