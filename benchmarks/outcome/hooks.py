"""DDP with torch's own compression hooks as a rival, measured next to ours in rounds.

The hooks are those of `autotune.jobs.campaign.train_varied.HOOKS`, whose short training a test
compares with the uncompressed one. First, each is swept over the buckets of the sweep of DDP, with
as many trials as our search and the options that DDP has in the domain. Then a round measures each
side once, in an order of its own: ours with compressors, ours without, and the best of each hook. A
script registers its hook for good, so ranks start for their side's turn and end with it. Each trial
of the sweep and each round is kept when it ends, so a run that was cut off resumes. A trial of the
sweep that fails is run once more, because the machine may be at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.dataset.folder import read_domain
from autotune.errors import InvalidInput, LaunchError
from autotune.files import write_whole
from autotune.jobs.campaign.session import TrialSession, trial_session
from autotune.jobs.campaign.setups import Setup, varied
from autotune.jobs.campaign.train_varied import HOOKS
from autotune.parsing import parse, read_json
from autotune.records import Measured
from autotune.rng import generator
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.statistics import CONFIDENCE, compare, fewest_values
from autotune.workload import Workload
from benchmarks.outcome.ddp_options import option_sets
from benchmarks.outcome.figures import FAILURES, geomean
from benchmarks.outcome.horovod_through import BlockHung, block_of
from benchmarks.outcome.kept import BESIDE_HOOKS, Frozen, compressors_are_shown, read_frozen
from benchmarks.outcome.measure import LENGTHS
from benchmarks.outcome.rivals import DDP, DDP_SWEPT, ddp_arguments, families
from benchmarks.outcome.rounds import measure_rounds
from benchmarks.outcome.searches import OURS, OURS_LOSSY
from benchmarks.outcome.sweeps import best_of, medians_s, missing

FILE = "hooks.json"
ALWAYS = ("bucket_cap_mb=1000", "bucket_cap_mb=25")
"""A single bucket, and torch's default."""
OURS_SIDES = {"ours": OURS, "ours with compressors": OURS_LOSSY}

Say = Callable[[str], None]


