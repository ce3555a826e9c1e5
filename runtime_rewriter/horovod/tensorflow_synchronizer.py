"""Plans for the gradients that `horovod.tensorflow.DistributedGradientTape` averages.

The tape (tensorflow_tape.py) reports each gradient to `ready` and takes the averages from `finish`.
It does so inside the script's own graph, whatever the plan, so a switch of plans traces nothing. A
gradient that is None on this rank and not on all counts as zeros.

Plans have no variables whose gradients are rows (`tf.IndexedSlices`). Horovod returns the rows of
all ranks, also those of equal index, and optimizers and norms take each by itself. So Horovod's own
operations average them under every plan.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from autotune.errors import InvalidInput, SynchronizationError
from autotune.strategy_space.plan import Plan
from autotune.workload import Library
from runtime_rewriter.horovod.connection import HorovodConnection
from runtime_rewriter.horovod.tensorflow_messages import TensorflowLanes
from runtime_rewriter.horovod.tensorflow_variables import TensorflowStep, to_numpy, to_torch
from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

AVERAGED_TWICE = (
    "a step must average the gradients of the same variables once, but one does it several times; "
    "add up the losses, and compute all gradients in one tape.gradient()"
)
NO_CROSSING = "tape.gradient() returns the averages, so it waits for all of them"


class GraphRecorder(Protocol):
    """Runs the calls of a step's function, and records some of them.

    `capturing`: the function is being traced for it, with Horovod's own averages.
    """

    @property
    def capturing(self) -> bool: ...

    def run_step(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the results of the function."""


@dataclass(frozen=True)
class TapeSettings:
    """Arguments of `DistributedGradientTape` that matter under a plan."""

    op: Any
    process_set: Any
    sparse_as_dense: bool


@dataclass(frozen=True)
class Switches:
    """Variables that the graphs of steps read: whether a plan is loaded, and whether the local
    gradients are recorded."""

    planned: Any
    recording: Any

    @staticmethod
    def created() -> Switches:
        """Call it outside of a `tf.function`, which is traced once more if it creates variables."""
        with tf.device("CPU:0"):
            return Switches(*(tf.Variable(False, trainable=False) for _ in range(2)))


