"""Read real trials, of datasets or of your own trial store, as examples for rankers.

A campaign was measured under one profile and one probe. Campaigns of one model on one cluster are
one domain: they are held out together, and times are compared within a campaign only, since a
machine is not equally fast on two days. The sessions of a dataset's domain are one campaign, since
`Domain.steady_s` brings them to one speed.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import autotune
from autotune.canonical import canonical_json, content_id
from autotune.dataset.folder import read_dataset
from autotune.dataset.noise import noise_of_repeats, reference_noise, repeat_noise
from autotune.dataset.trials import Domain
from autotune.features.extract import Extractor, StrategyFeatures, job_extractor
from autotune.features.timeline import TIMELINE_FEATURES, TimelineFeatures
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.jobs.workspace import Workspace
from autotune.records import Accelerators
from autotune.rng import generator
from autotune.simulators.interface import Example
from autotune.storage.store import PastTrial, Store
from autotune.strategy_space.plan import Plan, PlannedStrategy, plan
from autotune.strategy_space.strategy import Strategy
from benchmarks.ranking.json_lines import JsonLines
from benchmarks.ranking.median_noise import median_noise
from benchmarks.ranking.unprobed import without_probe
from benchmarks.stated_clusters import stated_cluster

_ROOT = Path(autotune.__file__).parent
_REPLAYED_BY = ("costs", "dfg", "features", "lowering", "strategy_space")
"""Folders of the package whose code, with the modules outside folders, determines a replay."""
_CALIBRATED_BY = ("calibration.py", "combination.py", "constants.py", "gaussian_process.py")
"""Files of `autotune.simulators` whose code determines a calibration."""
_OPTIMIZED = ":optimizer"
"""Part of the source of a trial that the tuner's optimizer proposed."""


@dataclass(frozen=True)
class Campaign:
    """Trials under one profile and one probe, which `extractor` uses for the features.

    `unprobed`: the extractor of a job that has probed nothing. `measured`: strategy, plan and step
    time in seconds of every undisturbed trial that did not fail, in order of time; `left_out`: the
    number of others with reasons, or "". `noise`: relative standard deviation of a trial's median;
    NaN: unknown. `searched`: plans that the tuner's optimizer proposed. `runtime`: the kind of
    runtime; a job learns only from earlier ones of its own kind.
    """

    domain: str
    model: str
    cluster_name: str
    extractor: Extractor
    unprobed: Extractor
    measured: tuple[tuple[Strategy, Plan, float], ...]
    left_out: str = ""
    noise: float = math.nan
    searched: frozenset[str] = frozenset()
    runtime: str = ""


@dataclass(frozen=True)
class Point:
    """One plan in one campaign, whose name is `example.domain`; its time is the median there.

    `model_id` depends on names and shapes, since two names may mean one model. `plan_id`: its
    `Plan.enacted_id`. `noise`: relative standard deviation of the median; NaN: unknown. `searched`:
    the tuner's optimizer proposed the plan. `runtime`: as in `Campaign`.
    """

    example: Example
    domain: str
    model: str
    model_id: str
    cluster: str
    plan_id: str
    noise: float = math.nan
    searched: bool = False
    runtime: str = ""


class ReplayedTimes:
    """A cache of replayed steps by plan, workload, fused ops, cluster, costs and code."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        entries = map(_entry, self._lines.values)
        self._known = dict(entry for entry in entries if entry is not None)
        self._code = _digest(_texts(replay_sources()))

    def key(self, campaign: Campaign, trials: Sequence[str]) -> str:
        """Return an identity of what calibrates the campaign's replays on these trials."""
        code = _texts(calibration_sources())
        return _digest([self._given(campaign.extractor), *code, *trials])

    def _given(self, extractor: Extractor) -> str:
        fused = list(extractor.fused.items())
        given = (extractor.workload, extractor.cluster, extractor.costs, fused)
        return _digest([self._code, *(canonical_json(each) for each in given)])

    def of(self, campaign: Campaign) -> Callable[[StrategyFeatures, Plan], StrategyFeatures]:
        """Return what adds the replay under the campaign's profile and probe to features."""
        extractor = campaign.extractor
        given = self._given(extractor)

        def described(features: StrategyFeatures, wanted: Plan) -> StrategyFeatures:
            key = _digest([given, wanted.id])
            if key not in self._known:
                replayed = extractor.described(features, wanted)
                assert replayed.timeline is not None and replayed.replayed_step_s is not None
                row = (replayed.replayed_step_s, *replayed.timeline.row.tolist())
                self._known[key] = row
                self._lines.append([key, row])
            step_s, *timeline = self._known[key]
            return replace(features, replayed_step_s=step_s, timeline=TimelineFeatures(*timeline))

        return described


