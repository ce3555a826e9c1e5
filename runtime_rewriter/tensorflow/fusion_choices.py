"""Proposes choices of op fusion for a captured graph: sets that pay, and the step with them.

A set pays if its kernel is faster than its ops, one set alone. In a step it can still lose: its
gradients wait for the whole set, and other threads share the cores. So the replay of the predicted
step and trials decide between the choices.

The backward pass with the sets is replayed on one thread, in the order of a traced step. The
measured times are then scaled by replayed with / replayed without sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.workload import Workload
from runtime_rewriter.tensorflow.fused_times import SetTimes, measured_times, shape_inputs
from runtime_rewriter.tensorflow.fusible_sets import (
    FusibleSet,
    Phase,
    concrete_types,
    fusible_sets,
    phase_of_ops,
)
from runtime_rewriter.tensorflow.graph_view import control_inputs
from runtime_rewriter.tensorflow.op_fusion import can_be_kernels
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1

_MICROSECOND_S = 1e-6
_LEAST_SHARE = 0.1
"""Of a phase's time that stays, whatever its sets save: other ops and the executor remain."""


@dataclass(frozen=True)
class FusionProposal:
    """`choices`: from the one that saves most. `report`: what was measured, for people."""

    choices: tuple[OpFusionChoice, ...]
    report: str


Span = tuple[float, float]
"""Start and duration of an op in a traced step, in seconds."""