class TensorflowSynchronizer(GradientSynchronizer):
    """The synchronizer of the variables of a step. `horovod` is the module `horovod.tensorflow`.

    `in_rows`: the step's variables whose gradients are rows. Building one is collective over all
    ranks.
    """

    def __init__(
        self,
        module: TensorflowStep,
        settings: TapeSettings,
        horovod: Any,
        connection: HorovodConnection,
        switches: Switches,
        waits: Timeouts,
        in_rows: Sequence[str] = (),
    ) -> None:
        self._horovod, self._settings, self._connection = horovod, settings, connection
        self.planned, self.recording = switches.planned, switches.recording
        self.missing: frozenset[int] = frozenset()
        """Variables without a gradient on this rank in the first step."""
        self._in_rows = tuple(in_rows)
        self._recorded: dict[int, Any] = {}
        self._reported: set[int] = set()  # in this step
        self.graphs: WeakSet[Any] = WeakSet()
        """The outermost graphs that compute the gradients."""
        self.own_averages: Callable[[list[Any]], list[Any]]
        """Horovod's own averages of gradients, one per variable."""
        with connection.world.as_default():
            super().__init__(
                module,
                timeout_s=waits.message_s,
                agreement_timeout_s=waits.agreement_s,
                refusal_reason=self._refusal_reason,
                emulation_refusal=self._emulation_refusal,
                on_byte_scale=_no_byte_scale,
                lanes=partial(TensorflowLanes, horovod, settings.process_set),
                summed=settings.op == horovod.Sum,
                unused_as_zeros=True,
            )
        self.library = Library.HOROVOD
        self.world = connection.world.as_default
        self.cross_step.conditions.forbidden = NO_CROSSING
        self.records_graph = True
        self.graph_recorder: GraphRecorder | None = None
        self.failure: BaseException | None = None
        """What ended a step inside TensorFlow, which would report it as an error of an
        operation."""

    def _refusal_reason(self) -> str | None:
        if self._settings.op not in (self._horovod.Average, self._horovod.Sum):
            return "the tape was built with an op other than hvd.Average and hvd.Sum"
        return None

    def _emulation_refusal(self) -> str | None:
        if self._in_rows:
            return (
                f"the gradients of {', '.join(self._in_rows[:3])} are rows, which are not "
                "recorded; pass sparse_as_dense=True to hvd.DistributedGradientTape"
            )
        return self._refusal_reason()

    def load(self, plan: Plan | None, *, deferred: bool = False) -> None:
        with self._connection.world.as_default():
            super().load(plan, deferred=deferred)
        packing: Any = self._packing
        packing.write = partial(self._write_anew, packing.write)
        with tf.init_scope():
            self.planned.assign(plan is not None)

    def close(self) -> None:
        with self._connection.world.as_default():
            super().close()
        with tf.init_scope():
            self.planned.assign(False)

    def _hook(self) -> None:
        """The tape calls `ready`: there are no hooks."""

    def _write_anew(
        self,
        write: Callable[[Mapping[int, Tensor | None]], None],
        gradients: Mapping[int, Tensor | None],
    ) -> None:
        """Write averages to new memory: the gradients' own belongs to TensorFlow."""
        write(dict.fromkeys(gradients))

    # -- a step

    def step_starts(self) -> None:
        """Call before the forward pass. Between two instructions of the driver it waits here."""
        with self._connection.world.as_default() if self.boundaries.due else nullcontext():
            self.before_forward(synchronize=True)
        self.gradients_are_due()
        self.forward_starts()

    def gradients_are_due(self) -> None:
        """Call before a step computes its gradients, also if the step before it failed."""
        self._reported.clear()
        self.failure = None

    def backward_starts(self) -> None:
        """Call when the loss has been computed; later calls in a pass do nothing."""
        with self._lock, self._kept_failures():
            self._begin()

    def ready(self, position: int, values: Any) -> None:
        """Call when the gradient of a variable, an array, is final."""
        with self._lock, self._kept_failures():
            self._begin()
            if position in self._reported:
                raise InvalidInput(AVERAGED_TWICE)
            self._reported.add(position)
            self.parameters[position].grad = to_torch(values)
            self._pass.ready(position)

    def finish(self) -> list[Any]:
        """Wait for the averages of all variables, which are arrays."""
        with self._kept_failures():
            self._begin()
            super()._finish()
            averages = [_average(parameter.grad) for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            return averages

    def check_missing(self, missing: frozenset[int]) -> None:
        """Raise `InvalidInput` under a plan if other gradients are None than in the first step.

        Horovod leaves a variable alone whose gradients are None on all ranks. Under a plan no rank
        knows whether they are.
        """
        if missing != self.missing:
            names = ", ".join(self.names[position] for position in missing ^ self.missing)
            with self._kept_failures():
                raise InvalidInput(
                    "under a plan the same gradients must be None in every step of a rank, but "
                    f"those of {names} are not; compute each in every step, from zeros if need be"
                )

    def step_ended(self) -> None:
        """Call when a step without a plan has ended."""
        if self._plan is None:
            self._begun = self._armed = False
            self._end_backward()

    # -- recording of one step

    @contextmanager
    def recording_gradients(self) -> Iterator[dict[int, Any]]:
        """Copies of the local gradients of a step inside: arrays, by position."""
        self._recorded = {}
        self.recording.assign(True)
        try:
            yield self._recorded
        finally:
            self.recording.assign(False)

    def record(self, positions: Sequence[int], arrays: Sequence[Any]) -> None:
        """Keep the gradients of a step."""
        for position, array in zip(positions, arrays, strict=True):
            self._recorded[position] = np.array(array)

    def _begin(self) -> None:
        if self._begun:
            return
        self._check_usable()
        self._begun = True
        self.after_forward(())
        self._pass.begin(())

    def _kept_failures(self) -> _KeptFailures:
        return _KeptFailures(self)


class _KeptFailures:
    """Keeps what a step raises, and disables autograd: threads of TensorFlow run it."""

    def __init__(self, synchronizer: TensorflowSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._no_grad.__exit__(kind, error, trace)
        if error is not None:
            # A refusal on one rank lets messages of others time out, which is no reason.
            self._synchronizer.failure = self._synchronizer.failure or error
            if isinstance(error, SynchronizationError):
                self._synchronizer._broken = str(error)


def _average(gradient: Tensor | None) -> Any:
    assert gradient is not None, "every variable of the plan has an average"
    return to_numpy(gradient)


def _no_byte_scale(byte_scale: float) -> None:
    if byte_scale != 1:
        raise InvalidInput(
            "a byte scale cannot be used with Horovod, whose own operations send whole gradients; "
            "leave out --byte-scale"
        )
