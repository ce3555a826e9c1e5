"""What a rank holds between the two halves of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OwnedSum:
    """This rank's part of the sum, once the first `steps` of an exchange have completed.

    `values()`: flat and contiguous, from element `start` of the exchange's values on; empty if
    other ranks own everything. Call it once per exchange, between its two halves. The steps after
    the first ones send the parts to all ranks.
    """

    steps: int
    start: int
    values: Callable[[], Tensor]
