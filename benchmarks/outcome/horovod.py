"""Horovod as a rival, measured next to ours in rounds.

The ranks of all sides wait for the same computation. First, Horovod tunes itself and is tuned: its
autotune runs once, for its own budget, and the best of its samples within our number of steps
counts as its result with our budget; the fusion threshold and cycle time are swept. Then our tuner
searches a plan through Horovod, in a Horovod script whose messages are Horovod's own operations,
with as many trials as our own search had. That is less than autotune's budget.

A round measures each side once, in an order of its own: ours, ours through Horovod, and Horovod's
defaults, best of the sweep and best samples. Ranks start for their side's turn and end with it:
even idle, the negotiation cycles of Horovod's ranks take most of a core. Each round is kept when it
ends, so a run that was cut off resumes. Autotune's response cache stays on even where the best
sample had it off, which favors Horovod. Sparse gradients are sent by Horovod's gathers or dense
(`sparse_as_dense`), whichever is faster by its defaults.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from autotune.cluster import Cluster
from autotune.dataset.folder import read_domain
from autotune.errors import InvalidInput
from autotune.files import write_whole
from autotune.jobs.campaign.session import trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.lowering.negotiation import HorovodSettings
from autotune.rng import generator
from autotune.strategy_space.strategy import Strategy
from autotune.units import format_seconds
from autotune.workload import Workload
from benchmarks.horovod_ranks.start import Case, run_cases
from benchmarks.outcome.horovod_sides import (
    AUTOTUNE_OURS,
    AUTOTUNE_OWN,
    DEFAULT,
    FILE,
    OURS_BESIDE,
    SWEPT,
    THROUGH,
    HorovodRivals,
    HorovodSide,
    least_within_s,
    read_rivals,
    write_rivals,
)
from benchmarks.outcome.horovod_through import STEPS, ThroughHorovod, block_of, through_horovod
from benchmarks.outcome.kept import Frozen, read_frozen
from benchmarks.outcome.measure import LENGTHS
from benchmarks.outcome.rounds import measure_rounds
from benchmarks.outcome.searches import OURS

LOG = "autotune.csv"
MIB = 2**20
SWEEP = {
    f"{threshold:g} MiB, {cycle_ms:g} ms": HorovodSettings(int(threshold * MIB), cycle_ms * 1e-3)
    for threshold, cycle_ms in ((64, 5), (0.5, 1), (2, 1), (8, 1), (2, 5), (8, 5), (32, 10))
}
WARMUP = 3
SWEEPS = 3
STEPS_PER_SAMPLE = 50
"""A row of the log is the median of 5 scores of 10 steps each (Horovod 0.28.1,
parameter_manager.cc)."""
AUTOTUNE_STEPS, QUICK_AUTOTUNE_STEPS = 30 + 20 * STEPS_PER_SAMPLE, 30 + 6 * STEPS_PER_SAMPLE
"""By default, autotune takes 3 scores to warm up and 20 samples."""

Say = Callable[[str], None]


def measure_horovod(setup: Setup, folder: Path, rounds: int, say: Say, quick: bool = False) -> None:
    """Measure a domain whose closing comparison is complete, until it has all `rounds`; needs root.

    `quick`: autotune gets a third of its own budget, and the sweep measures each setting once.
    """
    frozen = read_frozen(folder)
    if frozen is None:
        say(f"{setup.name}: Horovod needs our side first")
        return
    ranks = _HorovodRanks(setup, folder)
    rivals = read_rivals(folder)
    if rivals is None:
        rivals = _tuned_rivals(ranks, frozen, say, quick)
        write_rivals(folder, rivals)
    if rivals.rounds >= rounds:
        say(f"{setup.name}: Horovod measured")
        return
    blocks = _Blocks(setup, folder, frozen, say, quick)
    if rivals.through_trials == 0:
        with through_horovod(setup, folder, frozen.settings, quick) as through:
            rivals = _with_search(rivals, through)
        write_rivals(folder, rivals)
    measure_rounds(
        rivals,
        rounds,
        measure=lambda rivals: _with_round(rivals, ranks, blocks),
        keep=partial(write_rivals, folder),
        say=say,
        name=f"{setup.name}: Horovod",
    )


@dataclass(frozen=True)
class _Blocks:
    """Measures blocks of ours, each with ranks that start for it and end with it."""

    setup: Setup
    folder: Path
    frozen: Frozen
    say: Say
    quick: bool

    def ours(self, number: int, strategy: Strategy | None) -> tuple[float, ...]:
        with trial_session(self.folder, self.setup, LENGTHS, self.say) as session:
            return block_of(session, f"beside-horovod:{number}:{OURS_BESIDE}", strategy)

    def through(self, number: int, rivals: HorovodRivals) -> tuple[float, ...]:
        settings = self.frozen.settings
        with through_horovod(self.setup, self.folder, settings, self.quick) as through:
            _with_search(rivals, through)  # it must be the same plan
            return through.block(number)


class _HorovodRanks:
    """Ranks of plain Horovod on a domain's workload and cluster."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.workload: Workload = read_domain(folder).workload
        self.cluster: Cluster = setup.cluster()
        self.work = folder / "work" / "horovod"
        self.work.mkdir(parents=True, exist_ok=True)

    @property
    def sparse(self) -> bool:
        return any(variable.sparse for variable in self.workload.variables)

    def steps_s(self, sides: Sequence[HorovodSide]) -> list[tuple[float, ...]]:
        """Measure a block of each side."""
        cases = [
            Case(side.settings, (("plain", STEPS),), WARMUP, sparse_as_dense=side.sparse_as_dense)
            for side in sides
        ]
        results = run_cases(self.cluster, self.workload, cases, self.work)
        return [tuple(result.steps_s("plain")) for result in results]

    def autotune(self, steps: int, sparse_as_dense: bool) -> None:
        """Let Horovod tune itself for `steps`, and keep its log."""
        log = (self.work / LOG).resolve()
        tuning = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
        blocks = (("plain", steps),)
        case = Case(None, blocks, environment=tuning, sparse_as_dense=sparse_as_dense)
        run_cases(self.cluster, self.workload, [case], self.work)
        read_samples(log)
        write_whole(self.folder / LOG, log.read_text(encoding="utf-8"), "Horovod's log")