def propose_fusions(
    running: RunningGraph, batch: Mapping[str, np.ndarray], workload: Workload
) -> FusionProposal:
    """Measure sets of the running graph on this machine. No variable changes.

    `batch`: of all replicas, as a step takes it. `workload`: its profile.
    """
    training, replicas = running.training, len(running.servers.devices)
    shapes = {
        feed.name: (
            (len(batch[feed.name]) // replicas, *batch[feed.name].shape[1:])
            if feed.split
            else batch[feed.name].shape
        )
        for feed in training.feeds
    }
    types = concrete_types(training, shapes)
    sets = fusible_sets(training, types, running.servers.devices[0])
    known = running.values_of([str(one) for one in shape_inputs(training.view, types, sets)], batch)
    values = dict(zip(shape_inputs(training.view, types, sets), known, strict=True))
    times = measured_times(training.view, types, sets, values, running.servers.config)
    metadata = v1.RunMetadata()
    running.only([f"replica_0/{one.values.node}" for one in training.gradients], batch, metadata)
    return choices_of(training, workload, times, spans_of(metadata, 0))


def spans_of(metadata: Any, rank: int) -> dict[str, Span]:
    """Start and duration of the ops of one replica's graph in a traced step."""
    prefix = f"replica_{rank}/"
    spans: dict[str, Span] = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name.startswith(prefix):
                start_s = node.all_start_micros * _MICROSECOND_S
                length_s = node.all_end_rel_micros * _MICROSECOND_S
                spans.setdefault(node.node_name.removeprefix(prefix), (start_s, length_s))
    return spans


def choices_of(
    training: TrainingGraph,
    workload: Workload,
    times: Mapping[FusibleSet, SetTimes],
    spans: Mapping[str, Span],
) -> FusionProposal:
    """All sets that pay; those without a delayed gradient; those of the forward pass.

    `spans`: of the ops up to the gradients.
    """
    paying = _together(training, {one: found for one, found in times.items() if found.pays})
    if not paying:
        return FusionProposal((), _report(times, {}, workload))
    passes = _Passes(training, workload, times, spans)
    prompt = [one for one in paying if one.phase is not Phase.BACKWARD]
    for one in (one for one in paying if one.phase is Phase.BACKWARD):
        if not passes.delays([one]):
            prompt.append(one)
    forward = [one for one in paying if one.phase is Phase.FORWARD]
    named: dict[tuple[FusibleSet, ...], str] = {}
    for name, chosen in (
        ("all sets that pay", paying),
        ("sets that delay no gradient", prompt),
        ("sets of the forward pass", forward),
    ):
        if chosen:
            named.setdefault(tuple(sorted(chosen, key=lambda one: one.ops)), name)
    choices = tuple(passes.choice(name, chosen) for chosen, name in named.items())
    return FusionProposal(choices, _report(times, dict.fromkeys(paying), workload))


def _together(training: TrainingGraph, paying: Mapping[FusibleSet, SetTimes]) -> list[FusibleSet]:
    """The sets that can all be kernels in one graph, preferring those that save most."""
    chosen: list[FusibleSet] = []
    for one in sorted(paying, key=lambda one: (-paying[one].saved_s, one.ops)):
        taken = {op for other in chosen for op in other.ops}
        apart = taken.isdisjoint(one.ops)
        if apart and can_be_kernels(training.view, [other.ops for other in (*chosen, one)]):
            chosen.append(one)
    return chosen


class _Passes:
    """The phases of one replica's step, with and without sets."""

    def __init__(
        self,
        training: TrainingGraph,
        workload: Workload,
        times: Mapping[FusibleSet, SetTimes],
        spans: Mapping[str, Span],
    ) -> None:
        self._training, self._workload, self._times, self._spans = training, workload, times, spans
        phases = phase_of_ops(training)
        self._backward = [
            name
            for name in sorted(spans, key=lambda name: (spans[name][0], name))
            if phases.get(name) is Phase.BACKWARD
        ]
        self._before = self._ends([])

    def choice(self, name: str, sets: Sequence[FusibleSet]) -> OpFusionChoice:
        workload = self._workload
        after = self._ends(sets)
        ready_s = {}
        for variable in workload.variables:
            op = self._training.gradient_of[variable.name].values.node
            if variable.ready_s is not None and self._before.get(op):
                ready_s[variable.name] = variable.ready_s * after[op] / self._before[op]
        last = max(self._before.values(), default=0.0)
        slower = max(after.values()) / last if last else 1.0
        saved = {phase: self._saved_s(sets, phase) for phase in Phase}
        return OpFusionChoice(
            name,
            tuple(one.ops for one in sets),
            sum(self._times[one].saved_s for one in sets),
            _less(workload.forward_s, saved[Phase.FORWARD]),
            max([workload.backward_s * slower, *ready_s.values()]),
            _less(workload.update_s, saved[Phase.UPDATE]),
            ready_s,
        )

    def delays(self, sets: Sequence[FusibleSet]) -> bool:
        """Whether a gradient is ready later than without the sets, though the pass is shorter."""
        after = self._ends(sets)
        gradients = [one.values.node for one in self._training.gradients]
        return any(after[op] > self._before[op] * 1.001 for op in gradients if op in self._before)

    def _saved_s(self, sets: Iterable[FusibleSet], phase: Phase) -> float:
        return sum(self._times[one].saved_s for one in sets if one.phase is phase)

    def _ends(self, sets: Sequence[FusibleSet]) -> dict[str, float]:
        """When each op of the backward pass ends on one thread, from the start of the pass."""
        place = {op: number for number, one in enumerate(sets) for op in one.ops}
        inside = set(self._backward)
        members: dict[object, list[str]] = {}
        for name in self._backward:
            members.setdefault(place.get(name, name), []).append(name)
        of = {name: key for key, names in members.items() for name in names}
        readers: dict[object, set[object]] = {key: set() for key in members}
        waits = dict.fromkeys(members, 0)
        for name in self._backward:
            node = self._training.view.nodes[name]
            sources = {one.node for one in self._training.view.inputs[name]}
            for source in (sources | set(control_inputs(node))) & inside:
                if of[source] != of[name] and of[name] not in readers[of[source]]:
                    readers[of[source]].add(of[name])
                    waits[of[name]] += 1
        turn = {key: number for number, key in enumerate(members)}
        ready = [(turn[key], key) for key, count in waits.items() if count == 0]
        heapq.heapify(ready)
        now_s, ends = 0.0, dict.fromkeys(self._backward, 0.0)
        while ready:
            _, key = heapq.heappop(ready)
            length_s = sum(self._spans[name][1] for name in members[key])
            if isinstance(key, int):
                length_s /= max(self._times[sets[key]].ratio, 1.0)
            now_s += length_s
            for name in members[key]:
                ends[name] = now_s
            for reader in readers[key]:
                waits[reader] -= 1
                if waits[reader] == 0:
                    heapq.heappush(ready, (turn[reader], reader))
        return ends


def _less(phase_s: float, saved_s: float) -> float:
    return max(phase_s - saved_s, _LEAST_SHARE * phase_s)


def _report(
    times: Mapping[FusibleSet, SetTimes], paying: Mapping[FusibleSet, None], workload: Workload
) -> str:
    if not times:
        return "op fusion: the graph has no set of ops worth measuring"
    if not paying:
        best = max(found.ratio for found in times.values())
        return (
            f"op fusion: none of {len(times)} sets of ops is faster as one kernel "
            f"(the best: {best:.2f} times)"
        )
    saved_s = sum(times[one].saved_s for one in paying)
    apart_s = sum(float(np.median(times[one].apart_s)) for one in paying)
    return (
        f"op fusion: {len(paying)} of {len(times)} sets of ops are faster as one kernel, "
        f"together {1e3 * saved_s:.1f} of {1e3 * apart_s:.1f} ms, in a step that computes for "
        f"{1e3 * workload.compute_s:.0f} ms"
    )
