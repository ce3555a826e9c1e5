"""TensorFlow's MultiWorkerMirroredStrategy as a rival, on a testbed of the same cluster.

It is measured after the closing comparison. Its workers wait for the same computation as our ranks
do, and all-reduce gradients by TensorFlow's ring over gRPC. A round measures each side once, in an
order of its own: one message, which is TensorFlow's default, and a sweep of `bytes_per_pack`. The
best of them counts. Rounds pair with those of the closing comparison.

Models with sparse gradients are left out: TensorFlow sends their rows by two gathers each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune.canonical import canonical_json
from autotune.cluster_file import read_cluster
from autotune.dataset.folder import read_domain
from autotune.files import write_whole
from autotune.jobs.campaign.setups import Setup
from autotune.parsing import parse, read_json
from autotune.records import Measured
from autotune.rng import generator
from autotune.tuning.statistics import CONFIDENCE, compare
from benchmarks.outcome.figures import geomean, whole_rounds
from benchmarks.outcome.kept import CLOSING, read_frozen, rounds_of
from benchmarks.outcome.searches import OURS

FILE = "tensorflow.json"
MIB = 2**20
DEFAULT = "MultiWorkerMirrored, default"
SWEEP = {
    f"MultiWorkerMirrored, {mib:g} MiB": int(mib * MIB) for mib in (0.25, 0.5, 1, 2, 4, 8, 16, 32)
}
STEPS, WARMUP = 6, 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class MirroredSide:
    """`rounds`: seconds of the timed steps of each round, the slowest worker's."""

    name: str
    bytes_per_pack: int
    rounds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MirroredRivals:
    """The sides of a domain."""

    domain: str
    sides: tuple[MirroredSide, ...]


@dataclass(frozen=True)
class MirroredRatios:
    """time(TensorFlow) / time(ours): above 1, ours is faster. `rival`: the best side."""

    domain: str
    best: float
    low: float
    high: float
    rival: str
    default: float


def measure_tensorflow(setup: Setup, folder: Path, rounds: int, say: Say) -> None:
    """Measure the sides of a domain whose closing comparison is complete; needs root."""
    from benchmarks.mirrored_ranks.start import Case, run_cases

    frozen = read_frozen(folder)
    if frozen is None or (folder / FILE).exists():
        say(f"{setup.name}: TensorFlow " + ("measured" if frozen else "needs our side first"))
        return
    workload, cluster = read_domain(folder).workload, read_cluster(setup.cluster_file)
    sparse = [variable.name for variable in workload.variables if variable.sparse]
    if sparse:
        say(f"{setup.name}: without TensorFlow, since {sparse[0]!r} has sparse gradients")
        return
    sides = {DEFAULT: 0, **SWEEP}
    order: list[str] = []
    for number in range(rounds):
        names = list(sides)
        places = generator(frozen.settings.seed, "tensorflow", number).permutation(len(names))
        order += [names[place] for place in places.tolist()]
    say(f"{setup.name}: TensorFlow, {len(sides)} sides in {rounds} rounds")
    cases = [Case(sides[name], STEPS, WARMUP) for name in order]
    results = run_cases(cluster, workload, cases, folder / "work" / "tensorflow")
    listed = tuple(
        MirroredSide(
            name,
            size,
            tuple(times for other, times in zip(order, results, strict=True) if other == name),
        )
        for name, size in sides.items()
    )
    rivals = MirroredRivals(setup.name, listed)
    write_whole(folder / FILE, canonical_json(rivals), "the measurements of TensorFlow")


def tensorflow_ratios(folder: Path) -> MirroredRatios | None:
    """Evaluate a domain's folder; None if TensorFlow was not measured there."""
    frozen = read_frozen(folder)
    if frozen is None or not (folder / FILE).exists():
        return None
    rivals = parse(MirroredRivals, read_json(folder / FILE), str(folder / FILE))
    rounds = whole_rounds(rounds_of(read_domain(folder).trials, CLOSING), frozen.sides)
    course = frozen.courses[OURS]
    ours_name = course.sides[max(course.sides, key=int)]
    ours_plan = next(side.plan for side in frozen.sides if side.name == ours_name)
    return ratios_of(rivals, [measured[ours_plan] for measured in rounds])


def ratios_of(rivals: MirroredRivals, ours: Sequence[Measured]) -> MirroredRatios:
    """Compare the sides with our rounds, pair by pair."""
    medians_s = {
        side.name: median(median(times_s) for times_s in side.rounds) for side in rivals.sides
    }
    best = min(rivals.sides, key=lambda side: medians_s[side.name])
    blocks = [Measured(step_s=(times_s,)) for times_s in best.rounds]
    pairs = min(len(blocks), len(ours))
    interval = compare(blocks[:pairs], ours[:pairs], CONFIDENCE)
    ours_s = median(block.median_s for block in ours)
    return MirroredRatios(
        rivals.domain,
        interval.ratio,
        interval.low,
        interval.high,
        best.name,
        medians_s[DEFAULT] / ours_s,
    )


def tensorflow_keys(ratios: Sequence[MirroredRatios]) -> Mapping[str, object]:
    """Return the keys of the benchmark's last line; none without a measured domain."""
    if not ratios:
        return {}
    worst = min(ratios, key=lambda one: one.best)
    return {
        "ratio_geomean_to_tensorflow": geomean([one.best for one in ratios]),
        "ratio_min_to_tensorflow": worst.best,
        "ratio_min_to_tensorflow_high": worst.high,
        "ratio_geomean_to_tensorflow_default": geomean([one.default for one in ratios]),
        "tensorflow": [
            {
                "domain": one.domain,
                "ratio": one.best,
                "low": one.low,
                "high": one.high,
                "rival": one.rival,
                "default": one.default,
            }
            for one in ratios
        ],
    }
