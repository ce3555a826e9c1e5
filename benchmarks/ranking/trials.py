"""Read real trials, of datasets or of your own trial store, as examples for rankers.

A campaign was measured under one profile and one probe. Campaigns of one model on one cluster are
one domain: they are held out together, and times are compared within a campaign only, since a
machine is not equally fast on two days. The sessions of a dataset's domain are one campaign, since
`Domain.steady_s` brings them to one speed.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import autotune
from autotune.canonical import canonical_json, content_id
from autotune.dataset.folder import read_dataset
from autotune.dataset.noise import reference_noise, repeat_noise
from autotune.dataset.trials import Domain
from autotune.features.extract import Extractor, StrategyFeatures, job_extractor
from autotune.features.timeline import TIMELINE_FEATURES, TimelineFeatures
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.jobs.workspace import Workspace
from autotune.rng import generator
from autotune.simulators.interface import Example
from autotune.storage.store import PastTrial, Store
from autotune.strategy_space.plan import Plan, PlannedStrategy, plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.statistics import MEDIAN_ERROR

_REPLAYED_BY = ("lowering", "dfg", "features", "strategy_space")
"""Folders of the package whose code determines a replayed time."""
_CALIBRATED_BY = ("calibration.py", "combination.py", "constants.py", "gaussian_process.py")
"""Files of `autotune.simulators` whose code determines a calibration."""
_OPTIMIZED = ":optimizer"
"""Part of the source of a trial that the tuner's optimizer proposed."""


@dataclass(frozen=True)
class Campaign:
    """Trials under one profile and one probe, which `extractor` uses for the features.

    `measured`: strategy, plan and step time in seconds of every undisturbed trial that did not
    fail, in order of time; `left_out`: the number of others with reasons, or "". `noise`: relative
    standard deviation of a trial's median. `searched`: plans that the tuner's optimizer proposed.
    """

    domain: str
    model: str
    cluster_name: str
    extractor: Extractor
    measured: tuple[tuple[Strategy, Plan, float], ...]
    left_out: str = ""
    noise: float = 0.0
    searched: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Point:
    """One plan in one campaign, whose name is `example.domain`; its time is the median there.

    `model_id` depends on names and shapes, since two names may mean one model. `plan_id`: its
    `Plan.enacted_id`. `noise`: relative standard deviation of the median. `searched`: the tuner's
    optimizer proposed the plan.
    """

    example: Example
    domain: str
    model: str
    model_id: str
    cluster: str
    plan_id: str
    noise: float = 0.0
    searched: bool = False


class ReplayedTimes:
    """A cache of replayed steps in JSON lines, by plan, workload, cluster, costs and code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = dict(entry for line in lines if (entry := _entry(line)) is not None)
        self._code = _digest(_sources())

    def key(self, campaign: Campaign, trials: Sequence[str]) -> str:
        """Return an identity of what calibrates the campaign's replays on these trials."""
        folder = Path(autotune.__file__).parent / "simulators"
        code = [(folder / name).read_text(encoding="utf-8") for name in _CALIBRATED_BY]
        return _digest([self._given(campaign.extractor), *code, *trials])

    def _given(self, extractor: Extractor) -> str:
        given = (extractor.workload, extractor.cluster, extractor.costs)
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
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps([key, row]) + "\n")
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
    return Campaign(
        domain.name,
        domain.model,
        domain.cluster_name,
        domain_extractor(domain),
        tuple(measured),
        left_out,
        repeat_noise(domain) or reference_noise(domain) or 0.0,
        frozenset(
            trial.plan.enacted_id
            for trial in domain.candidates
            if trial.plan is not None and _OPTIMIZED in trial.source
        ),
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
    return [
        Campaign(f"{model}/{cluster}", model, cluster, _extractor(of_job[0]), _planned(of_job))
        for (_, model, cluster), of_job in jobs.items()
    ]


def _machines_id(trial: PastTrial) -> str:
    """Return an identity of the machines that does not depend on the speed that a probe found.

    Without a cluster file, the measured cluster has this speed, and the hosts where the ranks ran.
    """
    given, layout = trial.given, [(host.name, host.devices) for host in trial.cluster.hosts]
    if layout == [(host.name, host.devices) for host in given.hosts]:
        return given.id
    return content_id("cluster", layout)


def _extractor(trial: PastTrial) -> Extractor:
    return job_extractor(
        trial.workload, trial.cluster, trial.accelerators, trial.software, trial.op_fusions
    )


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
    times_s: dict[str, list[float]] = {}
    for strategy, enacted, measured_s in campaign.measured:
        first.setdefault(enacted.enacted_id, (strategy, enacted))
        times_s.setdefault(enacted.enacted_id, []).append(measured_s)
    points = []
    for plan_id, (strategy, enacted) in first.items():
        features = campaign.extractor.features(PlannedStrategy(strategy, enacted))
        features = described(features, enacted)
        example = Example(features, statistics.median(times_s[plan_id]), name, group=plan_id)
        points.append(
            Point(
                example,
                campaign.domain,
                campaign.model,
                workload.id,
                campaign.cluster_name,
                plan_id,
                median_noise(campaign.noise, len(times_s[plan_id])),
                plan_id in campaign.searched,
            )
        )
    return points


def median_noise(noise: float, trials: int) -> float:
    """Return the relative standard deviation of the median of this many trials."""
    return noise if trials < 3 else noise * MEDIAN_ERROR / math.sqrt(trials)


def _entry(line: str) -> tuple[str, tuple[float, ...]] | None:
    """Return a line's entry, or None if a run was stopped while it wrote the line."""
    try:
        key, row = json.loads(line)
        numbers = tuple(float(value) for value in row)
    except (ValueError, TypeError):
        return None
    return (str(key), numbers) if len(numbers) == 1 + len(TIMELINE_FEATURES) else None


def _sources() -> list[str]:
    root = Path(autotune.__file__).parent
    files = [
        *root.glob("*.py"),
        *(file for folder in _REPLAYED_BY for file in (root / folder).rglob("*.py")),
    ]
    return [file.read_text(encoding="utf-8") for file in sorted(files)]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