def _tuned_rivals(ranks: _HorovodRanks, frozen: Frozen, say: Say, quick: bool) -> HorovodRivals:
    """Sweep Horovod's settings and run its autotune; return the sides without rounds."""
    sweeps = 1 if quick else SWEEPS
    name = ranks.setup.name
    dense = False
    if ranks.sparse:
        ways = [HorovodSide(DEFAULT, HorovodSettings(), None, way) for way in (False, True)]
        rows_s, dense_s = _medians_s(ranks, ways, 2 * sweeps)
        dense = dense_s < rows_s
        say(
            f"{name}: Horovod's defaults take {format_seconds(rows_s)} with gathered rows and "
            f"{format_seconds(dense_s)} with sparse_as_dense"
        )
    sides = [HorovodSide(one, settings, None, dense) for one, settings in SWEEP.items()]
    sweep_s = dict(zip(SWEEP, _medians_s(ranks, sides, sweeps), strict=True))
    swept = min(sweep_s, key=sweep_s.__getitem__)
    say(f"{name}: Horovod's best of the sweep is {swept}")
    budget = our_steps(frozen)
    steps = max(budget, QUICK_AUTOTUNE_STEPS if quick else AUTOTUNE_STEPS)
    if not (ranks.folder / LOG).exists():
        about_s = steps * sweep_s[swept]
        say(f"{name}: Horovod's autotune for {steps} steps, about {format_seconds(about_s)}")
        ranks.autotune(steps, dense)
    samples = read_samples(ranks.folder / LOG)
    within = samples[: budget // STEPS_PER_SAMPLE]
    settings = {
        DEFAULT: HorovodSettings(),
        SWEPT: SWEEP[swept],
        AUTOTUNE_OWN: best_sample(samples),
        AUTOTUNE_OURS: best_sample(within) if within else HorovodSettings(),
    }
    strategy = ours_of(frozen)
    listed = [HorovodSide(one, chosen, None, dense) for one, chosen in settings.items()]
    listed += [HorovodSide(OURS_BESIDE, None, strategy), HorovodSide(THROUGH)]
    bound_s = least_within_s(ranks.workload, ranks.cluster)
    return HorovodRivals(name, tuple(listed), steps, 0, sweep_s, bound_s)


def _medians_s(ranks: _HorovodRanks, sides: Sequence[HorovodSide], repeats: int) -> list[float]:
    """Return the median step of each side, over interleaved blocks."""
    blocks = [ranks.steps_s(sides) for _ in range(repeats)]
    return [
        median(step_s for block in of_side for step_s in block)
        for of_side in zip(*blocks, strict=True)
    ]


def ours_of(frozen: Frozen) -> Strategy | None:
    """Return our strategy at the last mark; None for the script's own DDP."""
    course = frozen.courses[OURS]
    name = course.sides[max(course.sides, key=int)]
    return next(side.strategy for side in frozen.sides if side.name == name)


def our_steps(frozen: Frozen) -> int:
    """Return the steps of our search up to its last mark: a warm-up and timed steps per trial."""
    trials = max(frozen.courses[OURS].trials.values(), default=0)
    return trials * (LENGTHS.warmup_steps + LENGTHS.timed_steps)


def _with_search(rivals: HorovodRivals, through: ThroughHorovod) -> HorovodRivals:
    """Freeze the strategy that the search found; a resumed search finds the same."""
    found = through.found
    if rivals.through_trials:
        before = next(side.strategy for side in rivals.sides if side.name == THROUGH)
        if before != found.strategy:
            raise InvalidInput(
                f"the search through Horovod must resume with the strategy of the {rivals.rounds} "
                f"rounds of {rivals.domain}, but found another one; remove {FILE} in its folder"
            )
        return rivals
    sides = [
        replace(side, strategy=found.strategy) if side.name == THROUGH else side
        for side in rivals.sides
    ]
    return replace(rivals, sides=tuple(sides), through_trials=max(found.trials, 1))


def _with_round(rivals: HorovodRivals, ranks: _HorovodRanks, blocks: _Blocks) -> HorovodRivals:
    """Measure each side once: Horovod's together, before, between or after ours."""
    number = rivals.rounds
    rng = generator(blocks.frozen.settings.seed, "horovod", number)
    of_horovod = [side for side in rivals.sides if side.settings is not None]
    of_horovod = [of_horovod[place] for place in rng.permutation(len(of_horovod)).tolist()]
    strategy = next(side.strategy for side in rivals.sides if side.name == OURS_BESIDE)
    times_s: dict[str, tuple[float, ...]] = {}
    turns = (DEFAULT, OURS_BESIDE, THROUGH)
    for turn in [turns[place] for place in rng.permutation(len(turns)).tolist()]:
        if turn == OURS_BESIDE:
            times_s[turn] = blocks.ours(number, strategy)
        elif turn == THROUGH:
            times_s[turn] = blocks.through(number, rivals)
        else:
            names = [side.name for side in of_horovod]
            times_s |= zip(names, ranks.steps_s(of_horovod), strict=True)
    sides = [replace(side, rounds=(*side.rounds, times_s[side.name])) for side in rivals.sides]
    return replace(rivals, sides=tuple(sides))


@dataclass(frozen=True)
class AutotuneSample:
    """A row of Horovod's log; a higher score is better, in bytes per microsecond."""

    threshold_bytes: int
    cycle_s: float
    score: float


def read_samples(log: Path) -> list[AutotuneSample]:
    """Read `HOROVOD_AUTOTUNE_LOG`. Raises `InvalidInput` without a sample."""
    samples = []
    with log.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                threshold = float(row["tensor_fusion_threshold"]) * MIB
                cycle_s = float(row["cycle_time_ms"]) * 1e-3
                samples.append(AutotuneSample(int(threshold), cycle_s, float(row["score"])))
            except (KeyError, TypeError, ValueError):
                continue  # the last row may be cut off
    if not samples:
        raise InvalidInput(f"Horovod's autotune must log a sample, but {log} has none")
    return samples


def best_sample(samples: Sequence[AutotuneSample]) -> HorovodSettings:
    best = max(samples, key=lambda sample: sample.score)
    return HorovodSettings(best.threshold_bytes, best.cycle_s)
