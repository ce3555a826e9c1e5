"""Data-flow graphs and replays: refusals, locks, gaps and channels, and Chrome traces."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from autotune.dfg.build import DfgBuilder, csr
from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.dfg.compiled import compiled
from autotune.dfg.critical_path import critical_path
from autotune.dfg.graph import NONE, OP_COLUMNS, Column, Dfg, Discipline, Kind
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import iteration_summary
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.execution_graph import parent_csr
from benchmarks.replay_throughput.incremental import IncrementalReplay


def two_workers() -> Dfg:
    """A computes and sends to B over two links, then B computes, with virtual ops in between."""
    builder = DfgBuilder()
    device = [builder.queue("device 0"), builder.queue("device 1")]
    up, down = builder.queue("up 0"), builder.queue("down 1")
    layer = builder.layer("conv1")
    first = builder.op("forward", device[0], 1.0, Kind.FORWARD, layer=layer, worker=0)
    idle = builder.op("short", device[1], 0.5, Kind.FORWARD, worker=1)
    latency = builder.op("latency", NONE, 0.25, Kind.VIRTUAL, [first], worker=0)
    sent: dict[str, Any] = {"channel": down, "size_bytes": 8.0, "layer": layer, "worker": 0}
    send = builder.op("send", up, 2.0, Kind.SEND, [latency], **sent)
    out = builder.op("out", NONE, 0.0, Kind.VIRTUAL, [send, idle])
    builder.op("update", device[1], 1.0, Kind.UPDATE, [out], layer=layer, worker=1)
    return builder.build()


def test_a_cycle_is_refused_by_the_names_of_its_ops() -> None:
    builder = DfgBuilder()
    queue = builder.queue("q")
    ops = [builder.op(name, queue, 1.0, Kind.FORWARD) for name in ("free", "a", "b")]
    builder.edge(ops[1], ops[2])
    builder.edge(ops[2], ops[1])
    with pytest.raises(InvalidInput, match="among or before a, b"):
        builder.build()


@pytest.mark.parametrize("edge", [(0, 2), (2, 0), (-1, 0), (0, -1)])
def test_an_edge_to_an_unknown_op_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match="0 to 1"):
        csr(2, [edge[0]], [edge[1]])


def test_edges_count_once_and_parents_are_in_ascending_order() -> None:
    start, child = csr(3, [1, 0, 1, 1], [2, 2, 2, 0])
    assert (start.tolist(), child.tolist()) == ([0, 1, 3, 3], [2, 0, 2])
    start, parent = parent_csr(two_workers())
    assert parent[start[4] : start[5]].tolist() == [1, 3]
    assert start[-1] == len(parent) == two_workers().edges


HELD = [("holds it", "q", 0, NONE), ("waits for it", "q", 0, 0)]
CROSSED = [
    (f"{place} {n}", f"q{n}", takes, gives)
    for n in (0, 1)
    for place, takes, gives in (("first", n, NONE), ("second", 1 - n, 1 - n), ("third", NONE, n))
]
GENEROUS = [("generous", "q", NONE, 0)]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (HELD, "'waits for it' for lock 0"),
        (CROSSED, "2 ops wait forever: 'second 0' for lock 1, 'second 1' for lock 0"),
        (GENEROUS, "'generous' gives back lock 0"),
    ],
)
@pytest.mark.parametrize("run", [replay, IncrementalReplay])
def test_misused_locks_are_refused_by_the_names_of_their_ops(run, ops, message: str) -> None:
    """An op is (name, queue, lock that it takes, lock that it gives back)."""
    builder = DfgBuilder()
    for lock in range(2):
        builder.lock(key=lock)
    last: dict[str, int] = {}
    for name, queue, takes, gives in ops:
        op = (name, builder.queue(queue), 1.0, Kind.SEND, [last.get(queue, NONE)])
        last[queue] = builder.op(*op, acquires=takes, releases=gives)
    with pytest.raises(InvalidInput, match=message):
        run(builder.build())


def test_a_lock_holds_a_thread_for_a_whole_message() -> None:
    """Two messages of two transfers: the second message waits even while the link is idle."""
    builder = DfgBuilder()
    link, lock = builder.queue("link"), builder.lock()
    for message in range(2):
        first = builder.op(f"{message}.0", link, 1.0, Kind.SEND, acquires=lock, priority=-message)
        pause = builder.op(f"{message} pause", NONE, 3.0, Kind.VIRTUAL, [first])
        builder.op(f"{message}.1", link, 1.0, Kind.SEND, [pause], releases=lock)
    timeline = replay(builder.build())
    assert timeline.start_s.tolist() == [5.0, 6.0, 9.0, 0.0, 1.0, 4.0]
    assert timeline.cause.tolist() == [5, 0, 1, NONE, 3, 4]


def test_a_gap_delays_its_queue_and_no_other() -> None:
    builder = DfgBuilder()
    device, link = builder.queue("device"), builder.queue("link")
    first = builder.op("first", device, 1.0, Kind.FORWARD, gap_s=2.0)
    builder.op("second", device, 1.0, Kind.FORWARD, [first])
    builder.op("send", link, 1.0, Kind.SEND, [first])
    timeline = replay(builder.build())
    assert timeline.start_s.tolist() == [0.0, 3.0, 1.0]
    path = critical_path(timeline)
    assert (path.ops.tolist(), path.wait_s.tolist()) == ([0, 1], [0.0, 2.0])


def test_the_urgent_message_goes_first_among_those_for_one_channel() -> None:
    builder = DfgBuilder()
    receiver = builder.queue("down")
    for priority in (0, 2, 1):
        sender = builder.queue(f"up {priority}")
        builder.op("send", sender, 1.0, Kind.SEND, channel=receiver, priority=priority)
    assert replay(builder.build()).start_s.tolist() == [0.0, 2.0, 1.0]


@pytest.mark.parametrize("wrong", [[1.0] * 3, [-1.0] * 6, [np.nan] * 6, [np.inf] * 6])
def test_other_durations_are_checked(wrong: list[float]) -> None:
    with pytest.raises(InvalidInput, match="durations must"):
        replay(two_workers(), np.array(wrong))


def read(path: Path) -> dict[str, Any]:
    written = path.read_bytes()
    return json.loads(gzip.decompress(written) if path.suffix == ".gz" else written)


def arrows(trace: dict[str, Any], phases: str = "sf") -> list[tuple[str, float]]:
    """The phases and times of a trace's arrows, or of other pairs of events."""
    return [(e["ph"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in phases]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_shows_workers_queues_and_the_critical_path(tmp_path: Path, name: str) -> None:
    assert write_chrome_trace(replay(two_workers()), tmp_path / name) == 6
    trace = read(tmp_path / name)
    events = trace["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(process.values()) == ["critical path", "shared", "worker 0", "worker 1"]
    thread = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    (send,) = (e for e in slices if e["name"] == "send" and process[e["pid"]] == "worker 0")
    assert thread[send["pid"], send["tid"]] == {"name": "up 0"}
    assert (send["ts"], send["dur"], send["cat"]) == (1.25e6, 2e6, "send")
    assert send["args"] == {"op": 3, "layer": "conv1", "bytes": 8.0, "channel": "down 1"}
    critical = [(e["name"], e["tid"]) for e in slices if process[e["pid"]] == "critical path"]
    assert critical == [(op, 0) for op in ("forward", "latency", "send", "out", "update")]
    assert {e["bp"] for e in events if e["ph"] == "f"} == {"e"}
    assert [e["id"] for e in events if e["ph"] in "sf"] == [0, 0, 1, 1]
    assert arrows(trace) == [("s", 0.5e6), ("f", 2.25e6), ("s", 2.25e6), ("f", 3.75e6)]
    assert arrows(trace, "be") == [("b", 1e6), ("e", 1.25e6)]
    assert trace["otherData"]["makespan_s"] == 4.25


def test_a_large_trace_keeps_the_critical_path_and_both_counts(tmp_path: Path) -> None:
    timeline, path = replay(two_workers()), tmp_path / "trace.json"
    assert write_chrome_trace(timeline, path, max_ops=5) == 5
    trace = read(path)
    assert trace["otherData"] == {"ops": 6, "shown_ops": 5, "makespan_s": 4.25}
    assert "short" not in [event["name"] for event in trace["traceEvents"]]
    write_chrome_trace(timeline, path, max_ops=2)
    assert sum(e["ph"] == "X" and e["pid"] == 0 for e in read(path)["traceEvents"]) == 2
    with pytest.raises(InvalidInput, match="max_ops"):
        write_chrome_trace(timeline, path, max_ops=0)


def test_arrows_skip_ops_without_duration_and_times_have_nanoseconds(tmp_path: Path) -> None:
    builder = DfgBuilder()
    queue = builder.queue("device")
    first = builder.op("first", queue, 1.2346e-6, Kind.FORWARD)
    marker = builder.op("marker", queue, 0.0, Kind.FORWARD, [first])
    builder.op("last", queue, 1e-6, Kind.FORWARD, [marker])
    write_chrome_trace(replay(builder.build()), tmp_path / "trace.json")
    assert arrows(read(tmp_path / "trace.json")) == [("s", 0.617), ("f", 1.735)]


def test_equal_timelines_give_equal_compressed_files(tmp_path: Path) -> None:
    for name in ("one.json.gz", "two.json.gz"):
        write_chrome_trace(replay(two_workers()), tmp_path / name)
    written = (tmp_path / "one.json.gz").read_bytes()
    assert written == (tmp_path / "two.json.gz").read_bytes()
    assert written[4:8] == bytes(4)  # no time


def test_an_empty_graph_has_an_empty_timeline(tmp_path: Path) -> None:
    timeline = replay(DfgBuilder().build())
    assert timeline.makespan_s == 0.0
    assert len(critical_path(timeline).ops) == 0
    assert write_chrome_trace(timeline, tmp_path / "empty.json") == 0


def test_resumed_replay_refuses_unknown_ops_and_no_snapshots() -> None:
    with pytest.raises(InvalidInput, match="0 to 5"):
        IncrementalReplay(two_workers()).replay_changed(np.array([6]), np.array([1.0]))
    with pytest.raises(InvalidInput, match="1 snapshot"):
        IncrementalReplay(two_workers(), snapshots=0)


@pytest.mark.parametrize(("name", "column"), OP_COLUMNS.items())
def test_every_column_is_checked_by_the_table(name: str, column: Column) -> None:
    dfg = two_workers()
    values = getattr(dfg, name)
    assert values.dtype == column.dtype and not values.flags.writeable
    with pytest.raises(InvalidInput, match="one value per op"):
        replace(dfg, **{name: values[1:]})
    if column.is_amount or column.numbers:
        invalid = values.copy()
        invalid[0] = np.nan if column.is_amount else 99
        with pytest.raises(InvalidInput, match=f"{name} must"):
            replace(dfg, **{name: invalid})


def test_a_block_of_ops_equals_the_same_ops_one_by_one() -> None:
    single, block = DfgBuilder(), DfgBuilder()
    for builder in (single, block):
        builder.queue("q")
    ops = [single.op(f"op {i}", 0, float(i), Kind.SEND, [i - 1], worker=2) for i in range(3)]
    first = block.block(3, lambda i: f"op {i}", duration_s=[0, 1, 2], queue=0, kind=7, worker=2)
    block.edges(first + np.arange(2), first + np.arange(1, 3))
    one, other = single.build(), block.build()
    assert (ops, list(one.names.ops)) == ([0, 1, 2], list(other.names.ops))
    for name in (*OP_COLUMNS, "child_start", "child"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_a_channel_must_be_another_queue() -> None:
    with pytest.raises(InvalidInput, match="channel"):
        replace(two_workers(), channel=two_workers().queue)
    assert {int(kind) for kind in Discipline} == {0, 1, 2}


def shared_link(**columns: Any) -> Dfg:
    """A large and a small message at once, and one behind the small one."""
    builder = DfgBuilder()
    link = builder.queue("link", Discipline.SHARED)
    builder.op("large", link, 4.0, Kind.SEND)
    small = builder.op("small", link, 1.0, Kind.SEND, **columns)
    builder.op("next", link, 1.0, Kind.SEND, [small])
    return builder.build()


def test_a_shared_queue_lets_small_ops_pass_large_ones(tmp_path: Path) -> None:
    timeline = replay(shared_link())
    assert timeline.start_s.tolist() == [0, 0, 2]
    assert timeline.end_s.tolist() == [6, 2, 4]
    path = critical_path(timeline)
    assert (path.ops.tolist(), path.communication_s, path.total_wait_s) == ([0], 6, 0)
    assert iteration_summary(timeline).bottleneck_queue == "link"
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lasting = [event["name"] for event in events if event["ph"] == "b"]
    assert lasting == ["large", "small", "next"]  # slices of a thread must not overlap
    with pytest.raises(InvalidInput, match="neither gap nor channel"):
        shared_link(gap_s=0.1)
    with pytest.raises(InvalidInput, match="one op at a time"):
        IncrementalReplay(shared_link())


def test_a_kernel_compiles_without_a_cache_folder() -> None:
    """numba keeps no code of source without a file."""
    written: dict[str, Any] = {}
    exec(compile("def twice(x):\n    return 2 * x\n", "<string>", "exec"), written)
    with pytest.raises(RuntimeError, match="locator"):
        numba.njit(cache=True)(written["twice"])
    assert compiled(allocates=False)(written["twice"])(21) == 42


def test_the_summary_is_of_a_worker_that_trains_and_not_of_its_server() -> None:
    builder = DfgBuilder()
    forward = builder.op("forward", builder.queue("replica"), 1.0, Kind.FORWARD, worker=0)
    backward = builder.op(
        "backward", builder.queue("replica"), 2.0, Kind.BACKWARD, [forward], worker=0
    )
    builder.op("update", builder.queue("server"), 0.5, Kind.UPDATE, [backward], worker=1)
    summary = iteration_summary(replay(builder.build()))
    assert (summary.worker, summary.backward_s, summary.iteration_s) == (0, 2.0, 3.5)
