"""Lowered graphs: their ops, costs of the runtime, and refusals."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_cluster import FREE, cluster, costs

from autotune.cluster import Cluster, CollectiveFit
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.features.extract import job_extractor
from autotune.garbage import collection_paused
from autotune.lowering.costs import EMULATED_COSTS, TENSORFLOW_COSTS, Constant, RuntimeCosts
from autotune.lowering.lower import Lowering
from autotune.records import Accelerators
from autotune.strategy_space.builders.collectives import per_variable, single_bucket
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from autotune.workload import Variable, Workload


def even(count: int) -> Cluster:
    return cluster(*[(1, 1000)] * count)


def model(apart_s: float = 0.01) -> Workload:
    """Five variables whose gradients are ready one after another."""
    times = [(apart_s * (i + 1), 0.01 * (4 - i)) for i in range(5)]
    variables = (Variable(f"v{i}", (1000, 100), "float32", False, *times[i]) for i in range(5))
    return Workload("m", tuple(variables), (), 0.05, 0.06, 0.002)


GPU, FOUR = model(), even(4)
CPU = replace(GPU, threads=1)


def ring(count: int = 4) -> Plan:
    return plan(per_variable(GPU), GPU, count)


def bucket(workload: Workload = GPU) -> Plan:
    return plan(single_bucket(workload), workload, 4)


def probed(name: str, alpha_s: float, beta_s_per_byte: float = 0.0, cpu_s: float = 0.0) -> Cluster:
    line = (alpha_s, beta_s_per_byte, 0.0, 1024, 2**24)
    return FOUR.with_fits((CollectiveFit(name, 4, *line, cpu_alpha_s=cpu_s),))


def more_s(workload: Workload, plan: Plan, base: RuntimeCosts, **values: float) -> float:
    """How much longer a step takes with other values of the costs."""
    slow, fast = (Lowering(workload, FOUR, each) for each in (costs(base, **values), base))
    return slow.step_s(plan) - fast.step_s(plan)


def sync_s(lowering: Lowering, *messages: Message, limit: int | None = None) -> float:
    """The time of the messages alone."""
    return replay(lowering.message_graph(list(messages), limit=limit)).makespan_s


def cut(message: Message, parts: int) -> list[Message]:
    """The message in about equal parts."""
    elements, whole = message.elements, message.slices[0]
    sizes = [elements * (n + 1) // parts - elements * n // parts for n in range(parts)]
    return [replace(message, slices=(replace(whole, elements=size),)) for size in sizes]


def workers(graph: Dfg) -> set[int]:
    return set(graph.worker[graph.kind == Kind.BACKWARD].tolist())


def test_a_thousand_equal_workers_need_as_many_ops_as_few() -> None:
    few, many = (Lowering(GPU, even(count)).period(ring(count)) for count in (16, 1024))
    assert few.ops == many.ops
    served = []
    for count in (4, 1024):
        owned = plan(parameter_server(GPU, even(count)), GPU, count)
        one = replace(owned, messages=tuple(replace(m, owner=0) for m in owned.messages))
        served.append(Lowering(GPU, even(count)).period(one).ops)
    assert served[0] == served[1]


def test_a_ring_moves_its_share_per_round_and_holds_its_thread() -> None:
    graph = Lowering(GPU, FOUR).graph(bucket(), steps=1, symmetric=False)
    sends = graph.kind == Kind.SEND
    assert sends.sum() == 6 * 8  # rounds of four hosts, out and in
    assert np.allclose(graph.size_bytes[sends], 4 * 500_000 / 6)
    (taken,), given = np.flatnonzero(graph.acquires >= 0), np.flatnonzero(graph.releases >= 0)
    assert len(given) == 1
    assert graph.names.ops[int(taken)] == "message 0 all_reduce in"
    assert graph.lock_capacity[graph.acquires[taken]] == 2


def test_only_an_asymmetric_graph_has_every_worker() -> None:
    lowering = Lowering(GPU, FOUR)
    assert workers(lowering.graph(ring(), symmetric=False)) == {0, 1, 2, 3}
    assert workers(lowering.graph(ring())) == {0}


def test_ops_of_a_message_have_the_layer_of_its_last_variable() -> None:
    graph = Lowering(GPU, FOUR).period(ring())
    layers = {graph.names.layers[graph.layer[op]] for op in np.flatnonzero(graph.kind == Kind.SEND)}
    assert layers == {f"v{i}" for i in range(5)}


def test_sending_delays_a_computing_cpu() -> None:
    two_threads, sending = replace(GPU, threads=2), probed("all_reduce", 1e-3, 1.2e-8, cpu_s=5e-3)
    free_s, taken_s = (
        Lowering(two_threads, sending, taken_share=share).step_s(ring()) for share in (0.0, 1.0)
    )
    assert taken_s > free_s


def test_packing_delays_the_backward_pass_only_on_a_cpu() -> None:
    for workload, times in ((CPU, 5), (GPU, 1)):
        packing_s = more_s(workload, bucket(), costs(bucket_s=0.0), bucket_s=4e-3)
        assert packing_s == pytest.approx(times * 4e-3)


def test_parts_of_a_message_overlap_their_handshakes_but_not_their_bytes() -> None:
    lowering = Lowering(GPU, probed("all_reduce", 1e-3, 1.2e-8, cpu_s=5e-3))
    (message,) = bucket().messages
    whole_s, halves_s, many_s = (sync_s(lowering, *cut(message, parts)) for parts in (1, 2, 16))
    assert whole_s == pytest.approx(sync_s(lowering, message))
    bytes_s = 1.2e-8 * 2_000_000
    assert bytes_s < halves_s < whole_s + 1e-3
    assert many_s > halves_s


def test_two_messages_in_flight_overlap_their_waits() -> None:
    """The wait behind a message's bytes, 2 ms, is as long as the bytes of the shortest.

    With one in flight, the link sends the messages one by one, each with its wait.
    """
    lowering = Lowering(GPU, probed("all_reduce", 2e-3, 1.2e-8), FREE)
    sizes = [1_000_000, 4_000_000, 2_000_000, 1_000_000]
    how = (Synchronizer.ALL_REDUCE, Compressor.NONE, "float32")
    sent = [Message((TensorSlice("v0", size // 4),), *how) for size in sizes]
    one_s, two_s = (sync_s(lowering, *sent, limit=limit) for limit in (1, 2))
    assert one_s == pytest.approx(sum(2e-3 + 1.2e-8 * size for size in sizes))
    assert 1.2e-8 * sum(sizes) < two_s < one_s - 2 * 2e-3


def test_behind_rows_messages_of_another_kind_wait_until_the_rows_have_arrived() -> None:
    """Others of rows wait for the first lane only, which carries the counts."""
    table = Variable("v0", (1000, 100), "float32", True, 0.01, 0.04, touched_rows=500.0)
    sparse = replace(GPU, variables=(table, *GPU.variables[1:]))
    how = (Synchronizer.ALL_REDUCE, Compressor.NONE, "float32")
    rows = Message((TensorSlice("v0", 100_000),), *how, sparse=SparseHandling.ALL_GATHER)
    dense = Message((TensorSlice("v1", 100_000),), *how)
    lowering = Lowering(sparse, FOUR, FREE)

    def starts_s(behind: Message) -> tuple[float, float]:
        """When the message behind two of rows starts, and when the first's rows have arrived."""
        graph = lowering.message_graph([rows, rows, behind], limit=2)
        start_s = dict(zip(graph.names.ops, replay(graph).start_s.tolist(), strict=True))
        return start_s["message 2 lane 0 of r0"], start_s["message 0 lane 2 of r0"]

    starts, arrived = starts_s(dense)
    assert starts == pytest.approx(arrived)
    starts, arrived = starts_s(rows)
    assert starts < 0.1 * arrived


