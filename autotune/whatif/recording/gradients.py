"""The gradients of a recorded step: their sizes, and where they are completed and used.

Sizes come from a file of the user, from our own recording, or from recorded shapes. Without any of
these they are unknown.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import MISSING, RankTrace
from autotune.profiling.graph.forward_passes import (
    ForwardPass,
    find_origins,
    find_passes,
    recomputes,
)
from autotune.profiling.graph.host_units import ACCUMULATE, HostUnits, Unit, host_units
from autotune.profiling.graph.layers import update_units
from autotune.profiling.traces.job import TraceJob
from autotune.whatif.base import Base
from autotune.whatif.question import Gradient
from autotune.whatif.recording.parameter_sizes import (
    TensorShape,
    matched_by_shape,
    read_parameters,
    recorded_variables,
)
from autotune.whatif.recording.sparse_rows import LookedUpRows, counted_rows, looked_up_rows
from autotune.workload import Variable


def gradients_of(
    job: TraceJob, place: int, base: Base, parameters: Path | None = None
) -> tuple[Gradient, ...] | None:
    """The gradients of rank `place` in the order of its backward pass; None if sizes are unknown.

    `base` is the rank's `recorded_base`. `parameters` is a file as `read_parameters` reads it; it
    takes precedence. Raises `InvalidInput` for a file that cannot be read, or that does not fit the
    gradients of the trace.
    """
    trace = job.ranks[place]
    gradients = _accumulated(trace, base)
    if not gradients:
        if parameters is None:
            return None
        raise InvalidInput(
            "gradients are found by their accumulation, but the trace has no "
            f"{ACCUMULATE}; record the operators of the host as well"
        )
    variables = _variables(job, gradients)
    named = _named(gradients, variables, parameters)
    if named is None:
        return None
    if variables is not None:
        rows = [counted_rows(one) for one in variables]
        shapes = [one.shape for one in variables]
    else:
        rows = [looked_up_rows(one.shape, one.looked_up) for one in gradients]
        shapes = [() if one.shape is None else one.shape.dims for one in gradients]
    return tuple(
        Gradient(
            known.name,
            known.size_bytes,
            one.layer,
            one.ready,
            one.update,
            one.read,
            dtype=known.dtype or "float32",
            shape=shape,
            touched=touched,
            updates_before=one.updates_before,
        )
        for one, known, shape, touched in zip(gradients, named, shapes, rows, strict=True)
    )


@dataclass(frozen=True)
class _Accumulated:
    """A gradient in the trace; ops are numbers of the base.

    `shape` is None if not recorded. `looked_up`: rows of a sparse one, 0 of a dense one.
    """

    shape: TensorShape | None
    looked_up: int
    layer: str
    ready: int
    update: int
    read: int
    updates_before: int


@dataclass(frozen=True)
class _Named:
    """A gradient's name, bytes and type; "" for a type that nothing states."""

    name: str
    size_bytes: float
    dtype: str


def _variables(job: TraceJob, gradients: Sequence[_Accumulated]) -> Sequence[Variable] | None:
    """The variables of our recording in the order of `gradients`; None if they do not fit it."""
    variables = recorded_variables(job.details)
    shapes = [one.shape for one in gradients if one.shape is not None]
    if variables is None or len(shapes) == len(gradients):
        return None if variables is None else matched_by_shape(variables, shapes)
    return variables if len(variables) == len(gradients) else None


