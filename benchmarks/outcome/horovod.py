"""Horovod as a rival: measured after the closing comparison, on a testbed of the same cluster.

Its ranks wait for the same computation as ours do. A round starts them anew and measures each side
once, in an order of its own: Horovod's defaults, a sweep of fusion threshold and cycle time, the
best settings that its autotune logged, and our best plan that Horovod's groups express, enacted by
Horovod itself. Autotune runs once, for its own budget; the best of the samples within our number of
steps counts as its result with our budget. Its response cache stays on even where the best sample
had it off, which favours Horovod. Rounds pair with those of the closing comparison.

Variables with sparse gradients are left out: Horovod sends their rows by two gathers each.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune.canonical import canonical_json
from autotune.cluster_file import read_cluster
from autotune.dataset.folder import read_domain
from autotune.errors import InvalidInput
from autotune.files import write_whole
from autotune.jobs.campaign.setups import Setup
from autotune.lowering.negotiation import HorovodSettings
from autotune.parsing import parse, read_json
from autotune.records import Measured
from autotune.rng import generator
from autotune.strategy_space.horovod_groups import horovod_groups
from autotune.strategy_space.plan import Plan, plan
from autotune.tuning.statistics import CONFIDENCE, compare
from autotune.workload import Workload
from benchmarks.outcome.figures import geomean, whole_rounds
from benchmarks.outcome.kept import CLOSING, Frozen, Group, read_frozen, rounds_of
from benchmarks.outcome.searches import OURS

FILE, LOG = "horovod.json", "autotune.csv"
MIB = 2**20
DEFAULT = "Horovod, default"
AUTOTUNE_OWN, AUTOTUNE_OURS = "Horovod autotune, its budget", "Horovod autotune, our budget"
THROUGH = "ours through Horovod"
SWEEP = {
    f"Horovod, {threshold:g} MiB, {cycle_ms:g} ms": HorovodSettings(
        int(threshold * MIB), cycle_ms * 1e-3
    )
    for threshold, cycle_ms in ((64, 5), (0.5, 1), (2, 1), (8, 1), (2, 5), (8, 5), (32, 10))
}
STEPS, WARMUP = 6, 3
STEPS_PER_SAMPLE = 50
"""A row of the log is the median of 5 scores of 10 steps each (Horovod 0.28.1,
parameter_manager.cc)."""
AUTOTUNE_STEPS, QUICK_AUTOTUNE_STEPS = 30 + 20 * STEPS_PER_SAMPLE, 30 + 6 * STEPS_PER_SAMPLE
"""By default, autotune takes 3 scores to warm up and 20 samples."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class HorovodSide:
    """`rounds`: seconds of the timed steps of each round, the slowest rank's."""

    name: str
    settings: HorovodSettings
    rounds: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class HorovodRivals:
    """The sides of a domain. `autotune_steps`: steps for which autotune ran."""

    domain: str
    sides: tuple[HorovodSide, ...]
    autotune_steps: int


@dataclass(frozen=True)
class HorovodRatios:
    """time(Horovod) / time(ours), and to our plan through Horovod; None where it has no groups."""

    domain: str
    autotune: float
    low: float
    high: float
    rival: str
    default: float
    swept: float
    through: float | None