def of_datasets(folders: Sequence[Path]) -> list[Campaign]:
    """Return every domain of these datasets; a domain of two datasets is two campaigns."""
    return [of_domain(domain) for folder in folders for domain in read_dataset(folder)]


def of_domain(domain: Domain) -> Campaign:
    """Return the domain without failed and disturbed trials."""
    measured, counts = [], {"failed": 0, "disturbed": 0}
    for trial in domain.candidates:
        assert trial.strategy is not None and trial.plan is not None
        if trial.number not in domain.steady_s:
            counts["failed"] += 1
        elif trial.disturbed:
            counts["disturbed"] += 1
        else:
            measured.append((trial.strategy, trial.plan, domain.steady_s[trial.number]))
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    extractor, environment = domain_extractor(domain), domain.environment
    accelerators = environment.conditions.accelerators
    return Campaign(
        domain=domain.name,
        model=domain.model,
        cluster_name=domain.cluster_name,
        extractor=extractor,
        unprobed=job_extractor(
            domain.workload,
            without_probe(extractor.cluster, stated_cluster(domain)),
            accelerators,
            environment.software,
        ),
        measured=tuple(measured),
        left_out=left_out,
        noise=_known_noise(repeat_noise(domain), reference_noise(domain)),
        searched=frozenset(
            trial.plan.enacted_id
            for trial in domain.candidates
            if trial.plan is not None and _OPTIMIZED in trial.source
        ),
        runtime=_runtime(accelerators, environment.software),
    )


def of_store(directory: Path) -> list[Campaign]:
    """Return the undisturbed measured candidates of all jobs in `directory`, a campaign each.

    Their models have their ids as names, their clusters what identifies the machines. Times and
    replays are those of the tuner.
    """
    with Store.open(Workspace.existing(directory).store_path) as store:
        trials = store.past_trials()
    jobs: dict[tuple[str, str, str], list[PastTrial]] = {}
    for trial in trials:
        jobs.setdefault((trial.job_id, trial.workload.id, _machines_id(trial)), []).append(trial)
    return [_of_job(model, cluster, of_job) for (_, model, cluster), of_job in jobs.items()]


def _of_job(model: str, cluster: str, trials: Sequence[PastTrial]) -> Campaign:
    first, measured = trials[0], _planned(trials)
    extractor = job_extractor(
        first.workload, first.cluster, first.accelerators, first.software, first.op_fusions
    )
    stated = without_probe(first.cluster, first.given)
    return Campaign(
        domain=f"{model}/{cluster}",
        model=model,
        cluster_name=cluster,
        extractor=extractor,
        unprobed=job_extractor(
            first.workload, stated, first.accelerators, first.software, first.op_fusions
        ),
        measured=measured,
        noise=_known_noise(noise_of_repeats(plan_times_s(measured).values())),
        runtime=_runtime(first.accelerators, first.software),
    )


def _known_noise(*noises: float | None) -> float:
    """Return the first noise that is known; NaN without any."""
    return next((noise for noise in noises if noise is not None), math.nan)


def _runtime(accelerators: Accelerators, software: Mapping[str, str]) -> str:
    framework = "tensorflow" if "tensorflow" in software else "torch"
    return f"{framework}, {accelerators.value} accelerators"


