"""Read and write `sides.json` in a domain's folder: the frozen sides of the closing comparison.

Every trial of the benchmark is a trial of the domain (`autotune.dataset`). Its source is
"options:ROUND:SET:reference" (options of DDP), "sweep:ROUND:RIVAL, SETTING", "closing:ROUND:SIDE",
"closing:ROUND:reference", or that of a search's job (`autotune.jobs.campaign.tuning_jobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.dataset.trials import DatasetTrial
from autotune.files import write_whole
from autotune.parsing import parse, read_json
from autotune.records import CURRENT_SETUP
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, Strategy

OPTIONS, SWEEP, CLOSING, BESIDE_HOOKS = "options", "sweep", "closing", "beside-hooks"
SIDES = "sides.json"


class Group(StrEnum):
    """The kind of a side."""

    TODAY = "today"  # DDP, with its default and with its best setting
    RIVAL = "rival"
    OURS = "ours"
    PART = "part"  # a search without a part of the method
    SEED = "seed"  # our search again, with another seed
    STOP = "stop"  # an earlier best of ours, for the trials until within 2 %
    KNOWN = "known"  # the best of a longer search; it counts as best known only


@dataclass(frozen=True)
class OutcomeSettings:
    """OutcomeSettings of a domain's measurement.

    `marks`: numbers of trials after which ours is frozen, ascending; the last one is the budget of
    every search and of every rival's sweep. `rounds`: of the closing comparison. `more_seeds`: our
    search runs again with each of them. `long`: trials of a longer search for the best known plan;
    0: none. `ratio`: of computation to communication (`autotune.jobs.campaign.balance`); None: as
    the model has it. `parts`: whether our search also runs within the step only. `options`: whether
    DDP's options are swept. `baselines`: whether random search and scikit-optimize are rivals.
    """

    marks: tuple[int, ...] = (25, 50, 100, 200)
    rounds: int = 12
    lossy: bool = True
    seed: int = 0
    more_seeds: tuple[int, ...] = ()
    long: int = 0
    ratio: float | None = None
    parts: bool = True
    options: bool = True
    baselines: bool = True

    @property
    def budget(self) -> int:
        """Trials of our search, of every other search and of every rival."""
        return self.marks[-1]


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

    @property
    def convergence_shown(self) -> bool:
        """Whether a test shows that training with its compressors converges (`SearchSpace`)."""
        return self.strategy is None or compressors_are_shown(self.strategy)


def compressors_are_shown(strategy: Strategy) -> bool:
    """Whether the strategy uses only settings of compressors that a lossy search draws."""
    space = SearchSpace.default(lossy=True)
    shown = {setting for kind in Compressor for setting in space.settings_of(kind)}
    return all(
        (shard.compressor, shard.ratio, shard.rank) in shown
        for choice in strategy.variables
        for shard in choice.shards
    )


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
    """The sides of the closing comparison.

    `swept_s`: rival -> setting -> median step. `options_s`: options of DDP -> median step;
    `options`: those that the script had.
    """

    settings: OutcomeSettings
    sides: tuple[Side, ...]
    courses: dict[str, Course]
    swept_s: dict[str, dict[str, float]] = field(default_factory=dict)
    options_s: dict[str, float] = field(default_factory=dict)
    options: str = ""


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
