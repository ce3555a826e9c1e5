"""TensorFlow's MultiWorkerMirroredStrategy as a rival, measured next to ours in rounds.

Its workers wait for the same computation as our ranks do, and all-reduce gradients by TensorFlow's
ring over gRPC. First, `bytes_per_pack` is swept. Then a round measures each side once: ours, and
TensorFlow with one message, which is its default, and with the best of the sweep; which of the two
systems goes first alternates at random. Ranks start for their side's turn and end with it. Each
round is kept when it ends, so a run that was cut off resumes.

Models with sparse gradients are left out: TensorFlow sends their rows by two gathers each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from autotune.canonical import canonical_json
from autotune.dataset.folder import read_domain
from autotune.files import write_whole
from autotune.jobs.campaign.session import trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.parsing import parse, read_json
from autotune.records import Measured
from autotune.rng import generator
from autotune.tuning.statistics import CONFIDENCE, compare, fewest_values
from benchmarks.outcome.figures import geomean
from benchmarks.outcome.horovod import ours_of
from benchmarks.outcome.horovod_through import block_of
from benchmarks.outcome.kept import Frozen, read_frozen
from benchmarks.outcome.measure import LENGTHS
from benchmarks.outcome.rounds import measure_rounds

FILE = "tensorflow.json"
MIB = 2**20
DEFAULT, SWEPT = "MultiWorkerMirrored, default", "MultiWorkerMirrored, best of the sweep"
OURS_BESIDE = "ours"
SWEEP_BYTES = tuple(int(mib * MIB) for mib in (0, 0.25, 0.5, 1, 2, 4, 8, 16, 32))
"""0: one message."""
SWEEPS = 3
STEPS, WARMUP = 6, 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class MirroredSide:
    """`rounds`: seconds of the timed steps of each round, the slowest worker's.

    `bytes_per_pack` of TensorFlow; None for ours.
    """

    name: str
    bytes_per_pack: int | None
    rounds: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class MirroredRivals:
    """The sides of a domain, each with the same number of rounds.

    `sweep_s`: bytes per pack -> median step of the sweep.
    """

    domain: str
    sides: tuple[MirroredSide, ...]
    sweep_s: dict[str, float] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return min(len(side.rounds) for side in self.sides)


@dataclass(frozen=True)
class MirroredRatios:
    """time(TensorFlow) / time(ours); above 1, ours is faster. `best`: the better of the sweep's
    best size and the default."""

    domain: str
    best: float
    low: float
    high: float
    bytes_per_pack: int
    default: float


def measure_tensorflow(setup: Setup, folder: Path, rounds: int, say: Say) -> None:
    """Measure a domain whose closing comparison is complete until it has `rounds`; needs root."""
    frozen = read_frozen(folder)
    if frozen is None:
        say(f"{setup.name}: TensorFlow needs our side first")
        return
    workload = read_domain(folder).workload
    sparse = [variable.name for variable in workload.variables if variable.sparse]
    if sparse:
        say(f"{setup.name}: without TensorFlow, since {sparse[0]!r} has sparse gradients")
        return
    workers = _Workers(setup, folder)
    rivals = read_mirrored(folder)
    if rivals is None:
        sweep_s = workers.sweep_s(frozen.settings.seed)
        best = min(sweep_s, key=sweep_s.__getitem__)
        say(f"{setup.name}: TensorFlow's best of the sweep is {best} bytes per pack")
        named = {str(size): took_s for size, took_s in sweep_s.items()}
        sides = (
            MirroredSide(DEFAULT, 0),
            MirroredSide(SWEPT, best),
            MirroredSide(OURS_BESIDE, None),
        )
        rivals = MirroredRivals(setup.name, sides, named)
        _write(folder, rivals)
    measure_rounds(
        rivals,
        rounds,
        measure=lambda rivals: _with_round(rivals, workers, frozen, say),
        keep=partial(_write, folder),
        say=say,
        name=f"{setup.name}: TensorFlow",
    )


@dataclass(frozen=True)
class _Workers:
    """Workers of both systems on a domain's workload and cluster."""

    setup: Setup
    folder: Path

    def mirrored(self, sizes: Sequence[int]) -> list[tuple[float, ...]]:
        """Measure a block of TensorFlow with each of these bytes per pack."""
        from benchmarks.mirrored_ranks.start import Case, run_cases

        workload = read_domain(self.folder).workload
        cluster = self.setup.cluster()
        cases = [Case(size, STEPS, WARMUP) for size in sizes]
        return run_cases(cluster, workload, cases, self.folder / "work" / "tensorflow")

    def sweep_s(self, seed: int) -> dict[int, float]:
        """Return the median step with each size, over blocks in random order."""
        rng = generator(seed, "tensorflow's sweep")
        order = [
            SWEEP_BYTES[place]
            for _ in range(SWEEPS)
            for place in rng.permutation(len(SWEEP_BYTES)).tolist()
        ]
        taken_s: dict[int, list[float]] = {size: [] for size in SWEEP_BYTES}
        for size, block in zip(order, self.mirrored(order), strict=True):
            taken_s[size] += block
        return {size: median(values) for size, values in taken_s.items()}

    def ours(self, number: int, frozen: Frozen, say: Say) -> tuple[float, ...]:
        with trial_session(self.folder, self.setup, LENGTHS, say) as session:
            return block_of(session, f"beside-tensorflow:{number}:{OURS_BESIDE}", ours_of(frozen))


