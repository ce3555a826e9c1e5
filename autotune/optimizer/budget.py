"""How much a search may replay. Apart from the search, which needs the compiled replay."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InvalidInput


@dataclass(frozen=True)
class Budget:
    """`replays` of whole steps at most, and `seconds` of wall clock as the emergency brake; each over the whole search."""

    replays: int = 400
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.replays < 1 or self.seconds <= 0:
            raise InvalidInput(f"a search needs a budget of at least 1 replay and more than 0 s, but has {self.replays} and {self.seconds}")
