"""What all messages under way have in common: when they start, when they have arrived, and how they fail."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotune.errors import SynchronizationError
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import Compressor
from runtime_rewriter.pytorch.exchange.lanes import Flight, Lanes, Step
from runtime_rewriter.pytorch.exchange.refusals import describe

WIRE_DTYPE = {Compressor.FP16: torch.float16, Compressor.BF16: torch.bfloat16}
"""What travels instead of the message's own dtype."""


class Sending:
    """One message. `pending` counts the slices that this backward pass has not filled yet."""

    def __init__(self, number: int, message: Message, lanes: Lanes, steps: Sequence[tuple[int, Step]]) -> None:
        self.number, self.message = number, message
        self.pending = len(message.slices)
        self._lanes, self._steps = lanes, steps
        self._flight: Flight | None = None

    def issue(self) -> None:
        """Start it. Every rank issues its messages in plan order."""
        if not self._steps:
            return
        try:
            self._flight = self._lanes.run(self._steps)
        except RuntimeError as error:
            raise self._failed(error) from error

    @property
    def arrived(self) -> bool:
        """Of an issued message: whether `wait` would return, or raise, at once. Does not block."""
        return self._flight is None or self._flight.arrived

    def wait(self) -> None:
        """Until the wire holds the sum. Raises `SynchronizationError` when a rank is gone or too late."""
        try:
            if self._flight is not None:
                self._flight.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._flight = None

    def reset(self) -> None:
        self.pending = len(self.message.slices)

    def _failed(self, error: Exception) -> SynchronizationError:
        return SynchronizationError(
            f"message {self.number} ({describe(self.message)}) must complete on every rank, but failed on rank {self._lanes.ranks.rank}: "
            f"{error}; is every other rank alive and at the same step?"
        )
