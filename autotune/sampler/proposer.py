"""One round of proposals: sample, score and select (AutoSync Fig. 1), or one of the baselines.

Samples and the optimizer's results depend only on the job, its seed and the history. The machine
decides which simulators have time to be trained. A round is recorded as an event, so a resumed job
never proposes it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from autotune.garbage import collection_paused
from autotune.optimizer.budget import NO_DEADLINE, Budget, Deadline
from autotune.rng import generator
from autotune.sampler.bayes import BayesianSearch
from autotune.sampler.encodings import Encoding, FusionScalars, SpaceChoices
from autotune.sampler.random import samples
from autotune.sampler.scoring import Candidate, Scorer, Scores
from autotune.sampler.selection import choice_agreement_rows, hidden_cosine, select_diverse
from autotune.simulators.interface import Simulator
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.enactable import refusal_reason, scaled_refusal_reason, scaled_space
from autotune.strategy_space.mirrored import mirrored_space
from autotune.strategy_space.moves.neighbours import mutate, neighbourhood
from autotune.strategy_space.plan import Plan, PlannedStrategy
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import OpFusionSets, Strategy
from autotune.tuning.events import Proposal, Proposed
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search, Similarity

PARENTS = 5
"""The fastest strategies so far, whose neighbours are proposed."""
SURVIVORS = 0.3
"""Share of the scored strategies that pass the filter by time, before diversity chooses."""
FIRST_EXPLORERS = 0.5
EXPLORERS = 0.17
"""Share of the first and of a later round's trials that explores strategies the ranker rejects."""
OPTIMIZER = Budget(1600, 40_000_000, seconds=1200, stale=12)
AGAIN = Budget(400, 10_000_000, seconds=600, stale=12)
"""The optimizer's replays before the first round, about 10 s, and before a later one.

The seconds are a safety limit only."""
ROUND = 0.25
"""Largest share of a job's remaining time for the proposals of a round, as thousands of variables
need. Half of it is for the optimizer, a quarter for samples, the rest to learn and score them."""
CALIBRATION = 0.2
"""Share of the time for a round's proposals in which the replay's constants must be calibrated."""
FINISH = 0.1
"""Share of a job's time for the last training; simulators that need more are not kept."""
SCORING = 0.9
"""Share of the time after sampling for learning and scoring; the rest is to choose and identify."""
POOL_SLICES = 2**21
"""Most slices of the plans of a round's candidates: 1 GB, if each is a message of 0.45 kB."""
SHORTEST_S = 1.0
"""A search that has less time finds nothing that the hand-made strategies do not have."""
UNCALIBRATED = (
    "the wall clock ended the calibration of the replay, which keeps the stated constants, "
    "so that the same job may be proposed something else next time"
)
CUT_SHORT = (
    "the wall clock ended the search for proposals, "
    "so that the same job may be proposed something else next time"
)
LEADERS = 0.75
LATER_LEADERS = 0.5
"""Largest share of the first and of a later round's trials for the optimizer's strategies.

With compressors, 0.75 includes all six in a round of eight. Their predicted times differ less than
the replay's error: with half of them omitted, the best lossless one was never tried.
"""
PASSED_OVER = 12
"""Most of the optimizer's strategies that a round keeps for later ones."""
NEIGHBOURS = 600
"""Most neighbours of an incumbent that are scored, all by replay."""
NEAR = 0.05
"""Neighbours are proposed up to this predicted distance from the incumbent, about the error of the
replay."""
BAYESIAN = {Search.BAYES: "the search space", Search.FUSION: "fusion threshold and cycle time"}
BAYES_ASKS = 20
"""Consecutive known plans of a baseline, each with its known time, before the search ends."""
FAILED_FACTOR = 2.0
"""Time assumed for a failed trial, relative to the current setup: slow, but not an outlier."""


