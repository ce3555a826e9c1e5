"""Emulated accelerators: timed waits instead of a step's computation, and real sums.

The first call for each kind of batch runs, and its local gradients are recorded. Later calls return
its results and play the step: the gradients are handed to the sums at the times of the profile. The
waits are those of `runtime_rewriter.tensorflow.emulation`. Variables keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import groupby
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.mirrored.kept_traces import KeptTraces
from runtime_rewriter.mirrored.recorded import RecordedRows, RecordedStep
from runtime_rewriter.mirrored.script_sums import ScriptSums
from runtime_rewriter.tensorflow.emulation import waited

MOST_RECORDED_STEPS = 32
"""Each holds a copy of all gradients."""
Sums = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class MirroredAccelerator:
    """Plays the steps of one worker. `overrun`: see `Accelerator`."""

    def __init__(self, timetable: Timetable, script_sums: ScriptSums) -> None:
        self._timetable, self._script_sums = timetable, script_sums
        self._recorded: dict[Hashable, RecordedStep] = {}
        self._steps = KeptTraces()
        self.overrun = 0.0

    def recorded(self, kind: Hashable) -> RecordedStep | None:
        """The step that was recorded for a kind of batch."""
        return self._recorded.get(kind)

    def add(self, kind: Hashable, recorded: RecordedStep) -> None:
        """Play this step from now on. Raises `InvalidInput` if that is not possible."""
        if recorded.problem is not None:
            raise recorded.problem
        if len(self._recorded) == MOST_RECORDED_STEPS:
            raise InvalidInput(
                f"accelerators are emulated for at most {MOST_RECORDED_STEPS} kinds of batches, "
                "but the step's arguments have more shapes or values; pad batches to few shapes"
            )
        timed, computed = {name for name, _ in self._timetable.ready}, set(recorded.gradients)
        if timed != computed:
            raise InvalidInput(
                "a profile must be of the running model, but they differ in "
                f"{', '.join(sorted(timed ^ computed)[:3])}; leave --profile out to measure it"
            )
        self._recorded[kind] = recorded

    def play(self, recorded: RecordedStep, plan: Plan | None, gated: bool, sums: Sums) -> None:
        """Play a step. `sums`: those of the step under `plan`, with the gate if it is `gated`."""

        def build() -> Any:
            return tf.function(lambda: self._played(recorded, sums), autograph=False)

        step = self._steps.get(plan, (id(recorded), gated), build)
        self.overrun = float(step()) / self._timetable.compute_s

    def _played(self, recorded: RecordedStep, sums: Sums) -> Any:
        """Return the largest lateness of the waits, in seconds."""
        late: list[Any] = []

        def wait(start: Any, seconds: float) -> Any:
            end, late_s = waited(start, seconds)
            late.append(late_s)
            return end

        table, ready = self._timetable, dict[str, Any]()
        start = tf.timestamp()
        before = wait(start, table.forward_s)
        backward_start = start + table.forward_s
        for ready_s, group in groupby(table.ready, key=lambda pair: pair[1]):
            with tf.control_dependencies([before]):
                before = wait(backward_start, ready_s)
            with tf.control_dependencies([before]):
                ready |= {name: _read(recorded.gradients[name]) for name, _ in group}
        with tf.control_dependencies([before]):
            computed = wait(backward_start, table.backward_s)
        arrived = sums({name: ready[name] for name in recorded.gradients})
        with tf.control_dependencies([computed, *tf.nest.flatten(list(arrived.values()), True)]):
            update_start = tf.timestamp()
            further = [self._summed(one.read_value()) for one in recorded.further]
        with tf.control_dependencies(further):
            wait(update_start, table.update_s)
        return tf.reduce_max(tf.stack(late))

    def _summed(self, tensor: Any) -> Any:
        script = self._script_sums
        return script.launcher.all_reduce(tensor, None, script.options)


def _read(held: Any) -> Any:
    return held.read() if isinstance(held, RecordedRows) else held.read_value()
