"""One round of proposals: sample, score and select (AutoSync Fig. 1), or one of the baselines.

Samples and the optimizer's results depend only on the job, its seed and the history. The machine
decides which simulators have time to be trained, and earlier jobs correct the first ranking. A
round is recorded as an event, so a resumed job never proposes it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autotune.optimizer.budget import Budget, Deadline
from autotune.rng import generator
from autotune.sampler.bayesian_proposer import BAYESIAN, BayesianProposer
from autotune.sampler.job_space import JobSpace
from autotune.sampler.past_jobs import PastJobs, no_past_jobs
from autotune.sampler.pool import (
    AGAIN,
    NEIGHBOURS,
    OPTIMIZER,
    POOL_SLICES,
    PoolBuilder,
    proposal_of,
)
from autotune.sampler.ranking import INCUMBENT, Candidate, Scores
from autotune.sampler.scoring import Scorer
from autotune.sampler.selection import choice_agreement_rows, hidden_cosine, select_diverse
from autotune.simulators.interface import Simulator
from autotune.simulators.replay_settings import ReplaySettings
from autotune.strategy_space.space import SearchSpace
from autotune.tuning.events import Proposal, Proposed
from autotune.tuning.history import History
from autotune.tuning.job import DEFAULT_S, NO_LIMIT_S, JobSpec, Search, Similarity

SURVIVORS = 0.3
"""Share of the scored strategies that pass the filter by time, before diversity chooses."""
FIRST_EXPLORERS = 0.5
EXPLORERS = 0.17
"""Share of the first and of a later round's trials that explores strategies the ranker rejects."""
ROUND = 0.25
"""Largest share of a job's remaining time for the proposals of a round, as thousands of variables
need. Half of it is for the optimizer, a quarter for samples, the rest to learn and score them."""
CALIBRATION = 0.2
"""Share of the time for a round's proposals in which the replay's constants must be calibrated."""
FINISH = 0.1
"""Share of a job's time for the last training; simulators that need more are not kept."""
SCORING = 0.9
"""Share of the time after sampling for learning and scoring; the rest is to choose and identify."""
LEADERS = 0.75
LATER_LEADERS = 0.5
"""Largest share of the first and of a later round's trials for the optimizer's strategies.

With compressors, 0.75 includes all six in a round of eight. Their predicted times differ less than
the replay's error: with half of them omitted, the best lossless one was never tried.
"""
PASSED_OVER = 12
"""Most of the optimizer's strategies that a round keeps for later ones."""
BUILT_NEAR = 0.1
"""The first round tries the fastest hand-made strategy up to this predicted distance from the best,
about twice the error of the replay."""
NEAR = 0.05
"""Neighbours are proposed up to this predicted distance from the incumbent, about the error of the
replay."""


