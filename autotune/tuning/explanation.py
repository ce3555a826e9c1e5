"""Why a strategy's measured step time differs from its prediction, as far as records show it.

Symbols: `P` predicted, `M` measured (`History.measured_s`), `R` replayed, all in seconds per step.
A reason is a difference that a record or the replay shows. The rest is "not explained".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, median

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.features.extract import job_extractor
from autotune.lowering.replayed import LoweredSteps
from autotune.lowering.steady import SteadySteps
from autotune.records import CURRENT_SETUP, Conditions, Constants, Decision, Measured
from autotune.simulators.constants import with_constants
from autotune.simulators.evaluation import UNLEARNED
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.tuning.events import Proposal, Proposed
from autotune.tuning.history import History
from autotune.units import format_seconds

NOISE_FACTOR = 2.0
"""Standard deviations of a trial's median within which a prediction is right: 95 % of a normal."""
INTERVAL = 0.95
"""Confidence of the interval in which a measurement is predicted to be."""
SMALLEST_SHARE = 0.1
"""A smaller part of a difference is not worth a line."""
CONFIDENCE = 0.05
"""Chance of a wrong remark about plans of one kind, over all kinds."""
MOST_COMPARED = 200
"""Strategies from which kinds of plans are judged, the first ones; each is planned for it."""
NOT_EXPLAINED = "not explained"

PlanKind = tuple[str, Callable[[Plan], bool]]
KINDS: tuple[PlanKind, ...] = (
    ("compressed", lambda p: any(m.compressor is not Compressor.NONE for m in p.messages)),
    (
        "sent to servers",
        lambda p: any(m.synchronizer is Synchronizer.PARAMETER_SERVER for m in p.messages),
    ),
    ("running into the next forward pass", lambda p: p.cross_step),
    ("first within each host", lambda p: any(m.hierarchical for m in p.messages)),
)
"""Kinds of plans in words, and "of more than N messages" for the median N of the job's plans."""


@dataclass(frozen=True)
class Explanation:
    """One strategy. `reasons` are for people.

    `steps`: one step of it, replayed with the constants of the prediction.
    `predicted_sd`: relative standard deviation of a measurement around the prediction, if known.
    """

    strategy_id: str
    predicted_s: float
    measured_s: float
    steps: SteadySteps
    reasons: tuple[str, ...]
    predicted_sd: float | None = None

    @property
    def miss(self) -> float:
        """How much longer the measured step is than predicted, relative to the prediction."""
        return self.measured_s / self.predicted_s - 1

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons)

    @property
    def line(self) -> str:
        return (
            f"predicted {format_seconds(self.predicted_s)}{self._interval}, measured "
            f"{format_seconds(self.measured_s)} ({self.miss:+.1%}: {self.reason})"
        )

    @property
    def _interval(self) -> str:
        """The interval of the prediction in words, "" where it is unknown."""
        if self.predicted_sd is None:
            return ""
        wide = NormalDist().inv_cdf((1 + INTERVAL) / 2) * self.predicted_sd
        low, high = (self.predicted_s * math.exp(side * wide) for side in (-1, 1))
        return f" ({INTERVAL:.0%} interval {format_seconds(low)} to {format_seconds(high)})"