def _machines_id(trial: PastTrial) -> str:
    """Return an identity of the machines that does not depend on the speed that a probe found.

    Without a cluster file, the measured cluster has this speed, and the hosts where the ranks ran.
    """
    given, layout = trial.given, [(host.name, host.devices) for host in trial.cluster.hosts]
    if layout == [(host.name, host.devices) for host in given.hosts]:
        return given.id
    return content_id("cluster", layout)


def _planned(trials: Sequence[PastTrial]) -> tuple[tuple[Strategy, Plan, float], ...]:
    """Plan each strategy once, since a store keeps no plans."""
    plans: dict[str, Plan] = {}
    for trial in trials:
        if trial.strategy.id not in plans:
            plans[trial.strategy.id] = plan(
                trial.strategy, trial.workload, trial.cluster.world_size
            )
    return tuple((trial.strategy, plans[trial.strategy.id], trial.steady_s) for trial in trials)


def points_of(campaigns: Sequence[Campaign], replayed: ReplayedTimes) -> list[Point]:
    """Return one point per plan and campaign, in a random order that is the same in every run.

    Equal predictions are ranked in the order of the points. In the order of the trials, a ranker
    that cannot tell two strategies apart would profit from the searches that chose them.
    """
    campaigns_of: dict[str, int] = {}
    points: list[Point] = []
    for campaign in campaigns:
        campaigns_of[campaign.domain] = number = campaigns_of.get(campaign.domain, 0) + 1
        new_points = _points(campaign, f"{campaign.domain} #{number}", replayed)
        points += [
            new_points[index]
            for index in generator(0, "order of trials", campaign.domain, number).permutation(
                len(new_points)
            )
        ]
    return points


def plans_by_domain(points: Iterable[Point]) -> dict[str, list[str]]:
    """Return domain -> its distinct plans, both in order of their names."""
    ids: dict[str, set[str]] = {}
    for point in points:
        ids.setdefault(point.domain, set()).add(point.plan_id)
    return {name: sorted(plans) for name, plans in sorted(ids.items())}


def _points(campaign: Campaign, name: str, replayed: ReplayedTimes) -> list[Point]:
    described, workload = replayed.of(campaign), campaign.extractor.workload
    first: dict[str, tuple[Strategy, Plan]] = {}
    for strategy, enacted, _ in campaign.measured:
        first.setdefault(enacted.enacted_id, (strategy, enacted))
    points = []
    for plan_id, times_s in plan_times_s(campaign.measured).items():
        strategy, enacted = first[plan_id]
        features = campaign.extractor.features(PlannedStrategy(strategy, enacted))
        features = described(features, enacted)
        points.append(
            Point(
                example=Example(features, statistics.median(times_s), name, group=plan_id),
                domain=campaign.domain,
                model=campaign.model,
                model_id=workload.id,
                cluster=campaign.cluster_name,
                plan_id=plan_id,
                noise=median_noise(campaign.noise, len(times_s)),
                searched=plan_id in campaign.searched,
                runtime=campaign.runtime,
            )
        )
    return points


def plan_times_s(measured: Iterable[tuple[Strategy, Plan, float]]) -> dict[str, list[float]]:
    """Return `Plan.enacted_id` -> the times of its trials in their order."""
    times_s: dict[str, list[float]] = {}
    for _, enacted, measured_s in measured:
        times_s.setdefault(enacted.enacted_id, []).append(measured_s)
    return times_s


def _entry(value: Any) -> tuple[str, tuple[float, ...]] | None:
    """Return the entry of a line, or None if it is none."""
    try:
        key, row = value
        numbers = tuple(float(number) for number in row)
    except (ValueError, TypeError):
        return None
    return (str(key), numbers) if len(numbers) == 1 + len(TIMELINE_FEATURES) else None


def replay_sources() -> list[Path]:
    """Return the files whose code determines replays, and some more."""
    folders = (file for name in _REPLAYED_BY for file in (_ROOT / name).rglob("*.py"))
    return sorted([*_ROOT.glob("*.py"), *folders])


def calibration_sources() -> list[Path]:
    """Return the further files whose code determines calibrations."""
    return [_ROOT / "simulators" / name for name in _CALIBRATED_BY]


def _texts(files: Iterable[Path]) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in files]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
