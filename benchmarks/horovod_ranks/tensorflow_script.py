"""The script of TensorFlow: a timed step under `hvd.DistributedGradientTape`.

A step is a `tf.function`. Logged steps run in a session, as the recorder of Horovod's TensorFlow
scripts runs them: its events time the collectives of this rank.
"""

# mypy: untyped-calls-exclude=horovod

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

import horovod.tensorflow as hvd
import tensorflow as tf

from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Workload
from benchmarks.horovod_ranks.script import LATENCY, probes_of
from benchmarks.tensorflow_ranks.timed_model import timed_part, turn
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.tensorflow.emulation import waited
from runtime_rewriter.tensorflow.local_device import LocalDevice
from runtime_rewriter.tensorflow.recording.recorder import RunStep
from runtime_rewriter.tensorflow.recording.step_events import NodeEvent, all_events, step_events

v1 = tf.compat.v1

THREADS = 8
"""Between the operations of a step: each wait takes one."""
FILLED = 1e-3
_ALL_REDUCE = re.compile(r"HorovodAllreduce_.*gradient_(\d+)")


def prepare() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def barrier() -> None:
    hvd.allreduce(tf.zeros(()), name="barrier")


class TensorflowScript:
    """Implements `HorovodScript` for dense variables."""

    def __init__(self, workload: Workload, case: dict[str, Any]) -> None:
        sparse = [variable.name for variable in workload.variables if variable.sparse]
        if sparse:
            raise SystemExit(f"timed TensorFlow scripts have dense variables only, not {sparse[0]}")
        self._workload = workload
        self.calls: list[HorovodCall] = []
        self._session: Any = None
        self._traces: list[tuple[int, Any]] = []  # (step, StepStats)
        model = _TimedStep(workload, case["groups"])
        self._step = tf.function(model, autograph=False)
        self._logged_step: RunStep[list[float]]

    @contextmanager
    def logging(self) -> Iterator[None]:
        with tf.Graph().as_default() as graph:
            marks = _TimedStep(self._workload, groups=())()
            with _session(graph) as self._session:
                self._session.run(v1.global_variables_initializer())
                self._logged_step = lambda options, metadata: self._session.run(
                    marks, options=options, run_metadata=metadata
                )
                try:
                    self._logged_step(None, None)  # the first run builds the executors
                    yield
                finally:
                    self._session = None
                    self._read_traces()

    def step(self, number: int) -> list[float]:
        if self._session is None:
            return [float(mark) for mark in self._step()]
        marks, trace = _traced(self._logged_step)
        self._traces.append((number, trace))
        return [float(mark) for mark in marks]

    def _read_traces(self) -> None:
        """List the calls of the logged steps behind them: between two steps other ranks wait."""
        variables = self._workload.variables
        for number, trace in self._traces:
            for event in all_events(step_events(trace)):
                if (match := _ALL_REDUCE.search(event.name)) is not None:
                    variable = variables[int(match[1])]
                    size_bytes = 4 * variable.elements
                    self.calls.append(_call(variable.name, size_bytes, number, event))
        self._traces.clear()

    def probe(self, size_bytes: int) -> None:
        probes = probes_of(size_bytes)
        events = self._probed(size_bytes, [factor for _, factor in probes])
        self.calls += [
            _call(name, size_bytes, -1, event)
            for (name, _), event in zip(probes, events, strict=True)
        ]

    def latency(self, number: int) -> None:
        (event,) = self._probed(4, [1.0])
        self.calls.append(_call(f"{LATENCY}.{number}", 4, -1, event))

    def _probed(self, size_bytes: int, factors: Sequence[float]) -> list[NodeEvent]:
        """All-reduces with these postscale factors, in the order of their completion."""
        with tf.Graph().as_default() as graph:
            tensors = [tf.fill([size_bytes // 4], FILLED) for _ in factors]
            with tf.control_dependencies(tensors):
                ready = [hvd.mpi_ops._allreduce(tf.zeros(()), name="probe_barrier")]
            with tf.control_dependencies(ready):
                reduced = [
                    hvd.mpi_ops._allreduce(
                        tensor, name=f"probe_{size_bytes}_{number}", postscale_factor=factor
                    )
                    for number, (tensor, factor) in enumerate(zip(tensors, factors, strict=True))
                ]
            done = tf.group(*reduced)
            with _session(graph) as session:
                run: RunStep[None] = lambda options, metadata: session.run(  # noqa: E731
                    done, options=options, run_metadata=metadata
                )
                _, trace = _traced(run)
        events = all_events(step_events(trace))
        probes = [event for event in events if event.name.startswith(f"probe_{size_bytes}_")]
        return sorted(probes, key=lambda event: event.end_ns)

    def largest(self, values: Sequence[float]) -> list[float]:
        whole = tf.constant(values, tf.float64)
        return [float(one) for one in hvd.allreduce(whole, op=hvd.Max, name="times")]


script = TensorflowScript


class _TimedStep:
    """Variables, and the function of a step that computes by waits until absolute times."""

    def __init__(self, workload: Workload, groups: Sequence[Sequence[str]]) -> None:
        self._table = timetable_of(workload)
        self._variables = {
            one.name: tf.Variable(tf.fill(one.shape, FILLED), name=one.name)
            for one in workload.variables
        }
        self._place = {name: place for place, name in enumerate(self._variables)}
        self._groups = [[self._variables[name] for name in group] for group in groups]

    def __call__(self) -> list[Any]:
        table = self._table
        together = [
            (ready_s, [name for name, _ in of])
            for ready_s, of in groupby(table.ready, key=lambda pair: pair[1])
        ]
        begins = [0.0, *(ready_s for ready_s, _ in together)]
        begun = tf.timestamp()
        with tf.GradientTape() as tape:
            ends_at = begun
            for (ready_s, names), begin_s in reversed(list(zip(together, begins, strict=False))):
                nodes = [f"gradient_{self._place[name]}" for name in names]
                part = timed_part(table.forward_s / len(together), ready_s - begin_s, nodes)
                ends_at = part(ends_at, *(self._variables[name] for name in names))
            loss = turn(ends_at)
        turned = _now([loss])
        tape = hvd.DistributedGradientTape(tape, groups=self._groups or None)
        averages = tape.gradient(loss, list(self._variables.values()))
        ended = _now([_waited(begun + table.forward_s, table.backward_s)])
        arrived = _now([*averages, ended])
        return [begun, turned, ended, _now([_waited(arrived, table.update_s)])]


def _waited(start: Any, seconds: float) -> Any:
    return waited(start, seconds)[0]


def _now(after: Sequence[Any]) -> Any:
    """The time, in seconds, when these tensors exist."""
    with tf.control_dependencies(after):
        return tf.timestamp()


def _session(graph: Any) -> Any:
    config = LocalDevice().config
    config.inter_op_parallelism_threads = THREADS
    return v1.Session(graph=graph, config=config)


def _traced(run: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """What `run` returns, and the `StepStats` of its nodes, which all are on the CPU."""
    metadata = v1.RunMetadata()
    result = run(v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), metadata)
    return result, metadata.step_stats


def _call(name: str, size_bytes: int, step: int, event: NodeEvent) -> HorovodCall:
    """The call of an all-reduce, which is enqueued as soon as its node starts."""
    start_s = event.start_ns / 1e9
    return HorovodCall(
        name=name,
        op="all_reduce",
        tensors=1,
        size_bytes=size_bytes,
        dtype="float32",
        step=step,
        called_s=start_s,
        returned_s=start_s,
        incomplete_s=start_s,
        complete_s=event.end_ns / 1e9,
    )
