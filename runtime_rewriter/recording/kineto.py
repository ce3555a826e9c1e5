"""Runs torch's own profiler (Kineto) between step boundaries and marks the steps."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.recordings.job_file import ORDINARY_STEPS, ClockPair
from runtime_rewriter.recording.settings import RecordSettings


def clock_pair() -> ClockPair:
    """Read both clocks at one instant, which is the fastest of a few tries."""
    tries = []
    for _ in range(5):
        before_ns = time.perf_counter_ns()
        wall_ns = time.time_ns()
        after_ns = time.perf_counter_ns()
        tries.append((after_ns - before_ns, ClockPair((before_ns + after_ns) // 2, wall_ns)))
    return min(tries, key=lambda attempt: attempt[0])[1]


class KinetoTrace:
    """One trace of this process: `prepare`, `start`, any number of steps, `stop`, `read`.

    Steps between `pause` and `resume` are ordinary ones, which are not recorded.

    It traces all threads, since the messages of a plan are issued on threads of their own. Shapes,
    memory and stacks are left out unless the settings request them.
    """

    def __init__(self, settings: RecordSettings, device: torch.device | None) -> None:
        self._cuda = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._device = device
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            # The link from kernels to operators costs a tenth of an operator's record, and without
            # a device there are no kernels. Only the file is read, so the stop need not build a
            # tree of objects; stacks are in the file only with that tree.
            experimental_config=_ExperimentalConfig(
                profile_all_threads=True,
                disable_external_correlation=not self._cuda,
                trace_only=not settings.with_stack,
            ),
        )
        self._mark: Any = None
        self._mark_ns = 0
        self._pause: Any = None
        self.step_s: list[float] = []
        self.before: ClockPair | None = None
        self.after: ClockPair | None = None

    def prepare(self) -> None:
        """Call some steps before `start`: the first call loads what takes long."""
        self._profile.prepare_trace()

    def start(self) -> None:
        """Start at a boundary; a step is marked from `begin_step` to `end_step`."""
        self._finish_queued()
        self._profile.start_trace()
        self.before = clock_pair()

    def begin_step(self) -> None:
        self._mark = record_function(f"ProfilerStep#{len(self.step_s)}")
        self._mark_ns = time.perf_counter_ns()
        self._mark.__enter__()

    def end_step(self) -> None:
        """End the open step; nothing is marked until the next one begins."""
        if self._mark is None:
            return
        if self._cuda:  # the host runs ahead of its queue; messages that nobody awaits may go on
            torch.cuda.current_stream(self._device).synchronize()
        self.drop_step()
        self.step_s.append((time.perf_counter_ns() - self._mark_ns) / 1e9)

    def drop_step(self) -> None:
        """End the open step without counting it."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def pause(self) -> None:
        """Record no operator of this thread until `resume`; call between two steps.

        Threads of backends follow this thread, which starts their work. A device does not follow.
        """
        if self._pause is None:
            self._pause = record_function(ORDINARY_STEPS)
            self._pause.__enter__()
            torch.autograd._enable_record_function(False)

    def resume(self) -> None:
        """Record again after `pause`."""
        if self._pause is not None:
            torch.autograd._enable_record_function(True)
            self._pause.__exit__(None, None, None)
            self._pause = None

    def stop(self) -> None:
        self.drop_step()
        self.resume()
        self._finish_queued()
        self.after = clock_pair()
        self._profile.stop_trace()

    def read(self) -> dict[str, Any]:
        """The whole trace, as Kineto writes it. Read it once."""
        trace: dict[str, Any] = json.loads(self._exported())
        return trace

    def count_events(self) -> int:
        """The spans of the trace. Call instead of `read`."""
        return self._exported().count(b'"ph": "X"')

    def _exported(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="autotune-trace-") as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return path.read_bytes()

    def _finish_queued(self) -> None:
        """Wait for the device's queue, whose work belongs to the steps before."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
