"""Records a `MemoryProfile`: what one replica of a module holds during a training step, and when.

    recorder = MemoryRecorder(module)
    profile = recorder.record(lambda: train_step(batch))

The first steps only make what is made once (the optimizer's state, gradients that are kept), some more are timed, and two are recorded,
since what one step leaves behind is given back in the next one. Whoever does not call the step calls `boundary()` between two steps,
and `apart()` before and after what is not the replica's own, such as its synchronization.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.errors import InvalidInput
from autotune.recordings.memory_profile import MemoryProfile
from runtime_rewriter.pytorch.agreement import assumed_workload, trainable_parameters
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.device import Mark as Time
from runtime_rewriter.recording.memory.allocations import AllocationLog
from runtime_rewriter.recording.memory.lifetimes import Kept, RecordedStep, profile_of
from runtime_rewriter.recording.memory.marks import (
    At,
    Mark,
    StepMarks,
    default_regions,
    memories_of,
    memory_of,
)

WARMUP_STEPS = 2
"""The first makes the optimizer's state, the second is the first one that has it from the start."""
RECORDED_STEPS = 2


class MemoryRecorder:
    """`regions`: submodules that could be computed twice; default: the outermost parts of the module's sequences.

    `done` turns true at the boundary after the last step. Raises `InvalidInput` where steps differ, or a profiler is at work.
    """

    def __init__(
        self,
        module: nn.Module,
        regions: Sequence[str] | None = None,
        timed_steps: int = 3,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        self._module = module
        self._regions = default_regions(module) if regions is None else list(regions)
        self._timed, self._warmup = timed_steps, warmup_steps
        self._device = Device(next(iter(trainable_parameters(module).values())).device)
        self._log = AllocationLog(self._device.device)
        self._steps: list[list[Mark]] = []
        self._times: list[list[Time]] = []
        self._apart: list[
            list[tuple[int, Time]]
        ] = []  # of every step: segment and time, begins and ends in turn
        self._noted = 0  # calls of `apart` in recorded steps
        self._gradients_after: dict[int, dict[str, tuple[int, ...]]] = {}
        self._optimizers: list[Optimizer] = []
        self._kept: list[Kept] = []
        self._open: ExitStack | None = None
        self._recording = self.done = False
        self._marks: StepMarks | None = None

    def record(self, step: Callable[[], object]) -> MemoryProfile:
        """The profile of `step`, which is called a few times and makes one whole training step each time."""
        try:
            self.boundary()
            while not self.done:
                step()
                self.boundary()
        finally:
            self.close()
        return self.profile()

    @property
    def steps(self) -> int:
        """Whole steps that it takes."""
        return self._warmup + self._timed + RECORDED_STEPS

    @property
    def batch(self) -> int | None:
        """The leading dimension of the module's inputs; None where they do not share one."""
        batches = set() if self._marks is None else self._marks.batches
        return next(iter(batches)) or None if len(batches) == 1 else None

    def boundary(self) -> None:
        """Between two steps of the training; the first one opens the recorder."""
        if self.done:
            return
        if self._open is None:
            self._begin()
        taken = len(self._steps)
        if taken == self.steps:
            self._on_mark(Mark(At.STEP))  # ends the last segment
            self._kept = [
                *kept_by(self._module, self._optimizers),
                *_kept_by_libraries(self._device.device),
            ]
            self.done = True
            self.close()
            return
        assert self._marks is not None
        self._marks.looks_at_rows = (
            taken < self._warmup
        )  # in steps that are neither timed nor recorded
        if taken == self._warmup + self._timed:
            assert self._open is not None
            self._open.enter_context(self._log.recording())
            self._recording = True
        if self._steps:
            self._times[-1].append(self._device.mark())
        self._steps.append([])
        self._times.append([])
        self._apart.append([])
        self._on_mark(Mark(At.STEP))

    def apart(self) -> None:
        """Called in turn: what follows is not the replica's own work, or is again. Its time and its buffers do not count."""
        if self._open is None:
            return
        self._apart[-1].append((len(self._steps[-1]) - 1, self._device.mark()))
        if self._recording:
            if self._noted % 2:
                self._gradients_after[self._noted] = {
                    name: tuple(memory_of(part) for part in memories_of(parameter.grad))
                    for name, parameter in trainable_parameters(self._module).items()
                }
            self._noted += 1
            self._log.apart()

    def close(self) -> None:
        """Remove every hook, end the recording."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _begin(self) -> None:
        self._open = ExitStack()
        _kept_by_libraries(
            self._device.device
        )  # pieces of streams that the training does not use are not made again
        self._marks = StepMarks(self._module, self._regions, self._on_mark)
        self._open.callback(self._marks.close)
        self._open.callback(register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        mine = {id(parameter) for parameter in self._module.parameters()}
        if optimizer not in self._optimizers and any(
            id(p) in mine for group in optimizer.param_groups for p in group["params"]
        ):
            self._optimizers.append(optimizer)

    def _on_mark(self, mark: Mark) -> None:
        self._steps[-1].append(mark)
        self._times[-1].append(self._device.mark())
        if self._recording:
            self._log.mark()

    def profile(self) -> MemoryProfile:
        """After the last step. Raises `InvalidInput` where its steps were not alike."""
        if not self.done:
            raise InvalidInput(f"a memory profile needs {self.steps} whole steps, but saw fewer")
        assert self._marks is not None
        timed = range(self._warmup, self._warmup + self._timed)
        first, second = self._steps[-2:]
        second, end = second[:-1], second[-1]
        kinds = [mark.kind for mark in first]
        if any(
            [mark.kind for mark in marks] != kinds
            for marks in (second, *(self._steps[number] for number in timed))
        ):
            raise InvalidInput(
                "a memory profile needs steps that compute the same each time, but these called other modules or gave other gradients; "
                "record where the model's control flow does not depend on the data"
            )
        apart_s = {step: self._apart_s(step) for step in timed}
        seconds = [
            median(
                self._device.seconds_between(self._times[step][at], self._times[step][at + 1])
                - apart_s[step][at]
                for step in timed
            )
            for at in range(len(kinds))
        ]
        step = RecordedStep(
            first, second, [*self._log.events], seconds, self._marks.facts, self._gradients_after
        )
        assert end.at is At.STEP
        found = profile_of(
            step, self._kept, assumed_workload(self._module).id, self._device.device.type
        )
        return replace(found, sparse_bytes=tuple(sorted(self._marks.sparse_bytes.items())))

    def _apart_s(self, step: int) -> dict[int, float]:
        """Segment of the step -> seconds in it that do not count."""
        found: dict[int, float] = defaultdict(float)
        noted = self._apart[step]
        for (at, begin), (_, end) in zip(noted[::2], noted[1::2], strict=False):
            found[at] += self._device.seconds_between(begin, end)
        return found


def kept_by(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Kept]:
    """Memory of the module's parameters and buffers and of the optimizers' state for them, each once, aliases included."""
    names = {id(parameter): name for name, parameter in trainable_parameters(module).items()}
    found: dict[int, Kept] = {}

    def keep(tensor: Tensor, kind: str, variable: str | None, device: torch.device) -> None:
        for part in memories_of(tensor):
            if part.device == device and part.untyped_storage().nbytes():
                found.setdefault(
                    memory_of(part),
                    Kept(memory_of(part), part.untyped_storage().nbytes(), kind, variable),
                )

    device = next(module.parameters()).device
    for parameter in module.parameters():
        keep(parameter, "parameter", names.get(id(parameter)), device)
    for buffer in module.buffers():
        keep(buffer, "buffer", None, device)
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    keep(value, "optimizer", names.get(id(owner)), device)
    for parameter in module.parameters():
        if (
            parameter.grad is not None
        ):  # where the script keeps gradients from step to step it was not made anew
            keep(parameter.grad, "gradient", names.get(id(parameter)), device)
    return list(found.values())


def _kept_by_libraries(device: torch.device) -> list[Kept]:
    """cuBLAS keeps memory of torch's allocator, a piece for each stream that multiplied matrices; it is given back, and made again when
    the next matrices are multiplied."""
    if device.type != "cuda":
        return []
    before_bytes = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    freed_bytes = before_bytes - torch.cuda.memory_allocated(device)
    return [Kept(0, freed_bytes, "library", None)] if freed_bytes else []
