"""Rounds of the baselines that propose by Bayesian optimization with scikit-optimize."""

from __future__ import annotations

from autotune.optimizer.budget import NO_DEADLINE, Deadline
from autotune.sampler.bayes import BayesianSearch
from autotune.sampler.encodings import Encoding, FusionScalars, SpaceChoices
from autotune.sampler.job_space import JobSpace
from autotune.sampler.pool import CUT_SHORT, proposal_of
from autotune.sampler.ranking import Candidate
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.events import Proposed
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search

BAYESIAN = {Search.BAYES: "the search space", Search.FUSION: "fusion threshold and cycle time"}
BAYES_ASKS = 20
"""Consecutive known plans of a baseline, each with its known time, before the search ends."""
FAILED_FACTOR = 2.0
"""Time assumed for a failed trial, relative to the current setup: slow, but not an outlier."""


class BayesianProposer:
    """Proposes one strategy a round for one job, whose search is in `BAYESIAN`."""

    def __init__(self, spec: JobSpec, allowed: JobSpace) -> None:
        self._spec, self._allowed = spec, allowed
        self._bayes: BayesianSearch | None = None

    def propose(self, history: History, round_: int, deadline: Deadline) -> Proposed:
        """Propose the next strategy whose plan is new.

        A resumed job repeats the asks and tells of its earlier rounds first, which the deadline
        does not limit: they must end in the state in which the job was interrupted.
        """
        over = BAYESIAN[self._spec.search]
        if self._bayes is None:
            self._bayes = BayesianSearch(self._encoding(history), self._spec.seed)
            for at, event in enumerate(history.events):
                if isinstance(event, Proposed):
                    self._next_of(self._bayes, history.first(at), NO_DEADLINE)
        planned, asked = self._next_of(self._bayes, history, deadline)
        if planned is None:
            reason = f"{over}: no plan was found that was not tried"
            reason = f"{reason}; {CUT_SHORT}" if deadline.passed() else reason
            return Proposed(round_, (), "gaussian process", reason, asked, (), 0.0)
        reason = f"Bayesian optimization of {over} was asked for"
        return Proposed(
            round_,
            (proposal_of(Candidate(planned, "bayes"), history),),
            "gaussian process",
            reason,
            asked,
            (),
            0.0,
        )

    def _next_of(
        self, search: BayesianSearch, history: History, deadline: Deadline
    ) -> tuple[PlannedStrategy | None, int]:
        """The next strategy with a new plan, and how many were asked for.

        None if there is none, or none until the deadline. The search learns the time of a known
        plan at once; a plan that cannot be enacted failed.
        """
        assert history.profiled is not None
        workload = history.profiled.workload
        slowest_s = max(history.measured_s.values(), default=0.0)
        failed_s = max(FAILED_FACTOR * history.references[0][1], slowest_s)
        tried = dict.fromkeys(trial.request.strategy_id for trial in history.candidates)
        times = {
            planned.plan.enacted_id: history.measured_s.get(strategy_id, failed_s)
            for strategy_id in tried
            if (planned := history.planned(strategy_id)) is not None
        }
        told: set[str] = set()
        repeats = asked = 0
        while repeats < BAYES_ASKS:
            asked += 1
            planned = PlannedStrategy.of(search.ask(), workload, self._spec.workers)
            enacted_id = planned.plan.enacted_id
            refusal = self._allowed.refusal_reason(planned.plan, workload)
            if enacted_id not in times and refusal is None:
                return planned, asked
            search.tell(planned.strategy.id, times.get(enacted_id, failed_s))
            repeats = repeats + 1 if enacted_id in told else 0
            told.add(enacted_id)
            if deadline.passed():
                break
        return None, asked

    def _encoding(self, history: History) -> Encoding:
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        space = self._allowed.space(history)
        if self._spec.search is Search.FUSION:
            return FusionScalars(workload, every=not space.dense_rows)
        return SpaceChoices(workload, cluster, space, self._spec.seed)