def _with_round(
    rivals: MirroredRivals, workers: _Workers, frozen: Frozen, say: Say
) -> MirroredRivals:
    number = rivals.rounds
    rng = generator(frozen.settings.seed, "tensorflow", number)
    of_tensorflow = [side for side in rivals.sides if side.bytes_per_pack is not None]
    of_tensorflow = [of_tensorflow[place] for place in rng.permutation(len(of_tensorflow)).tolist()]
    times_s: dict[str, tuple[float, ...]] = {}
    ours_first = bool(rng.integers(2))
    if ours_first:
        times_s[OURS_BESIDE] = workers.ours(number, frozen, say)
    blocks = workers.mirrored([side.bytes_per_pack or 0 for side in of_tensorflow])
    times_s |= zip((side.name for side in of_tensorflow), blocks, strict=True)
    if not ours_first:
        times_s[OURS_BESIDE] = workers.ours(number, frozen, say)
    sides = [replace(side, rounds=(*side.rounds, times_s[side.name])) for side in rivals.sides]
    return replace(rivals, sides=tuple(sides))


def _write(folder: Path, rivals: MirroredRivals) -> None:
    write_whole(folder / FILE, canonical_json(rivals), "the measurements of TensorFlow")


def read_mirrored(folder: Path) -> MirroredRivals | None:
    """Read what was measured so far in a domain's folder."""
    file = folder / FILE
    return parse(MirroredRivals, read_json(file), str(file)) if file.exists() else None


def tensorflow_ratios(folder: Path) -> MirroredRatios | None:
    """Evaluate a domain's folder; None if it has too few rounds for an interval."""
    rivals = read_mirrored(folder)
    enough = rivals is not None and rivals.rounds >= fewest_values(CONFIDENCE)
    return ratios_of(rivals) if rivals is not None and enough else None


def ratios_of(rivals: MirroredRivals) -> MirroredRatios:
    """Compare the sides, block by block of the same round."""
    sides = {side.name: side for side in rivals.sides}

    def blocks(name: str) -> list[Measured]:
        return [Measured(step_s=(times_s,)) for times_s in sides[name].rounds[: rivals.rounds]]

    ours = blocks(OURS_BESIDE)
    compared = {name: compare(blocks(name), ours, CONFIDENCE) for name in (SWEPT, DEFAULT)}
    best = min(compared, key=lambda name: compared[name].ratio)
    return MirroredRatios(
        rivals.domain,
        compared[best].ratio,
        compared[best].low,
        compared[best].high,
        sides[best].bytes_per_pack or 0,
        compared[DEFAULT].ratio,
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
                "bytes_per_pack": one.bytes_per_pack,
                "default": one.default,
            }
            for one in ratios
        ],
    }