def test_a_period_begins_with_the_backward_pass_and_a_graph_with_the_forward_pass() -> None:
    lowering = Lowering(GPU, FOUR)
    assert lowering.period(ring()).kind[0] == Kind.BACKWARD
    graph = lowering.graph(ring())
    assert graph.kind[0] == Kind.FORWARD
    assert graph.kind[graph.queue != NONE][-1] == Kind.UPDATE


def test_a_graph_is_freed_without_the_garbage_collector() -> None:
    lowering, each = Lowering(GPU, FOUR), plan(per_variable(GPU), GPU, 4)
    across = replace(each, cross_step=True)
    gc.collect()
    with collection_paused():
        for one in (each, across):
            lowering.graph(one, 2)
        assert gc.collect() == 0


def test_op_names_describe_the_ops() -> None:
    graph = Lowering(GPU, FOUR).graph(ring(), steps=1)
    names = list(graph.names.ops)
    assert len(names) == graph.ops
    rank = {"r0 backward v0", "r0 pack v4", "r0 issue v2", "r0 update"}
    assert rank | {"message 0 all_reduce in", "message 4 all_reduce 5 wait"} <= set(names)
    assert graph.names.ops[-1] == names[-1]
    with pytest.raises(IndexError):
        graph.names.ops[graph.ops]


