"""Read and write `sides.json` in a domain's folder: the frozen sides of the closing comparison.

Every trial of the benchmark is a trial of the domain (`autotune.dataset`). Its source is
"sweep:ROUND:NAME", "closing:ROUND:SIDE", "closing:ROUND:reference", or that of a search's job
(`autotune.jobs.campaign.tuning_jobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.dataset.trials import DatasetTrial
from autotune.files import write_whole
from autotune.parsing import parse, read_json
from autotune.records import CURRENT_SETUP
from autotune.strategy_space.strategy import Strategy

SWEEP, CLOSING = "sweep", "closing"
SIDES = "sides.json"


class Group(StrEnum):
    """The kind of a side."""

    TODAY = "today"  # DDP, with its default and with its best bucket size
    RIVAL = "rival"
    OURS = "ours"
    STOP = "stop"  # an earlier best of ours, for the trials until within 2 %


@dataclass(frozen=True)
class OutcomeSettings:
    """OutcomeSettings of a domain's measurement.

    `marks`: numbers of trials after which ours is frozen, ascending; the last one is the budget of
    every search. `rounds`: of the closing comparison. `sweeps`: how often each bucket size is
    measured before the best is chosen.
    """

    marks: tuple[int, ...] = (25, 50, 100, 200)
    rounds: int = 12
    sweeps: int = 3
    lossy: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Side:
    """A side of the closing comparison.

    `strategy`: None for the script's own DDP; `plan`: its id.
    """

    name: str
    group: Group
    plan: str
    strategy: Strategy | None

    @property
    def lossless(self) -> bool:
        return self.strategy is None or self.strategy.lossless


@dataclass(frozen=True)
class Stop:
    """The best of a search from trial `trials` on, `seconds` after its start, and its side."""

    trials: int
    seconds: float
    side: str


@dataclass(frozen=True)
class Course:
    """One search of ours: mark -> side, trials and seconds, and its bests. Marks are JSON keys."""

    sides: dict[str, str]
    trials: dict[str, int]
    seconds: dict[str, float]
    stops: tuple[Stop, ...]


@dataclass(frozen=True)
class Frozen:
    """The sides of the closing comparison. `sweep_s`: bucket size -> median time of its trials."""

    settings: OutcomeSettings
    sides: tuple[Side, ...]
    courses: dict[str, Course]
    sweep_s: dict[str, float]


def key_of(trial: DatasetTrial) -> str:
    """Return the id of the trial's plan, or of the current setup, as in `Side.plan`."""
    return trial.plan_id or CURRENT_SETUP


def rounds_of(trials: Sequence[DatasetTrial], phase: str) -> dict[int, list[DatasetTrial]]:
    """Return round -> trials of the sweep or of the closing comparison, in the order of time."""
    by_round: dict[int, list[DatasetTrial]] = {}
    for trial in trials:
        kind, number, *_ = (*trial.source.split(":", 2), "")
        if kind == phase and number.isdecimal():
            by_round.setdefault(int(number), []).append(trial)
    return by_round


def read_frozen(folder: Path) -> Frozen | None:
    """Read the frozen sides of a domain's folder; None if nothing was frozen yet."""
    file = folder / SIDES
    return parse(Frozen, read_json(file), str(file)) if file.exists() else None


def write_frozen(folder: Path, frozen: Frozen) -> None:
    write_whole(folder / SIDES, canonical_json(frozen), "the frozen sides")
