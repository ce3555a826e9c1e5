"""Real trials as examples for rankers: of collected domains or of one's own trial store, with the replayed time of every plan.

A session is one `Domain` as it was collected: one profile, one probe, one stretch of time. Sessions of one model on one cluster are
one domain: they are held out together. Times are compared within a session only, since a machine is not equally fast on two days.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import autotune
from autotune.canonical import canonical_json
from autotune.commands.workspace import Workspace
from autotune.features.extract import Extractor
from autotune.rng import generator
from autotune.simulators.interface import Example
from autotune.store import PastTrial, Store
from autotune.strategy_space.plan import Plan, plan
from benchmarks.accuracy_trials import CLUSTERS, SCRIPTS, Domain, Trial, read_domain
from benchmarks.runtime_costs import costs_of

_REPLAYED_BY = ("lowering", "dfg", "features", "strategy_space")
"""Folders of the package whose code decides a replayed time."""


@dataclass(frozen=True)
class Point:
    """One plan in one session. `example.domain` is the session's name; its time is the median of the plan's medians there.

    `model_id`: by names and shapes, since two names may mean one model.
    """

    example: Example
    domain: str
    model: str
    model_id: str
    cluster: str
    plan_id: str


class ReplayedTimes:
    """Replayed step times kept in a file of JSON lines, by what they follow from: plan, workload, cluster, costs and the code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known_s: dict[str, float] = dict(json.loads(line) for line in lines)
        self._code = _digest(_sources())

    def of_session(self, session: Domain, extractor: Extractor) -> Callable[[Plan], float]:
        """The replayed time of a plan of that session."""
        costs = canonical_json(dict(sorted(session.costs.items())))
        given = _digest([self._code, canonical_json(session.workload), canonical_json(extractor.cluster), costs])

        def step_s(wanted: Plan) -> float:
            key = _digest([given, wanted.id])
            if key not in self._known_s:
                self._known_s[key] = extractor.steps.step_s(wanted)
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps([key, self._known_s[key]]) + "\n")
            return self._known_s[key]

        return step_s


def extractor_of(session: Domain) -> Extractor:
    """What makes a session's features: by its own profile, probe and costs of the runtime; all its hosts stand on one machine."""
    cluster = replace(session.cluster, machine_cores=session.cores)
    return Extractor(session.workload, cluster, costs_of(session.costs, cluster.world_size))


def read_accuracy_trials(folders: Sequence[Path]) -> list[Domain]:
    """The sessions that `benchmarks.accuracy_trials` left in these folders."""
    found = [read_domain(folder, model, cluster) for folder in folders for model in SCRIPTS for cluster in CLUSTERS]
    return [session for session in found if session is not None]


def read_store(directory: Path) -> list[Domain]:
    """The undisturbed measured candidates of all jobs in `directory`, a session each. Model and cluster are called by their ids."""
    with Store.open(Workspace.existing(directory).store_path) as store:
        trials = store.past_trials()
    sessions: dict[tuple[str, str, str], list[PastTrial]] = {}
    for trial in trials:
        sessions.setdefault((trial.job_id, trial.workload.id, trial.cluster.id), []).append(trial)
    return [
        Domain(
            model,
            cluster,
            of_job[0].workload,
            of_job[0].cluster,
            {},
            of_job[0].cluster.machine_cores,
            tuple(Trial("candidate", trial.strategy, (trial.median_s,), None, 0.0) for trial in of_job),
        )
        for (_, model, cluster), of_job in sessions.items()
    ]


def points_of(sessions: Sequence[Domain], replayed: ReplayedTimes) -> list[Point]:
    """One point per plan and session, in an order that says nothing about the time and is the same in every run.

    Trials lie in the order in which somebody wanted them, and equal predictions are ranked in the order of the points: unshuffled,
    a ranker that cannot tell two strategies apart would get that somebody's opinion.
    """
    seen: dict[str, int] = {}
    points: list[Point] = []
    for session in sessions:
        seen[session.name] = number = seen.get(session.name, -1) + 1
        found = _of_session(session, f"{session.name} #{number}", replayed)
        points += [found[index] for index in generator(0, "order of trials", session.name, number).permutation(len(found))]
    return points


def plans_by_domain(points: Iterable[Point]) -> dict[str, list[str]]:
    """Domain -> its distinct plans, in order of the names of the domains and of the plans."""
    found: dict[str, set[str]] = {}
    for point in points:
        found.setdefault(point.domain, set()).add(point.plan_id)
    return {name: sorted(plans) for name, plans in sorted(found.items())}


def _of_session(session: Domain, name: str, replayed: ReplayedTimes) -> list[Point]:
    extractor = extractor_of(session)
    step_s = replayed.of_session(session, extractor)
    first: dict[str, tuple[Trial, Plan]] = {}
    medians_s: dict[str, list[float]] = {}
    for trial in session.trials:
        if trial.strategy is None or not trial.step_s:
            continue
        enacted = plan(trial.strategy, session.workload, session.cluster.world_size)
        first.setdefault(enacted.id, (trial, enacted))
        medians_s.setdefault(enacted.id, []).append(statistics.median(trial.step_s))
    points = []
    for plan_id, (trial, enacted) in first.items():
        assert trial.strategy is not None
        features = replace(extractor.features(trial.strategy, enacted), replayed_step_s=step_s(enacted))
        example = Example(features, statistics.median(medians_s[plan_id]), name)
        points.append(Point(example, session.name, session.model, session.workload.id, session.cluster_name, plan_id))
    return points


def _sources() -> list[str]:
    root = Path(autotune.__file__).parent
    files = [*root.glob("*.py"), *(file for folder in _REPLAYED_BY for file in (root / folder).rglob("*.py"))]
    return [file.read_text(encoding="utf-8") for file in sorted(files)]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
