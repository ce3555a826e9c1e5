"""TensorFlow scripts of Horovod train the same under a plan as under their own Horovod."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_scripts.horovod_tensorflow import TENSORFLOW_SCRIPTS, step_of
from odd_scripts.refused_horovod_tensorflow import (
    REFUSED,
    THREADS,
    recorded,
    recorded_branch,
    recorded_shapes,
)
from tensorflow_ranks import TensorflowProcess
from test_horovod_torch import (
    FP16,
    WAITS,
    WAYS,
    PlanSession,
    as_launched,
    keep_imports_from_collections,
    with_timelines,
)
from torch_plans import uniform
from torch_world import run_world

from autotune.errors import AutotuneError, InvalidInput
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import read_job
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.horovod.tensorflow_refusals import check_threads
from runtime_rewriter.horovod.tensorflow_scripts import tensorflow_horovod_steered
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.pytorch.emulation import accelerator_of
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.recording.session import RecordingSession
from runtime_rewriter.recording.settings import RecordSettings

pytest.importorskip("horovod", reason="`make horovod` builds it")
pytestmark = pytest.mark.timeout(600)  # of the first test, with what all of them look at

TRACES, RECORDED_STEPS = "traces", 2
TIMED_STEPS = 4
RECORDED = (recorded, recorded_branch, recorded_shapes)
"""Refused scripts that are recorded; the others are tuned."""
OF_ONE_ELEMENT = {"clipping", "words"}
"""Scripts whose steps multiply variables of one element or scalars."""


@dataclass
class Run:
    rank: int
    seen: list[Any] = field(default_factory=list)

    def see(self, *values: Any) -> None:
        self.seen.append(copy.deepcopy(list(values)))


def check_scripts(rank: int, port: int) -> list[str]:
    """The differences and the refusals of all scripts."""
    in_one_job(rank, port)
    return [f"{name}: {p}" for name in TENSORFLOW_SCRIPTS for p in problems_of(name, rank)]


def in_one_job(rank: int, port: int) -> None:
    as_launched(rank, port)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    keep_imports_from_collections()


def check_all(rank: int, port: int, timeline: str, traces: str) -> dict[str, Any]:
    """Everything else that the tests look at, in one job."""
    in_one_job(rank, port)
    one_thread = refusal_of_one_thread()  # TensorFlow takes no other number after its first step
    return {
        "sent": sent(rank, timeline),
        "fp16": compressed(rank),
        "profile": profiled(rank),
        "recording": trains_while_recorded(rank, traces),
        "emulated": emulated(rank),
        "one rank": on_one_rank(rank),
        "refusals": refusals(rank),
        "one_thread": one_thread,
    }


def refusal_of_one_thread() -> str:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    try:
        check_threads()
    except InvalidInput as refusal:
        return str(refusal)
    finally:
        tf.config.threading.set_inter_op_parallelism_threads(0)
    return "not refused"


@contextmanager
def launched(session: Any) -> Iterator[Any]:
    os.environ.pop("HOROVOD_RANK", None)  # the launcher's last start in this process has set it
    with tensorflow_horovod_steered(session, WAITS):
        import horovod.tensorflow as hvd

        hvd.init()
        yield hvd


def problems_of(name: str, rank: int) -> Iterator[str]:
    """What differs or was refused, in each way."""
    import tensorflow as tf

    # TensorFlow's graph optimizer multiplies a variable of one element and scalars in another order
    # if nodes have other names: here, the gradient's, the learning rate and that of the clipping.
    alone = name in OF_ONE_ELEMENT
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": alone})
    own = Run(rank)
    with launched(None):
        pass  # the reference runs without us
    TENSORFLOW_SCRIPTS[name](own)
    for way in ("by Horovod in a trial", "in all ways"):
        plan_of, in_trial = WAYS[way]
        run, session = Run(rank), PlanSession(plan_of, in_trial)
        with launched(session):
            try:
                TENSORFLOW_SCRIPTS[name](run)
                compare(run.seen, own.seen)
            except (AutotuneError, AssertionError) as problem:
                yield f"{way}: {type(problem).__name__}: {problem}"
        if session.synchronizer is None:
            yield f"{way}: no model was found"
            continue
        if in_trial and session.steps < 5:
            yield f"{way}: only {session.steps} boundaries"
        session.synchronizer.close()


def compare(run: Any, own: Any) -> None:
    if isinstance(own, list):
        assert len(run) == len(own)
        for one, other in zip(run, own, strict=True):
            compare(one, other)
    else:
        np.testing.assert_array_equal(run, own)


def sent(rank: int, timeline: str) -> list[str]:
    """The all-reduces of steps in the order of their execution, by rank 0's timeline.

    It may begin in the middle of the first step.
    """
    import horovod.tensorflow as hvd

    session = PlanSession(lambda module: uniform(module, 2), in_trial=False)
    with with_timelines(hvd), launched(session):
        _, train = step_of(hvd, rank)
        train(0)
        synchronizer = session.synchronizer
        assert synchronizer is not None
        hvd.start_timeline(timeline)
        for step in range(TIMED_STEPS + 1):
            # The first messages of a plan wait for each other. Later ones only begin in order:
            # a thread that waits for a core can lose its place.
            synchronizer.load(None)
            synchronizer.load(uniform(synchronizer.module, 2))
            train(step)
        hvd.stop_timeline()
        synchronizer.close()
    if rank > 0:
        return []
    events = json.loads(Path(timeline).read_text())
    tensors = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    return [tensors[event["pid"]] for event in events if event.get("name") == "GLOO_ALLREDUCE"]


def compressed(rank: int) -> bool:
    """Whether a plan of fp16 gives the bits of the script's own compression."""
    results = []
    for plan_of in (lambda module: None, lambda module: uniform(module, 2, compressor=FP16)):
        session = PlanSession(plan_of, in_trial=False)
        with launched(session) as hvd:
            variables, train = step_of(hvd, rank, compression=hvd.Compression.fp16)
            for step in range(3):
                train(step)
            results.append([variable.numpy() for variable in variables])
        assert session.synchronizer is not None
        session.synchronizer.close()
    return all(map(np.array_equal, *results))