def _named(
    gradients: Sequence[_Accumulated], variables: Sequence[Variable] | None, parameters: Path | None
) -> list[_Named] | None:
    """Names, sizes and types of `gradients` in their order; `variables` in the same order."""
    shapes = [one.shape for one in gradients if one.shape is not None]
    sizes = [shape.size_bytes for shape in shapes]
    known = [float(size) for size in sizes if size is not None]
    dtypes = ["" if one.shape is None else one.shape.torch_dtype for one in gradients]
    if parameters is not None:
        listed = list(reversed(read_parameters(parameters).items()))
        named = [(name, one.size_bytes) for name, one in listed]
        _refuse_unfit(parameters, named, len(gradients), known)
        return [
            _Named(name, one.size_bytes, one.dtype or dtype)
            for (name, one), dtype in zip(listed, dtypes, strict=True)
        ]
    if len(known) < len(gradients):
        if variables is None:
            return None
        known = [float(one.grad_bytes) for one in variables]
    if variables is not None:
        return [
            _Named(one.name, size, dtype or one.dtype)
            for one, size, dtype in zip(variables, known, dtypes, strict=True)
        ]
    names = _numbered([one.layer or "gradient" for one in gradients])
    return [_Named(*one) for one in zip(names, known, dtypes, strict=True)]


def _refuse_unfit(
    path: Path, named: Sequence[tuple[str, float]], count: int, known: Sequence[float]
) -> None:
    if len(named) != count:
        raise InvalidInput(
            f"{path} must list every parameter that has a gradient, but lists {len(named)} and the "
            f"trace accumulates {count}"
        )
    if len(known) == count and sorted(known) != sorted(size for _, size in named):
        wrong = next(
            (name, size, own) for (name, size), own in zip(named, known, strict=True) if size != own
        )
        raise InvalidInput(
            f"{path} must list parameters in the order of the forward pass with the sizes of the "
            f"trace, but {wrong[0]!r} has {wrong[1]:.0f} bytes and its gradient {wrong[2]:.0f}"
        )


def _numbered(layers: Iterable[str]) -> list[str]:
    """`conv_3.0`, `conv_3.1`: the gradients of each layer, counted."""
    counts: dict[str, int] = {}
    names = []
    for layer in layers:
        counts[layer] = counts.get(layer, -1) + 1
        names.append(f"{layer}.{counts[layer]}")
    return names


def _accumulated(trace: RankTrace, base: Base) -> list[_Accumulated]:
    """All gradients of the base in the order of the backward pass."""
    host = (base.event != NONE) & ~base.on_device
    units = host_units(trace, np.unique(base.event[host]).tolist())
    origins = find_origins(units.units)
    passes = [
        one
        for one in find_passes(units.units, trace.steps, origins, {}, _updates(base, units))
        if one.gradients
    ]
    ops = _UnitOps(trace, base, units)
    rows = LookedUpRows(trace)
    return [
        gradient
        for updates_before, between in enumerate(_between_updates(passes, ops))
        for gradient in _completed(trace, ops, rows, origins, between, updates_before)
    ]


def _between_updates(passes: Sequence[ForwardPass], ops: _UnitOps) -> list[list[ForwardPass]]:
    """The passes of a step, apart where the optimizer updates parameters in between."""
    by_update = groupby(passes, lambda one: ops.updates_until(one.forward[0].start_s))
    return [list(between) for _, between in by_update]


def _completed(
    trace: RankTrace,
    ops: _UnitOps,
    rows: LookedUpRows,
    origins: Mapping[Unit, Unit],
    passes: Sequence[ForwardPass],
    updates_before: int,
) -> list[_Accumulated]:
    """The gradients of passes that one update follows."""
    counts = {len(one.gradients) for one in passes}
    repeats = len(counts) == 1  # micro-batches accumulate the same gradients
    first_update = ops.first_update(passes[0].forward[0].start_s)
    updated: dict[Unit, Unit] = {}
    for gradient, unit in update_units(passes[-1]):
        updated.setdefault(gradient, unit)
    gradients = []
    for one in passes[-1:] if repeats else passes:
        batches = passes if repeats else [one]
        readers = (passes[0] if repeats else one).gradients
        for place, (unit, reader) in enumerate(zip(one.gradients, readers, strict=True)):
            same = [batch.gradients[place] for batch in batches]
            gradients.append(
                _Accumulated(
                    None
                    if unit.inputs == MISSING
                    else TensorShape.of(trace.op_inputs[unit.inputs]),
                    sum(rows.of(each.lane, each.start_s) for each in same),
                    ops.layer(unit),
                    ops.last_device(unit),
                    ops.first_device(updated.get(unit)) if updated else first_update,
                    ops.first_read(origins.get(reader)),
                    updates_before,
                )
            )
    return gradients


