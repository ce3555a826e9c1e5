"""What a domain's folder keeps, so that a run that was stopped goes on and nothing is lost.

`domain.json`: profile, cluster with its fitted links, conditions. `trials.jsonl`: one line per trial, of every search, the sweep and the
closing comparison, as it ends. `autotune.db`: the searches' jobs. `sides.json`: the frozen strategies of the closing comparison.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.parsing import parse, parse_json, read_json
from autotune.records import CURRENT_SETUP, Conditions, Failed, Measured, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from runtime_rewriter.findings import Profile


class Group(StrEnum):
    """Which sides are asked for the best of a kind."""

    TODAY = "today"  # what a user can have today: DDP, with its default and with its best bucket size
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
class Described:
    """`given`: the cluster file; `links`: with the rates of its links as fitted, for the bound. `profile_s`: what profiling took."""

    profile: Profile
    given: Cluster
    links: Cluster
    conditions: Conditions
    profile_s: float
    cores: int
    machine: str


@dataclass(frozen=True)
class Line:
    """One trial. `phase`: "sweep", "closing", or the id of a search's job. `plan`: its id, or that of the current setup; `strategy`: the
    id of its strategy in a search, else the plan's again.
    """

    phase: str
    round: int
    strategy: str
    plan: str
    step_s: tuple[float, ...]
    overrun: float | None
    failure: str
    load: float
    time: float

    @property
    def measured(self) -> Measured | None:
        return Measured((self.step_s,), overrun=self.overrun) if self.step_s else None


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


def plan_key(wanted: Plan | None) -> str:
    return wanted.id if wanted is not None else CURRENT_SETUP


class Folder:
    """One domain's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @property
    def store(self) -> Path:
        return self.path / "autotune.db"

    def described(self) -> Described | None:
        file = self.path / "domain.json"
        return parse(Described, read_json(file), str(file)) if file.exists() else None

    def describe(self, described: Described) -> None:
        self._write("domain.json", to_data(described))

    def frozen(self) -> Frozen | None:
        file = self.path / "sides.json"
        return parse(Frozen, read_json(file), str(file)) if file.exists() else None

    def freeze(self, frozen: Frozen) -> None:
        self._write("sides.json", to_data(frozen))

    def lines(self, phase: str) -> list[Line]:
        return [line for line in self.all_lines() if line.phase == phase]

    def append(self, phase: str, round_: int, request: TrialRequest, wanted: Plan | None, outcome: Measured | Failed) -> Line:
        measured = outcome if isinstance(outcome, Measured) else None
        line = Line(
            phase,
            round_,
            request.strategy_id,
            plan_key(wanted),
            tuple(measured.slowest_s.tolist()) if measured else (),
            measured.overrun if measured else None,
            f"{outcome.kind}: {outcome.message[:300]}" if isinstance(outcome, Failed) else "",
            os.getloadavg()[0],
            time.time(),
        )
        with (self.path / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_data(line)) + "\n")
        return line

    def all_lines(self) -> Iterator[Line]:
        file = self.path / "trials.jsonl"
        if not file.exists():
            return
        *whole, cut = file.read_text(encoding="utf-8").split("\n")  # a process that was killed may leave half a line behind
        if cut:
            file.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
        for number, text in enumerate(whole, start=1):
            yield parse(Line, parse_json(text, f"{file}:{number}"), f"{file}:{number}")

    def _write(self, name: str, data: Any) -> None:
        """Whole or not at all."""
        made = self.path / f"{name}.new"
        made.write_text(json.dumps(data), encoding="utf-8")
        made.replace(self.path / name)
