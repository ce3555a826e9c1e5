"""Predicted and measured steps of the strategies that a seed draws for our runtime."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.dataset.trials import DatasetTrial, Domain
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.jobs.campaign.strategy_sources import Sourced
from autotune.simulators.evaluation import kendall_tau
from autotune.strategy_space.plan import Plan, PlannedStrategy


@dataclass(frozen=True)
class PredictedStep:
    """One plan of a strategy: medians and predictions in seconds."""

    domain: str
    kind: str
    source: str
    messages: int
    measured_s: float
    spread: float
    replayed_s: float
    analytic_s: float
    overrun: float
    load: float

    @property
    def error(self) -> float:
        return abs(self.replayed_s / self.measured_s - 1)

    @property
    def analytic_error(self) -> float:
        return abs(self.analytic_s / self.measured_s - 1)


@dataclass(frozen=True)
class DomainSteps:
    """The drawn strategies of one domain.

    - `rows`: one for each plan of a strategy; a later planner may have made another one of it.
    - `failed`: a strategy that was never measured -> the reason of its last trial.
    - `missing`: drawn strategies without a trial.
    - `disturbed`: rows that count a disturbed trial.
    - `others`: candidate trials of strategies that were not drawn, which count nowhere.
    - `commits`: of the sessions whose trials count.
    """

    domain: str
    rows: tuple[PredictedStep, ...]
    failed: Mapping[str, str]
    missing: int
    disturbed: int
    others: int
    commits: frozenset[str]


def kind_of(enacted: Plan) -> str:
    """Describe a plan: across the step or not, by which synchronizers, compressed or not."""
    when = "across the step" if enacted.cross_step else "within the step"
    primitives = {message.synchronizer.operation for message in enacted.messages}
    how = primitives.pop().replace("_", " ") if len(primitives) == 1 else "mixed"
    compressors = {message.compressor.value for message in enacted.messages} - {"none"}
    return f"{when}, {how}, {'compressed' if compressors else 'uncompressed'}"


def steps_of(domain: Domain, drawn: Collection[Sourced]) -> DomainSteps:
    """Predict every measured plan of a drawn strategy, by the median of its trials' medians."""
    by_id: dict[str, list[DatasetTrial]] = {strategy.id: [] for _, strategy in drawn}
    others = 0
    for trial in domain.candidates:
        assert trial.strategy is not None, "a candidate has a strategy"
        if trial.strategy.id in by_id:
            by_id[trial.strategy.id].append(trial)
        else:
            others += 1
    measured = [of_plan for trials in by_id.values() for of_plan in _by_plan(trials)]
    failed = [
        trials[-1]
        for trials in by_id.values()
        if trials and not any(trial.step_s for trial in trials)
    ]
    predictor = _Predictor(domain)
    sessions = {trial.session for trials in by_id.values() for trial in trials}
    return DomainSteps(
        domain.name,
        rows=tuple(map(predictor.row, measured)),
        failed={f"{domain.name}, {one.source} ({one.number})": one.failure for one in failed},
        missing=sum(not trials for trials in by_id.values()),
        disturbed=sum(any(one.disturbed for one in trials) for trials in measured),
        others=others,
        commits=frozenset(one.environment.source for one in domain.sessions if one.id in sessions),
    )


def _by_plan(trials: Sequence[DatasetTrial]) -> list[list[DatasetTrial]]:
    """Return the measured trials of each plan that the ranks enacted."""
    of_plan: dict[str, list[DatasetTrial]] = {}
    for trial in trials:
        if trial.step_s:
            assert trial.plan is not None, "a candidate has a plan"
            of_plan.setdefault(trial.plan.enacted_id, []).append(trial)
    return list(of_plan.values())


class _Predictor:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._extractor = domain_extractor(domain)

    def row(self, trials: Sequence[DatasetTrial]) -> PredictedStep:
        """Return the row of the plan that all `trials` measured."""
        trial = trials[0]
        assert trial.strategy is not None and trial.plan is not None, "a candidate has both"
        enacted = trial.plan
        low_s, middle_s, high_s = np.quantile(trial.step_s, [0.25, 0.5, 0.75])
        features = self._extractor.features(PlannedStrategy(trial.strategy, enacted))
        return PredictedStep(
            self._domain.name,
            kind_of(enacted),
            trial.source,
            len(enacted.messages),
            measured_s=float(np.median([one.median_s for one in trials])),
            spread=float((high_s - low_s) / middle_s),
            replayed_s=self._extractor.steps.step_s(enacted),
            analytic_s=features.analytic_step_s,
            overrun=trial.overrun or 0.0,
            load=trial.load,
        )


def summary(rows: Sequence[PredictedStep]) -> dict[str, float]:
    errors, analytic = [row.error for row in rows], [row.analytic_error for row in rows]
    return {
        "strategies": len(rows),
        "error_mean": float(np.mean(errors)),
        "error_p90": float(np.quantile(errors, 0.9)),
        "bias": float(np.mean([row.replayed_s / row.measured_s - 1 for row in rows])),
        "analytic_error_mean": float(np.mean(analytic)),
        "analytic_error_p90": float(np.quantile(analytic, 0.9)),
    }


def taus(rows: Sequence[PredictedStep]) -> tuple[float, float]:
    """Return Kendall's tau of the replay and of the analytic estimate, mean over the domains."""
    names = sorted({row.domain for row in rows})
    values = []
    for name in names:
        of_domain = [row for row in rows if row.domain == name]
        measured = [row.measured_s for row in of_domain]
        values.append(
            (
                len(of_domain),
                kendall_tau([r.replayed_s for r in of_domain], measured),
                kendall_tau([r.analytic_s for r in of_domain], measured),
            )
        )
    table = np.array(values)
    replayed, analytic = np.average(table[:, 1:], axis=0, weights=table[:, 0]).tolist()
    return float(replayed), float(analytic)


def write_table(rows: Sequence[PredictedStep], path: Path) -> None:
    columns = (
        "domain",
        "kind",
        "source",
        "messages",
        "measured_s",
        "spread",
        "replayed_s",
        "analytic_s",
        "overrun",
        "load",
    )
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows([getattr(row, column) for column in columns] for row in rows)


def shown(title: str, rows: Sequence[PredictedStep]) -> str:
    figures = summary(rows)
    return (
        f"{title:62} {figures['strategies']:3d}  error {figures['error_mean']:6.1%}  "
        f"p90 {figures['error_p90']:6.1%}  "
        f"bias {figures['bias']:+6.1%}  analytic {figures['analytic_error_mean']:6.1%}"
    )


@dataclass(frozen=True)
class Counts:
    """What `DomainSteps` counts, over all domains."""

    failed: dict[str, str]
    missing: int
    disturbed: int
    others: int
    commits: list[str]

    @staticmethod
    def of(domains: Sequence[DomainSteps]) -> Counts:
        return Counts(
            failed={name: reason for one in domains for name, reason in one.failed.items()},
            missing=sum(one.missing for one in domains),
            disturbed=sum(one.disturbed for one in domains),
            others=sum(one.others for one in domains),
            commits=sorted({commit for one in domains for commit in one.commits}),
        )

    def lines(self) -> list[str]:
        """Describe the counts for people."""
        return [
            *(f"failed: {name}: {reason}" for name, reason in self.failed.items()),
            f"{len(self.failed)} strategies failed, {self.missing} have no trial, "
            f"{self.disturbed} rows were disturbed, {self.others} trials of other strategies are "
            f"left out; measured at {', '.join(self.commits) or 'no commit'}",
        ]
