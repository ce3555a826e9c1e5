"""Issue, arrival and failure of all messages under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch

from autotune.errors import SynchronizationError
from autotune.strategy_space.enactable import describe
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.lanes import Flight, Lanes, Step
from runtime_rewriter.pytorch.exchange.residuals import Residuals, slice_of
from runtime_rewriter.pytorch.exchange.rows import dense_of


def wire_dtype(message: Message) -> torch.dtype | None:
    """The dtype to which a cast rounds the message; None for its own."""
    name = message.compressor.description.wire_dtype
    dtype: torch.dtype | None = getattr(torch, name) if name is not None else None
    return dtype


class Sending(ABC):
    """One message. `pending` counts the slices that this backward pass has not filled yet.

    `rows`: as in `Flight`.
    """

    rows = False

    def __init__(
        self,
        number: int,
        message: Message,
        residuals: Residuals,
        lanes: Lanes,
        pieces: Sequence[Sequence[tuple[int, Step]]],
        results: Sequence[Sequence[tuple[int, Step]]] = (),
    ) -> None:
        """`pieces`: the steps of each piece of the message; none if it has no elements.

        `results`: those that `issue_results` starts, after those of `issue`.
        """
        self.number = number
        self.message = message
        self.pending = len(message.slices)
        self._residuals = residuals
        self._unused: dict[str, torch.Tensor | None] = {}
        self._lanes = lanes
        self._pieces, self._results = pieces, results
        self._direct = message.synchronizer is Synchronizer.DIRECT_EXCHANGE
        self._flights: list[Flight] = []

    @property
    def last_lane(self) -> int:
        """The lane of the last step that `issue` starts."""
        return max((steps[-1][0] for steps in self._pieces), default=0)

    def issue(self) -> None:
        """Start the message. Every rank issues its messages in plan order."""
        self._run(self._pieces)

    def issue_results(self, lane: int) -> None:
        """Start sending the sum from its owners, on `lane` and those behind it."""
        for steps in self._results:
            shift = lane - steps[0][0]
            self._run([[(own_lane + shift, step) for own_lane, step in steps]])

    def _run(self, pieces: Sequence[Sequence[tuple[int, Step]]]) -> None:
        try:
            for steps in pieces:
                self._flights.append(self._lanes.run(steps, self.number, self._direct, self.rows))
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait_for_sum(self) -> None:
        """Wait for what `issue` has started. Raises `RuntimeError` if a rank is gone."""
        for flight in self._flights[: len(self._pieces)]:
            flight.wait()

    @property
    def arrived(self) -> bool:
        """Whether `wait` on the issued message would return, or raise, at once."""
        return all(flight.arrived for flight in self._flights)

    def wait(self) -> None:
        """Block until the sum has arrived. Raises `SynchronizationError` if a rank is gone."""
        if not self._flights:
            return
        try:
            for flight in self._flights:
                flight.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._flights = []
        self._release_residuals()
        if self._unused:
            self._keep_sums()
        self._unused = {}

    def take_back(self, variable: str, packed: torch.Tensor | None) -> None:
        """Note that the variable keeps its `.grad`, so the sum of its residuals must not be lost.

        `packed`: what was added to this rank's residual, if anything. When the issued message has
        arrived, rank 0 makes the sum its residual, and each rank takes off what it packed.
        """
        self._unused[variable] = packed

    def _keep_sums(self) -> None:
        if self._lanes.ranks.rank == 0:
            self._add_to_residuals(self._unused.keys())
        for part in self.message.slices:
            if part.variable not in self._unused:
                continue
            packed = self._unused[part.variable]
            if packed is not None:
                self._residuals.residual_of(part).sub_(slice_of(dense_of(packed), part))
            waiting = self._residuals.waiting(part)
            if waiting is not None:  # the sum may have overflowed, as in `drop_non_finite_`
                waiting.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _release_residuals(self) -> None:
        """The message has arrived, and the residuals with it."""
        for part in self.message.slices:
            self._residuals.release(part)

    @abstractmethod
    def _add_to_residuals(self, variables: Collection[str]) -> None:
        """Add the sums of these variables to this rank's residuals."""

    def reset(self) -> None:
        self.pending = len(self.message.slices)

    def _failed(self, error: Exception) -> SynchronizationError:
        return SynchronizationError(
            f"message {self.number} ({describe(self.message)}) must complete on every rank, but "
            f"failed on rank {self._lanes.ranks.rank}: {error}; is every other rank alive and at "
            "the same step?"
        )
