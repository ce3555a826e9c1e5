"""Records a `MemoryProfile`: the memory of one replica of a module during a training step.

    recorder = MemoryRecorder(module)
    profile = recorder.record(lambda: train_step(batch))

The first steps allocate what is allocated once (optimizer state, gradients that are kept). Some
more are timed, and two are recorded, since one step's remains are freed in the next one. A caller
that does not pass the step calls `boundary()` between two steps. It calls `apart()` before and
after work that is not the replica's own, such as its synchronization.
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
from autotune.recordings.memory_profile import MemoryProfile, TensorRole
from runtime_rewriter.pytorch.agreement import assumed_workload, trainable_parameters
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.device import Mark as Time
from runtime_rewriter.recording.memory.allocations import AllocationLog
from runtime_rewriter.recording.memory.lifetimes import PersistentBlock, RecordedSteps, profile_of
from runtime_rewriter.recording.memory.marks import (
    At,
    Mark,
    StepMarks,
    default_regions,
    memories_of,
    memory_of,
)

WARMUP_STEPS = 2
"""The first one creates the optimizer's state, the second one has it from the start."""
RECORDED_STEPS = 2


class MemoryRecorder:
    """Records `regions`, submodules that could be computed twice.

    By default these are the outermost parts of the module's sequences. `done` becomes true at the
    boundary after the last step. Raises `InvalidInput` where steps differ or a profiler is active.
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
        # of every step: segment and time of the `apart` calls
        self._apart: list[list[tuple[int, Time]]] = []
        self._noted = 0  # `apart` calls in recorded steps
        self._gradients_after: dict[int, dict[str, tuple[int, ...]]] = {}
        self._optimizers: list[Optimizer] = []
        self._persistent: list[PersistentBlock] = []
        self._open: ExitStack | None = None
        self._recording = self.done = False
        self._marks: StepMarks | None = None

    def record(self, step: Callable[[], object]) -> MemoryProfile:
        """The profile of `step`, which runs one whole training step per call."""
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
        """Number of whole steps that the recording takes."""
        return self._warmup + self._timed + RECORDED_STEPS

    @property
    def batch(self) -> int | None:
        """The leading dimension of the module's inputs; None where they do not share one."""
        batches = set() if self._marks is None else self._marks.batches
        return next(iter(batches)) or None if len(batches) == 1 else None

    def boundary(self) -> None:
        """Call between two training steps; the first call opens the recorder."""
        if self.done:
            return
        if self._open is None:
            self._begin()
        done_steps = len(self._steps)
        if done_steps == self.steps:
            self._on_mark(Mark(At.STEP))  # ends the last segment
            libraries = _free_library_memory(self._device.device)
            self._persistent = [*persistent_blocks(self._module, self._optimizers), *libraries]
            self.done = True
            self.close()
            return
        assert self._marks is not None
        # in steps that are neither timed nor recorded
        self._marks.looks_at_rows = done_steps < self._warmup
        if done_steps == self._warmup + self._timed:
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
        """Call before and after work of another owner; its time and buffers do not count."""
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
        # memory for streams that the training does not use is not allocated again
        _free_library_memory(self._device.device)
        self._marks = StepMarks(self._module, self._regions, self._on_mark)
        self._open.callback(self._marks.close)
        self._open.callback(register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        parameters = {id(parameter) for parameter in self._module.parameters()}
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if optimizer not in self._optimizers and not parameters.isdisjoint(updated):
            self._optimizers.append(optimizer)

    def _on_mark(self, mark: Mark) -> None:
        self._steps[-1].append(mark)
        self._times[-1].append(self._device.mark())
        if self._recording:
            self._log.mark()

    def profile(self) -> MemoryProfile:
        """Call after the last step. Raises `InvalidInput` where the steps were not equal."""
        if not self.done:
            raise InvalidInput(f"a memory profile needs {self.steps} whole steps, but saw fewer")
        assert self._marks is not None
        first, second = self._steps[-2:]
        second, end = second[:-1], second[-1]
        assert end.at is At.STEP
        timed = range(self._warmup, self._warmup + self._timed)
        kinds = [mark.kind for mark in first]
        compared = [second, *(self._steps[number] for number in timed)]
        if any([mark.kind for mark in marks] != kinds for marks in compared):
            raise InvalidInput(
                "a memory profile needs steps that compute the same each time, but these called "
                "other modules or gave other gradients; record where the model's control flow does "
                "not depend on the data"
            )
        segment_s = [self._segment_seconds(number, len(kinds)) for number in timed]
        seconds = [median(values) for values in zip(*segment_s, strict=True)]
        facts = self._marks.facts
        events = [*self._log.events]
        steps = RecordedSteps(first, second, events, seconds, facts, self._gradients_after)
        model = assumed_workload(self._module).id
        profile = profile_of(steps, self._persistent, model, self._device.device.type)
        return replace(profile, sparse_bytes=tuple(sorted(self._marks.sparse_bytes.items())))

    def _segment_seconds(self, step: int, segments: int) -> list[float]:
        """Seconds of each segment of a step, without the work of others."""
        apart_s: dict[int, float] = defaultdict(float)
        notes = self._apart[step]
        for (at, begin), (_, end) in zip(notes[::2], notes[1::2], strict=False):
            apart_s[at] += self._device.seconds_between(begin, end)
        times = self._times[step]
        return [
            self._device.seconds_between(times[at], times[at + 1]) - apart_s[at]
            for at in range(segments)
        ]


def persistent_blocks(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[PersistentBlock]:
    """Memory of parameters, buffers, gradients and their optimizer state, each block once."""
    names = {id(parameter): name for name, parameter in trainable_parameters(module).items()}
    device = next(module.parameters()).device
    blocks: dict[int, PersistentBlock] = {}

    def keep(tensor: Tensor, role: TensorRole, owner: Tensor | None = None) -> None:
        for part in memories_of(tensor):
            size = part.untyped_storage().nbytes()
            if part.device == device and size:
                address = memory_of(part)
                block = PersistentBlock(address, size, role, names.get(id(owner)))
                blocks.setdefault(address, block)

    for parameter in module.parameters():
        keep(parameter, TensorRole.PARAMETER, parameter)
    for buffer in module.buffers():
        keep(buffer, TensorRole.BUFFER)
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    keep(value, TensorRole.OPTIMIZER, owner)
    for parameter in module.parameters():
        # a gradient that the script keeps from step to step was not allocated again
        if parameter.grad is not None:
            keep(parameter.grad, TensorRole.GRADIENT, parameter)
    return list(blocks.values())


def _free_library_memory(device: torch.device) -> list[PersistentBlock]:
    """Free and return the memory that cuBLAS keeps in torch's allocator.

    It keeps a block for each stream that multiplied matrices, and allocates it again when needed.
    """
    if device.type != "cuda":
        return []
    before_bytes = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    freed_bytes = before_bytes - torch.cuda.memory_allocated(device)
    return [PersistentBlock(0, freed_bytes, TensorRole.LIBRARY, None)] if freed_bytes else []
