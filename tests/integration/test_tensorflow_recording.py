"""Steps of a TensorFlow graph on three servers: recorded, read, replayed and optimized."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isolated_servers import WAIT_S, isolated

from autotune.cli import main
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import iteration_summary
from autotune.profiling.formats.rank_trace import MISSING
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.recordings.graph_file import NodePhase, StepGraph
from autotune.workload import Variable

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

WIDTH, BATCH, REPLICAS, STEPS = 256, 64, 2, 3
WORKERS = [f"/job:worker/replica:0/task:{task}" for task in range(REPLICAS)]
SERVER = "/job:ps/replica:0/task:0"


@dataclass(frozen=True)
class Recording:
    folder: Path
    graph: StepGraph
    job: TraceJob


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def config() -> Any:
    settings = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    settings.experimental.collective_group_leader = WORKERS[0]
    settings.graph_options.optimizer_options.opt_level = -1
    settings.graph_options.rewrite_options.disable_meta_optimizer = True
    return settings


def training_step() -> tuple[list[Any], dict[str, str], dict[str, str]]:
    """Return (targets, gradients, handles): a variable on the server, and one per replica."""
    v1 = tf.compat.v1
    targets, served_gradients = [], []
    gradients: dict[str, str] = {}
    handles = {"served": "served"}
    with tf.device(f"{SERVER}/cpu:0"):
        served = v1.get_variable("served", [WIDTH, WIDTH], use_resource=True)
    for task, worker in enumerate(WORKERS):
        with tf.device(f"{worker}/cpu:0"), v1.name_scope(f"replica{task}"):
            reduced = v1.get_variable(f"reduced{task}", [WIDTH, WIDTH], use_resource=True)
            handles[f"reduced{task}"] = "reduced"
            features = v1.placeholder(tf.float32, [BATCH, WIDTH], name="features")
            first, second = served.read_value(), reduced.read_value()
            loss = tf.reduce_mean(tf.square(tf.nn.relu(features @ first) @ second))
            of_first, of_second = tf.gradients(loss, [first, second])
            gradients |= {of_first.op.name: "served", of_second.op.name: "reduced"}
            served_gradients.append(of_first)
            summed = tf.raw_ops.CollectiveReduceV2(
                ordering_token=[],
                input=of_second,
                group_size=REPLICAS,
                group_key=1,
                instance_key=7,
                merge_op="Add",
                final_op="Id",
                communication_hint="ring",
                timeout_seconds=60,
            )
            targets.append(reduced.assign_sub(summed * 1e-3).op)
    with tf.device(f"{SERVER}/cpu:0"):
        targets.append(served.assign_sub(tf.add_n(served_gradients) * 1e-3).op)
    return targets, gradients, handles


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return isolated().submit(recorded, tmp_path_factory.mktemp("recording")).result(WAIT_S)


def recorded(folder: Path) -> Recording:
    from runtime_rewriter.tensorflow.recording.graph_nodes import TrainedVariables
    from runtime_rewriter.tensorflow.recording.recorder import record_steps

    v1 = tf.compat.v1
    ports = free_ports(REPLICAS + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = tf.train.ClusterSpec({"worker": addresses[:REPLICAS], "ps": addresses[REPLICAS:]})
    places = [("worker", 0), ("worker", 1), ("ps", 0)]
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=task, config=config())
        for job, task in places
    ]
    with tf.Graph().as_default() as graph:
        targets, gradients, handles = training_step()
        with v1.Session(servers[0].target, graph=graph, config=config()) as session:
            session.run(v1.global_variables_initializer())

            batch = np.random.default_rng(0).normal(size=(BATCH, WIDTH))
            feeds = {f"replica{task}/features:0": batch for task in range(REPLICAS)}

            def run(options: Any, metadata: Any) -> None:
                session.run(targets, feeds, options=options, run_metadata=metadata)

            records = record_steps(run, steps=STEPS, warmup=1)
    shape = (WIDTH, WIDTH)
    variables = [Variable("served", shape), Variable("reduced", shape)]
    hosts = {WORKERS[0]: "a", WORKERS[1]: "b", SERVER: "c"}
    graph = records.write(folder, TrainedVariables(gradients, handles), variables, hosts)
    return Recording(folder, graph, read_job(folder))


def test_every_device_is_a_rank_and_replicas_come_first(recording: Recording) -> None:
    assert [device.host for device in recording.graph.devices] == ["a", "b", "c"]
    assert recording.job.rank_numbers == (0, 1, 2)
    assert len(recording.job.steps) == STEPS
    assert recording.job.hosts.names == ("a", "b", "c")
    assert not recording.job.repairs


def test_each_transfer_and_collective_is_matched_in_every_step(recording: Recording) -> None:
    joints = recording.job.joints
    names = [joint.name for joint in joints]
    assert names.count("all_reduce") == STEPS
    assert len(names) == STEPS * (1 + 2 * REPLICAS)  # one pull and one push of each replica
    assert all(joint.complete for joint in joints)
    places = {tuple(place for place, _ in joint.members) for joint in joints}
    assert places == {(0, 1), (0, 2), (1, 2)}
    pulls = [joint for joint in joints if joint.name != "all_reduce" and joint.root == 2]
    assert len(pulls) == STEPS * REPLICAS
    labels = {name for trace in recording.job.ranks for name in trace.names}
    assert any(name.startswith("tf:PULL") for name in labels)
    assert any(name.startswith("tf:PUSH") for name in labels)
    size = WIDTH * WIDTH * 4
    assert {joint.size_bytes for joint in joints} == {size}


def test_the_replay_gives_the_recorded_step_again(recording: Recording) -> None:
    steps = TracedSteps(recording.job)
    for number in recording.job.steps:
        summary = iteration_summary(replay(steps.dfg(number)))
        assert summary.iteration_s == pytest.approx(steps.measured_s(number), rel=0.01)
        assert summary.forward_s > 0
        assert summary.backward_s > 0
        assert summary.communication_s > 0


def test_every_op_keeps_its_recorded_start(recording: Recording) -> None:
    steps = TracedSteps(recording.job)
    number = steps.chosen("median")
    timeline = replay(steps.dfg(number))
    names = list(timeline.dfg.names.ops)
    begin_s = min(part.ops.begin_s + part.shift_s for part in steps.parts(number))
    for part in steps.parts(number):
        for op in part.ops.ops:
            if op.collective == MISSING and op.name != "_SOURCE":  # one on each device
                start_s = timeline.start_s[names.index(op.name)]
                assert start_s == pytest.approx(op.start_s + part.shift_s - begin_s, abs=1e-5)


def test_passes_follow_the_data(recording: Recording) -> None:
    phase = {node.name: node.phase for node in recording.graph.nodes}
    assert phase["replica0/Relu"] is NodePhase.FORWARD
    assert phase["replica0/gradients/replica0/Relu_grad/ReluGrad"] is NodePhase.BACKWARD
    assert phase["AddN"] is NodePhase.UPDATE
    assert phase["replica1/CollectiveReduceV2"] is NodePhase.UPDATE


def test_the_workload_names_the_variables(recording: Recording, tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.json"
    words = ["optimize", str(recording.folder), "--cluster", "B7", "--budget-time", "0.2s"]
    assert main([*words, "--output", str(strategy)]) == 0
    assert {"served", "reduced"} <= set(json.dumps(json.loads(strategy.read_text())).split('"'))


def test_the_timeline_opens_in_perfetto(recording: Recording, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    assert main(["replay", str(recording.folder), "--timeline", str(timeline)]) == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any("collective" in name for name in threads)


def test_events_of_one_node_become_one() -> None:
    from tensorflow.core.framework.step_stats_pb2 import StepStats

    from runtime_rewriter.tensorflow.recording.step_events import step_events

    stats = StepStats()
    gpu = "/job:worker/replica:0/task:0/device:GPU:0"
    for device, name, start, length in (
        (gpu, "matmul", 1000, 500),
        (f"{gpu}/stream:all", "matmul:MatMul", 2000, 7000),
        (f"{gpu}/stream:13", "matmul:MatMul@@kernel", 2500, 6000),
    ):
        of_device = stats.dev_stats.add(device=device)
        of_device.node_stats.add(node_name=name, all_start_nanos=start, op_end_rel_nanos=length)
    events = step_events(stats).nodes
    assert list(events) == [gpu]
    event = events[gpu]["matmul"]
    assert (event.start_ns, event.end_ns) == (1000, 9000)


def test_the_peak_counts_what_nodes_had_allocated_at_once() -> None:
    from tensorflow.core.framework.step_stats_pb2 import StepStats

    from runtime_rewriter.tensorflow.recording.step_events import step_events

    stats = StepStats()
    device = "/job:worker/replica:0/task:0/device:CPU:0"
    of_device = stats.dev_stats.add(device=device)
    for name, changes in (
        ("first", [(1, 100), (5, -100)]),
        ("second", [(3, 50), (7, -50)]),
        ("third", [(5, 30), (9, -30)]),  # before the first is freed in the same microsecond
    ):
        allocator = of_device.node_stats.add(node_name=name, all_start_nanos=1).memory.add()
        for at_us, size in changes:
            allocator.allocation_records.add(alloc_micros=at_us, alloc_bytes=size)
    assert step_events(stats).allocated_peak(device) == 180
    assert step_events(stats).allocated_peak("another") == 0


def test_the_forward_pass_is_found_where_layers_wait_for_their_variables() -> None:
    from benchmarks.tensorflow_ranks.layers import TimedLayer
    from benchmarks.tensorflow_ranks.timed_model import timed_training
    from runtime_rewriter.tensorflow.recording.replicas import forward_nodes

    training = timed_training([TimedLayer("only", 4, 0.001, 0.002)])
    waits = {node.name for node in training.graph_def.node if node.op == "SleepDataset"}
    assert len(waits) == 2
    assert len(waits & forward_nodes(training)) == 1