def profiled(rank: int) -> dict[str, Any]:
    """A profile of two steps, and the numerics gate's error in a step."""
    session = PlanSession(lambda module: None, in_trial=False)
    with launched(session) as hvd:
        _, train = step_of(hvd, rank)
        train(0)
        synchronizer = session.synchronizer
        assert synchronizer is not None
        profilers: list[WorkloadProfiler] = []

        class Boundary:
            def on_boundary(self, now_s: float, clean: bool) -> None:
                if not profilers:
                    profilers.append(WorkloadProfiler(synchronizer, steps=2))

            def on_backward_end(self) -> None: ...

        synchronizer.listeners.append(Boundary())
        step = 0
        while not (profilers and profilers[0].done):
            train(step := step + 1)
        with synchronizer.world():
            workload = profilers[0].finish()
        synchronizer.listeners.clear()
        synchronizer.load(uniform(synchronizer.module, 2))
        gate = GradientGate(synchronizer)
        gate.arm()
        with synchronizer.world():
            train(step)
        error = gate.error().relative_error
        synchronizer.close()
    ready_s = [variable.ready_s for variable in workload.variables]
    return {
        "names": [variable.name for variable in workload.variables],
        "times": [*ready_s, workload.forward_s, workload.backward_s, workload.update_s],
        "error": error,
    }


def trains_while_recorded(rank: int, traces: str) -> bool:
    """Whether variables have the values that they have without a recording, within rounding."""
    results = []
    recording = RecordingSession(RecordSettings(traces, RECORDED_STEPS, warmup=1))
    for session in (PlanSession(lambda module: None, in_trial=False), recording):
        with launched(session) as hvd:
            variables, train = step_of(hvd, rank)
            for step in range(2 * RECORDED_STEPS + 6):
                train(step)
            results.append([variable.numpy() for variable in variables])
    return recording.written and all(map(np.allclose, *results))


def emulated(rank: int) -> dict[str, Any]:
    """Steps of emulated accelerators under Horovod's own operations, and under a plan."""
    session = PlanSession(lambda module: None, in_trial=False)
    with launched(session) as hvd:
        variables, train = step_of(hvd, rank)
        train(0)
        synchronizer = session.synchronizer
        assert synchronizer is not None
        due = [(name, 0.004 * n) for n, name in enumerate(reversed(synchronizer.names), 1)]
        timetable = Timetable(0.02, (), tuple(due), 0.03, 0.01)
        synchronizer.emulate(accelerator_of(synchronizer, timetable))
        recorded = float(train(1))
        before = [variable.numpy() for variable in variables]
        played = [float(train(2)), float(train(3))]
        synchronizer.load(uniform(synchronizer.module, 2))
        gate = GradientGate(synchronizer)
        gate.arm()
        with synchronizer.world():
            started_s = time.perf_counter()
            played.append(float(train(4)))
            step_s = time.perf_counter() - started_s
        unchanged = all(map(np.array_equal, before, [variable.numpy() for variable in variables]))
        synchronizer.emulate(None)
        trained = float(train(5)) != recorded
        synchronizer.close()
    return {
        "results": set(played) == {recorded} and unchanged and trained,
        "waited": step_s >= timetable.forward_s + timetable.backward_s,
        "error": gate.error().relative_error,
    }