def test_a_plan_of_another_model_or_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lowered with its own model"):
        Lowering(GPU, FOUR).step_s(replace(ring(), workload_id="model-other"))
    with pytest.raises(InvalidInput, match="it is for 4 ranks"):
        Lowering(GPU, even(5)).step_s(ring())
    with pytest.raises(InvalidInput, match="at least 1 step"):
        Lowering(GPU, FOUR).graph(ring(), steps=0)


def test_every_constant_has_a_source() -> None:
    assert all(RuntimeCosts().sources.values())
    with pytest.raises(InvalidInput, match="needs a source"):
        Constant(1.0, "")
    with pytest.raises(InvalidInput, match="finite and at least 0"):
        Constant(-1.0, "test")
    with pytest.raises(InvalidInput, match="payload must lie"):
        costs(payload=1.5)


def test_a_reduce_and_its_broadcast_have_separate_lanes() -> None:
    how: dict[str, Any] = {"synchronizer": Synchronizer.REDUCE_BROADCAST, "owner": 1}
    rooted = replace(ring(), messages=tuple(replace(m, **how) for m in ring().messages))
    graph = Lowering(GPU, FOUR).period(rooted)
    locks = {name.split()[2] for name in graph.names.ops if name.endswith(" in")}
    assert locks == {"reduce", "broadcast"}
    assert graph.locks == 2


def test_torchs_own_reducer_spends_less_on_a_gradient_than_our_hooks() -> None:
    """A ring order, here the default one, keeps torch's reducer from being the backend."""
    torchs, ours = bucket(), replace(bucket(), ring_order=(0, 1, 2, 3))
    free, default = costs(fill_s=0.0, write_s=0.0, bucket_s=0.0), RuntimeCosts()
    fill_s, write_s, bucket_s = (default[name] for name in ("fill_s", "write_s", "bucket_s"))
    hooks = {"fill_s": 4e-3, "write_s": 1e-3, "bucket_s": bucket_s}
    torch = {"fill_s": fill_s, "write_s": write_s, "bucket_s": 4e-3}
    assert more_s(CPU, ours, free, **hooks) == pytest.approx(5 * 5e-3)
    assert more_s(CPU, ours, free, **torch) == pytest.approx(5 * fill_s + 5 * write_s)
    assert more_s(CPU, torchs, free, **torch) == pytest.approx(5 * 4e-3)
    assert more_s(CPU, torchs, free, **hooks) == pytest.approx(5 * bucket_s)


@pytest.mark.parametrize(("apart_s", "wakes"), [(0.0015, 5), (0.0006, 3), (0.0, 1)])
def test_emulated_accelerators_wake_up_once_per_close_group(apart_s: float, wakes: int) -> None:
    timed = replace(model(apart_s), threads=1)
    waking_s = more_s(timed, bucket(timed), RuntimeCosts(), wake_s=2e-3)
    assert waking_s == pytest.approx(wakes * 2e-3)
    # Messages that start together find threads awake and caches warm, except the first.
    firsts_s = more_s(timed, ring(), FREE, issue_first_s=2e-3)
    assert firsts_s == pytest.approx(wakes * 2e-3)