class Explainer:
    """Explains strategies of one profiled job.

    A prediction is explained by replays with the constants of its round. `replays` have those of
    the last round, for steps that are compared with each other.
    """

    def __init__(self, history: History, conditions: Conditions) -> None:
        profiled = history.profiled
        assert profiled is not None
        self._history = history
        self._stated = job_extractor(
            profiled.workload,
            profiled.cluster,
            conditions.accelerators,
            profiled.software,
            profiled.op_fusions,
        )
        self._known: list[tuple[Constants | None, LoweredSteps]] = []
        rounds = history.rounds
        self.replays = self._replays_with(rounds[-1].constants if rounds else None)

    def _replays_with(self, constants: Constants | None) -> LoweredSteps:
        for known, replays in self._known:
            if known == constants:
                return replays
        stated = self._stated
        extractor = stated if constants is None else with_constants(stated, constants)
        self._known.append((constants, extractor.steps))
        return extractor.steps

    def explain(self, strategy_id: str) -> Explanation | None:
        """None for a strategy without a prediction or a measurement."""
        proposal = self._history.proposals.get(strategy_id)
        measured_s = self._history.measured_s.get(strategy_id)
        planned = self._history.planned(strategy_id)
        if proposal is None or measured_s is None or planned is None or not proposal.predicted_s:
            return None
        replays = self._replays_with(self._round_of(strategy_id).constants)
        steps, predicted_s = replays.steady(planned.plan, 1), proposal.predicted_s
        reasons = self._reasons(proposal, planned.plan, measured_s, replays, steps.step_s)
        return Explanation(
            strategy_id, predicted_s, measured_s, steps, reasons, proposal.predicted_sd
        )

    def missed(self, most: int) -> tuple[list[Explanation], int]:
        """The strategies that missed their prediction most, and how many missed it."""
        compared = self._compared
        worst = sorted(compared, key=lambda id_: -abs(math.log(compared[id_])))
        missed = [id_ for id_ in worst if abs(compared[id_] - 1) > self._tolerance]
        explained = [self.explain(id_) for id_ in missed[:most]]
        return [each for each in explained if each is not None], len(missed)

    def exposed_s(self, strategy_id: str) -> tuple[float, float] | None:
        """Exposed seconds of a step with the strategy and with the current setup, by `replays`.

        None if the messages of one of them are not known.
        """
        current, planned = self._history.current_plan, self._history.planned(strategy_id)
        if current is None or planned is None:
            return None
        plans = (planned.plan, current)
        now_s, before_s = (max(self.replays.steady(plan, 1).exposed_s, 0.0) for plan in plans)
        return now_s, before_s

    @property
    def _tolerance(self) -> float:
        return NOISE_FACTOR * self._history.noise

    @cached_property
    def _compared(self) -> dict[str, float]:
        """Strategy id -> measured over predicted step time."""
        proposals = self._history.proposals
        return {
            id_: measured_s / predicted_s
            for id_, measured_s in self._history.measured_s.items()
            if id_ in proposals and (predicted_s := proposals[id_].predicted_s)
        }

    def _reasons(
        self,
        proposal: Proposal,
        plan: Plan,
        measured_s: float,
        replays: LoweredSteps,
        replayed_s: float,
    ) -> tuple[str, ...]:
        strategy_id, predicted_s = proposal.strategy.id, proposal.predicted_s
        assert predicted_s is not None, "only a prediction is explained"
        missing_s = measured_s - predicted_s
        if abs(missing_s) <= self._tolerance * predicted_s:
            return (f"within ± {self._tolerance:.0%}, the noise of measurements",)
        parts = [
            self._correction(strategy_id, predicted_s, replayed_s),
            self._overrun(strategy_id),
            self._shared(replays, replayed_s),
        ]
        # A part explains only a miss of its own direction.
        parts = [
            (part_s, text)
            for part_s, text in parts
            if part_s * missing_s > 0 and abs(part_s) >= SMALLEST_SHARE * abs(missing_s)
        ]
        reasons = [text for _, text in parts]
        if self._always_disturbed(strategy_id):
            reasons.append("the machine changed during every trial of it")
        reasons += self._kinds(plan, missing_s)
        left_s = abs(missing_s) - sum(abs(part_s) for part_s, _ in parts)
        if not reasons:
            reasons.append(NOT_EXPLAINED)
        elif left_s > self._tolerance * predicted_s:
            reasons.append(f"{format_seconds(left_s)} {NOT_EXPLAINED}")
        return tuple(reasons)

    def _correction(
        self, strategy_id: str, predicted_s: float, replayed_s: float
    ) -> tuple[float, str]:
        """Compare the ranking with the replay."""
        ranker = self._round_of(strategy_id).ranker
        who = "its ranking" if ranker in UNLEARNED else f"the {ranker} simulator"
        predicted = f"{who} predicted {format_seconds(predicted_s)}"
        return replayed_s - predicted_s, f"{predicted}, the replay {format_seconds(replayed_s)}"

    def _round_of(self, strategy_id: str) -> Proposed:
        """Return the round whose prediction of the strategy is explained, its first one."""
        return next(
            proposed
            for proposed in self._history.rounds
            if any(proposal.strategy.id == strategy_id for proposal in proposed.proposals)
        )

    def _overrun(self, strategy_id: str) -> tuple[float, str]:
        """Real work of emulated accelerators that took longer than the profile."""
        assert self._history.profiled is not None
        overrun = self._history.overruns.get(strategy_id, 0.0)
        late_s = overrun * self._history.profiled.workload.compute_s
        text = f"emulated accelerators overran by up to {format_seconds(late_s)} per step"
        return late_s, text

    def _shared(self, replays: LoweredSteps, replayed_s: float) -> tuple[float, str]:
        """The miss that the current setup has in common, without its overrun."""
        current, current_s = self._history.current_plan, self._history.reference_s
        if current is None or current_s is None:
            return 0.0, ""
        steps = replays.steady(current, 1)
        assert self._history.profiled is not None
        overrun = self._history.overruns.get(CURRENT_SETUP, 0.0)
        late_s = overrun * self._history.profiled.workload.compute_s
        miss = (current_s - late_s) / steps.step_s - 1
        text = f"the current setup misses its replay by {miss:+.1%}, too"
        return miss * replayed_s, text

    def _always_disturbed(self, strategy_id: str) -> bool:
        history = self._history
        return all(
            trial.request.number in history.disturbed
            for trial in history.candidates
            if trial.request.strategy_id == strategy_id and isinstance(trial.outcome, Measured)
        )

    def _kinds(self, plan: Plan, missing_s: float) -> list[str]:
        """Kinds of this plan that miss their predictions in this direction more than others."""
        logs, have, kinds = self._kinds_of_compared
        remarks = []
        for column, (words, is_kind) in enumerate(kinds):
            of_kind, others = logs[have[:, column]], logs[~have[:, column]]
            if not is_kind(plan) or min(len(of_kind), len(others)) < 2:
                continue
            from scipy.stats import mannwhitneyu

            sign = 1.0 if missing_s > 0 else -1.0
            test = mannwhitneyu(sign * of_kind, sign * others, alternative="greater")
            chance = float(test.pvalue)
            if chance < CONFIDENCE / len(kinds):
                with_it, without = math.expm1(np.median(of_kind)), math.expm1(np.median(others))
                remarks.append(
                    f"the {len(of_kind)} plans {words} miss by {with_it:+.1%} in the median, "
                    f"others by {without:+.1%}"
                )
        return remarks

    @cached_property
    def _kinds_of_compared(self) -> tuple[FloatArray, BoolArray, tuple[PlanKind, ...]]:
        """ln(M / P) of the first strategies, shape (n,), and which are of each kind, (n, kinds)."""
        ids = list(self._compared)[:MOST_COMPARED]
        logs = np.log([self._compared[id_] for id_ in ids])
        plans = [planned.plan for id_ in ids if (planned := self._history.planned(id_))]
        usual = median(len(plan.messages) for plan in plans)
        many = (f"of more than {usual:g} messages", lambda p: len(p.messages) > usual)
        kinds = (*KINDS, many)
        have = np.array([[is_kind(plan) for _, is_kind in kinds] for plan in plans], dtype=bool)
        return logs, have.reshape(len(ids), len(kinds)), kinds


def explained(decision: Decision, explainer: Explainer) -> Decision:
    """The decision with the explanation of its best candidate in one line."""
    best = decision.best_candidate_id
    explanation = explainer.explain(best) if best else None
    if explanation is None:
        return decision
    parts = [explanation.line]
    exposed_s = explainer.exposed_s(explanation.strategy_id)
    if exposed_s is not None:
        now, before = map(format_seconds, exposed_s)
        parts.append(f"replayed, {now} of each step are exposed, {before} with the current setup")
    name = "" if decision.strategy_id == best else f"{best}: "
    return replace(decision, explanation=name + "; ".join(parts))
