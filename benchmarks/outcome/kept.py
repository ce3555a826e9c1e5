"""What a domain's folder keeps beside its trials (`autotune.dataset`): `sides.json`, the frozen strategies of the closing comparison.

Every trial of the benchmark is a trial of the domain, and its source tells what it was taken for: "sweep:ROUND:NAME",
"closing:ROUND:SIDE", "closing:ROUND:reference", and what the searches' jobs say (`autotune.jobs.campaign.tuning_jobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.dataset.trials import DatasetTrial
from autotune.export import write_whole
from autotune.parsing import parse, read_json
from autotune.records import CURRENT_SETUP
from autotune.strategy_space.strategy import Strategy

SWEEP, CLOSING = "sweep", "closing"
SIDES = "sides.json"


class Group(StrEnum):
    """Which sides are asked for the best of a kind."""

    TODAY = (
        "today"  # what a user can have today: DDP, with its default and with its best bucket size
    )
    RIVAL = "rival"
    OURS = "ours"
    STOP = "stop"  # an earlier best of ours, for the trials until within 2 %


@dataclass(frozen=True)
class Settings:
    """`marks`: numbers of trials after which ours is frozen, ascending; the last one is the budget of every search. `rounds`: of the
    closing comparison. `sweeps`: how often each bucket size is measured before the best is chosen.
    """

    marks: tuple[int, ...] = (25, 50, 100, 200)
    rounds: int = 12
    sweeps: int = 3
    lossy: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Side:
    """Of the closing comparison. `strategy` is None for the script's own DDP; `plan` is what `plan_key` says."""

    name: str
    group: Group
    plan: str
    strategy: Strategy | None

    @property
    def lossless(self) -> bool:
        return self.strategy is None or self.strategy.lossless


@dataclass(frozen=True)
class Stop:
    """The best of a search from trial number `trials` on, `seconds` after its start, and the side that it is."""

    trials: int
    seconds: float
    side: str


@dataclass(frozen=True)
class Course:
    """Of a search of ours: mark -> side, trials made and seconds taken; and where its bests came up. Marks are text, as JSON's keys."""

    sides: dict[str, str]
    trials: dict[str, int]
    seconds: dict[str, float]
    stops: tuple[Stop, ...]


@dataclass(frozen=True)
class Frozen:
    """What the closing comparison compares, and how it was come by. `sweep_s`: bucket size -> median time of its own trials."""

    settings: Settings
    sides: tuple[Side, ...]
    courses: dict[str, Course]
    sweep_s: dict[str, float]


def key_of(trial: DatasetTrial) -> str:
    """Its plan's id, or that of the current setup, as in `Side.plan`."""
    return trial.plan_id or CURRENT_SETUP


def rounds_of(trials: Sequence[DatasetTrial], phase: str) -> dict[int, list[DatasetTrial]]:
    """Number of a round of the sweep or of the closing comparison -> its trials. Rounds and trials in the order they were made."""
    found: dict[int, list[DatasetTrial]] = {}
    for trial in trials:
        kind, number, *_ = (*trial.source.split(":", 2), "")
        if kind == phase and number.isdecimal():
            found.setdefault(int(number), []).append(trial)
    return found


def read_frozen(folder: Path) -> Frozen | None:
    """Of a domain's folder; None where nothing was frozen yet."""
    file = folder / SIDES
    return parse(Frozen, read_json(file), str(file)) if file.exists() else None


def write_frozen(folder: Path, frozen: Frozen) -> None:
    write_whole(folder / SIDES, canonical_json(frozen), "the frozen sides")