def _updates(base: Base, units: HostUnits) -> set[int]:
    """Events that begin a unit of the optimizer, according to annotations."""
    ops = np.flatnonzero(base.kind == Kind.UPDATE)
    calls = np.where(base.on_device[ops], base.launch[ops], ops)
    events = base.event[calls[calls != NONE]].tolist()
    return {units.of_event[event].event for event in events if event in units.of_event}


class _UnitOps:
    """The ops of units in a base."""

    def __init__(self, trace: RankTrace, base: Base, units: HostUnits) -> None:
        self.base = base
        self.first: dict[Unit, int] = {}
        self.last: dict[Unit, int] = {}
        for op in np.flatnonzero((base.event != NONE) & ~base.on_device).tolist():
            unit = units.of_event.get(int(base.event[op]))
            if unit is not None:
                self.first.setdefault(unit, op)
                self.last[unit] = op
        plain = base.launched[base.kind[base.launched] != Kind.COLLECTIVE]
        self.launched: dict[int, tuple[list[int], IntArray]] = {}
        for queue in np.unique(base.queue[base.launch[plain]]).tolist():
            own = plain[base.queue[base.launch[plain]] == queue]
            own = own[np.argsort(base.launch[own], kind="stable")]
            self.launched[queue] = base.launch[own].tolist(), own
        updates = base.launched[base.kind[base.launched] == Kind.UPDATE]
        calls = base.launch[updates]
        if not len(updates):
            updates = calls = np.flatnonzero((base.kind == Kind.UPDATE) & (base.event != NONE))
        called_s = trace.start_s[base.event[calls]]
        order = np.argsort(called_s, kind="stable")
        self.updates, self.updated_s = updates[order], called_s[order]

    def updates_until(self, at_s: float) -> int:
        """Count the ops of optimizers that are called before a time of the trace."""
        return int(np.searchsorted(self.updated_s, at_s))

    def first_update(self, after_s: float) -> int:
        """The first op of an optimizer behind a time of the trace; else the step's first one."""
        if not len(self.updates):
            return NONE
        return int(self.updates[self.updates_until(after_s) % len(self.updates)])

    def layer(self, unit: Unit) -> str:
        layer = int(self.base.layer[self.first[unit]]) if unit in self.first else NONE
        return "" if layer == NONE else self.base.names.layers[layer]

    def last_device(self, unit: Unit) -> int:
        """The last device op that the thread launches up to the unit's end; else its last op."""
        op = self.last[unit]
        launches, device = self.launched.get(int(self.base.queue[op]), ([], np.empty(0, int)))
        place = bisect.bisect_right(launches, op)
        return int(device[place - 1]) if place else op

    def first_read(self, unit: Unit | None) -> int:
        """The first op that reads a parameter of a forward unit."""
        if unit is not None and recomputes(unit) and unit in self.first:
            layer = int(self.base.layer[self.first[unit]])
            same = self.base.on_device & (self.base.layer == layer) & (layer != NONE)
            return int(np.argmax(same)) if same.any() else NONE
        return self.first_device(unit)

    def first_device(self, unit: Unit | None) -> int:
        """The first device op that the thread launches from the unit on; else its first op."""
        if unit is None or unit not in self.first:
            return NONE
        op = self.first[unit]
        launches, device = self.launched.get(int(self.base.queue[op]), ([], np.empty(0, int)))
        place = bisect.bisect_left(launches, op)
        return int(device[place]) if place < len(device) else op