@dataclass
class _Pool:
    """Candidates, the reasons of refused ones, and whether the search for them ran out of time.

    `known`: ids of plans that are no candidates any more. `slices`: of all plans together.
    """

    known: set[str]
    candidates: list[Candidate] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    cut_short: bool = False
    slices: int = 0


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
    ) -> None:
        """`clock`: seconds, for the safety limit of the optimizer's search. `pool_slices`: about
        the most slices of a round's plans. `narrow` returns the part of the job's space to search.
        `budgets`: of the optimizer in the first and in a later round.
        """
        self._spec, self._clock, self._pool_slices = spec, clock, pool_slices
        self._narrow, self._budgets = narrow, budgets
        self._bayes: BayesianSearch | None = None
        self._scorer = Scorer(spec, simulators)

    def propose(self, history: History, round_: int, count: int, incumbent: str = "") -> Proposed:
        """At most `count` strategies with untried plans; none if the space has nothing new.

        With the id of an `incumbent`, they are neighbours of this measured strategy.
        """
        left_s = max(0.0, self._spec.max_seconds - history.elapsed_s)
        deadline = Deadline.after(ROUND * left_s, self._clock)
        if self._spec.search in BAYESIAN:
            return self._propose_bayes(history, round_, deadline)
        contradicted: tuple[str, ...] = ()
        if self._spec.search is Search.AUTOSYNC:
            contradicted = self._scorer.calibrate(history, deadline.share(CALIBRATION))
        if incumbent:
            proposed = self._propose_neighbours(history, round_, count, incumbent, deadline)
        else:
            proposed = self._propose_sampled(history, round_, count, deadline)
        if self._scorer.calibration_given_up:
            proposed = replace(proposed, reason=f"{proposed.reason}; {UNCALIBRATED}")
        return replace(proposed, contradicted=contradicted)

    def _propose_sampled(
        self, history: History, round_: int, count: int, deadline: Deadline
    ) -> Proposed:
        """Propose from the optimizer's strategies and samples."""
        untried = self._pool(history, round_, deadline)
        pool = untried.candidates
        if not pool:
            reason = _full_reason("no strategy was sampled that had not been tried", untried)
            return Proposed(round_, (), "none", reason, 0, (), 0.0)
        if self._spec.search is Search.RANDOM:
            proposals = tuple(_proposal(candidate, history) for candidate in pool[:count])
            reason = _full_reason("random search was asked for", untried)
            return Proposed(round_, proposals, "random", reason, len(pool), (), 0.0)
        scores = self._scorer.score(history, pool, deadline.share(SCORING))
        scored = len(scores.ranked)
        untried.cut_short |= scored < len(pool)
        most = int(LATER_LEADERS * count) if round_ else max(1, round(LEADERS * count))
        leading = [i for i in range(scored) if pool[i].optimized][:most]
        rest = [i for i in range(scored) if i not in leading]
        if rest and len(leading) < count:
            others, left = [pool[i] for i in rest], count - len(leading)
            chosen = self._choose(others, scores.of(rest), left, round_)
            leading += [rest[i] for i in chosen]
        leading += range(scored, len(pool))[: count - len(leading)]
        proposals = tuple(_scored(pool, scores, i, history) for i in leading)
        reason, quality = _full_reason(scores.reason, untried), scores.quality
        optimized = [i for i in scores.ranked.tolist() if pool[i].optimized and i not in leading]
        passed_over = tuple(_scored(pool, scores, i, history) for i in optimized[:PASSED_OVER])
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
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        start = history.planned(incumbent)
        assert start is not None, "the current setup is no incumbent"
        pool = _Pool({trial.plan_id for trial in history.trials if trial.plan_id is not None})
        with collection_paused():
            self._add(pool, _passed_over(history), history, NO_DEADLINE, optimized=True)
            around = neighbourhood(start.strategy, workload, cluster, self._space(history))
            neighbours = (("neighbour", strategy) for strategy in islice(around, NEIGHBOURS))
            self._add(pool, neighbours, history, deadline.share(0.5))
        what = f"neighbours of {incumbent}, each to be compared with it"
        if not pool.candidates:
            reason = _full_reason(f"{what}: all were tried", pool)
            return Proposed(round_, (), "none", reason, 0, (), 0.0, incumbent)
        # The incumbent is scored with its neighbours, so that predictions compare.
        candidates = [Candidate(start, "incumbent", optimized=True), *pool.candidates]
        scores = self._scorer.score(
            history, candidates, deadline.share(SCORING), replayed=NEIGHBOURS
        )
        pool.cut_short |= len(scores.ranked) < len(candidates)
        assert scores.predicted_s is not None, "only a guided search descends"
        most_s = (1 + NEAR) * float(scores.predicted_s[0])
        chosen = [i for i in scores.ranked.tolist() if i and scores.predicted_s[i] <= most_s]
        proposals = tuple(_scored(candidates, scores, i, history) for i in chosen[:count])
        reason = _full_reason(f"{what}; {scores.reason}", pool)
        considered, quality = len(pool.candidates), scores.quality
        return Proposed(
            round_, proposals, scores.ranker, reason, considered, quality, 0.0, incumbent
        )

    def _pool(self, history: History, round_: int, deadline: Deadline) -> _Pool:
        """Collect distinct untried plans that can be enacted.

        They come from the optimizer, the field's hand-made strategies, neighbours of the fastest
        and random ones. Each of these has a share of the time, and at least one strategy.
        """
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        parents = [history.proposals[key].strategy for key, _ in history.ranking()[:PARENTS]]
        wanted = self._spec.samples_per_round
        guided = self._spec.search is Search.AUTOSYNC
        mutants = wanted // 2 if guided and parents else 0
        space = self._space(history)
        pool = _Pool({trial.plan_id for trial in history.trials if trial.plan_id is not None})
        with collection_paused():
            if guided:
                seconds = deadline.share(0.5).left_s
                found, pool.cut_short = self._searched(history, space, parents, round_, seconds)
                self._add(pool, found, history, NO_DEADLINE, optimized=True)
                self._add(pool, _passed_over(history), history, NO_DEADLINE, optimized=True)
            sampling = deadline.share(0.5)
            if self._spec.search is not Search.RANDOM:
                seeds = seed_strategies(workload, cluster, space)
                self._add(pool, seeds, history, sampling.share(1 / 3))
            if mutants:
                mutated = islice(self._mutated(parents, history, space, round_), mutants)
                self._add(pool, mutated, history, sampling.share(1 / 2))
            seed = int(generator(self._spec.seed, "samples", round_).integers(2**31))
            sampled = islice(samples(workload, cluster, space, seed), wanted - mutants)
            self._add(pool, (("sampled", strategy) for strategy in sampled), history, sampling)
        return pool

    def _mutated(
        self, parents: Sequence[Strategy], history: History, space: SearchSpace, round_: int
    ) -> Iterator[tuple[str, Strategy]]:
        rng = generator(self._spec.seed, "mutations", round_)
        while True:
            parent = parents[int(rng.integers(len(parents)))]
            yield "mutated", self._walk(parent, history, space, rng)

    def _searched(
        self,
        history: History,
        space: SearchSpace,
        parents: Sequence[Strategy],
        round_: int,
        seconds: float,
    ) -> tuple[list[tuple[str, Strategy]], bool]:
        """Search by replay: the best strategy of each family, fastest first, then those of other
        climbs.

        Also return whether the search was cut short, at the latest after `seconds`. It starts from
        `parents`, the fastest measured ones, if there are any.
        """
        from autotune.optimizer.suggest import (
            suggestions,  # numba is heavy, and the baselines do without
        )

        steps = self._scorer.extractor(history).steps

        def allowed(one: Plan) -> bool:
            return self._refusal_reason(one) is None

        seed = int(generator(self._spec.seed, "optimizer", round_).integers(2**31))
        first, again = self._budgets
        budget = again if parents else first
        budget = replace(budget, seconds=max(min(budget.seconds, seconds), SHORTEST_S))
        tried = {trial.plan_id for trial in history.trials if trial.plan_id is not None}
        suggested = suggestions(
            steps,
            space,
            begin=parents,
            avoid=tried,
            budget=budget,
            seed=seed,
            allowed=allowed,
            clock=self._clock,
        )
        found = [
            (f"optimizer: {suggestion.name}", suggestion.strategy)
            for suggestion in (*suggested.best, *suggested.others)
        ]
        return [*found, *_other_fusions(found, history)], suggested.cut_short

    def _add(
        self,
        pool: _Pool,
        strategies: Iterable[tuple[str, Strategy]],
        history: History,
        deadline: Deadline,
        optimized: bool = False,
    ) -> None:
        """Add the new strategies that can be enacted until the deadline, or `pool_slices`.

        The pool has at least one candidate before the deadline counts.
        """
        assert history.profiled is not None
        for origin, strategy in strategies:
            planned = PlannedStrategy.of(strategy, history.profiled.workload, self._spec.workers)
            if planned.plan.id not in pool.known:
                pool.known.add(planned.plan.id)
                refusal = self._refusal_reason(planned.plan)
                if refusal is None:
                    pool.candidates.append(Candidate(planned, origin, optimized))
                    pool.slices += planned.plan.slice_count
                else:
                    pool.refusals.append(refusal)
            if pool.candidates and deadline.passed():
                pool.cut_short = True
                break
            if pool.slices > self._pool_slices:
                break

    def _refusal_reason(self, wanted: Plan) -> str | None:
        # only scripts whose graph is rewritten have choices of op fusion
        return refusal_reason(
            wanted, rewrites_graph=bool(wanted.op_fusion)
        ) or scaled_refusal_reason(wanted, self._spec.conditions.byte_scale)

    def _space(self, history: History) -> SearchSpace:
        """The strategies that the job, its conditions and its script allow."""
        assert history.profiled is not None
        space = scaled_space(
            SearchSpace.default(lossy=self._spec.lossy), self._spec.conditions.byte_scale
        )
        fusions = tuple(choice.sets for choice in history.profiled.op_fusions)
        space = replace(space, op_fusions=fusions)
        if history.profiled.mirrored:
            space = mirrored_space(space)
        if history.profiled.direct_refused:
            space = space.without_direct()
        refused = history.profiled.cross_step_refused
        return self._narrow(space.without_cross_step(refused) if refused else space)

    @staticmethod
    def _walk(
        strategy: Strategy, history: History, space: SearchSpace, rng: np.random.Generator
    ) -> Strategy:
        """Make one to four moves: near enough to inherit, far enough to differ measurably."""
        assert history.profiled is not None
        for _ in range(int(rng.integers(1, 5))):
            strategy = mutate(
                strategy, history.profiled.workload, history.profiled.cluster, space, rng
            )
        return strategy

    def finish(self, history: History) -> dict[str, Simulator]:
        """Fit each simulator on all measurements, to keep for later jobs; may return none.

        Takes about `FINISH` of the job's time at most.
        """
        limit_s = FINISH * self._spec.max_seconds
        return self._scorer.finish(history, Deadline.after(limit_s, self._clock))

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

    def _propose_bayes(self, history: History, round_: int, deadline: Deadline) -> Proposed:
        """Propose with scikit-optimize.

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
            (_proposal(Candidate(planned, "bayes"), history),),
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

        None if there is none, or none until the deadline.
        The search learns the time of a known plan at once; a plan that cannot be enacted failed.
        """
        assert history.profiled is not None
        workload = history.profiled.workload
        failed_s = FAILED_FACTOR * history.references[0][1]
        times = {
            trial.plan_id: history.measured_s.get(trial.request.strategy_id, failed_s)
            for trial in history.candidates
        }
        reasons: set[str] = set()
        repeats = asked = 0
        while repeats < BAYES_ASKS:
            asked += 1
            planned = PlannedStrategy.of(search.ask(), workload, self._spec.workers)
            plan_id = planned.plan.id
            if plan_id not in times and self._refusal_reason(planned.plan) is None:
                return planned, asked
            search.tell(planned.strategy.id, times.get(plan_id, failed_s))
            repeats = repeats + 1 if plan_id in reasons else 0
            reasons.add(plan_id)
            if deadline.passed():
                break
        return None, asked

    def _encoding(self, history: History) -> Encoding:
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        space = self._space(history)
        if self._spec.search is Search.FUSION:
            return FusionScalars(workload, rows=not space.dense_rows)
        return SpaceChoices(workload, cluster, space, self._spec.seed)


