"""What all messages under way have in common: when they start, when they have arrived, and how they fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from autotune.errors import SynchronizationError
from autotune.strategy_space.enactable import describe
from autotune.strategy_space.plan import Message
from runtime_rewriter.pytorch.exchange.lanes import Flight, Lanes, Step
from runtime_rewriter.pytorch.exchange.residuals import Residuals


def wire_dtype(message: Message) -> torch.dtype | None:
    """The dtype to which a cast rounds the message; None for its own."""
    name = message.compressor.description.wire_dtype
    dtype: torch.dtype | None = getattr(torch, name) if name is not None else None
    return dtype


class Sending(ABC):
    """One message. `pending` counts the slices that this backward pass has not filled yet."""

    def __init__(
        self,
        number: int,
        message: Message,
        residuals: Residuals,
        lanes: Lanes,
        steps: Sequence[tuple[int, Step]],
    ) -> None:
        self.number, self.message = number, message
        self._residuals, self._unwanted = residuals, set[str]()
        self.pending = len(message.slices)
        self._lanes, self._steps = lanes, steps
        self._flight: Flight | None = None

    def issue(self) -> None:
        """Start it. Every rank issues its messages in plan order."""
        if not self._steps:
            return
        try:
            self._flight = self._lanes.run(self._steps, self.number)
        except RuntimeError as error:
            raise self._failed(error) from error

    @property
    def arrived(self) -> bool:
        """Of an issued message: whether `wait` would return, or raise, at once. Does not block."""
        return self._flight is None or self._flight.arrived

    def wait(self) -> None:
        """Until the wire holds the sum. Raises `SynchronizationError` when a rank is gone or too late."""
        if self._flight is None:
            return
        try:
            self._flight.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._flight = None
        self._sent()
        if self._unwanted and self._lanes.ranks.rank == 0:
            self._put_back(frozenset(self._unwanted))
        self._unwanted.clear()

    def take_back(self, variable: str) -> None:
        """Of a message that is issued: the variable keeps its `.grad`, so what earlier steps left of it is sent for nothing.

        One rank makes the sum its residual when it has arrived.
        """
        if self._residuals.in_use:
            self._unwanted.add(variable)

    def _sent(self) -> None:
        """The message has arrived: what waited in the residuals went with it."""
        for part in self.message.slices:
            self._residuals.release(part)

    @abstractmethod
    def _put_back(self, variables: frozenset[str]) -> None:
        """Add the sums of these variables to this rank's residuals."""

    def reset(self) -> None:
        self.pending = len(self.message.slices)

    def _failed(self, error: Exception) -> SynchronizationError:
        return SynchronizationError(
            f"message {self.number} ({describe(self.message)}) must complete on every rank, but failed on rank {self._lanes.ranks.rank}: "
            f"{error}; is every other rank alive and at the same step?"
        )