def test_messages_that_are_read_together_cost_a_first_flush_once() -> None:
    """Reads 10 ms apart, or all at once; the first one cannot hide behind the pass."""
    crossing = replace(ring(), cross_step=True)
    for apart_s, firsts in ((0.01, 5), (0.0, 1)):
        variables = (replace(v, needed_s=apart_s * (4 - i)) for i, v in enumerate(GPU.variables))
        timed = replace(CPU, variables=tuple(variables))
        flushed_s = more_s(timed, crossing, FREE, settle_first_s=2e-3)
        assert flushed_s == pytest.approx(firsts * 2e-3)


def test_buffers_travel_before_every_forward_pass() -> None:
    cluster = probed("broadcast", 0.004)
    buffered = replace(GPU, buffer_bytes=(4000, 80), buffers=7)
    none_s, some_s = (Lowering(each, cluster).step_s(bucket(each)) for each in (GPU, buffered))
    assert some_s - none_s == pytest.approx(2 * 0.004 + 7 * RuntimeCosts()["buffer_s"])
    for cross_step in (False, True):
        crossing = replace(bucket(buffered), cross_step=cross_step)
        names = Lowering(buffered, cluster).graph(crossing, steps=2).names.ops
        assert sum("broadcast buffers" in name for name in names) == 2


@pytest.mark.parametrize("cross_step", [False, True])
def test_one_broadcast_of_the_buffers_reaches_all_workers_of_a_graph(cross_step: bool) -> None:
    workload = replace(GPU, buffer_bytes=(2_000_000,))
    lowering = Lowering(workload, cluster(*[(1, 1000)] * 4), FREE)
    planned = replace(bucket(workload), cross_step=cross_step)
    of_one, of_all = (
        replay(lowering.period(planned, symmetric=symmetric)).makespan_s
        for symmetric in (True, False)
    )
    assert of_all == pytest.approx(of_one, rel=1e-6)


def test_buffers_wait_behind_the_messages_that_cross_the_step() -> None:
    """Each of the two hops of the broadcast's tree waits for a round of an all-reduce."""
    workload = replace(GPU, buffer_bytes=(8,))
    on = cluster(*[(1, 1000)] * 4, latency_s=0.0)
    lowering = Lowering(workload, on, costs(FREE, collective_s=0.0))

    def taken_s(cross_step: bool) -> float:
        crossing = replace(bucket(workload), cross_step=cross_step)
        timeline = replay(lowering.graph(crossing))
        ends_s = dict(zip(timeline.dfg.names.ops, timeline.end_s.tolist(), strict=True))
        return ends_s["r0 broadcast buffers"] - ends_s["r0 copy buffers"]

    bytes_s = 8 / 125e6 / FREE["payload"]
    assert taken_s(cross_step=False) == pytest.approx(3 * bytes_s)
    round_s = 2e6 / 4 / 125e6 / FREE["payload"]
    assert round_s < taken_s(cross_step=True) < 2.01 * round_s


def test_ranks_share_cores_if_there_are_fewer_cores() -> None:
    """On 2 cores, packing five gradients of 10 ms takes every rank twice as long."""
    alone_s, roomy_s, crowded_s = (
        Lowering(GPU, replace(FOUR, machine_cores=cores), costs(bucket_s=0.01)).step_s(ring())
        for cores in (0, 8, 2)
    )
    assert alone_s == roomy_s
    assert crowded_s - alone_s > 4 * 0.01


@pytest.mark.parametrize(
    ("device", "real", "times"), [("cpu", 0.0, 1), ("cpu", 1.0, 2), ("cuda", 1.0, 1)]
)
def test_real_updates_of_old_emulations_take_the_shared_cores(device, real, times) -> None:
    shared = replace(FOUR, machine_cores=2)
    short_s, long_s = (
        Lowering(trained, shared, costs(real_update=real)).step_s(ring())
        for trained in (replace(GPU, update_s=update_s, device=device) for update_s in (0.0, 0.1))
    )
    assert long_s - short_s == pytest.approx(times * 0.1)