def _other_fusions(
    found: Sequence[tuple[str, Strategy]], history: History
) -> Iterator[tuple[str, Strategy]]:
    """The fastest found strategy with each other choice of op fusion, and with none.

    The times of the choices were measured set by set, so trials compare whole steps.
    """
    assert history.profiled is not None
    choices: list[tuple[OpFusionSets, str]] = [((), "no op fusion")]
    choices += [(choice.sets, choice.name) for choice in history.profiled.op_fusions]
    for origin, strategy in found[:1] if len(choices) > 1 else ():
        for sets, name in choices:
            if sets != strategy.op_fusion:
                yield f"{origin}, {name}", replace(strategy, op_fusion=sets)


def _passed_over(history: History) -> Iterator[tuple[str, Strategy]]:
    """Strategies of the optimizer that no earlier round proposed, by ascending first prediction."""
    known: dict[str, Proposal] = {}
    for proposed in history.rounds:
        for proposal in proposed.passed_over:
            known.setdefault(proposal.strategy.id, proposal)
    for proposal in sorted(known.values(), key=lambda one: one.predicted_s or math.inf):
        yield proposal.origin, proposal.strategy


def _proposal(
    candidate: Candidate,
    history: History,
    predicted_s: float | None = None,
    predicted_sd: float | None = None,
) -> Proposal:
    """The proposal as it is stored; the history keeps its plan."""
    history.keep_plan(candidate.planned)
    return Proposal(candidate.planned.strategy, candidate.origin, predicted_s, predicted_sd)


def _scored(
    candidates: Sequence[Candidate], scores: Scores, number: int, history: History
) -> Proposal:
    """The proposal of a candidate with its prediction."""
    predicted_s, predicted_sd = scores.of_one(number), scores.sd_of_one(number)
    return _proposal(candidates[number], history, predicted_s, predicted_sd)


def _full_reason(reason: str, pool: _Pool) -> str:
    """Add whether the optimizer was cut short, and how many strategies were refused."""
    reason, refusals = f"{reason}; {CUT_SHORT}" if pool.cut_short else reason, pool.refusals
    if not refusals:
        return reason
    if len(refusals) == 1:
        return f"{reason}; left out 1 strategy that cannot be enacted: {refusals[0]}"
    return (
        f"{reason}; left out {len(refusals)} strategies that cannot be enacted, "
        f"the first because of {refusals[0]}"
    )
