"""Instructions of the tuner to the driver."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records import Decision, TrialRequest


@dataclass(frozen=True)
class ProfileWorkload:
    """Run the script, profile one replica and probe the links."""


@dataclass(frozen=True)
class Propose:
    """Retrain on the measured trials and propose at most `count` strategies for `round`.

    `incumbent`: the strategy whose neighbours are proposed, "" for a search of the whole space.
    """

    round: int
    count: int
    incumbent: str = ""


@dataclass(frozen=True)
class RunTrial:
    request: TrialRequest


@dataclass(frozen=True)
class Finish:
    decision: Decision


@dataclass(frozen=True)
class Abort:
    """The script cannot be tuned: it fails unchanged."""

    message: str


Instruction = ProfileWorkload | Propose | RunTrial | Finish | Abort
