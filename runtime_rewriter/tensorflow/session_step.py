"""The step of a script in a session of its process, as the script computes it on one device.

Only sessions return the partitions of a graph, and the times of ops that end in another thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan
from runtime_rewriter.tensorflow.batch_kinds import batch_kind
from runtime_rewriter.tensorflow.capture import CapturedStep, capture_step, untraced
from runtime_rewriter.tensorflow.gradient_marks import Marks
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.local_device import LocalDevice
from runtime_rewriter.tensorflow.recording.recorder import StepRecording
from runtime_rewriter.tensorflow.running import RunningGraph

STEP_TIMEOUT_S = 600.0
REFUSED = "the step cannot be recorded"


class SessionStep:
    """A captured function and its session. `marks`: those in force around the capture, if any.

    Variables start from the script's values; `running` has them from then on. `threads`: between
    the ops of a step, 0 for as many as cores.
    """

    def __init__(
        self,
        function: Any,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        marks: Marks | None = None,
    ) -> None:
        self._function = function
        self._kind = batch_kind((arguments, named), REFUSED)
        self.name: str = getattr(function, "__name__", "train_step")
        given, by_name = tf.nest.map_structure(_spec, (list(arguments), dict(named)))
        self.captured: CapturedStep = capture_step(untraced(function), given, by_name, marks)
        device = LocalDevice()
        self.threads: int = device.config.intra_op_parallelism_threads
        training = self.captured.training
        # the step synchronizes its gradients itself, or not at all: the rewriter has none to send
        self.running = RunningGraph(replace(training, gradients=()), device, STEP_TIMEOUT_S)
        self.running.load(Plan(workload_of(training, self.name).id, 1, ()))

    def run(
        self,
        recording: StepRecording,
        function: Any,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
    ) -> list[np.ndarray]:
        """Run a call as `recording` decides; return the fetches."""
        kind = batch_kind((arguments, named), REFUSED)
        if function is not self._function or kind != self._kind:
            raise InvalidInput(
                f"{REFUSED}: every step must call one function with arguments of one shape, but a "
                f"call differs from the first one ({self.name}); drop smaller batches, and record "
                "one function"
            )
        needed = {feed.name for feed in self.running.training.feeds}
        pairs = zip(self.captured.arguments, _arrays(function, arguments, named), strict=True)
        values = {name: value for name, value in pairs if name in needed}

        def run_step(options: Any, metadata: Any) -> list[np.ndarray]:
            wanted = recording.further_fetches(self.captured.training.row_indices(0))
            results, rows = self.running.observed_step(values, metadata, wanted, options)
            recording.note_rows(rows)
            return results

        return recording.step(run_step)


def _spec(value: Any) -> Any:
    if isinstance(value, tf.Tensor | np.ndarray | np.generic):
        return tf.TensorSpec(value.shape, value.dtype)
    return value


def _arrays(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[np.ndarray]:
    """The tensors among the arguments, in the order of the function's parameters."""
    bound = inspect.signature(function.python_function).bind(*arguments, **named)
    flat = tf.nest.flatten(list(bound.arguments.values()), expand_composites=True)
    return [np.asarray(one) for one in flat if isinstance(_spec(one), tf.TensorSpec)]
