"""Lowered graphs: their ops, costs of the runtime, and refusals."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from autotune.cluster import Cluster, CollectiveFit, Host
from autotune.dfg.graph import NONE, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.lowering.costs import Constant, RuntimeCosts
from autotune.lowering.lower import Lowering
from autotune.strategy_space.builders.collectives import per_variable, single_bucket
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

NOTHING = {
    field.name: Constant(0.0, "none")
    for field in fields(RuntimeCosts)
    if field.name not in ("threads", "payload")
}
"""Costs of a runtime that takes no time itself."""


def workload(threads: int = 0) -> Workload:
    variables = tuple(
        Variable(f"v{i}", (1000, 100), ready_s=0.01 * (i + 1), needed_s=0.01 * (4 - i))
        for i in range(5)
    )
    return Workload("m", variables, (), 0.05, 0.06, 0.002, threads=threads)


def even(count: int) -> Cluster:
    return Cluster("even", tuple(Host(f"h{i}", 1, 125e6, 5e-5, 1e10, 5e-6) for i in range(count)))


def ring(count: int) -> Plan:
    return plan(per_variable(workload()), workload(), count)


def test_a_thousand_equal_workers_need_as_many_ops_as_sixteen() -> None:
    few, many = (Lowering(workload(), even(count)).period(ring(count)) for count in (16, 1024))
    assert few.ops == many.ops


def test_a_server_of_a_thousand_workers_needs_as_many_ops_as_of_four() -> None:
    counts = []
    for count in (4, 1024):
        cluster = even(count)
        owned = plan(parameter_server(workload(), cluster), workload(), count)
        one = replace(
            owned, messages=tuple(replace(message, owner=0) for message in owned.messages)
        )
        counts.append(Lowering(workload(), cluster).period(one).ops)
    assert counts[0] == counts[1]


def test_a_ring_moves_its_share_per_round_and_holds_its_thread() -> None:
    graph = Lowering(workload(), even(4)).graph(
        plan(single_bucket(workload()), workload(), 4), steps=1, symmetric=False
    )
    sends = graph.kind == Kind.SEND
    assert sends.sum() == 6 * 8  # rounds of four hosts, out and in
    assert np.allclose(graph.size_bytes[sends], 4 * 500_000 / 6)
    taken, given = np.flatnonzero(graph.acquires >= 0), np.flatnonzero(graph.releases >= 0)
    assert len(taken) == len(given) == 1
    assert graph.names.ops[int(taken[0])] == "message 0 all_reduce in"
    assert graph.lock_capacity[graph.acquires[taken[0]]] == 2


def test_every_worker_is_in_an_asymmetric_graph() -> None:
    graph = Lowering(workload(), even(4)).graph(ring(4), symmetric=False)
    assert set(graph.worker[graph.kind == Kind.BACKWARD].tolist()) == {0, 1, 2, 3}
    folded = Lowering(workload(), even(4)).graph(ring(4))
    assert set(folded.worker[folded.kind == Kind.BACKWARD].tolist()) == {0}


def test_ops_of_a_message_have_the_layer_of_its_last_variable() -> None:
    graph = Lowering(workload(), even(4)).period(ring(4))
    layers = {graph.names.layers[graph.layer[op]] for op in np.flatnonzero(graph.kind == Kind.SEND)}
    assert layers == {f"v{i}" for i in range(5)}


def test_sending_delays_a_computing_cpu() -> None:
    computing = workload(threads=2)
    free, taken = (
        Lowering(computing, probed(), taken_share=share).step_s(ring(4)) for share in (0.0, 1.0)
    )
    assert taken > free


def probed() -> Cluster:
    from autotune.cluster import CollectiveFit

    return even(4).with_fits(
        (CollectiveFit("all_reduce", 4, 1e-3, 1.2e-8, 0.0, 4096, 2**24, cpu_alpha_s=5e-3),)
    )


def test_packing_delays_the_backward_pass_only_on_a_cpu() -> None:
    slow = replace(RuntimeCosts(), bucket_s=Constant(4e-3, "test"))
    none = replace(RuntimeCosts(), bucket_s=Constant(0.0, "test"))
    single = plan(single_bucket(workload()), workload(), 4)
    cpu = [Lowering(workload(threads=1), even(4), costs).step_s(single) for costs in (none, slow)]
    accelerator = [Lowering(workload(), even(4), costs).step_s(single) for costs in (none, slow)]
    assert cpu[1] - cpu[0] == pytest.approx(5 * 4e-3)
    assert accelerator[1] - accelerator[0] == pytest.approx(4e-3)


def test_parts_of_a_message_overlap_their_handshakes_but_not_their_bytes() -> None:
    lowering = Lowering(workload(), probed())
    message = plan(single_bucket(workload()), workload(), 4).messages[0]
    whole_s, halves_s, many_s = (sync_s(lowering, message, parts) for parts in (1, 2, 16))
    assert whole_s == pytest.approx(replay(lowering.message_graph([message])).makespan_s)
    bytes_s = 1.2e-8 * 2_000_000
    assert bytes_s < halves_s < whole_s + 1e-3
    assert many_s > halves_s


def sync_s(lowering: Lowering, message: Message, parts: int = 1) -> float:
    """Time of the message alone, cut into about equal parts."""
    elements, whole = message.elements, message.slices[0]
    sizes = [elements * (n + 1) // parts - elements * n // parts for n in range(parts)]
    cut = [replace(message, slices=(replace(whole, elements=size),)) for size in sizes]
    return replay(lowering.message_graph(cut)).makespan_s


def in_turn(seconds: float, beta_s_per_byte: float, limit: int, sizes_bytes: list[float]) -> float:
    """The last end: the link sends the messages one by one, then each takes `seconds`."""
    free_s, ends = 0.0, list[float]()
    for number, size in enumerate(sizes_bytes):
        start_s = max(ends[number - limit] if number >= limit else 0.0, free_s)
        free_s = start_s + beta_s_per_byte * size
        ends.append(free_s + seconds)
    return max(ends)


def test_two_messages_in_flight_overlap_their_waits() -> None:
    """The wait behind a message's bytes, 2 ms, is as long as the bytes of the shortest."""
    fit, free = (
        CollectiveFit("all_reduce", 4, 2e-3, 1.2e-8, 0.0, 4096, 2**24),
        replace(RuntimeCosts(), **NOTHING),
    )
    lowering = Lowering(workload(), even(4).with_fits((fit,)), free)
    sizes = [1_000_000, 4_000_000, 2_000_000, 1_000_000]
    sent = [
        Message(
            (TensorSlice("v0", size // 4),), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32"
        )
        for size in sizes
    ]
    one, two = (replay(lowering.message_graph(sent, limit=limit)).makespan_s for limit in (1, 2))
    assert one == pytest.approx(in_turn(2e-3, 1.2e-8, 1, [float(size) for size in sizes]))
    assert 1.2e-8 * sum(sizes) < two < one - 2 * 2e-3


def test_a_period_begins_with_the_backward_pass_and_a_graph_with_the_forward_pass() -> None:
    lowering = Lowering(workload(), even(4))
    assert lowering.period(ring(4)).kind[0] == Kind.BACKWARD
    graph = lowering.graph(ring(4))
    assert graph.kind[0] == Kind.FORWARD
    assert graph.kind[graph.queue != NONE][-1] == Kind.UPDATE


def test_op_names_describe_the_ops() -> None:
    graph = Lowering(workload(), even(4)).graph(ring(4), steps=1)
    names = list(graph.names.ops)
    assert len(names) == graph.ops == len(set(enumerate(names)))
    for name in (
        "r0 backward v0",
        "r0 pack v4",
        "r0 issue v2",
        "message 0 all_reduce in",
        "message 4 all_reduce 5 wait",
        "r0 update",
    ):
        assert name in names
    assert graph.names.ops[-1] == names[-1]
    with pytest.raises(IndexError):
        graph.names.ops[graph.ops]


def test_a_plan_of_another_model_or_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lowered with its own model"):
        Lowering(workload(), even(4)).step_s(replace(ring(4), workload_id="model-other"))
    with pytest.raises(InvalidInput, match="it is for 4 ranks"):
        Lowering(workload(), even(5)).step_s(ring(4))
    with pytest.raises(InvalidInput, match="at least 1 step"):
        Lowering(workload(), even(4)).graph(ring(4), steps=0)


def test_every_constant_has_a_source() -> None:
    assert all(RuntimeCosts().sources.values())
    with pytest.raises(InvalidInput, match="needs a source"):
        Constant(1.0, "")
    with pytest.raises(InvalidInput, match="finite and at least 0"):
        Constant(-1.0, "test")
    with pytest.raises(InvalidInput, match="payload must lie"):
        replace(RuntimeCosts(), payload=Constant(1.5, "test"))


def test_a_reduce_and_its_broadcast_have_separate_lanes() -> None:
    owned = ring(4)
    rooted = replace(
        owned,
        messages=tuple(
            replace(m, synchronizer=Synchronizer.REDUCE_BROADCAST, owner=1) for m in owned.messages
        ),
    )
    graph = Lowering(workload(), even(4)).period(rooted)
    locks = {name.split()[2] for name in graph.names.ops if name.endswith(" in")}
    assert locks == {"reduce", "broadcast"}
    assert graph.locks == 2


def test_torchs_own_reducer_spends_less_on_a_gradient_than_our_hooks() -> None:
    buckets = plan(single_bucket(workload()), workload(), 4)
    ours = replace(
        buckets, ring_order=(0, 1, 2, 3)
    )  # the default order, but then torch's reducer is not the backend
    by_hooks = replace(
        RuntimeCosts(), fill_s=Constant(4e-3, "test"), write_s=Constant(1e-3, "test")
    )
    by_torch = replace(RuntimeCosts(), bucket_s=Constant(4e-3, "test"))

    def more_s(wanted: Plan, costs: RuntimeCosts) -> float:
        free = replace(
            costs, **{name: Constant(0.0, "test") for name in ("fill_s", "write_s", "bucket_s")}
        )
        computing = workload(threads=1)
        return Lowering(computing, even(4), costs).step_s(wanted) - Lowering(
            computing, even(4), free
        ).step_s(wanted)

    assert more_s(ours, by_hooks) == pytest.approx(5 * 5e-3) and more_s(
        ours, by_torch
    ) == pytest.approx(5 * RuntimeCosts()["fill_s"] + 5 * RuntimeCosts()["write_s"])
    assert more_s(buckets, by_torch) == pytest.approx(5 * 4e-3) and more_s(
        buckets, by_hooks
    ) == pytest.approx(5 * RuntimeCosts()["bucket_s"])


def test_emulated_accelerators_wake_up_once_per_close_group() -> None:
    waking = replace(RuntimeCosts(), wake_s=Constant(2e-3, "test"))
    none = RuntimeCosts()

    def more_s(apart_s: float) -> float:
        """Of five gradients, so long apart."""
        base = workload(threads=1)
        variables = tuple(
            replace(own, ready_s=number * apart_s) for number, own in enumerate(base.variables)
        )
        timed = replace(base, variables=variables)
        single = plan(single_bucket(timed), timed, 4)
        return Lowering(timed, even(4), waking).step_s(single) - Lowering(
            timed, even(4), none
        ).step_s(single)

    assert more_s(0.0015) == pytest.approx(5 * 2e-3)
    assert more_s(0.0006) == pytest.approx(3 * 2e-3)
    assert more_s(0.0) == pytest.approx(2e-3)


def test_buffers_travel_before_every_forward_pass() -> None:
    cluster = probed_broadcast(0.004)
    buffered = replace(workload(), buffer_bytes=(4000, 80), buffers=7)
    none, some = (
        Lowering(each, cluster).step_s(plan(single_bucket(each), each, 4))
        for each in (workload(), buffered)
    )
    assert some - none == pytest.approx(2 * 0.004 + 7 * RuntimeCosts()["buffer_s"])
    for cross_step in (False, True):
        names = (
            Lowering(buffered, cluster)
            .graph(
                replace(plan(single_bucket(buffered), buffered, 4), cross_step=cross_step), steps=2
            )
            .names.ops
        )
        assert sum("broadcast buffers" in name for name in names) == 2


def probed_broadcast(seconds: float) -> Cluster:
    return even(4).with_fits((CollectiveFit("broadcast", 4, seconds, 0.0, 0.0, 1024, 2**20),))


def test_ranks_share_cores_if_there_are_fewer_cores() -> None:
    wanted, duties = ring(4), replace(RuntimeCosts(), bucket_s=Constant(0.01, "test"))
    alone, roomy, crowded = (
        Lowering(workload(), replace(even(4), machine_cores=cores), duties).step_s(wanted)
        for cores in (0, 8, 2)
    )
    assert alone == roomy, "each rank has a core for itself"
    assert crowded - alone > 4 * 0.01, (
        "packing five gradients of 10 ms takes every rank twice as long"
    )


@pytest.mark.parametrize(
    ("device", "real", "times"), [("cpu", 0.0, 1), ("cpu", 1.0, 2), ("cuda", 1.0, 1)]
)
def test_real_updates_of_old_emulations_take_the_shared_cores(
    device: str, real: float, times: int
) -> None:
    there, wanted = replace(workload(), update_s=0.1, device=device), ring(4)
    costs = replace(RuntimeCosts(), real_update=Constant(real, "test"))
    short = Lowering(replace(there, update_s=0.0), replace(even(4), machine_cores=2), costs).step_s(
        wanted
    )
    assert Lowering(there, replace(even(4), machine_cores=2), costs).step_s(
        wanted
    ) - short == pytest.approx(times * 0.1)


def test_cpu_time_beyond_a_messages_end_delays_other_messages() -> None:
    """All-reduces of 1 ms with 2 ms of CPU on each of 4 ranks: 100 take 400 ms on 2 cores."""
    fit = CollectiveFit("all_reduce", 4, 0.001, 0.0, 0.0, 1024, 2**20, cpu_alpha_s=0.002)
    lowering = Lowering(workload(), replace(even(4).with_fits((fit,)), machine_cores=2))
    message = ring(4).messages[0]
    alone = sync_s(Lowering(workload(), even(4).with_fits((fit,))), message)
    ends = lowering.message_graph([message])
    arrived = replay(ends).end_s[[name.endswith("wait") for name in ends.names.ops]].max()
    assert arrived == pytest.approx(alone)
    assert sync_s(lowering, message, parts=100) > 0.35


def test_a_slow_host_alternates_between_serving_and_sending() -> None:
    """Both gathers move 30 MB over the slow host's link, in and out; on even hosts they overlap."""
    slow = even(4)
    slow = replace(slow, hosts=(*slow.hosts[:3], replace(slow.hosts[3], link_bytes_per_s=1e7)))
    to_slow, to_fast = (
        Message(
            (TensorSlice("v0", count),),
            Synchronizer.PARAMETER_SERVER,
            Compressor.NONE,
            "float32",
            owner=owner,
        )
        for owner, count in ((3, 2_500_000), (0, 7_500_000))
    )
    both = replay(Lowering(workload(), slow).message_graph([to_slow, to_fast])).makespan_s
    each = [
        replay(Lowering(workload(), slow).message_graph([one])).makespan_s
        for one in (to_slow, to_fast)
    ]
    assert both > 0.9 * sum(each)
    fast = [
        replay(Lowering(workload(), even(4)).message_graph(list(some))).makespan_s
        for some in ([to_slow], [to_fast], [to_slow, to_fast])
    ]
    assert fast[2] < 0.9 * (fast[0] + fast[1])
