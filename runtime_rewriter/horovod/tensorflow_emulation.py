"""Emulated accelerators for TensorFlow steps under Horovod: timed waits replace a step's function.

The first call for each signature of the arguments runs and is recorded: its results, and the local
gradients of this rank. Later calls return these results. They hand out the recorded gradients at
the times of the profile: to the loaded plan, or to Horovod's own operations in a graph of their
own. The times are those of `runtime_rewriter.pytorch.emulation`. Variables keep their values.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.horovod.tensorflow_synchronizer import TensorflowSynchronizer
from runtime_rewriter.horovod.tensorflow_tape import OWN_BRANCH
from runtime_rewriter.pytorch.emulation import MOST_RECORDED_PASSES, EmulatedAccelerator
from runtime_rewriter.tensorflow.batch_kinds import batch_kind

_LOCAL = ("Size", "Rank", "Included")
"""Ends of the names of Horovod's operations that send nothing."""


@dataclass(frozen=True)
class _RecordedStep:
    """Results, and the local gradient of each variable that has one, an array."""

    results: Any
    gradients: Mapping[int, Any]


class TensorflowAccelerator(EmulatedAccelerator):
    """Plays the functions that compute the synchronizer's gradients."""

    def __init__(self, synchronizer: TensorflowSynchronizer, timetable: Timetable | None) -> None:
        super().__init__(synchronizer, timetable)
        self._of_tensorflow = synchronizer
        self._recorded_steps: dict[Hashable, _RecordedStep] = {}
        self._baselines: dict[Hashable, Callable[[], Any]] = {}
        self._backward_start_s = 0.0

    def run_step(self, function: Any, call: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """Play the call of a step's function if one with this signature was recorded; else run
        it."""
        now_s = self._of_tensorflow.device.now_s()
        self._step_start_s = self._step_start_s or now_s
        self._in_backward = False
        key = (id(function), batch_kind(arguments))
        recorded = self._recorded_steps.get(key)
        if recorded is None:
            return self._recorded_step(key, call)
        start_s = self.backward_begins(self._timetable)
        self._backward_start_s = start_s
        if self._of_tensorflow.plan is None:
            if key not in self._baselines:
                self._baselines[key] = self._baseline(recorded)
            self._baselines[key]()
        else:
            self._play_plan(recorded)
        return recorded.results

    def _recorded_step(self, key: Hashable, call: Callable[[], Any]) -> Any:
        synchronizer = self._of_tensorflow
        synchronizer.mark_unclean()
        if len(self._recorded_steps) == MOST_RECORDED_PASSES:
            raise InvalidInput(
                f"accelerators are emulated for at most {MOST_RECORDED_PASSES} kinds of batches, "
                "but the step's arguments have more shapes; pad batches to few shapes"
            )
        with synchronizer.recording_gradients() as gradients:
            results = call()
        foreign = [name for graph in synchronizer.graphs for name in _transfers_in(graph)]
        if foreign:
            raise InvalidInput(
                "accelerators cannot be emulated: the step has transfers of its own "
                f"({foreign[0]}); move them out of the tf.function"
            )
        if gradients:  # else the call computed none, in a branch, say
            self._recorded_steps[key] = _RecordedStep(results, dict(gradients))
        return results

    def _play_plan(self, recorded: _RecordedStep) -> None:
        synchronizer = self._of_tensorflow
        synchronizer.backward_starts()
        for positions, ready_s in self._handed_out:
            self._wait_after(ready_s)
            for position in positions:
                if position in recorded.gradients:
                    synchronizer.ready(position, recorded.gradients[position])
        if self._timetable is not None:
            self._wait_after(self._timetable.backward_s)
        synchronizer.finish()

    def _wait_after(self, after_s: float) -> None:
        if self._timetable is not None:
            self.wait_in_backward(self._backward_start_s + after_s)

    def _baseline(self, recorded: _RecordedStep) -> Callable[[], Any]:
        """Horovod's own operations on the gradients, as the waits hand them out."""
        synchronizer = self._of_tensorflow

        def hand_out(positions: Sequence[int], ready_s: float) -> list[Any]:
            arrays = [recorded.gradients[position].copy() for position in positions]
            self._wait_after(ready_s)
            return arrays

        def end() -> Any:
            if self._timetable is not None:
                self._wait_after(self._timetable.backward_s)
            return tf.int32.as_numpy_dtype(0)

        def played() -> list[Any]:
            gradients: list[Any] = [None] * len(synchronizer.parameters)
            for due, ready_s in self._handed_out:
                positions = [position for position in due if position in recorded.gradients]
                kinds = [recorded.gradients[position].dtype for position in positions]
                if not positions:
                    continue
                # It has state: these functions run one after the other, in the order written here.
                tensors = tf.numpy_function(partial(hand_out, positions, ready_s), [], kinds)
                for position, tensor in zip(positions, tensors, strict=True):
                    tensor.set_shape(recorded.gradients[position].shape)
                    gradients[position] = tensor
            averages = synchronizer.own_averages(gradients)
            return [tf.numpy_function(end, [], tf.int32), *averages]

        function: Callable[[], Any] = tf.function(played, autograph=False)
        return function


def _transfers_in(graph: Any) -> Iterator[str]:
    """Operations of Horovod in the graph of a step, besides those that average its gradients."""
    definition = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in definition.library.function}
    seen: set[str] = set()
    pending = [definition.node]
    while pending:
        for node in pending.pop():
            if node.op.startswith("Horovod") and not node.op.endswith(_LOCAL):
                yield node.name
            for attribute in node.attr.values():
                for name in (attribute.func.name, *(one.name for one in attribute.list.func)):
                    if name in functions and name not in seen and OWN_BRANCH not in name:
                        seen.add(name)
                        pending.append(functions[name])
