"""Emulated accelerators: timed waits replace the module's computation; all else stays real.

The first pass for each signature of the inputs is computed and recorded (its step is marked
unclean). Later passes return the recorded output, connected to a chain of autograd nodes. The
backward pass runs down the chain, waits until the profile's next gradients are ready, and hands out
the recorded ones. Hooks on the gradients (DDP's reducer, ours, the script's own) notice no
difference.

| time | the wait ends |
|---|---|
| first read of variable i | needed_s[i] after the module began the step's first forward pass |
| start of the backward pass | forward_s after the module began the step's first forward pass |
| gradient of variable i | ready_s[i] after the start of the backward pass |
| end of the backward pass | backward_s after its start |
| the script's own read of variable i | script_reads_s[i] after the end of the backward pass |
| next step | update_s after all gradients were synchronized |

The update is one of these waits. The script's optimizers step but find no gradients, since an
accelerator's update takes no time of the processor. Only after a recorded pass do they really
update.

If a plan crosses the step, a late average delays all later reads and computation, in the forward
pass and between two steps. A variable's update then takes its time when its average is flushed: its
share of update_s, by elements. Where the script itself reads variables between two steps, all of
update_s passes there, as in the profile.

Waits end at absolute times, so they absorb real work (the loss, packing, the optimizer) that is
shorter than the profile's. `overrun` measures the excess.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autotune.errors import InvalidInput
from runtime_rewriter.emulation import Timetable, Waiter
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.recorded_pass import (
    GradientRecorder,
    Output,
    RecordedPass,
    collectives_started,
    signature_of,
    tensors_needing_gradient,
)

Due = tuple[tuple[int, ...], float]
"""Parameters, by position, whose gradients are ready, or which are read, at one time of the
timetable."""
MOST_RECORDED_PASSES = 32
"""Each holds a copy of all gradients. A script with more kinds of batches would record for ever."""


def emulation_refusal(synchronizer: GradientSynchronizer) -> str | None:
    """Why the module cannot be emulated, as far as is known before a step."""
    kind = synchronizer.device.device.type
    if kind != "cpu":
        return f"the model is on {kind}, where it really computes; use real accelerators"
    return synchronizer.emulation_refusal()


def accelerator_of(
    synchronizer: GradientSynchronizer, timetable: Timetable | None
) -> EmulatedAccelerator:
    """An accelerator for the synchronizer's model. Raises `InvalidInput` if there is none."""
    build = synchronizer.accelerator_of or EmulatedAccelerator
    accelerator: EmulatedAccelerator = build(synchronizer, timetable)
    return accelerator


