"""Measures one replica's training step: when each gradient is ready, and what surrounds the
backward pass.

The steps run under a plan that issues its messages only after the backward pass, so that no
communication disturbs the measured times. All ranks measure, and all get the medians over steps and
ranks. For emulated accelerators rank 0 computes alone: the others record one step and play it
without waits.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.errors import SynchronizationError
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload
from runtime_rewriter.protocol import PROFILE_WARMUP_STEPS
from runtime_rewriter.pytorch.agreement import dtype_name
from runtime_rewriter.pytorch.autograd import by_identity, variable_edges
from runtime_rewriter.pytorch.emulation import accelerator_of
from runtime_rewriter.pytorch.exchange.device import Mark
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.pytorch.reads import can_watch, script_compiles, unwatch, watch
from runtime_rewriter.pytorch.script_reads import ScriptReads
from runtime_rewriter.scheduling import step_down, take_round_robin


@dataclass
class _Marks:
    """Times of one step on the device's queue: its phases, ready gradients, and reads of variables.

    They are read after the step. Reading one sooner would keep the host from running ahead, as it
    does in training.
    """

    boundary: Mark
    forward_start: Mark | None = None
    backward_start: Mark | None = None
    computed: Mark | None = None
    backward_end: Mark | None = None
    ready: dict[int, Mark] = field(default_factory=dict)
    read: dict[int, Mark] = field(default_factory=dict)
    script_read: dict[int, Mark] = field(default_factory=dict)


@dataclass
class _Step:
    """Times of one step on this rank, in seconds.

    By variable: `ready_s` from the start of the backward pass, `needed_s` from that of the forward
    pass, `script_read_s` from the end of the backward pass.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    ready_s: dict[int, float] = field(default_factory=dict)
    needed_s: dict[int, float] = field(default_factory=dict)
    script_read_s: dict[int, float] = field(default_factory=dict)


def profiling_plan(workload: Workload, world_size: int) -> Plan:
    """One all-reduce per dtype over all variables."""
    by_dtype: dict[str, list[Variable]] = {}
    for variable in workload.variables:
        by_dtype.setdefault(variable.dtype, []).append(variable)
    messages = tuple(
        Message(
            tuple(TensorSlice(v.name, v.elements) for v in variables),
            Synchronizer.ALL_REDUCE,
            Compressor.NONE,
            dtype,
        )
        for dtype, variables in by_dtype.items()
    )
    return Plan(workload.id, world_size, messages)