def on_one_rank(rank: int) -> bool:
    """Whether a plan averages values that only rank 0 has with zeros."""
    session = PlanSession(lambda module: uniform(module, 2), in_trial=False)
    with launched(session) as hvd:
        import tensorflow as tf

        bias, head = tf.Variable(tf.zeros(2)), tf.Variable(tf.ones(2))
        for _ in range(2):
            with tf.GradientTape() as tape:
                used = tf.reduce_sum(3.0 * bias) if rank == 0 else 0.0
                loss = used + tf.reduce_sum(head)
            tape = hvd.DistributedGradientTape(tape)
            of_bias, of_head = tape.gradient(loss, [bias, head])
    assert session.synchronizer is not None
    session.synchronizer.close()
    return np.array_equal(of_bias, [1.5, 1.5]) and np.array_equal(of_head, [1.0, 1.0])


def refusals(rank: int) -> dict[str, str]:
    """The message of each script that cannot be tuned."""
    messages = {}
    for script in REFUSED:
        session = PlanSession(lambda module: None, in_trial=False)
        recorder = RecordingSession(RecordSettings("unused"))
        with launched(recorder if script in RECORDED else session):
            try:
                script(rank, session)
                messages[script.__name__] = "not refused"
            except AutotuneError as refusal:
                messages[script.__name__] = str(refusal)
    return messages


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("horovod")
    arguments = (unclaimed_port("127.0.0.1"), str(folder / "timeline.json"), str(folder / TRACES))
    of_ranks = run_world(check_all, 2, *arguments, timeout_s=500.0, process=TensorflowProcess)
    return of_ranks, folder / TRACES


@pytest.fixture(scope="module")
def found(world: tuple[list[dict[str, Any]], Path]) -> list[dict[str, Any]]:
    return world[0]


@pytest.mark.slow
def test_every_script_sees_and_trains_what_its_own_horovod_gives() -> None:
    port = unclaimed_port("127.0.0.1")
    of_ranks = run_world(check_scripts, 2, port, timeout_s=500.0, process=TensorflowProcess)
    for rank, problems in enumerate(of_ranks):
        assert not problems, f"rank {rank}: " + "\n".join(problems)


def test_every_message_is_one_operation_and_they_follow_the_plan(found) -> None:
    numbers = [int(name.split(".")[-1].split("_")[0]) for name in found[0]["sent"]]
    assert numbers == sorted(set(numbers)) and len(numbers) % (TIMED_STEPS + 1) == 0
    assert len(numbers) > TIMED_STEPS + 1, "several messages a step"


def test_fp16_gives_the_bits_of_horovods_own_compression(found) -> None:
    assert found[0]["fp16"] and found[1]["fp16"]


def test_a_profile_times_every_gradient_and_the_gate_compares_them(found) -> None:
    for of_rank in found:
        profile = of_rank["profile"]
        assert len(profile["names"]) == 6
        assert all(0 <= time_s < 100 for time_s in profile["times"])
        assert profile["error"] == 0.0


def test_a_recording_has_the_graph_of_each_rank_and_replays_its_measured_steps(world) -> None:
    from autotune.dfg.replay import replay  # brings numba, which no rank needs

    found, traces = world
    assert all(of_rank["recording"] for of_rank in found)
    job = read_job(traces)
    assert job.graph is not None and job.rank_numbers == (0, 1)
    gradients = {node.gradient_of for node in job.graph.nodes} - {""}
    assert gradients == {variable.name for variable in job.graph.variables}
    assert len(gradients) == 6
    assert len(job.joints) == 6 * RECORDED_STEPS  # one collective of each gradient
    assert all(joint.complete and joint.name == "all_reduce" for joint in job.joints)
    sent_bytes = [joint.size_bytes for joint in job.joints]
    grad_bytes = sum(variable.grad_bytes for variable in job.graph.variables)
    assert sum(sent_bytes) == RECORDED_STEPS * grad_bytes
    steps = TracedSteps(job)
    for number in job.steps:
        replayed_s = replay(steps.dfg(number)).makespan_s
        assert replayed_s == pytest.approx(steps.measured_s(number), rel=0.01)


def test_a_played_step_waits_sends_recorded_gradients_and_trains_nothing(found) -> None:
    for of_rank in found:
        assert of_rank["emulated"] == {"results": True, "waited": True, "error": 0.0}


def test_gradients_of_one_rank_are_averaged_with_zeros(found) -> None:
    assert found[0]["one rank"] and found[1]["one rank"]


def test_a_script_that_cannot_be_tuned_is_told_why(found) -> None:
    for of_rank in found:
        for script, part in REFUSED.items():
            assert part in of_rank["refusals"][script.__name__]


def test_one_thread_between_operations_is_refused_with_the_call_that_sets_two(found) -> None:
    for of_rank in found:
        assert THREADS in of_rank["one_thread"]