def measure_horovod(setup: Setup, folder: Path, rounds: int, say: Say, quick: bool = False) -> None:
    """Measure the sides of a domain whose closing comparison is complete; needs root.

    `quick`: autotune gets a third of its own budget.
    """
    from benchmarks.horovod_ranks.start import Case, run_cases

    frozen = read_frozen(folder)
    if frozen is None or (folder / FILE).exists():
        say(f"{setup.name}: Horovod " + ("measured" if frozen else "needs our side first"))
        return
    domain = read_domain(folder)
    workload, cluster = domain.workload, read_cluster(setup.cluster_file)
    sparse = [variable.name for variable in workload.variables if variable.sparse]
    if sparse:
        say(f"{setup.name}: without Horovod, since {sparse[0]!r} has sparse gradients")
        return
    work = folder / "work" / "horovod"
    budget = our_steps(frozen)
    steps = max(budget, QUICK_AUTOTUNE_STEPS if quick else AUTOTUNE_STEPS)
    if not (folder / LOG).exists():
        say(f"{setup.name}: Horovod's autotune for {steps} steps")
        log = (work / LOG).resolve()
        log.parent.mkdir(parents=True, exist_ok=True)
        tuning = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
        run_cases(cluster, workload, [Case(None, (("plain", steps),), environment=tuning)], work)
        read_samples(log)
        write_whole(folder / LOG, log.read_text(encoding="utf-8"), "Horovod's log")
    samples = read_samples(folder / LOG)
    sides = {DEFAULT: HorovodSettings(), **SWEEP}
    sides[AUTOTUNE_OWN] = best_sample(samples)
    within = samples[: budget // STEPS_PER_SAMPLE]
    sides[AUTOTUNE_OURS] = best_sample(within) if within else HorovodSettings()
    groups = expressible(frozen, folder)
    if groups is not None:
        sides[THROUGH] = HorovodSettings(groups=groups, fuses_groups=False)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        order = generator(frozen.settings.seed, "horovod", number).permutation(len(names))
        names = [names[place] for place in order.tolist()]
        cases = [Case(sides[name], (("plain", STEPS),), WARMUP) for name in names]
        results = run_cases(cluster, workload, cases, work)
        for name, result in zip(names, results, strict=True):
            times[name].append(tuple(result.steps_s("plain")))
        say(f"{setup.name}: Horovod, round {number + 1} of {rounds}")
    listed = tuple(
        HorovodSide(name, settings, tuple(times[name])) for name, settings in sides.items()
    )
    rivals = HorovodRivals(setup.name, listed, steps)
    write_whole(folder / FILE, canonical_json(rivals), "the measurements of Horovod")


def our_steps(frozen: Frozen) -> int:
    """Steps of our search up to its last mark: each trial has a warm-up and timed steps."""
    from benchmarks.outcome.measure import LENGTHS

    trials = max(frozen.courses[OURS].trials.values(), default=0)
    return trials * (LENGTHS.warmup_steps + LENGTHS.timed_steps)


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


def expressible(frozen: Frozen, folder: Path) -> tuple[tuple[str, ...], ...] | None:
    """The groups of our fastest frozen side that Horovod's groups express; None if none is."""
    domain = read_domain(folder)
    rounds = whole_rounds(rounds_of(domain.trials, CLOSING), frozen.sides)
    found: dict[tuple[tuple[str, ...], ...], float] = {}
    for side in frozen.sides:
        if side.strategy is None or side.group is Group.RIVAL:
            continue
        enacted = plan(side.strategy, domain.workload, domain.cluster.world_size)
        times_s = [measured[side.plan].median_s for measured in rounds if side.plan in measured]
        groups = groups_of(enacted, domain.workload)
        if groups is not None and times_s:
            found[groups] = min(median(times_s), found.get(groups, float("inf")))
    return min(found, key=found.__getitem__) if found else None


def groups_of(enacted: Plan, workload: Workload) -> tuple[tuple[str, ...], ...] | None:
    """The variables of each message, if all are uncompressed all-reduces of whole variables."""
    found = horovod_groups(enacted, workload.variables)
    return None if found is None or found.fp16 else found.groups


def horovod_ratios(folder: Path) -> HorovodRatios | None:
    """Evaluate a domain's folder; None if Horovod was not measured there."""
    frozen = read_frozen(folder)
    if frozen is None or not (folder / FILE).exists():
        return None
    rivals = parse(HorovodRivals, read_json(folder / FILE), str(folder / FILE))
    domain = read_domain(folder)
    rounds = whole_rounds(rounds_of(domain.trials, CLOSING), frozen.sides)
    course = frozen.courses[OURS]
    ours_name = course.sides[max(course.sides, key=int)]
    ours_plan = next(side.plan for side in frozen.sides if side.name == ours_name)
    ours = [measured[ours_plan] for measured in rounds]
    return ratios_of(rivals, ours)


def ratios_of(rivals: HorovodRivals, ours: Sequence[Measured]) -> HorovodRatios:
    """Compare the sides with our rounds, pair by pair."""
    sides = {side.name: side for side in rivals.sides}

    def seconds(name: str) -> float:
        return median(median(times_s) for times_s in sides[name].rounds)

    autotuned = min((AUTOTUNE_OWN, AUTOTUNE_OURS), key=seconds)
    blocks = [Measured(step_s=(times_s,)) for times_s in sides[autotuned].rounds]
    pairs = min(len(blocks), len(ours))
    interval = compare(blocks[:pairs], ours[:pairs], CONFIDENCE)
    ours_s = median(block.median_s for block in ours)
    swept = [name for name in sides if name in SWEEP]
    through = seconds(autotuned) / seconds(THROUGH) if THROUGH in sides else None
    return HorovodRatios(
        rivals.domain,
        interval.ratio,
        interval.low,
        interval.high,
        autotuned,
        seconds(DEFAULT) / ours_s,
        min(map(seconds, swept)) / ours_s,
        through,
    )


def horovod_keys(ratios: Sequence[HorovodRatios]) -> Mapping[str, object]:
    """Return the keys of the benchmark's last line; none without a measured domain."""
    if not ratios:
        return {}
    through = [one.through for one in ratios if one.through is not None]
    worst = min(ratios, key=lambda one: one.autotune)
    return {
        "ratio_geomean_to_horovod": geomean([one.autotune for one in ratios]),
        "ratio_min_to_horovod": worst.autotune,
        "ratio_min_to_horovod_high": worst.high,
        "ratio_geomean_to_horovod_default": geomean([one.default for one in ratios]),
        "ratio_geomean_to_horovod_swept": geomean([one.swept for one in ratios]),
        "ratio_geomean_through_horovod": geomean(through) if through else None,
        "horovod": [
            {
                "domain": one.domain,
                "ratio": one.autotune,
                "low": one.low,
                "high": one.high,
                "rival": one.rival,
                "default": one.default,
                "swept": one.swept,
                "through": one.through,
            }
            for one in ratios
        ],
    }
