"""The measured sides of Horovod in a domain, kept as `horovod.json`, and their ratios.

A ratio is time(Horovod) / time(ours): above 1, ours is faster. Blocks pair by round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.costs.timing import ready_times_s
from autotune.files import write_whole
from autotune.lowering.horovod import ring_s_per_byte
from autotune.lowering.negotiation import HorovodSettings
from autotune.optimizer.bounds import interruptible_s
from autotune.parsing import parse, read_json
from autotune.records import Measured
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.statistics import CONFIDENCE, compare, fewest_values
from autotune.workload import Variable, Workload
from benchmarks.outcome.figures import geomean

FILE = "horovod.json"
DEFAULT, SWEPT = "Horovod, default", "Horovod, best of the sweep"
AUTOTUNE_OWN, AUTOTUNE_OURS = "Horovod autotune, its budget", "Horovod autotune, our budget"
OURS_BESIDE, THROUGH = "ours", "ours through Horovod"


@dataclass(frozen=True)
class HorovodSide:
    """A side and its rounds.

    `settings` of Horovod itself; None for ours, which has a `strategy` instead (None: DDP).
    `sparse_as_dense` as in `hvd.DistributedOptimizer`. `rounds`: seconds of the timed steps of each
    round, the slowest rank's.
    """

    name: str
    settings: HorovodSettings | None = None
    strategy: Strategy | None = None
    sparse_as_dense: bool = False
    rounds: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class HorovodRivals:
    """The sides of a domain, each with the same number of rounds.

    `autotune_steps`: steps for which autotune ran. `through_trials`: trials of the search for our
    plan through Horovod. `sweep_s`: setting -> median step of the sweep. `within_bound_s`: see
    `least_within_s`.
    """

    domain: str
    sides: tuple[HorovodSide, ...]
    autotune_steps: int
    through_trials: int = 0
    sweep_s: dict[str, float] = field(default_factory=dict)
    within_bound_s: float = 0.0

    @property
    def rounds(self) -> int:
        return min(len(side.rounds) for side in self.sides)


@dataclass(frozen=True)
class Interval:
    """A ratio with its confidence interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class HorovodRatios:
    """Ratios of one domain.

    `autotune`, `default`, `swept`: time(Horovod) / time(ours). `rival`: the better autotune.
    `through`: time(the better autotune) / time(our plan through Horovod). `headroom`: the largest
    such ratio of any plan within the step, by `least_within_s`.
    """

    domain: str
    rival: str
    autotune: Interval
    default: float
    swept: float
    through: Interval
    headroom: float
    across: bool


def read_rivals(folder: Path) -> HorovodRivals | None:
    """Read what was measured so far in a domain's folder."""
    file = folder / FILE
    return parse(HorovodRivals, read_json(file), str(file)) if file.exists() else None


def horovod_rounds(folder: Path) -> int:
    """Return the number of rounds that a domain's folder holds."""
    rivals = read_rivals(folder)
    return 0 if rivals is None else rivals.rounds


def write_rivals(folder: Path, rivals: HorovodRivals) -> None:
    write_whole(folder / FILE, canonical_json(rivals), "the measurements of Horovod")


def least_within_s(workload: Workload, cluster: Cluster) -> float:
    """A lower bound of Horovod's step under any settings and groups.

    One thread executes all operations one by one, at the rate of the slowest link, and `step()`
    waits for all of them. The bound has no costs per operation, and lets operations be interrupted
    (`interruptible_s`). A sparse gradient travels dense or as its rows, whichever is less.
    """
    sent_s = [_least_operation_s(variable, cluster) for variable in workload.variables]
    synchronized_s = interruptible_s(ready_times_s(workload).tolist(), sent_s, [0.0] * len(sent_s))
    passes_s = workload.forward_s + max(workload.backward_s, synchronized_s)
    return passes_s + workload.update_s


def _least_operation_s(variable: Variable, cluster: Cluster) -> float:
    """An all-reduce moves 2 (n - 1) / n of the bytes through each port, a gather n - 1 times one
    rank's rows."""
    dense_s = ring_s_per_byte(cluster) * variable.grad_bytes
    if not variable.sparse:
        return dense_s
    return min(dense_s, dense_s * variable.touched_share * cluster.world_size / 2)


def horovod_ratios(folder: Path) -> HorovodRatios | None:
    """Evaluate a domain's folder; None if it has too few rounds for an interval."""
    rivals = read_rivals(folder)
    enough = rivals is not None and rivals.rounds >= fewest_values(CONFIDENCE)
    return ratios_of(rivals) if rivals is not None and enough else None


def ratios_of(rivals: HorovodRivals) -> HorovodRatios:
    """Compare the sides, block by block of the same round."""
    sides = {side.name: side for side in rivals.sides}
    blocks = {
        name: [Measured(step_s=(times_s,)) for times_s in side.rounds[: rivals.rounds]]
        for name, side in sides.items()
    }

    def seconds(name: str) -> float:
        return median(block.median_s for block in blocks[name])

    def ratio(name: str, to: str) -> Interval:
        comparison = compare(blocks[name], blocks[to], CONFIDENCE)
        return Interval(comparison.ratio, comparison.low, comparison.high)

    autotuned = min((AUTOTUNE_OWN, AUTOTUNE_OURS), key=seconds)
    through = sides[THROUGH].strategy
    return HorovodRatios(
        rivals.domain,
        autotuned,
        ratio(autotuned, OURS_BESIDE),
        ratio(DEFAULT, OURS_BESIDE).ratio,
        ratio(SWEPT, OURS_BESIDE).ratio,
        ratio(autotuned, THROUGH),
        seconds(autotuned) / rivals.within_bound_s,
        through is not None and through.cross_step,
    )


def horovod_keys(ratios: Sequence[HorovodRatios]) -> Mapping[str, object]:
    """Return the keys of the benchmark's last line; none without a measured domain."""
    if not ratios:
        return {}
    worst = min(ratios, key=lambda one: one.autotune.ratio)
    return {
        "ratio_geomean_to_horovod": geomean([one.autotune.ratio for one in ratios]),
        "ratio_min_to_horovod": worst.autotune.ratio,
        "ratio_min_to_horovod_high": worst.autotune.high,
        "ratio_geomean_to_horovod_default": geomean([one.default for one in ratios]),
        "ratio_geomean_to_horovod_swept": geomean([one.swept for one in ratios]),
        "ratio_geomean_through_horovod": geomean([one.through.ratio for one in ratios]),
        "bound_geomean_through_horovod_within_step": geomean([one.headroom for one in ratios]),
        "horovod": [
            {
                "domain": one.domain,
                "ratio": one.autotune.ratio,
                "low": one.autotune.low,
                "high": one.autotune.high,
                "rival": one.rival,
                "default": one.default,
                "swept": one.swept,
                "through": one.through.ratio,
                "through_low": one.through.low,
                "through_high": one.through.high,
                "through_crosses_the_step": one.across,
                "bound_within_step": one.headroom,
            }
            for one in ratios
        ],
    }
