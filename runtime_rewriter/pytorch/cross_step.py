"""Synchronization and update that run into the next forward pass, exactly.

When the backward pass ends under a plan with `cross_step`, messages may still be under way. From
then on each variable and its gradient are watched (`reads`). `step()` only notes the due update and
its hyperparameters. The first read of the variable waits for its messages, writes the averaged
gradient and applies the update. A forward pass, a checkpoint or a norm therefore reads the same
values as without. So are reads of the optimizer's state (`optimizer_guard`). What cannot be watched
is flushed before (`unseen_calls`) or does not cross the step (`crossing_conditions`). Everything is
flushed at the end of a forward pass at the latest, before the messages' buffers are filled again,
and before a process forks.

ByteScheduler (SOSP 2019) and P3 (SysML 2019) cross the step in the same way. The order is the
plan's.

A plan with `results` serves scripts that clip by the global norm: the norms are known before the
averages, and gradients under way answer with them (`scaled_gradients`).
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn import Parameter
from torch.optim import Optimizer

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.aliases import state_is_held
from runtime_rewriter.pytorch.crossing_conditions import CrossingConditions
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.norms import GradientNorms, NormExchange
from runtime_rewriter.pytorch.optimizer_guard import guard, unguard
from runtime_rewriter.pytorch.process_hooks import (
    OWN_HOOKS,
    flush_all_synchronizers,
    register,
    unregister,
    updates_are_due,
)
from runtime_rewriter.pytorch.reads import outside_modes, unwatch, watch
from runtime_rewriter.pytorch.scaled_gradients import AnsweringGradients, ScaledGradient
from runtime_rewriter.pytorch.script_reads import ScriptReads
from runtime_rewriter.pytorch.signal_handlers import SignalHandlers
from runtime_rewriter.pytorch.under_way import Arriving, MessagesUnderWay
from runtime_rewriter.pytorch.unseen_calls import UnseenFunctions, UnseenModules
from runtime_rewriter.pytorch.update_gate import UpdateGate
from runtime_rewriter.pytorch.updates import (
    Averaged,
    DueUpdate,
    apply_in_turns,
    coupling_reason,
    group_numbers,
)


@dataclass(slots=True)
class _Pending:
    """A variable whose average or update is still to come.

    `gradient`: this rank's own, into which the average is written. `due`: updates, each with the
    number of the variable's parameter group. `scaled`: what the script has done with the gradient.
    """

    gradient: Tensor | None
    scaled: ScaledGradient | None = None
    due: list[tuple[DueUpdate, int]] = field(default_factory=list)


class CrossStepUpdates:
    """Pending averages and updates of one synchronizer's variables.

    `write(gradients)` copies arrived averages into the gradients of positions; None: into a new
    `.grad`. An object lives as long as its synchronizer, since it examines the script's optimizers
    from their first step on. A forward pass under each plan finds the variables whose reads cannot
    be detected. Their messages do not cross the step: the backward pass waits for them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        device: Device,
        write: Callable[[Mapping[int, Tensor | None]], None],
    ) -> None:
        self._parameters, self._device, self._write = parameters, device, write
        self._stream = device.stream()
        self._position_of = {
            id(parameter): position for position, parameter in enumerate(parameters)
        }
        self._pending: dict[int, _Pending] = {}
        # Gradients that a running step() must not see: their updates were put off.
        self._stashed: dict[int, Tensor] = {}
        # Gradients withheld from a running step(), since an accelerator emulates its update.
        self._withheld: dict[int, Tensor] = {}
        self.updates_played = False
        """The emulated accelerator plays the updates, too: optimizers find no gradients."""
        self._under_way = MessagesUnderWay()
        self._answering = AnsweringGradients(self._wait_for_norms)
        self.conditions = CrossingConditions(parameters)
        self._on_reads = [partial(self._on_read, position) for position in range(len(parameters))]
        self._lock = RLock()
        self.gate: UpdateGate | None = None
        """Compares updates that cross the step with updates within it, while set."""
        self.script_reads: ScriptReads | None = None
        """Finds what the script reads between two steps, while set; nothing is deferred then."""
        self.before_wait: Callable[[Sequence[int]], None] | None = None
        """Called with pending variables before a wait for their messages."""
        self.waited_s = 0.0
        """Seconds that all reads have waited for messages so far."""
        # The number of updates of single variables that are due, of each optimizer.
        self._due: Counter[Optimizer] = Counter()
        self._stepping: Optimizer | None = None  # the optimizer whose step() runs
        self.outer: Optimizer | None = None
        """An optimizer whose step() synchronizes and then calls step() of its base class, which
        alone updates."""
        self._inside_outer = False
        self.check_step: Callable[[Mapping[int, int]], None] | None = None
        """Called before a step of an optimizer with the identities of its parameters; may raise."""
        ours = self._position_of.keys()
        self._modules = UnseenModules(ours, lambda _: self.flush())
        self._functions = UnseenFunctions(self.flush)
        self._handlers = SignalHandlers(self.flush, lambda: self._lock)
        register(self)

    @property
    def broken(self) -> str | None:
        """The error that a wait for a message raised."""
        return self._under_way.broken

    def enable(
        self, messages_of: Sequence[Sequence[Arriving]] | None, norms: NormExchange | None = None
    ) -> None:
        """Set the messages of each variable under a plan that crosses the step; None: any other.

        `norms`: those that a plan with `results` sends. Call it between two steps, with nothing
        pending.
        """
        self._answering.load(norms)
        self._under_way.plan(messages_of or ())
        self.conditions.load(enabled=messages_of is not None, norms=norms is not None)

    def close(self) -> None:
        unregister(self)

    # -- forward

    def forward_begins(self, observable: bool = True) -> None:
        """`observable`: the module itself computes; otherwise its emulation reads the variables."""
        self._end_interrupted_step()
        self._answering.end()
        self._inside_outer = False
        self._modules.stop()
        self.conditions.forward_begins(observable)

    def forward_ended(self) -> None:
        """Call before the backward pass, which fills the messages' buffers again."""
        self.flush()
        if self.gate is not None:
            self.gate.step_ended()
        self.conditions.forward_ended()

    # -- backward

    def backward_ended(self, gradients_final: bool) -> None:
        """`gradients_final`: nothing is pending."""
        if gradients_final:
            self.conditions.script.gradients_final()

    def defer(self, messages: Sequence[Arriving], positions: Iterable[int]) -> None:
        """Leave the messages, all under way, and the averages of `positions` to the next step."""
        with self._lock:
            self._stashed.clear()
            self._answering.end()
            self._stream = self._device.stream()
            self._under_way.begin(messages)
            parameters, on_reads = self._parameters, self._on_reads
            self._pending = {
                position: _Pending(parameters[position].grad) for position in positions
            }
            watchable, unwatchable = self.conditions.watchable(
                {position: pending.gradient for position, pending in self._pending.items()}
            )
            # Before anything is flushed: averages that have arrived here, and are still under way
            # on another rank, must answer with the same norms.
            if self._answering.loaded:
                self._answer(watchable)
            self.flush_variables(unwatchable)
            for position, pending in self._pending.items():
                assert pending.gradient is not None
                watch(pending.gradient, on_reads[position], pending.scaled)
                watch(parameters[position], on_reads[position])
            if self._pending:
                self._modules.watch()
                self._functions.watch()
                self._handlers.watch()

    def _answer(self, positions: Iterable[int]) -> None:
        """Let pending gradients answer with norms."""
        for position in positions:
            pending = self._pending[position]
            if pending.gradient is not None:
                flush = partial(self.flush_variables, (position,))
                pending.scaled = self._answering.begin(
                    position, pending.gradient, flush, self._lock
                )

    def _on_read(self, position: int, _: Tensor) -> None:
        self.flush_variables((position,))

    def _wait_for_norms(self, norms: NormExchange) -> GradientNorms:
        with outside_modes(), self._device.on(self._stream):
            if self.before_wait is not None:
                self.before_wait(())
            began_s = time.perf_counter()
            try:
                return norms.wait()
            except SynchronizationError as error:
                self._under_way.broken = str(error)
                raise
            finally:
                self.waited_s += time.perf_counter() - began_s

    @property
    def pending_positions(self) -> Set[int]:
        """The variables that wait for their averages or updates."""
        return self._pending.keys()

    @property
    def pending(self) -> bool:
        """Whether a variable waits for its average or update."""
        return bool(self._pending)

    # -- flushing

    def flush(self) -> None:
        """Wait for all messages and apply all pending averages and updates."""
        with self._lock:  # a flush of another thread ends first
            if self._under_way or self._pending:
                self.flush_variables(tuple(self._pending), rest=True)

    def flush_arrived(self) -> None:
        """Apply what has arrived, without waiting."""
        if self._under_way:
            self.flush_variables(())

    def flush_variables(self, positions: Iterable[int], rest: bool = False) -> float:
        """Average and update `positions`, and whatever else has arrived.

        `rest`: wait for every message, also of variables that are not pending. Returns the seconds
        spent waiting for messages.
        """
        under_way = self._under_way
        with self._lock:
            pending = [position for position in positions if position in self._pending]
            waited_for = under_way.all_numbers() if rest else under_way.numbers_of(pending)
            if not (waited_for or under_way.complete or under_way.next_arrived()):
                return 0.0  # most reads; leaving torch's modes costs more than all else here
            # On a GPU everything runs on the backward pass's stream: others may read on others.
            with outside_modes(), self._device.on(self._stream):
                if waited_for and self.before_wait is not None:
                    self.before_wait(pending)
                began_s = time.perf_counter()
                for number in waited_for:
                    under_way.receive(number)
                waited_s = time.perf_counter() - began_s
                self.waited_s += waited_s
                under_way.receive_arrived()
                complete = [n for n in under_way.take_complete() if n in self._pending]
                if complete:
                    self._finish(complete)
            return waited_s

    def _finish(self, positions: list[int]) -> None:
        """Average and update `positions`, all of whose messages have arrived."""
        done = {position: self._pending.pop(position) for position in positions}
        # Not by way of `.grad`, which the script may have dropped, and a running step() must not
        # see.
        self._write({position: pending.gradient for position, pending in done.items()})
        for pending in done.values():
            if pending.scaled is not None:
                pending.scaled.arrive()
        self._update(done)
        for position, pending in done.items():  # last: other threads wait for a watched tensor
            unwatch(self._parameters[position])
            if pending.gradient is not None:
                unwatch(pending.gradient)
            if pending.scaled is not None:
                self._answering.arrived(position)
        if not self._pending:
            self._stop_watching_calls()

    def _update(self, done: Mapping[int, _Pending]) -> None:
        updated = {n: pending.due for n, pending in done.items() if pending.due}
        if not updated:
            return
        if not self.updates_played:
            self._apply(updated, done)
        optimizers = [update.optimizer for due in updated.values() for update, _ in due]
        self._due.subtract(optimizers)
        self._guard(set(optimizers))

    def _apply(
        self, updated: Mapping[int, list[tuple[DueUpdate, int]]], done: Mapping[int, _Pending]
    ) -> None:
        averaged = {}
        for position in updated:
            gradient = done[position].gradient
            assert gradient is not None, "only a variable with a gradient is put off"
            averaged[position] = Averaged(self._parameters[position], gradient)
        if self.gate is not None:
            self.gate.before_updates(averaged, updated)
        apply_in_turns(updated, averaged)
        if self.gate is not None:
            self.gate.after_updates(averaged, updated)

    def _guard(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch the state of those optimizers that still have updates due."""
        for optimizer in optimizers:
            if self._due[optimizer] <= 0:
                del self._due[optimizer]
                if not updates_are_due(optimizer):  # of another model's variables
                    unguard(optimizer)
            elif optimizer is not self._stepping:
                guard(optimizer, flush_all_synchronizers)

    def has_due(self, optimizer: Optimizer) -> bool:
        """Whether updates of `optimizer` are due here."""
        return self._due[optimizer] > 0

    # -- the script's optimizers

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if optimizer is self.outer and not self._inside_outer:
            self._inside_outer = True
            return
        numbers = group_numbers(optimizer)
        if self._position_of.keys().isdisjoint(numbers):
            return
        if self.check_step is not None:
            self.check_step(numbers)
        if self._device.capturing:
            self.conditions.forbidden = (
                "the script captures a step of its optimizer in a CUDA graph, whose replays update "
                "unseen"
            )
        self._end_interrupted_step()
        given = (*args[1:], kwargs.get("closure"))  # step(None) is a plain step
        closure = any(value is not None for value in given)
        self._stepping = optimizer
        unguard(optimizer)  # its own step reads its state
        if self._answering.loaded:
            self._answering.end(
                position for position, one in enumerate(self._parameters) if id(one) in numbers
            )
        if self.script_reads is not None:
            self.script_reads.step_begins(optimizer, numbers)
        with self._lock:  # another thread's read, which may have begun, ends first
            crossing = bool(self._pending)
            if crossing:
                self._put_off(optimizer, numbers, closure)
        if not crossing:
            self.conditions.look_at(optimizer, numbers, closure)
        if self.updates_played and not closure:
            self._withhold(numbers)

    def _withhold(self, numbers: Mapping[int, int]) -> None:
        with DisableTorchFunctionSubclass():
            for position, parameter in enumerate(self._parameters):
                if id(parameter) in numbers and parameter.grad is not None:
                    self._withheld[position] = parameter.grad
                    parameter.grad = None

    def _put_off(self, optimizer: Optimizer, numbers: Mapping[int, int], closure: bool) -> None:
        updated = [n for n in self._pending if id(self._parameters[n]) in numbers]
        if closure or coupling_reason(optimizer, OWN_HOOKS) is not None:
            self.flush_variables(updated)
            return
        update = DueUpdate.now(optimizer)
        deferred = []
        with DisableTorchFunctionSubclass():
            held = [n for n in updated if state_is_held(optimizer, self._parameters[n])]
            self.flush_variables(held)
            for position in updated:
                parameter = self._parameters[position]
                if position not in self._pending or parameter.grad is None:
                    continue  # without a gradient, the script has dropped it: its step skips it
                self._pending[position].due.append((update, numbers[id(parameter)]))
                self._stashed[position] = parameter.grad
                parameter.grad = None
                deferred.append(position)
        self._due[optimizer] += len(deferred)
        if self.gate is not None and deferred:
            self.gate.step_called(update, deferred)

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self._stepping:
            if optimizer is self.outer:
                self._inside_outer = False
            return
        self._stepping = None
        with self._lock, DisableTorchFunctionSubclass():
            for position, gradient in (self._stashed | self._withheld).items():
                self._parameters[position].grad = gradient
            self._stashed.clear()
            self._withheld.clear()
            if optimizer in self._due:
                self._guard((optimizer,))
        if self.script_reads is not None:
            self.script_reads.step_ended(optimizer)

    def _end_interrupted_step(self) -> None:
        """Give back what was withheld from a step that an exception ended."""
        if self._stepping is not None:
            self.after_step(self._stepping)

    def forget(self) -> None:
        """Drop what is pending, in a forked process, where no message will ever arrive."""
        self._lock = RLock()
        self._under_way.forget()
        self._answering.end()
        for position, pending in self._pending.items():
            unwatch(self._parameters[position])
            if pending.gradient is not None:
                unwatch(pending.gradient)
        self._pending = {}
        for optimizer in self._due:
            unguard(optimizer)
        self._due.clear()
        self._stop_watching_calls()

    def _stop_watching_calls(self) -> None:
        self._modules.stop()
        self._functions.stop()
        self._handlers.stop()
