"""Clock and streams: the only module that tells CPU from CUDA."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

Mark = float | torch.cuda.Event
BUSY_CYCLES = 20_000_000
"""10 ms at 2 GHz, the usual clock of a GPU."""


class Device:
    """The device of one replica."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._side: dict[int, torch.cuda.Stream] = {}

    def now_s(self) -> float:
        """Monotonic seconds, once the current stream is idle.

        Messages that nobody has waited for may still be under way.
        """
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    @property
    def capturing(self) -> bool:
        """Whether the current stream's work is captured in a CUDA graph and does not run."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def mark(self) -> Mark:
        """A point in time on the device's own queue, without waiting for it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, start: Mark, stop: Mark) -> float:
        """Seconds from one mark to another; waits for the second."""
        if isinstance(start, float):
            assert isinstance(stop, float)
            return stop - start
        assert isinstance(stop, torch.cuda.Event)
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3

    def finish(self) -> None:
        """Wait for all work on the device, whatever its stream."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def occupy(self) -> None:
        """Keep the current stream busy for about 10 ms, for the host to get ahead of it."""
        if self._cuda:
            torch.cuda._sleep(BUSY_CYCLES)

    def enter_thread(self) -> None:
        """Set torch's current device, which each thread has its own of; call it first on a thread.

        The context of another device would take memory.
        """
        if self._cuda:
            torch.cuda.set_device(self.device)

    def queues(self, group: dist.ProcessGroup) -> bool:
        """Whether the group's collectives are queued on the device.

        Waiting for one then orders a stream and blocks no thread.
        """
        return self._cuda and group._get_backend(self.device).name() == "nccl"

    def side_stream(self, lane: int) -> AbstractContextManager[object]:
        """The stream that prepares a lane's steps: NCCL's `work.wait()` orders it, not
        training's."""
        if not self._cuda:
            return nullcontext()
        if lane not in self._side:
            self._side[lane] = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._side[lane])

    def fence(self) -> torch.cuda.Event | None:
        """An event after all work queued so far on the current stream; None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, fence: torch.cuda.Event | None) -> None:
        """Let the current stream continue after `fence`; the caller does not wait."""
        if fence is not None:
            torch.cuda.current_stream(self.device).wait_event(fence)

    def stream(self) -> torch.cuda.Stream | None:
        """The current stream; None on a CPU."""
        return torch.cuda.current_stream(self.device) if self._cuda else None

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue the work inside on `stream`, ordered with the current stream on both sides."""
        current = self.stream()
        if stream is None or current is None or stream == current:
            yield
            return
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Reuse the memory of `tensors` of another stream only after the current stream's work."""
        if self._cuda:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))
