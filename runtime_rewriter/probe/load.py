"""Computation during a probe's communication, as a backward pass would do it."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import threading
import time
from types import TracebackType

import torch

from autotune.errors import AutotuneError
from runtime_rewriter.pytorch.exchange.device import Device

CPU_SIDE = 128
CUDA_SIDE = 2048
"""The product of two such matrices takes about 0.1 ms of one core, or some of a GPU: much less than
a message that is worth hiding."""
STOP_TIMEOUT_S = 30.0
UNIT_TIMEOUT_S = 60.0
"""Thousands of times a product's duration, even if other ranks compute on the same core."""
REST_S = 0.05
"""Time over which the speed without communication is measured, before and after a point."""


class Load:
    """While entered, multiplies matrices in a thread (torch releases the interpreter lock)."""

    def __init__(self, device: torch.device, unit_timeout_s: float = UNIT_TIMEOUT_S) -> None:
        self._device, self._unit_timeout_s = device, unit_timeout_s
        side = CUDA_SIDE if device.type == "cuda" else CPU_SIDE
        self._matrix = torch.ones(side, side, device=device)
        self._threads = torch.get_num_threads()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compute, name="probe load", daemon=True)
        self.units = 0
        """Products that are finished."""

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)

    def unit_s(self) -> float:
        """Present seconds of one product, over `REST_S` or longer until one is finished.

        Raises `AutotuneError` if the computation ended, or finished nothing for the timeout.
        """
        before, start_s = self.units, time.perf_counter()
        while (watched_s := time.perf_counter() - start_s) < REST_S or self.units == before:
            if not self._thread.is_alive() or (
                self.units == before and watched_s > self._unit_timeout_s
            ):
                raise AutotuneError(
                    "the computation during a probe must go on, but finished nothing for "
                    f"{watched_s:.1f} s on {self._device}; see the log of this rank, and probe "
                    "again when the device is free"
                )
            time.sleep(REST_S / 10)
        return (time.perf_counter() - start_s) / (self.units - before)

    def _compute(self) -> None:
        if self._device.type != "cuda":
            torch.set_num_threads(self._threads)  # OpenMP has a setting per thread
            self._multiply(None)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._multiply(torch.cuda.current_stream())

    def _multiply(self, stream: torch.cuda.Stream | None) -> None:
        result = torch.empty_like(self._matrix)
        while not self._stop.is_set():
            torch.mm(self._matrix, self._matrix, out=result)
            if stream is not None:
                stream.synchronize()
            self.units += 1


class LostTime:
    """Seconds of computation lost to communication, from the products finished meanwhile."""

    def __init__(self, load: Load, device: Device) -> None:
        self._load, self._device = load, device
        self._elapsed_s, self._units = 0.0, 0
        self._rest_s = load.unit_s()

    def add(self, elapsed_s: float, units: int) -> None:
        """Add one message: its duration, and the products finished in that time."""
        self._elapsed_s += elapsed_s
        self._units += units

    def per_message_s(self, messages: int) -> float:
        """Mean over the messages; the undisturbed speed is the mean of those before and after."""
        unit_s = (self._rest_s + self._load.unit_s()) / 2
        return max(self._elapsed_s - self._units * unit_s, 0.0) / messages
