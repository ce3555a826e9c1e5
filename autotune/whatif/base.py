"""One training step of one rank as a periodic graph: the base that what-ifs modify (Daydream).

A step of a trace ends where it hands over to the next one: work of the host is hidden behind the
device, the device still runs, the next batch is loaded. A graph of one step alone has to guess at
all this. The base repeats instead: its edges lead to ops of the same step, or of a later one. Its
step time is the distance between equal ops of consecutive steps once these distances are steady.

The trace is cut where the host launches the last device op of a step, so the measured step time is
the distance between two executions of this op. Without a device it is cut where steps end.

symbol   meaning
N, E     ops and edges
Q        queues: host threads and streams
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.arrays import BoolArray, FloatArray, Int32Array, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Discipline
from autotune.dfg.replay import Timeline, replay
from autotune.errors import InvalidInput
from autotune.profiling.formats.op_inputs import OpInputs
from autotune.profiling.traces.groups import Groups

FEWEST_COPIES = 3
"""Two steps fill the queues and the third one shows the distance; edges may ask for more."""
STEADY = 1e-3
"""Relative difference of two distances that follow each other, up to which they are steady."""
MOST_COPIES = 12
"""A step whose queues get behind each other more slowly is replayed no longer."""
MOST_AHEAD = 6
"""Steps by which the host may be ahead. Further limits of the launch queue are left out: only where
the device is the bottleneck is the host so far ahead, and its distance does not depend on them."""
LAUNCH_QUEUE = 1024
"""Launches that the driver accepts ahead of the device (CUDA; not documented, often measured)."""


@dataclass(frozen=True)
class Operator:
    """A call of a framework's operator.

    `around`: the operators around it, from the outermost one on. `inputs`: None if the trace does
    not state them. `optimizer`: the class whose `step` calls it, such as "AdamW"; "" if none does,
    or if the trace does not name it.
    """

    name: str
    around: tuple[str, ...]
    inputs: OpInputs | None = None
    optimizer: str = ""

    @property
    def outer(self) -> str:
        """The outermost operator, itself if none is around it."""
        return self.around[0] if self.around else self.name


@dataclass(frozen=True)
class BaseNames:
    """Names of the N ops, the Q queues and the layers, and the operators that launch ops."""

    ops: tuple[str, ...]
    queues: tuple[str, ...]
    layers: tuple[str, ...]
    operators: tuple[Operator, ...] = ()


@dataclass(frozen=True, eq=False)
class Base:
    """A step that repeats. Times in seconds, sizes in bytes.

    - `duration_s`, `gap_s`, `size_bytes`, `queue`, `kind`, `layer` (N,): as in `Dfg`.
    - `on_device` (N,): whether the op runs on a device. `launch` (N,): the host op that launches
      it, NONE for a host op and for device work that nothing launches.
    - `operator` (N,): the call of an operator in `names.operators` that an op is a part of, or that
      launches it on the device; NONE if unknown.
    - `launched` (D,): device ops with a launch, in the order of their launches.
    - `event` (N,): the op's event in the trace, NONE for an added op. Several ops of a host thread
      may have one event.
    - `parent`, `child`, `delay_s` (E,): a child begins at least the delay after the parent's end.
    - `later` (E,): by how many steps the child's step is later.
    - `unknown_gap_s` (N,), `unknown_delay_s` (E,): the part of a gap or delay without known cause.
    - `priority` (N,): on queues of `by_priority` (Q,) the lowest goes first. Other queues take what
      is ready first; edges state the order of a recorded one.
    - `loading_s`, `between_s` (M,): the parts of a recorded op's gap in which its thread loaded
      data, or ran other code between two steps. Ops that what-ifs add come behind the M recorded
      ones.
    - `last`: the op whose executions the step time lies between.
    - `measured_s`: that distance in the trace, independent of the graph.
    - `device`: the name of the device, "" for a CPU or if the trace does not state it.
    - `recorded_s` (M,): durations of the recorded ops in the trace.
    - `precision`: what a what-if lets products compute in, "" as recorded.
    - `messages`: the what-if that replaced the messages, "" for whole ones. `network`: the factor
      that what-ifs gave to the bandwidth of the cluster.
    - `groups`: the sets of ranks of the recorded collectives, as far as the trace states them;
      `world_size`: all ranks of the job, None if unknown.
    - `element_bytes`: collective -> the bytes of an element, as far as its type is known.
    - `waits_s`: collective -> the part of its duration in which it waits for other ranks. Only
      the traces of all its ranks show it.
    - `notes`: amounts that what-ifs assumed, and their sources, for reports.
    """

    duration_s: FloatArray
    gap_s: FloatArray
    size_bytes: FloatArray
    queue: Int32Array
    kind: Int32Array
    layer: Int32Array
    on_device: BoolArray
    launch: Int32Array
    operator: Int32Array
    launched: IntArray
    event: IntArray
    parent: IntArray
    child: IntArray
    delay_s: FloatArray
    later: IntArray
    unknown_gap_s: FloatArray
    unknown_delay_s: FloatArray
    priority: Int32Array
    by_priority: BoolArray
    loading_s: FloatArray
    between_s: FloatArray
    recorded_s: FloatArray
    names: BaseNames
    last: int
    measured_s: float
    device: str = ""
    groups: Groups = ()
    world_size: int | None = None
    precision: str = ""
    messages: str = ""
    network: float = 1.0
    element_bytes: Mapping[int, int] = field(default_factory=dict)
    waits_s: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        return len(self.duration_s)

    @property
    def unknown_s(self) -> float:
        """Seconds of a step for which streams waited without a known cause."""
        return float(self.unknown_gap_s.sum() + self.unknown_delay_s.sum())

    def without_unknown_waits(self) -> Base:
        """The other extreme reading of waits without a known cause: none of them stays."""
        return replace(
            self,
            gap_s=self.gap_s - self.unknown_gap_s,
            delay_s=self.delay_s - self.unknown_delay_s,
            unknown_gap_s=np.zeros_like(self.unknown_gap_s),
            unknown_delay_s=np.zeros_like(self.unknown_delay_s),
        )

    @cached_property
    def launch_limits(self) -> tuple[IntArray, IntArray, IntArray]:
        """(parent, child, later): a launch waits for the op `LAUNCH_QUEUE` launches before it."""
        device = self.launched
        count = len(device)
        if not count:
            return (np.zeros(0, dtype=np.int64),) * 3
        earlier = np.arange(count) - LAUNCH_QUEUE
        near = earlier >= -MOST_AHEAD * count
        parent, later = device[earlier[near] % count], -(earlier[near] // count)
        return parent, self.launch[device][near].astype(np.int64), later

    @cached_property
    def order(self) -> IntArray:
        """All ops, each one behind those of its step that it waits for.

        Raises `InvalidInput` for a cycle within a step.
        """
        within = self.later == 0
        child = self.child[within]
        waiting = np.bincount(child, minlength=self.ops).tolist()
        by_parent = np.argsort(self.parent[within], kind="stable")
        starts = np.searchsorted(self.parent[within][by_parent], np.arange(self.ops + 1)).tolist()
        children = child[by_parent].tolist()
        ready = [op for op in range(self.ops - 1, -1, -1) if not waiting[op]]
        order: list[int] = []
        while ready:
            op = ready.pop()
            order.append(op)
            for follower in children[starts[op] : starts[op + 1]]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        if len(order) < self.ops:
            at = next(op for op in range(self.ops) if waiting[op] > 0)
            raise InvalidInput(
                f"a step must have no cycle, but there is one at or before {self.names.ops[at]!r}"
            )
        return np.array(order, dtype=np.int64)

    def queue_order(self, queue: int) -> IntArray:
        """The ops of a queue in their order."""
        ops: IntArray = self.order[self.queue[self.order] == queue]
        return ops

    def copies(self) -> int:
        """How many steps show the steady distance, unless threads catch up with each other."""
        latest = max(int(lag.max(initial=0)) for lag in (self.later, self.launch_limits[2]))
        return max(FEWEST_COPIES, latest + 2)

    def dfg(self, copies: int) -> Dfg:
        """The step `copies` times; op i of copy c is op c * N + i. Delays are virtual ops behind.

        Raises `InvalidInput` for a cycle.
        """
        graph = DfgBuilder()
        for number, name in enumerate(self.names.queues):
            discipline = Discipline.PRIORITY if self.by_priority[number] else Discipline.FIFO
            graph.queue(name, discipline, key=number)
        for name in self.names.layers:
            graph.layer(name)
        names, count = self.names.ops, self.ops
        graph.block(
            count * copies,
            lambda number: names[number % count],
            duration_s=np.tile(self.duration_s, copies),
            gap_s=np.tile(self.gap_s, copies),
            size_bytes=np.tile(self.size_bytes, copies),
            queue=np.tile(self.queue, copies),
            kind=np.tile(self.kind, copies),
            layer=np.tile(self.layer, copies),
            priority=np.tile(self.priority, copies),
        )
        self._add_edges(graph, copies, self.parent, self.child, self.later, self.delay_s)
        parent, child, later = self.launch_limits
        self._add_edges(graph, copies, parent, child, later, np.zeros(len(parent)))
        return graph.build()

    def _add_edges(
        self,
        graph: DfgBuilder,
        copies: int,
        parent: IntArray,
        child: IntArray,
        later: IntArray,
        delay_s: FloatArray,
    ) -> None:
        for copy in range(copies):
            there = copy - later >= 0
            parents = parent[there] + (copy - later[there]) * self.ops
            children = child[there] + copy * self.ops
            delayed = np.flatnonzero(delay_s[there] > 0)
            if len(delayed):
                first = graph.block(
                    len(delayed), lambda number: "delay", duration_s=delay_s[there][delayed]
                )
                virtual = first + np.arange(len(delayed))
                graph.edges(parents[delayed], virtual)
                parents = parents.copy()
                parents[delayed] = virtual
            graph.edges(parents, children)


@dataclass(frozen=True, eq=False)
class Steady:
    """The replay of `copies` steps; `step_s`: the last distance of executions of `Base.last`."""

    timeline: Timeline
    step_s: float
    copies: int


def steady(base: Base) -> Steady:
    """Replay the base until its distance is steady. Raises `InvalidInput` for a cycle."""
    copies, least_s = base.copies(), (1 - STEADY) * _longest_queue_s(base)
    while True:
        timeline = replay(base.dfg(copies))
        ends_s = timeline.end_s[base.last + base.ops * np.arange(copies)]
        before_s, step_s = np.diff(ends_s)[-2:].tolist()
        is_steady = math.isclose(before_s, step_s, rel_tol=STEADY) and step_s >= least_s
        if is_steady or copies >= MOST_COPIES:
            return Steady(timeline, step_s, copies)
        copies = min(2 * copies, MOST_COPIES)


def _longest_queue_s(base: Base) -> float:
    """The most that one queue works and pauses in a step; it repeats no faster."""
    queued = base.queue != NONE
    spent_s = (base.duration_s + base.gap_s)[queued]
    return float(np.bincount(base.queue[queued], weights=spent_s).max(initial=0.0))


def bounds_s(base: Base) -> tuple[float, float]:
    """The step time if waits without a known cause vanish, and if they stay as they are."""
    stays_s = steady(base).step_s
    gone_s = steady(base.without_unknown_waits()).step_s if base.unknown_s else stays_s
    return min(gone_s, stays_s), stays_s
