"""Records the gradients and further sums of a real step, for emulated accelerators to play."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

from autotune.errors import InvalidInput
from autotune.workload import Variable
from runtime_rewriter.mirrored.local_variables import local_variable

_GATHER = "_all_gather"
_REFUSED = "accelerators cannot be emulated"


@dataclass(frozen=True)
class RecordedRows:
    """Variables of the rows of a sparse gradient."""

    values: Any
    indices: Any
    shape: tuple[int, ...]

    def read(self) -> Any:
        shape = tf.constant(self.shape, tf.int64)
        return tf.IndexedSlices(self.values.read_value(), self.indices.read_value(), shape)


class RecordedStep:
    """What a step of one kind of batch has computed on this worker.

    `gradients`: copies of the local ones, by variable. `further`: those of the sums that the step
    makes after them, such as that of its loss. `results`: what the call returned. `problem`: why
    the step cannot be played.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, Any] = {}
        self.further: list[Any] = []
        self.results: Any = None
        self.problem: InvalidInput | None = None
        self._summing = False

    @contextmanager
    def summing(
        self, variables: Sequence[Variable], gradients: Mapping[str, Any]
    ) -> Iterator[None]:
        """Called while the step is traced, around the sums of the gradients of `variables`."""
        for one in variables:
            gradient = gradients[one.name]
            if isinstance(gradient, tf.IndexedSlices):
                values, indices = _copied(gradient.values), _copied(gradient.indices)
                self.gradients[one.name] = RecordedRows(values, indices, one.shape)
            else:
                self.gradients[one.name] = _copied(gradient)
        self._summing = True
        yield
        self._summing = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, note the collectives of a step that is traced."""
        own = {name: getattr(CollectiveReplicaLauncher, name) for name in ("all_reduce", _GATHER)}
        for name, original in own.items():
            setattr(CollectiveReplicaLauncher, name, self._noted(name, original))
        try:
            yield
        finally:
            for name, original in own.items():
                setattr(CollectiveReplicaLauncher, name, original)

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def collective(launcher: Any, tensor: Any, *rest: Any) -> Any:
            if not self._summing and not tf.executing_eagerly():
                self._note(name, tensor)
            return original(launcher, tensor, *rest)

        return collective

    def _note(self, name: str, tensor: Any) -> None:
        if not self.gradients:
            self.problem = InvalidInput(
                f"{_REFUSED}: the step has transfers of its own before its gradients are summed, "
                "as synchronized statistics have; keep statistics on each worker"
            )
        elif name == _GATHER:
            self.problem = InvalidInput(
                f"{_REFUSED}: the step gathers values of all workers; move that out of the "
                "tf.function"
            )
        else:
            self.further.append(_copied(tensor))


def _copied(tensor: Any) -> Any:
    """A variable that the traced step sets to the tensor's value."""
    held = local_variable(tensor.dtype, list(tensor.shape))
    held.assign(tensor)
    return held
