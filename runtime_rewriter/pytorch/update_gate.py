"""The second numerics gate: updates that cross the step against updates within it.

The gradient gate compares gradients. This one compares what becomes of them: for a few steps, every
deferred update is repeated on copies of the variables, their averaged gradients and their
optimizer state by torch's own `step()`, with the hyperparameters that the script's optimizer had at
its call. Parameters and state must agree bit for bit, no buffer may change, and
every update that became due must have been applied exactly once by the end of the forward pass.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime_rewriter.pytorch.optimizer_guard import attributes_of
from runtime_rewriter.pytorch.updates import Averaged, DueUpdate, unhooked_step, updating_class


class UpdateGate:
    """Checks the deferred updates of the variables with these `names` over `steps` steps.

    Build it with nothing pending. `buffers` returns the module's buffers. It costs copies of the
    variables and their state.
    """

    def __init__(
        self, names: Sequence[str], buffers: Callable[[], Sequence[Tensor]], steps: int
    ) -> None:
        self._names, self._buffers = names, buffers
        self._steps_left = steps
        # By identity of the update: the hyperparameters of each parameter group at `step()`.
        self._hyperparameters: dict[int, tuple[dict[str, Any], ...]] = {}
        self._due: Counter[int] = Counter()
        self._before: dict[int, tuple[Tensor, Tensor, dict[int, Any]]] = {}
        self._buffers_before: list[Tensor] = []
        self.checked = 0
        """Updates of single variables that were compared."""
        self.mismatch: str | None = None
        """What differs, by the first variable found."""

    @property
    def active(self) -> bool:
        return self._steps_left > 0

    def step_called(self, update: DueUpdate, positions: Sequence[int]) -> None:
        """The script's `step()` has left `update` for the variables at `positions`."""
        if self.active:
            self._due.update(positions)
            self._hyperparameters[id(update)] = tuple(
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                for group in update.optimizer.param_groups
            )

    def before_updates(
        self, averaged: Mapping[int, Averaged], due: Mapping[int, Sequence[tuple[DueUpdate, int]]]
    ) -> None:
        """Copy all that the updates `due` of these variables read."""
        if not self.active:
            return
        self._buffers_before = [buffer.clone() for buffer in self._buffers()]
        self._before = {}
        for position, (parameter, gradient) in averaged.items():
            optimizers = {id(update.optimizer): update.optimizer for update, _ in due[position]}
            self._before[position] = (
                parameter.detach().clone(),
                gradient.detach().clone(),
                {key: _state(optimizer, parameter) for key, optimizer in optimizers.items()},
            )

    def after_updates(
        self, averaged: Mapping[int, Averaged], due: Mapping[int, Sequence[tuple[DueUpdate, int]]]
    ) -> None:
        """Compare the variables and their state with `step()` on the copies."""
        if not self.active:
            return
        for position, (parameter, _) in averaged.items():
            value, gradient, states = self._before[position]
            reference = Parameter(value, requires_grad=parameter.requires_grad)
            reference.grad = gradient
            for update, group in due[position]:
                key = id(update.optimizer)
                states[key] = self._step_on_copies(update, group, reference, states[key])
                self._due[position] -= 1
                self.checked += 1
            self._compare(position, "parameter", parameter, reference)
            for update, _ in due[position]:
                state = _state(update.optimizer, parameter)
                self._compare(position, "optimizer state", state, states[id(update.optimizer)])
        for before, now in zip(self._buffers_before, self._buffers(), strict=True):
            if not _same(before, now):
                self._found("a deferred update changed a buffer of the model")
        self._before, self._buffers_before = {}, []

    def step_ended(self) -> None:
        """Everything has been flushed, at the end of the forward pass after the step."""
        if not self.active:
            return
        for position, count in self._due.items():
            if count:
                times = "never applied" if count > 0 else "applied more than once"
                self._found(f"a deferred update of {self._names[position]!r} was {times}")
        if self._hyperparameters:
            self._steps_left -= 1
        self._due.clear()
        self._hyperparameters.clear()

    def _step_on_copies(
        self, update: DueUpdate, group: int, reference: Parameter, state: dict[str, Any]
    ) -> dict[str, Any]:
        hyperparameters = self._hyperparameters[id(update)]
        kind = updating_class(update.optimizer)
        optimizer: Any = kind.__new__(kind)
        attributes_of(optimizer).update(attributes_of(update.optimizer))
        attributes_of(optimizer)["state"] = type(attributes_of(update.optimizer)["state"])(dict)
        if state:
            optimizer.state[reference] = state
        optimizer.param_groups = [{**hyperparameters[group], "params": [reference]}]
        with update.modes():
            unhooked_step(kind)(optimizer)
        result: dict[str, Any] = optimizer.state.get(reference, {})
        return result

    def _compare(self, position: int, what: str, mine: Any, reference: Any) -> None:
        if not _same(mine, reference):
            self._found(
                f"the deferred update of {self._names[position]!r} left another {what} than the "
                "same update within the step"
            )

    def _found(self, problem: str) -> None:
        self.mismatch = self.mismatch or problem


def _state(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    states: Any = attributes_of(optimizer)["state"]
    return copy.deepcopy(states[parameter]) if parameter in states else {}


def _same(a: Any, b: Any) -> bool:
    """Whether both hold the same bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = a.detach().contiguous(), b.detach().contiguous()
        return a.numel() == 0 or torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)