def test_an_update_across_the_step_takes_its_time_once_the_average_has_arrived() -> None:
    """Older emulations let 20 ms of it pass during the 50 ms of the message."""
    crossing, slow = replace(bucket(), cross_step=True), probed("all_reduce", 0.05)
    trained = replace(GPU, update_s=0.02)
    late_s, early_s = (
        Lowering(trained, slow, costs(early_update=share)).step_s(crossing) for share in (0.0, 1.0)
    )
    assert late_s - early_s == pytest.approx(0.02)
    read = replace(trained.variables[0], script_read_s=0.0)
    by_script = replace(trained, variables=(read, *trained.variables[1:]))
    assert (
        len({Lowering(by_script, slow, costs(early_update=s)).step_s(crossing) for s in (0, 1)})
        == 1
    )


def test_cpu_time_beyond_a_messages_end_delays_other_messages() -> None:
    """All-reduces of 1 ms with 2 ms of CPU on each of 4 ranks: 100 take 400 ms on 2 cores."""
    cluster = probed("all_reduce", 0.001, cpu_s=0.002)
    lowering, message = Lowering(GPU, replace(cluster, machine_cores=2)), ring().messages[0]
    alone_s = sync_s(Lowering(GPU, cluster), message)
    ends = lowering.message_graph([message])
    arrived_s = replay(ends).end_s[[name.endswith("wait") for name in ends.names.ops]].max()
    assert arrived_s == pytest.approx(alone_s)
    assert sync_s(lowering, *cut(message, 100)) > 0.35


def test_messages_to_all_hosts_follow_each_other_and_share_with_one_to_a_server() -> None:
    """A small all-reduce waits in each round for one of the large.

    A port serves its targets evenly, across the step: a small push to one server takes twice its
    time.
    """
    on = cluster(*[(1, 1000)] * 4, latency_s=0.0)
    lowering = Lowering(GPU, on, costs(FREE, collective_s=0.0))
    server = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    large, small = (
        replace(ring().messages[0], slices=(TensorSlice("v0", size),))
        for size in (6_000_000, 60_000)
    )
    pushed = Message(small.slices, *server, owner=0)

    def end_s(message: Message, step: str, limit: int | None) -> float:
        graph = lowering.message_graph([large, message], limit=limit)
        of_step = [name.startswith(f"message 1 {step}") for name in graph.names.ops]
        return float(replay(graph).end_s[of_step].max())

    for limit in (2, None):
        behind_s = sync_s(lowering, small) + sync_s(lowering, large)
        assert end_s(small, "", limit) == pytest.approx(behind_s, rel=0.01)
    push_s = sync_s(lowering, pushed) / 2
    assert end_s(pushed, "gather", 2) == pytest.approx(2 * push_s, rel=0.01)
    assert end_s(pushed, "gather", None) > 4 * push_s


def test_a_slow_host_alternates_between_serving_and_sending() -> None:
    """Both gathers move 30 MB over the slow host's link, in and out; on even hosts they overlap."""
    slow = cluster((1, 1000), (1, 1000), (1, 1000), (1, 80))
    how = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    to_slow = Message((TensorSlice("v0", 2_500_000),), *how, owner=3)
    to_fast = Message((TensorSlice("v0", 7_500_000),), *how, owner=0)

    def overlap(cluster: Cluster) -> float:
        lowering = Lowering(GPU, cluster)
        each_s = sync_s(lowering, to_slow) + sync_s(lowering, to_fast)
        return sync_s(lowering, to_slow, to_fast) / each_s

    assert overlap(slow) > 0.9 > overlap(FOUR)