class EmulatedAccelerator:
    """Plays the passes of the synchronizer's module; a `StepListener`. Without a timetable no
    waits.

    Pass it to `synchronizer.emulate`. Raises `InvalidInput` if the module cannot be emulated.
    """

    def __init__(self, synchronizer: GradientSynchronizer, timetable: Timetable | None) -> None:
        reason = emulation_refusal(synchronizer)
        if reason is not None:
            raise InvalidInput(f"accelerators cannot be emulated: {reason}")
        self._synchronizer, self._timetable = synchronizer, timetable
        self._handed_out = _ready_order(synchronizer.names, timetable)
        self._reads = () if timetable is None else _positions(synchronizer.names, timetable.needed)
        script_reads = () if timetable is None else timetable.script_reads
        self._script_reads = {
            position: at_s
            for positions, at_s in _positions(synchronizer.names, script_reads)
            for position in positions
        }
        self._recorded_passes: dict[Hashable, RecordedPass] = {}
        self._recorder: GradientRecorder | None = None
        self._recorded: tuple[Hashable, Output] | None = None  # without gradients so far
        # A played pass has begun its backward pass since the last forward pass.
        self._in_backward = False
        self._step_start_s: float | None = None
        self._synchronized_s: float | None = None
        self._waited_before_s = 0.0
        self._update_shares_s = _update_shares_s(synchronizer.parameters, timetable)
        self._waits = {name: Waiter() for name in ("forward", "backward", "update")}
        self.overrun = 0.0
        """The excess of real work over the profile's computation in the last step, as a share of
        it."""

    # -- steps

    def before_boundary(self) -> None:
        """Wait for the end of the profile's update, which ends the step."""
        if self._timetable is not None:
            if self._synchronized_s is not None:
                due_s = self._timetable.update_s - self._pending_updates_s()
                self._waits["update"].until(self._update_start_s() + due_s)
            late_s = sum(waiter.late_s for waiter in self._waits.values())
            self.overrun = late_s / self._timetable.compute_s
        for waiter in self._waits.values():
            waiter.restart()
        self._step_start_s = self._synchronized_s = None

    def on_boundary(self, now_s: float, clean: bool) -> None:
        """Nothing to do: `before_boundary` has waited."""

    def on_backward_end(self) -> None:
        self._synchronized_s = self._synchronizer.device.now_s()
        self._waited_before_s = self._synchronizer.cross_step.waited_s

    def _update_start_s(self) -> float:
        """The end of the backward pass, later by what the script's own reads have waited since."""
        assert self._synchronized_s is not None
        waited_s = self._synchronizer.cross_step.waited_s - self._waited_before_s
        return self._synchronized_s + waited_s

    def _pending_updates_s(self) -> float:
        """The time of the updates that happen when their averages arrive, in the next pass."""
        if self._script_reads:
            return 0.0
        pending = self._synchronizer.cross_step.pending_positions
        return sum(self._update_shares_s[position] for position in pending)

    def before_wait(self, positions: Sequence[int]) -> None:
        """Let the script itself read no earlier than in the profile.

        The update before it takes no time of this processor.
        """
        if self._synchronized_s is None:
            return  # within a forward pass
        due_s = [self._script_reads[p] for p in positions if p in self._script_reads]
        if due_s:
            Waiter().until(self._update_start_s() + min(due_s))

    # -- forward

    @torch.compiler.disable
    def run(
        self, compute: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Play the forward pass if one with this signature was recorded; else compute and record
        it."""
        if self._step_start_s is None:
            self._step_start_s = time.perf_counter()
        self._finish_recording()
        self._in_backward = False
        key = (self._synchronizer.module.training, signature_of((inputs, kwargs)))
        recording = self._recorded_passes.get(key)
        if recording is not None:
            return self._play(recording)
        return self._record(key, compute, inputs, kwargs)

    def _record(
        self,
        key: Hashable,
        compute: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._synchronizer.mark_unclean()
        self._synchronizer.cross_step.updates_played = False
        if tensors_needing_gradient((inputs, kwargs)):
            raise InvalidInput(
                "accelerators cannot be emulated: an input of the model requires a gradient; "
                "detach it"
            )
        if len(self._recorded_passes) == MOST_RECORDED_PASSES:
            raise InvalidInput(
                f"accelerators are emulated for at most {MOST_RECORDED_PASSES} kinds of batches, "
                "but the model's inputs have more shapes or values; pad batches to few shapes, and "
                "pass no argument that changes in every step"
            )
        before = collectives_started()
        output = compute(*inputs, **kwargs)
        if collectives_started() != before:
            raise InvalidInput(
                "accelerators cannot be emulated: the forward pass of the model has transfers of "
                "its own"
            )
        recorded = Output.of(output)
        if any(recorded.needs_gradient):
            self._recorded = (key, recorded)
            self._recorder = GradientRecorder(
                self._synchronizer.parameters, self._synchronizer.names
            )
        return output

    def _finish_recording(self) -> None:
        """End a recording at the next forward pass; drop it without a backward pass
        (evaluation)."""
        if self._recorder is None or self._recorded is None:
            return
        key, output = self._recorded
        begun = self._recorder.begun
        gradients = self._recorder.finish()
        self._recorder = self._recorded = None
        if begun:
            self._recorded_passes[key] = RecordedPass(output, gradients)

    def _play(self, recording: RecordedPass) -> object:
        timed = self._timetable if self._synchronizer.synchronizing else None
        # Before the reads, some of which are at the pass's very end: real work behind them would
        # make its end late.
        output = self._chained(recording, timed)
        self._read_variables()
        self._synchronizer.cross_step.updates_played = timed is not None
        return output

    def _chained(self, recording: RecordedPass, timed: Timetable | None) -> object:
        """The output, connected to the chain of the pass's autograd nodes. Reads no variable."""
        output = recording.output
        played = _PlayedPass(self, recording, timed)
        token = _End.apply(torch.zeros((), requires_grad=True), played)
        for positions, ready_s in reversed(self._handed_out):
            used = [position for position in positions if recording.gradients[position] is not None]
            if used:
                token = _HandOut.apply(
                    token,
                    played,
                    used,
                    ready_s,
                    *(self._synchronizer.parameters[position] for position in used),
                )
        flagged = list(zip(output.tensors, output.needs_gradient, strict=True))
        connected = iter(_Outputs.apply(token, *(tensor for tensor, needs in flagged if needs)))
        tensors = [next(connected) if needs else tensor.clone() for tensor, needs in flagged]
        for tensor, needs in zip(tensors, output.needs_gradient, strict=True):
            if needs:
                tensor.register_hook(played.begin)
        return output.rebuilt(tensors)

    def _read_variables(self) -> None:
        """Read variables when the module would; later if their averages are still under way."""
        cross_step = self._synchronizer.cross_step
        for positions, needed_s in self._reads:
            if not cross_step.pending:
                return
            assert self._step_start_s is not None
            before_s = self._pending_updates_s()
            cross_step.flush_arrived()
            self._step_start_s += before_s - self._pending_updates_s()
            self._waits["forward"].until(self._step_start_s + needed_s)
            if cross_step.pending_positions.isdisjoint(positions):
                continue  # a flush without anything to do costs, too
            before_s = self._pending_updates_s()
            self._step_start_s += cross_step.flush_variables(positions)
            self._step_start_s += before_s - self._pending_updates_s()

    # -- backward

    def backward_begins(self, timetable: Timetable | None) -> float:
        """Wait for the end of the forward pass; return the start of the backward pass."""
        if self._in_backward:  # a second chain would run after the first, with late gradients
            raise InvalidInput(
                "accelerators cannot be emulated: one backward pass goes through several forward "
                "passes of the model"
            )
        self._in_backward = True
        if timetable is None or self._step_start_s is None:
            return time.perf_counter()
        return self._waits["forward"].until(self._step_start_s + timetable.forward_s)

    def wait_in_backward(self, deadline_s: float) -> None:
        self._waits["backward"].until(deadline_s)


class _PlayedPass:
    """One played forward and backward pass; `timetable` is None if it is not synchronized."""

    def __init__(
        self, accelerator: EmulatedAccelerator, recording: RecordedPass, timetable: Timetable | None
    ) -> None:
        self._accelerator, self._recording, self._timetable = accelerator, recording, timetable
        self._start_s: float | None = None

    def begin(self, gradient: Tensor) -> None:
        """Start the backward pass at the first gradient of an output."""
        if self._start_s is None:
            self._start_s = self._accelerator.backward_begins(self._timetable)

    def hand_out(self, positions: Sequence[int], ready_s: float) -> list[Tensor]:
        """Copies of the gradients, taken before the wait, which the parameters may keep."""
        gradients = [
            recorded.clone()
            for position in positions
            if (recorded := self._recording.gradients[position]) is not None
        ]
        self.wait(ready_s)
        return gradients

    def wait(self, after_s: float) -> None:
        if self._timetable is not None and self._start_s is not None:
            self._accelerator.wait_in_backward(self._start_s + after_s)

    def end(self) -> None:
        if self._timetable is not None:
            self.wait(self._timetable.backward_s)


class _Outputs(Function):
    """(token, recorded tensors) -> copies. Backward: continue the chain, whatever the gradients
    are."""

    @staticmethod
    def forward(context: Any, token: Tensor, *recorded: Tensor) -> tuple[Tensor, ...]:
        context.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in recorded)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros(()), *([None] * len(gradients))