class WorkloadProfiler(BackwardObserver):
    """Profiles the next `steps` steps. Steps with an evaluation count only if all have one.

    Building one is collective, at a step boundary: it loads the profiling plan, or `plan`. `done`
    becomes true at the boundary after the last step. `finish` is collective, too, and leaves no
    plan loaded. A step starts at its boundary: under gradient accumulation `forward_s` includes all
    that precedes the synchronized backward pass. Data loading counts as `update_s`.

    `alone`: rank 0 computes alone, and the profile is of its steps. `forward_s` then starts with
    the module's computation, after the buffers were sent. Raises `InvalidInput` if the module
    cannot be emulated.
    """

    def __init__(
        self,
        synchronizer: GradientSynchronizer,
        steps: int = 3,
        *,
        alone: bool = False,
        plan: Plan | None = None,
    ) -> None:
        self._synchronizer, self._alone = synchronizer, alone
        playing = accelerator_of(synchronizer, None) if alone else None
        self._stepped_down = False
        if playing is not None and synchronizer.ranks.rank > 0:
            synchronizer.emulate(playing)
            self._stepped_down = step_down()
        self._wanted = steps
        self._seen = 0
        self._steps: list[tuple[_Step, bool]] = []
        self._edges: set[tuple[int, int]] = set()
        self._rows: dict[int, dict[int, Tensor]] = {}  # of the last gradient of each step
        plan = plan or profiling_plan(synchronizer.workload, synchronizer.ranks.size)
        synchronizer.load(plan, deferred=True)
        cross_step = synchronizer.cross_step
        self._script_reads = ScriptReads(
            synchronizer.parameters, self._on_script_read, cross_step.conditions.script.operations
        )
        # Only a plan that crosses the step would delay these reads.
        self._finds_reads = cross_step.conditions.forbidden is None
        cross_step.script_reads = self._script_reads if self._finds_reads else None
        synchronizer.observers.append(self)
        synchronizer.listeners.insert(0, self)  # before listeners that read `done`
        self._marks = _Marks(synchronizer.device.mark())

    @property
    def done(self) -> bool:
        # A number of steps that is the same on every rank, though one rank alone may evaluate in
        # between.
        return self._seen >= PROFILE_WARMUP_STEPS + self._wanted

    def on_forward_start(self) -> None:
        if self._marks.forward_start is not None:
            return
        self._marks.forward_start = self._synchronizer.device.mark()
        if script_compiles():
            return
        for index, parameter in enumerate(self._synchronizer.parameters):
            if can_watch(parameter):
                watch(parameter, partial(self._on_read, index))

    def _on_read(self, index: int, _: Tensor) -> None:
        self._marks.read[index] = self._synchronizer.device.mark()

    def _on_script_read(self, index: int) -> None:
        self._marks.script_read[index] = self._synchronizer.device.mark()

    def on_forward_output(self, tensors: list[Tensor]) -> None:
        for parameter in self._synchronizer.parameters:
            unwatch(parameter)
        if not self._edges:  # the graph of one step; it is gone after its backward pass
            self._edges = variable_edges(tensors, by_identity(self._synchronizer.parameters))

    def on_backward_start(self) -> None:
        self._marks.backward_start, self._marks.ready = self._synchronizer.device.mark(), {}

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        self._marks.ready[index] = self._synchronizer.device.mark()
        if gradient is not None and gradient.is_sparse:
            # Counted later, when nothing is timed any more.
            self._rows.setdefault(index, {})[self._seen] = gradient._indices()[0]

    def on_computed(self) -> None:
        self._marks.computed = self._synchronizer.device.mark()

    def on_backward_end(self) -> None:
        if self._finds_reads:
            self._script_reads.begin()
        self._marks.backward_end = self._synchronizer.device.mark()

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self._script_reads.end()
        marks, self._marks = self._marks, _Marks(self._synchronizer.device.mark())
        if marks.backward_end is None:  # the step began before this profiler
            return
        self._seen += 1
        if self._seen > PROFILE_WARMUP_STEPS:
            self._steps.append((self._step_of(marks, self._marks.boundary), clean))

    def _step_of(self, marks: _Marks, end: Mark) -> _Step:
        between = self._synchronizer.device.seconds_between
        forward_start, backward_start = marks.forward_start, marks.backward_start
        assert forward_start is not None and backward_start is not None
        assert marks.computed is not None and marks.backward_end is not None
        return _Step(
            forward_s=between(forward_start if self._alone else marks.boundary, backward_start),
            backward_s=between(backward_start, marks.computed),
            update_s=between(marks.backward_end, end),
            ready_s={index: between(backward_start, mark) for index, mark in marks.ready.items()},
            needed_s={index: between(forward_start, mark) for index, mark in marks.read.items()},
            script_read_s={
                index: max(between(marks.backward_end, mark), 0.0)  # an alias is found before
                for index, mark in marks.script_read.items()
            },
        )

    def finish(self) -> Workload:
        """The measured workload: rank 0's edges and touched rows, medians over steps and ranks."""
        synchronizer = self._synchronizer
        synchronizer.observers.remove(self)
        synchronizer.listeners.remove(self)
        self._script_reads.end()
        synchronizer.cross_step.script_reads = None
        if self._alone:
            synchronizer.emulate(None)
        if self._stepped_down:
            take_round_robin()
        if not self._steps:
            raise SynchronizationError(
                "a profile needs at least one whole training step, but there was none"
            )
        gathered: list[list[tuple[_Step, bool]]] = [[]] * synchronizer.ranks.size
        dist.all_gather_object(gathered, self._steps, group=synchronizer.ranks.control)
        reading = [False] * synchronizer.ranks.size
        reads_norms = synchronizer.cross_step.conditions.limits()[1]
        dist.all_gather_object(reading, reads_norms, group=synchronizer.ranks.control)
        touched = {
            index: float(median(len(rows.unique()) for rows in steps.values()))
            for index, steps in self._rows.items()
        }
        shape: list[tuple[set[tuple[int, int]], dict[int, float]]] = [(self._edges, touched)]
        dist.broadcast_object_list(shape, group=synchronizer.ranks.control, group_src=0)
        synchronizer.load(None)
        workload = self._workload(self._kept(gathered), _script_reads_s(gathered), *shape[0])
        return replace(workload, reads_norms=any(reading))

    def _kept(self, gathered: list[list[tuple[_Step, bool]]]) -> list[_Step]:
        """The clean steps. With `alone`, those of rank 0 in which no other rank computed."""
        if self._alone:
            quiet = [all(clean for _, clean in steps) for steps in zip(*gathered, strict=True)]
            of_first = [step for step, _ in gathered[0]]
            return [step for step, alone in zip(of_first, quiet, strict=True) if alone] or of_first
        return [step for of_rank in gathered for step in _clean(of_rank)]

    def _workload(
        self,
        steps: list[_Step],
        script_read_s: Mapping[int, float],
        edges: set[tuple[int, int]],
        touched: dict[int, float],
    ) -> Workload:
        backward_s = median(step.backward_s for step in steps)
        count = len(self._synchronizer.names)
        # A variable without a gradient is ready at the end of the backward pass. One whose reads
        # are not detected (in compiled code, say) is needed at once.
        ready_s, needed_s = [], []
        for index in range(count):
            ready_s.append(median(step.ready_s.get(index, step.backward_s) for step in steps))
            needed_s.append(median(step.needed_s.get(index, 0.0) for step in steps))
        order = sorted(range(count), key=lambda index: (ready_s[index], -index))
        position = {index: rank for rank, index in enumerate(order)}
        variables = tuple(
            Variable(
                self._synchronizer.names[index],
                tuple(self._synchronizer.parameters[index].shape),
                dtype_name(self._synchronizer.parameters[index]),
                index in touched,
                ready_s[index],
                needed_s[index],
                touched.get(index),
                script_read_s.get(index),
            )
            for index in order
        )
        pairs = {(min(position[a], position[b]), max(position[a], position[b])) for a, b in edges}
        # Played passes begin behind the buffers' broadcasts; measured ones of all ranks contain
        # them.
        buffers = self._synchronizer.buffers() if self._alone else ()
        sent: Counter[torch.dtype] = Counter()
        for buffer in buffers:
            sent[buffer.dtype] += buffer.nbytes
        return Workload(
            type(self._synchronizer.module).__name__,
            variables,
            tuple(sorted(pairs)),
            forward_s=median(step.forward_s for step in steps),
            backward_s=backward_s,
            update_s=median(step.update_s for step in steps),
            device=self._synchronizer.device.device.type,
            threads=torch.get_num_threads()
            if self._synchronizer.device.device.type == "cpu"
            else 0,
            source="measured",
            buffer_bytes=tuple(sent.values()),
            buffers=len(buffers),
            library=self._synchronizer.library,
        )


def _clean(steps: list[tuple[_Step, bool]]) -> list[_Step]:
    """The clean steps of one rank; all, if none is."""
    return [step for step, clean in steps if clean] or [step for step, _ in steps]


def _script_reads_s(gathered: list[list[tuple[_Step, bool]]]) -> dict[int, float]:
    """When the script first reads each variable itself, on the rank that reads it first.

    A variable counts if a rank reads it in more than half of its steps: trials take medians, too,
    in which rarer reads do not show.
    """
    read_s: dict[int, float] = {}
    for of_rank in gathered:
        steps = _clean(of_rank)
        for index in {index for step in steps for index in step.script_read_s}:
            times_s = [s.script_read_s[index] for s in steps if index in s.script_read_s]
            if 2 * len(times_s) > len(steps):
                read_s[index] = min(read_s.get(index, math.inf), median(times_s))
    return read_s