def direct(shares: tuple[float, ...] | None, elements: int = 4_000_000) -> Message:
    """A direct exchange in one piece, of 16 MB by default."""
    how = (Synchronizer.DIRECT_EXCHANGE, Compressor.NONE, "float32")
    return Message((TensorSlice("v0", elements),), *how, shares=shares)


def test_owners_of_small_shares_send_their_sums_while_others_still_receive() -> None:
    """The slowest link sends 16 MB to three owners at once and receives their sums.

    Two owners of a quarter have their parts after 3/4 of this time, so all takes 7/4 of it.
    """
    mixed = cluster((1, 2000), (1, 1000), (1, 1000), (1, 500))
    lowering = Lowering(GPU, mixed, FREE)
    once_s = 16e6 / 500e6 * 8 / FREE["payload"]
    taken_s = sync_s(lowering, direct((0.5, 0.25, 0.25, 0.0)))
    assert taken_s == pytest.approx(1.75 * once_s, rel=0.01)
    nearly_even_s = sync_s(lowering, direct((0.34, 0.33, 0.33, 0.0)))
    assert nearly_even_s == pytest.approx(2 * once_s, rel=0.01)


def test_one_owner_costs_the_cores_a_quarter_of_the_sends_of_four() -> None:
    """An exchange between four equal owners, of 4 ms, takes 2 ms of CPU from each of 4 ranks."""
    lowering = Lowering(GPU, replace(probed("direct_exchange", 0.004, 0.0, 0.002), machine_cores=2))

    def busy_s(shares: tuple[float, ...] | None) -> float:
        graph = lowering.message_graph([direct(shares, 4)])
        return float(graph.duration_s[graph.kind == Kind.COPY].sum())

    assert busy_s(None) == pytest.approx(0.004)
    assert busy_s((0.0, 1.0, 0.0, 0.0)) == pytest.approx(0.001)
    assert busy_s((0.5, 0.25, 0.25, 0.0)) == pytest.approx(0.003)
    shared_s, alone_s = (sync_s(lowering, direct(one, 4)) for one in (None, (0.0, 1.0, 0.0, 0.0)))
    assert shared_s - alone_s == pytest.approx(0.003, rel=0.05)


def test_streams_of_all_reduces_fill_a_link_whose_ring_pauses() -> None:
    """A ring was probed to take 4 % more than its bytes: a second one sends in its pauses."""
    size_bytes = 4 * 1e6
    bytes_s = 1.5 * size_bytes / 125e6
    lowering = Lowering(GPU, probed("all_reduce", 0.0, 1.04 * 1.5 / 125e6), FREE)
    message = replace(ring().messages[0], slices=(TensorSlice("v0", 1_000_000),))
    assert sync_s(lowering, message) == pytest.approx(1.04 * bytes_s)
    assert 8 * bytes_s < sync_s(lowering, *[message] * 8) < 8.1 * bytes_s


def test_bytes_to_the_only_owner_cost_what_a_gather_was_probed_to_cost() -> None:
    """With a second owner they cost what they do in an exchange between all ranks."""
    probed_slopes = {"direct_exchange": 1.05, "gather": 1.01, "scatter": 1.01}
    bytes_of = {"direct_exchange": 1.5, "gather": 3.0, "scatter": 3.0}
    on = FOUR.with_fits(
        tuple(
            CollectiveFit(name, 4, 0.0, slope * bytes_of[name] / 125e6, 0.0, 1024, 2**24)
            for name, slope in probed_slopes.items()
        )
    )
    lowering = Lowering(GPU, on, FREE)
    first, second = (tuple(float(rank == owner) for rank in range(4)) for owner in (0, 1))

    def link_s(*shares: tuple[float, ...]) -> float:
        batch = lowering.messages.batches([direct(each) for each in shares])[0]
        times = batch.steps[0].times
        assert times is not None
        return float(times.link_s[0])

    bytes_s = 3 * 16e6 / 125e6
    assert link_s(first) == pytest.approx(1.01 * bytes_s)
    assert link_s(first, first) == pytest.approx(1.01 * bytes_s)
    assert link_s(first, second) == pytest.approx(1.05 * bytes_s)


