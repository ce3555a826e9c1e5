"""Clock and streams: the one place that knows CPU from CUDA."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch

Mark = float | torch.cuda.Event


class Device:
    """The device of one replica."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._side: dict[int, torch.cuda.Stream] = {}

    def now_s(self) -> float:
        """Monotonic seconds after all queued device work."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

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

    def enter_thread(self) -> None:
        """First thing on a thread of ours: torch's current device is a thread's own, and another one's context takes memory."""
        if self._cuda:
            torch.cuda.set_device(self.device)

    def side_stream(self, lane: int) -> AbstractContextManager[object]:
        """Where the steps of a lane are prepared: with NCCL `work.wait()` orders this stream, not the training's."""
        if not self._cuda:
            return nullcontext()
        if lane not in self._side:
            self._side[lane] = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._side[lane])

    def fence(self) -> torch.cuda.Event | None:
        """What is queued so far on the current stream; None where nothing is ever queued."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, fence: torch.cuda.Event | None) -> None:
        """What the current stream does from now on comes after `fence`; the caller does not wait."""
        if fence is not None:
            torch.cuda.current_stream(self.device).wait_event(fence)

    def keep(self, *tensors: torch.Tensor) -> None:
        """The current stream works on `tensors` that another one made: their memory is not used again before it is done."""
        if self._cuda:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))
