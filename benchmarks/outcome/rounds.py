"""Rounds of a comparison with rivals, each kept when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from autotune.units import format_seconds


class HasRounds(Protocol):
    """Sides with the rounds that all of them have been measured in."""

    @property
    def rounds(self) -> int: ...


Rivals = TypeVar("Rivals", bound=HasRounds)


def measure_rounds(
    rivals: Rivals,
    rounds: int,
    *,
    measure: Callable[[Rivals], Rivals],
    keep: Callable[[Rivals], None],
    say: Callable[[str], None],
    name: str,
) -> None:
    """Let `measure` add a round to the rivals until they have `rounds`, and keep each.

    `name`: of the domain and the rival, for the lines of `say`.
    """
    began_s, done = time.monotonic(), rivals.rounds
    while rivals.rounds < rounds:
        rivals = measure(rivals)
        keep(rivals)
        round_s = (time.monotonic() - began_s) / (rivals.rounds - done)
        left_s = round_s * (rounds - rivals.rounds)
        say(f"{name}, round {rivals.rounds} of {rounds}, about {format_seconds(left_s)} left")