class _HandOut(Function):
    """One link of the chain. Backward: gradients that are ready together, like a layer's, on
    time."""

    @staticmethod
    def forward(
        context: Any,
        token: Tensor,
        played: _PlayedPass,
        positions: Sequence[int],
        ready_s: float,
        *parameters: Tensor,
    ) -> Tensor:
        context.played, context.positions, context.ready_s = played, positions, ready_s
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return token, None, None, None, *context.played.hand_out(context.positions, context.ready_s)


class _End(Function):
    """The last link. Backward: wait until the end of the profile's backward pass."""

    @staticmethod
    def forward(context: Any, token: Tensor, played: _PlayedPass) -> Tensor:
        context.played = played
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, token: Tensor) -> tuple[None, None]:
        context.played.end()
        return None, None


def _update_shares_s(
    parameters: Sequence[nn.Parameter], timetable: Timetable | None
) -> tuple[float, ...]:
    """Seconds of each parameter's update, by its elements; they add up to update_s."""
    update_s = 0.0 if timetable is None else timetable.update_s
    elements = [parameter.numel() for parameter in parameters]
    return tuple(update_s * count / max(sum(elements), 1) for count in elements)


def _ready_order(names: tuple[str, ...], timetable: Timetable | None) -> tuple[Due, ...]:
    """Parameters by ready time; without a timetable one by one in reverse definition order."""
    if timetable is None:
        return tuple(((position,), 0.0) for position in reversed(range(len(names))))
    profiled = [name for name, _ in timetable.ready]
    if set(profiled) != set(names):
        differing = sorted(set(profiled) ^ set(names))
        raise InvalidInput(
            "a profile must be of the running model, but they differ in "
            f"{', '.join(differing[:3])}; leave --profile out to measure it"
        )
    return _positions(names, timetable.ready)


def _positions(names: tuple[str, ...], timed: tuple[tuple[str, float], ...]) -> tuple[Due, ...]:
    position_of = {name: position for position, name in enumerate(names)}
    return tuple(
        (tuple(position_of[name] for name, _ in due), at_s)
        for at_s, due in groupby(timed, key=lambda entry: entry[1])
    )
