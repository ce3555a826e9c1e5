"""Keeps a program's own variables equal to those on the servers, whenever the program uses them.

Steps update the servers' variables only. A program reads and writes its own ones between steps: it
evaluates, writes checkpoints, changes the learning rate. So its first use of a variable after a
step fetches the present value, and what it has changed is sent before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import eager_mode
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from runtime_rewriter.tensorflow.running import RunningGraph

HANDLE = "_handle"


class ProgramVariables:
    """The program's variables by their names in the training graph."""

    def __init__(self, variables: Mapping[str, Any], running: RunningGraph) -> None:
        names = {one.name for one in running.training.variables}
        self._variables = {name: one for name, one in variables.items() if name in names}
        self._by_handle = {id(_handle(one)): name for name, one in self._variables.items()}
        self._running = running
        self._outdated: set[str] = set()
        self._lent: dict[str, np.ndarray] = {}

    def stepped(self) -> None:
        """Note that a step has changed the servers' variables."""
        self._outdated = set(self._variables)

    def used(self, handles: Iterable[int]) -> None:
        """Bring the variables with these ids of handles up to date, as the program uses them."""
        names = {self._by_handle[handle] for handle in handles if handle in self._by_handle}
        if not names:
            return
        for name, value in self._running.fetch(names & self._outdated).items():
            self._lent[name] = value
            _assign(self._variables[name], np.array(value))
        self._outdated -= names
        for name in names - self._lent.keys():
            self._lent[name] = _read(self._variables[name])

    def use_all(self) -> None:
        """Bring all variables up to date, unless the servers' graph is gone."""
        if self._running.graph is not None:
            self.used(list(self._by_handle))

    def send_changes(self) -> bool:
        """Send what the program has changed since the last step; return whether it used any."""
        present = {name: _read(self._variables[name]) for name in self._lent}
        self._running.send(
            {
                name: value
                for name, value in present.items()
                if not np.array_equal(value, self._lent[name])
            }
        )
        used, self._lent = bool(self._lent), {}
        return used

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, each use is noticed: by Python, and by functions that were traced before.

        TensorFlow's compiled code takes the attribute `_handle` of a variable itself.
        """
        own_call = ConcreteFunction._call_flat

        def handle(variable: Any) -> Any:
            resource = _handle(variable)
            self.used([id(resource)])
            return resource

        def set_handle(variable: Any, value: Any) -> None:
            vars(variable)[HANDLE] = value

        def call_flat(function: Any, inputs: Any, captured_inputs: Any) -> Any:
            self.used(map(id, captured_inputs))
            return own_call(function, inputs, captured_inputs)

        setattr(BaseResourceVariable, HANDLE, property(handle, set_handle))
        ConcreteFunction._call_flat = call_flat
        try:
            yield
        finally:
            delattr(BaseResourceVariable, HANDLE)
            ConcreteFunction._call_flat = own_call


def _handle(variable: Any) -> Any:
    """The handle, without a notice."""
    return vars(variable)[HANDLE]


def _read(variable: Any) -> np.ndarray:
    with eager_mode():  # at once, also while a function is traced or a SavedModel is written
        value = tf.raw_ops.ReadVariableOp(resource=_handle(variable), dtype=variable.dtype)
        return np.array(value)  # a copy: the program may update the variable in place


def _assign(variable: Any, value: np.ndarray) -> None:
    with eager_mode():
        tf.raw_ops.AssignVariableOp(
            resource=_handle(variable), value=tf.constant(value, variable.dtype)
        )