class Proposer:
    """Proposes for one job. `simulators` builds each learned simulator anew."""

    def __init__(
        self,
        spec: JobSpec,
        simulators: Mapping[str, Callable[[], Simulator]],
        clock: Callable[[], float] = time.monotonic,
        pool_slices: int = POOL_SLICES,
        narrow: Callable[[SearchSpace], SearchSpace] = lambda space: space,
        budgets: tuple[Budget, Budget] = (OPTIMIZER, AGAIN),
        past: PastJobs = no_past_jobs,
    ) -> None:
        """`clock`: seconds, for the safety limit of the optimizer's search. `pool_slices`: about
        the most slices of a round's plans. `narrow` returns the part of the job's space to search.
        `budgets`: of the optimizer in the first and in a later round. `past` loads earlier jobs.
        """
        self._spec, self._clock = spec, clock
        self._scorer = Scorer(spec, simulators, past=past)
        allowed = JobSpace(spec, narrow)
        self._bayesian = BayesianProposer(spec, allowed)
        self._builder = PoolBuilder(spec, allowed, self._scorer, clock, pool_slices, budgets)

    def propose(self, history: History, round_: int, count: int, incumbent: str = "") -> Proposed:
        """At most `count` strategies with untried plans; none if the space has nothing new.

        With the id of an `incumbent`, they are neighbours of this measured strategy.
        """
        deadline = Deadline.after(ROUND * self._time_s(history.elapsed_s), self._clock)
        if self._spec.search in BAYESIAN:
            return self._bayesian.propose(history, round_, deadline)
        contradicted: tuple[str, ...] = ()
        if self._spec.search is Search.AUTOSYNC:
            contradicted = self._scorer.calibrate(history, deadline.share(CALIBRATION))
        if incumbent:
            proposed = self._propose_neighbours(history, round_, count, incumbent, deadline)
        else:
            proposed = self._propose_sampled(history, round_, count, deadline)
        if self._scorer.calibration_given_up:
            reason = uncalibrated(self._scorer.is_calibrated)
            proposed = replace(proposed, reason=f"{proposed.reason}; {reason}")
        return replace(proposed, contradicted=contradicted, constants=self._scorer.constants)

    def _propose_sampled(
        self, history: History, round_: int, count: int, deadline: Deadline
    ) -> Proposed:
        """Propose from the optimizer's strategies and samples."""
        untried = self._builder.sampled(history, round_, deadline)
        pool = untried.candidates
        if not pool:
            reason = untried.explained("no strategy was sampled that had not been tried")
            return Proposed(round_, (), "none", reason, 0, (), 0.0)
        if self._spec.search is Search.RANDOM:
            proposals = tuple(proposal_of(candidate, history) for candidate in pool[:count])
            reason = untried.explained("random search was asked for")
            return Proposed(round_, proposals, "random", reason, len(pool), (), 0.0)
        scores = self._scorer.score(history, pool, deadline.share(SCORING))
        scored = len(scores.ranked)
        untried.cut_short |= scores.cut_short
        most = int(LATER_LEADERS * count) if round_ else max(1, round(LEADERS * count))
        optimized = [i for i in range(scored) if pool[i].optimized]
        leading = optimized[:most]
        if not round_:
            leading = _with_lossless(pool, leading, optimized[most:])
        if not round_ and len(leading) < count:
            built = _nearly_fastest_built(pool, scores)
            leading += [i for i in built if i not in leading]
        rest = [i for i in range(scored) if i not in leading]
        if rest and len(leading) < count:
            others, left = [pool[i] for i in rest], count - len(leading)
            chosen = self._choose(others, scores.of(rest), left, round_)
            leading += [rest[i] for i in chosen]
        leading += range(scored, len(pool))[: count - len(leading)]
        proposals = tuple(_scored(pool, scores, i, history) for i in leading)
        reason, quality = untried.explained(scores.reason), scores.quality
        later = [i for i in scores.ranked.tolist() if pool[i].optimized and i not in leading]
        passed_over = tuple(_scored(pool, scores, i, history) for i in later[:PASSED_OVER])
        return Proposed(
            round_,
            proposals,
            scores.ranker,
            reason,
            len(pool),
            quality,
            0.0,
            passed_over=passed_over,
        )

    def _propose_neighbours(
        self, history: History, round_: int, count: int, incumbent: str, deadline: Deadline
    ) -> Proposed:
        """Propose the neighbours, and strategies passed over, that are predicted to be fastest.

        Those that are predicted to be slower than the incumbent by more than `NEAR` are left out.
        """
        start = history.planned(incumbent)
        assert start is not None, "the current setup is no incumbent"
        pool = self._builder.neighbours(history, start.strategy, round_, deadline)
        what = f"neighbours of {incumbent}, each to be compared with it"
        if not pool.candidates:
            reason = pool.explained(f"{what}: all were tried")
            return Proposed(round_, (), "none", reason, 0, (), 0.0, incumbent)
        # The incumbent is scored with its neighbours, so that predictions compare.
        candidates = [Candidate(start, INCUMBENT, optimized=True), *pool.candidates]
        scores = self._scorer.score(
            history, candidates, deadline.share(SCORING), replayed=NEIGHBOURS
        )
        pool.cut_short |= scores.cut_short
        assert scores.predicted_s is not None, "only a guided search descends"
        most_s = (1 + NEAR) * float(scores.predicted_s[0])
        chosen = [i for i in scores.ranked.tolist() if i and scores.predicted_s[i] <= most_s]
        proposals = tuple(_scored(candidates, scores, i, history) for i in chosen[:count])
        reason = pool.explained(f"{what}; {scores.reason}")
        considered, quality = len(pool.candidates), scores.quality
        return Proposed(
            round_, proposals, scores.ranker, reason, considered, quality, 0.0, incumbent
        )

    def finish(self, history: History) -> dict[str, Simulator]:
        """Fit each simulator on all measurements, to keep for later jobs; may return none.

        Takes about `FINISH` of the job's time at most.
        """
        limit_s = FINISH * self._time_s()
        return self._scorer.finish(history, Deadline.after(limit_s, self._clock))

    def _time_s(self, elapsed_s: float = 0.0) -> float:
        """The job's time after `elapsed_s`, of which trainings and searches take shares.

        Without a time budget it is always the default one, or nothing would end them.
        """
        if self._spec.max_seconds == NO_LIMIT_S:
            return DEFAULT_S
        return max(0.0, self._spec.max_seconds - elapsed_s)

    def replay_settings(self, history: History) -> ReplaySettings:
        """Settings of the replays from which `finish` learned."""
        profiled = history.profiled is not None
        return self._scorer.replay_settings(history) if profiled else ReplaySettings()

    def _choose(
        self, pool: Sequence[Candidate], scores: Scores, count: int, round_: int
    ) -> list[int]:
        """Filter by predicted time, then minimize Eq. 11 greedily; add random ones that did not
        pass.

        Without those, a simulator would only see strategies that its predecessor liked, and could
        not learn what makes the others slow. AutoSync trains on random samples for the same reason.
        """
        predicted = scores.predicted_s if scores.predicted_s is not None else np.ones(len(pool))
        survivors, explorers = np.arange(len(pool)), np.arange(0)
        if scores.predicted_s is not None:
            ranked = scores.ranked
            passed = min(len(pool), max(count, round(SURVIVORS * len(pool))))
            survivors = ranked[:passed]
            wanted = min(
                round(count * (FIRST_EXPLORERS if round_ == 0 else EXPLORERS)), len(pool) - passed
            )
            explorers = generator(self._spec.seed, "explorers", round_).choice(
                ranked[passed:], wanted, replace=False
            )
            count -= len(explorers)
        if self._spec.similarity is Similarity.HIDDEN and scores.hidden is not None:
            agreement = hidden_cosine(scores.hidden[survivors])
            picked = select_diverse(predicted[survivors], agreement, count, self._spec.diversity)
        else:
            rows = choice_agreement_rows([pool[int(i)].planned.strategy for i in survivors])
            picked = select_diverse(predicted[survivors], rows, count, self._spec.diversity)
        return [int(survivors[i]) for i in picked] + explorers.tolist()