def test_stars_of_a_tensorflow_graph_share_the_links_of_both_directions() -> None:
    """Four owners get 30 MB each, then send as much, as fast as one of them alone.

    Gloo runs two gathers at once; of the same messages as calls of gRPC none waits for another.
    """
    how = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    sent = [Message((TensorSlice("v0", 2_500_000),), *how, owner=rank) for rank in range(4)]
    gloo_s, grpc_s = (
        sync_s(Lowering(GPU, FOUR, one), *sent) for one in (RuntimeCosts(), TENSORFLOW_COSTS)
    )
    alone_s = sync_s(Lowering(GPU, FOUR, TENSORFLOW_COSTS), sent[0])
    assert grpc_s == pytest.approx(alone_s, rel=0.01)
    assert gloo_s > 1.5 * grpc_s


def test_one_server_of_a_tensorflow_graph_answers_a_message_while_it_receives_the_next() -> None:
    """Eight messages of one server take as long as nine pushes: only the last pull is alone.

    If they shared its port, all sums would end late, and the pulls would begin then.
    """
    how = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    message = Message((TensorSlice("v0", 2_500_000),), *how, owner=0)
    lowering = Lowering(GPU, FOUR, TENSORFLOW_COSTS)
    push_s = 3 * message.wire_bytes / 125e6 / TENSORFLOW_COSTS["payload"]
    assert sync_s(lowering, *[message] * 8) == pytest.approx(9 * push_s, rel=0.01)
    assert sync_s(lowering, message) == pytest.approx(2 * push_s, rel=0.01)


def test_a_small_message_of_one_server_does_not_wait_for_a_large_one_of_another() -> None:
    """Its push has server 1's port alone; at server 0, its pull shares with three large pushes.

    So it takes the time of 3 + 4 of its tensors. In rounds over all ports it waited for the large
    message's rounds at server 0.
    """
    how = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    large = Message((TensorSlice("v0", 2_500_000),), *how, owner=0)
    small = Message((TensorSlice("v1", 25_000),), *how, owner=1)
    costs = replace(TENSORFLOW_COSTS, collective_s=Constant(0.0, "test"))
    on = cluster(*[(1, 1000)] * 4, latency_s=0.0)
    graph = Lowering(GPU, on, costs).message_graph([large, small])
    ends_s = replay(graph).end_s
    of_small = [name.startswith("message 1 ") for name in graph.names.ops]
    tensor_s = small.wire_bytes / 125e6 / costs["payload"]
    assert ends_s[of_small].max() == pytest.approx(7 * tensor_s, rel=0.01)


def test_a_job_predicts_with_the_costs_of_its_framework() -> None:
    def costs_of(software: dict[str, str]) -> RuntimeCosts | None:
        return job_extractor(GPU, FOUR, Accelerators.EMULATED, software).costs

    assert costs_of({"tensorflow": "2.21.0", "keras": "3.13"}) is TENSORFLOW_COSTS
    assert costs_of({"torch": "2.13.0"}) is EMULATED_COSTS
    assert job_extractor(GPU, FOUR, Accelerators.REAL, {"torch": "2.13.0"}).costs is None


def read_by_the_script(at_s: float) -> Workload:
    variables = tuple(replace(variable, script_read_s=at_s) for variable in GPU.variables)
    return replace(GPU, variables=variables)


def test_a_script_that_reads_everything_after_the_backward_pass_leaves_no_overlap() -> None:
    crossing, settled = replace(bucket(), cross_step=True), costs(FREE, early_update=0.0)
    unread_s, at_once_s, later_s = (
        Lowering(workload, FOUR, settled).step_s(crossing)
        for workload in (GPU, read_by_the_script(0.0), read_by_the_script(0.0015))
    )
    # v4 is read when the forward pass begins, and updated then
    assert unread_s == pytest.approx(at_once_s)
    assert at_once_s == pytest.approx(Lowering(GPU, FOUR, FREE).step_s(bucket()))
    assert later_s == pytest.approx(at_once_s - 0.0015)
