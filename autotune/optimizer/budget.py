"""The budget of a search; importing it does not load the compiled replay."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InvalidInput


@dataclass(frozen=True)
class Budget:
    """Limits of a whole search: replayed steps, ops of all replayed graphs, seconds of wall clock.

    Replays and ops are equal on every machine, so they decide; remembered replays count, too. The
    seconds are a distant safety net, and a search that they end reports it.
    """

    replays: int = 400
    ops: int = 7_500_000
    seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.replays < 1 or self.ops < 1 or self.seconds <= 0:
            raise InvalidInput(
                "a search needs a budget of at least 1 replay, 1 op and more than 0 s, "
                f"but has {self.replays} replays, {self.ops} ops and {self.seconds} s"
            )