@dataclass(frozen=True)
class HookSide:
    """`hook` of torch with a `setting` of DDP's sweep; None for ours.

    `rounds`: seconds of the timed steps of each round, the slowest rank's.
    """

    name: str
    hook: str | None = None
    setting: str = ""
    rounds: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class HookRivals:
    """The sides of a domain.

    `sweep_s`: hook -> for each round of its sweep, setting -> median step; None for a failure.
    `failed`: "HOOK, SETTING" -> reason. `hung`: hook -> settings that hung.
    """

    domain: str
    sides: tuple[HookSide, ...] = ()
    sweep_s: dict[str, tuple[dict[str, float | None], ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    hung: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return min((len(side.rounds) for side in self.sides), default=0)


@dataclass(frozen=True)
class HookRatios:
    """time(the better hook) / time(ours with compressors); above 1, ours is faster.

    `left_out`: a hook that ran with no setting -> the reason.
    """

    domain: str
    hook: str
    value: float
    low: float
    high: float
    left_out: Mapping[str, str] = field(default_factory=dict)


def measure_hooks(setup: Setup, folder: Path, rounds: int, say: Say) -> None:
    """Measure a domain whose closing comparison is complete until it has `rounds`; needs root."""
    frozen = read_frozen(folder)
    if frozen is None or OURS_LOSSY not in frozen.courses:
        say(f"{setup.name}: the hooks need our side with compressors first")
        return
    domain = read_domain(folder)
    ranks = _Ranks(setup, folder, frozen, say, option_sets(domain).get(frozen.options, {}))
    rivals = read_hooks(folder) or HookRivals(setup.name)
    settings = settings_of(domain.workload, domain.cluster)
    while not rivals.sides and (left := missing_looks(rivals, settings, frozen.settings.budget)):
        rivals = _with_look(rivals, ranks, *left)
        _write(folder, rivals)
    if not rivals.sides:
        hooks = _best_hooks(rivals.sweep_s)
        if not hooks:
            reason = next(iter(left_out(rivals).values()))
            raise InvalidInput(
                f"a hook of torch must run in {setup.name}, but none does: {reason}; "
                f"delete {folder / FILE} to try them again"
            )
        rivals = replace(rivals, sides=(*hooks, *map(HookSide, OURS_SIDES)))
    measure_rounds(
        rivals,
        rounds,
        measure=lambda rivals: _with_round(rivals, ranks),
        keep=partial(_write, folder),
        say=say,
        name=f"{setup.name}: hooks",
    )


def settings_of(workload: Workload, cluster: Cluster) -> list[str]:
    """Return the buckets of DDP's sweep and a single bucket, by their smallest cap, largest first.

    Callbacks of torch's PowerSGD hook wait for further sums on gloo's two threads, so that several
    buckets in flight wait for ever.
    """
    swept_by_ddp = families(workload, cluster)[DDP]
    given = [setting for setting in swept_by_ddp if setting != DDP_SWEPT]
    return sorted({*ALWAYS, *given}, key=lambda setting: (-_smallest_mib(setting), setting))


def _smallest_mib(setting: str) -> float:
    caps = next(iter(ddp_arguments(setting).values()))
    return min(caps) if isinstance(caps, list) else float(str(caps))


def missing_looks(
    rivals: HookRivals, settings: Sequence[str], budget: int
) -> tuple[str, int, str] | None:
    """Return hook, round and setting of the next trial of the sweeps; None at their end."""
    for hook in HOOKS:
        left = missing(_by_round(rivals.sweep_s.get(hook, ())), settings, budget)
        if left is not None:
            number, names = left
            return hook, number, names[0]
    return None


def _by_round(rounds: Sequence[Mapping[str, float | None]]) -> dict[int, dict[str, float]]:
    return {
        number: {name: math.inf if step_s is None else step_s for name, step_s in of_round.items()}
        for number, of_round in enumerate(rounds)
    }


def _best_hooks(sweep_s: Mapping[str, Sequence[Mapping[str, float | None]]]) -> list[HookSide]:
    """Return each hook that runs, with the best setting of its sweep."""
    sides = []
    for hook in HOOKS:
        by_round = _by_round(sweep_s.get(hook, ()))
        if any(step_s < math.inf for step_s in medians_s(by_round).values()):
            sides.append(HookSide(f"DDP, {hook} hook", hook, best_of(by_round, hook)))
    return sides


class Blocks(Protocol):
    """Measures blocks of steps of a side."""

    def say(self, message: str) -> None: ...

    def block(self, source: str, side: HookSide) -> tuple[float, ...]:
        """Return the seconds of a block's steps.

        Raises `BlockHung` if it hangs, and `LaunchError` if it fails otherwise.
        """


@dataclass(frozen=True)
class _Ranks:
    setup: Setup
    folder: Path
    frozen: Frozen
    say: Say
    options: Mapping[str, object]
    """The options of DDP in the domain's closing comparison."""

    def block(self, source: str, side: HookSide) -> tuple[float, ...]:
        """Measure a block of a side with ranks of its own."""
        source = f"{BESIDE_HOOKS}:{source}"
        if side.hook is None:
            strategy = ours_at_last_mark(self.frozen, OURS_SIDES[side.name])
            with self._session(self.setup) as session:
                return block_of(session, source if strategy else f"{source}:reference", strategy)
        setup = varied(self.setup, {**self.options, **ddp_arguments(side.setting)}, side.hook)
        with self._session(setup) as session:
            return block_of(session, f"{source}:reference", None)

    def _session(self, setup: Setup) -> AbstractContextManager[TrialSession]:
        """Start ranks whose trials are apart from those of the domain."""
        apart = self.folder / BESIDE_HOOKS
        return trial_session(apart, setup, LENGTHS, self.say, like=self.folder)


def ours_at_last_mark(frozen: Frozen, job: str) -> Strategy | None:
    """Return the job's strategy at the last mark; None for the script's own DDP.

    A strategy whose convergence no test shows does not count.
    """
    course = frozen.courses[job]
    name = course.sides[max(course.sides, key=int)]
    strategy = next(side.strategy for side in frozen.sides if side.name == name)
    return strategy if strategy is None or compressors_are_shown(strategy) else None


def _with_look(
    rivals: HookRivals, ranks: Blocks, hook: str, number: int, setting: str
) -> HookRivals:
    """Measure a block of a setting in a round of its hook's sweep; one that fails is repeated.

    A hook that hangs with some buckets is not tried with smaller ones, each of which would hang.
    """
    title, hung = f"{hook}, {setting}", rivals.hung.get(hook, ())
    if setting in hung:
        return _with_result(rivals, hook, number, setting, None)
    larger = [one for one in hung if _smallest_mib(one) >= _smallest_mib(setting)]
    if larger:
        reason = f"as {larger[0]}: {rivals.failed[f'{hook}, {larger[0]}']}"
        return _with_result(rivals, hook, number, setting, None, reason)
    errors: list[LaunchError] = []
    while len(errors) < FAILURES:
        try:
            block_s = ranks.block(f"sweep {number}, {title}", HookSide(title, hook, setting))
        except LaunchError as error:
            ranks.say(f"{rivals.domain}: {title} failed: {error}")
            errors.append(error)
        else:
            return _with_result(rivals, hook, number, setting, median(block_s))
    if all(isinstance(error, BlockHung) for error in errors):
        rivals = replace(rivals, hung={**rivals.hung, hook: (*hung, setting)})
    return _with_result(rivals, hook, number, setting, None, str(errors[-1])[:300])


def _with_result(
    rivals: HookRivals, hook: str, number: int, setting: str, step_s: float | None, reason: str = ""
) -> HookRivals:
    rounds = list(rivals.sweep_s.get(hook, ()))
    rounds += [{} for _ in range(number + 1 - len(rounds))]
    rounds[number] = {**rounds[number], setting: step_s}
    reasons = {f"{hook}, {setting}": reason} if reason else {}
    return replace(
        rivals, sweep_s={**rivals.sweep_s, hook: tuple(rounds)}, failed={**rivals.failed, **reasons}
    )


def _with_round(rivals: HookRivals, ranks: _Ranks) -> HookRivals:
    number = rivals.rounds
    rng = generator(ranks.frozen.settings.seed, "hooks", number)
    times_s = {
        rivals.sides[place].name: ranks.block(
            f"{number}, {rivals.sides[place].name}", rivals.sides[place]
        )
        for place in rng.permutation(len(rivals.sides)).tolist()
    }
    sides = [replace(side, rounds=(*side.rounds, times_s[side.name])) for side in rivals.sides]
    return replace(rivals, sides=tuple(sides))


def _write(folder: Path, rivals: HookRivals) -> None:
    write_whole(folder / FILE, canonical_json(rivals), "the measurements of torch's hooks")


def read_hooks(folder: Path) -> HookRivals | None:
    """Read what was measured so far in a domain's folder."""
    file = folder / FILE
    return parse(HookRivals, read_json(file), str(file)) if file.exists() else None


def left_out(rivals: HookRivals) -> dict[str, str]:
    """Return each hook that ran with no setting, and the reason of one of its failures."""
    compared = {side.hook for side in rivals.sides}
    reasons: dict[str, str] = {}
    for title, reason in rivals.failed.items():
        hook = title.partition(", ")[0]
        if hook not in compared:
            reasons.setdefault(hook, reason)
    return reasons


def hook_rounds(folder: Path) -> int:
    """Return the blocks that are on disk."""
    rivals = read_hooks(folder)
    if rivals is None:
        return 0
    return rivals.rounds + sum(len(one) for rounds in rivals.sweep_s.values() for one in rounds)


def hook_ratios(folder: Path) -> HookRatios | None:
    """Evaluate a domain's folder; None if it has too few rounds for an interval."""
    rivals = read_hooks(folder)
    enough = rivals is not None and rivals.rounds >= fewest_values(CONFIDENCE)
    return ratios_of(rivals) if rivals is not None and enough else None


def ratios_of(rivals: HookRivals) -> HookRatios:
    """Compare the hook with the lowest ratio with ours, block by block of the same round."""

    def blocks(side: HookSide) -> list[Measured]:
        return [Measured(step_s=(times_s,)) for times_s in side.rounds[: rivals.rounds]]

    lossy = next(side for side in rivals.sides if OURS_SIDES.get(side.name) == OURS_LOSSY)
    compared = [
        (compare(blocks(side), blocks(lossy), CONFIDENCE), side.name)
        for side in rivals.sides
        if side.hook is not None
    ]
    best, name = min(compared, key=lambda entry: entry[0].ratio)
    return HookRatios(rivals.domain, name, best.ratio, best.low, best.high, left_out(rivals))


def hook_keys(ratios: Sequence[HookRatios]) -> Mapping[str, object]:
    """Return the keys of the benchmark's last line; none without a measured domain."""
    if not ratios:
        return {}
    return {
        "ratio_geomean_to_hooks": geomean([one.value for one in ratios]),
        "ratio_min_to_hooks": min(one.value for one in ratios),
        "hooks": [
            {
                "domain": one.domain,
                "ratio": one.value,
                "low": one.low,
                "high": one.high,
                "hook": one.hook,
                "left_out": dict(one.left_out),
            }
            for one in ratios
        ],
    }
