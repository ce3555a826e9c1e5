"""Finds the variables that the script itself reads between two steps.

An average of all parameters, a logged norm, an evaluation or `zero_grad(set_to_none=False)` reads
variables outside the forward pass, the backward pass and `step()`. Under a plan that crosses the
step, such a read waits for its variable's update. Reads are noticed exactly as `cross_step` notices
them, but nothing is deferred here. A variable also counts as read where `cross_step` would not
defer it, or would flush it: with an alias, at the end of the backward pass; with a state that the
script holds, at `step()`.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime_rewriter.pytorch.aliases import COUNTS_ALIASES, aliased, state_is_held
from runtime_rewriter.pytorch.gradient_operations import GradientOperations
from runtime_rewriter.pytorch.optimizer_guard import guard, unguard
from runtime_rewriter.pytorch.reads import can_watch, script_compiles, unwatch, watch
from runtime_rewriter.pytorch.unseen_calls import UnseenFunctions, UnseenModules


class ScriptReads:
    """Calls `on_read(position)` at the first read of each variable after `begin`, until `end`."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        on_read: Callable[[int], None],
        operations: Callable[[int, Tensor], GradientOperations | None],
    ) -> None:
        """`operations(position, gradient)`: carry out norms and scaling, which are no reads."""
        self._parameters, self._report = parameters, on_read
        self._operations = operations
        self._unread: set[int] = set()
        self._watched: dict[int, list[Tensor]] = {}
        self._guarded: list[Optimizer] = []
        identities = {id(parameter) for parameter in parameters}
        self._modules = UnseenModules(identities, lambda _: self._all_read())
        self._functions = UnseenFunctions(self._all_read)

    def begin(self) -> None:
        """Call when all gradients are final."""
        self.end()
        if script_compiles() or not COUNTS_ALIASES:  # then nothing crosses the step
            return
        self._unread = set(range(len(self._parameters)))
        with DisableTorchFunctionSubclass():  # looking for aliases is no read of the script's
            self._read_at_once()
        self._watch()
        self._modules.watch()
        self._functions.watch()

    def end(self) -> None:
        """Call at the next forward pass."""
        self._unwatch(tuple(self._watched))
        self._unread.clear()
        self._modules.stop()
        self._functions.stop()
        for optimizer in self._guarded:
            unguard(optimizer)
        self._guarded.clear()

    def step_begins(self, optimizer: Optimizer, numbers: Collection[int]) -> None:
        """Call before a step, which reads the parameters with these identities."""
        self._unwatch(tuple(self._watched))
        for position in tuple(self._unread):
            parameter = self._parameters[position]
            if id(parameter) in numbers and state_is_held(optimizer, parameter):
                self._read(position)

    def step_ended(self, optimizer: Optimizer) -> None:
        self._watch()
        if self._unread:
            guard(optimizer, self._all_read)
            self._guarded.append(optimizer)

    def _read_at_once(self) -> None:
        """Report the variables with an alias of their parameter or gradient."""
        gradients = {
            position: parameter.grad
            for position, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }
        tensors: Mapping[int, Tensor]
        for tensors in (dict(enumerate(self._parameters)), gradients):
            positions = tuple(tensors)
            for place in aliased([tensors[position] for position in positions]):
                self._read(positions[place])

    def _watch(self) -> None:
        with DisableTorchFunctionSubclass():
            for position in self._unread:
                parameter = self._parameters[position]
                on_read = partial(self._on_read, position)
                tensors: list[Tensor] = []
                if can_watch(parameter):
                    watch(parameter, on_read)
                    tensors.append(parameter)
                gradient = parameter.grad
                if gradient is not None and can_watch(gradient):
                    watch(gradient, on_read, self._operations(position, gradient))
                    tensors.append(gradient)
                self._watched[position] = tensors

    def _unwatch(self, positions: Sequence[int]) -> None:
        for position in positions:
            for tensor in self._watched.pop(position, ()):
                unwatch(tensor)

    def _on_read(self, position: int, _: Tensor) -> None:
        self._read(position)

    def _read(self, position: int) -> None:
        if position in self._unread:
            self._unread.discard(position)
            self._report(position)
        self._unwatch((position,))

    def _all_read(self) -> None:
        for position in tuple(self._unread):
            self._read(position)
        self._modules.stop()
        self._functions.stop()
