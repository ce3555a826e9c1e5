"""How much a search may replay. Apart from the search, which needs the compiled replay."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InvalidInput


@dataclass(frozen=True)
class Budget:
    """`replays` of whole steps and `ops` of all graphs at most, and `seconds` of wall clock; each over the whole search.

    The first two are the same on every machine, so they decide. The seconds are a safety net far behind them, and a search that they
    end says so. What was replayed before and is remembered counts like what is replayed.
    """

    replays: int = 400
    ops: int = 7_500_000
    seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.replays < 1 or self.ops < 1 or self.seconds <= 0:
            raise InvalidInput(
                f"a search needs a budget of at least 1 replay, 1 op and more than 0 s, but has {self.replays} replays, {self.ops} ops and "
                f"{self.seconds} s"
            )