def uncalibrated(before: bool) -> str:
    """The remark on a calibration that ran out of time; `before`: whether one had succeeded."""
    constants = "the constants of an earlier round" if before else "the stated constants"
    return (
        f"the wall clock ended the calibration of the replay, which keeps {constants}, so that the "
        "same job may be proposed something else next time"
    )


def _with_lossless(
    pool: Sequence[Candidate], leading: list[int], following: Sequence[int]
) -> list[int]:
    """Let the first lossless one of those that follow take the last place, if none leads.

    A job that allows compressors still wants to know what it gains by them.
    """
    lossless = [i for i in following if pool[i].planned.strategy.lossless]
    if not leading or not lossless or any(pool[i].planned.strategy.lossless for i in leading):
        return leading
    return [*leading[:-1], lossless[0]]


def _nearly_fastest_built(pool: Sequence[Candidate], scores: Scores) -> list[int]:
    """The hand-made strategy that is predicted to be fastest; none if it is far from the best.

    A search by replay also finds where the replay is wrong. A strategy that no search has chosen
    does not have that bias, and ends a job at least as fast as the strategies that all know.
    """
    built = [i for i in scores.ranked.tolist() if pool[i].built][:1]
    if scores.predicted_s is None:
        return built
    most_s = (1 + BUILT_NEAR) * float(scores.predicted_s.min())
    return [i for i in built if scores.predicted_s[i] <= most_s]


def _scored(
    candidates: Sequence[Candidate], scores: Scores, number: int, history: History
) -> Proposal:
    """The proposal of a candidate with its prediction."""
    predicted_s, predicted_sd = scores.of_one(number), scores.sd_of_one(number)
    return proposal_of(candidates[number], history, predicted_s, predicted_sd)
