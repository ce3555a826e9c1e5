"""The candidates of a round: the optimizer's strategies, hand-made ones, neighbours and samples.

Candidates have distinct plans that were not tried and that can be enacted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from autotune.garbage import collection_paused
from autotune.optimizer.budget import NO_DEADLINE, Budget, Deadline
from autotune.rng import generator
from autotune.sampler.job_space import JobSpace
from autotune.sampler.random import samples
from autotune.sampler.ranking import Candidate
from autotune.sampler.scoring import Scorer
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.moves.neighbours import mutate, neighbourhood
from autotune.strategy_space.plan import Plan, PlannedStrategy
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import OpFusionSets, Strategy
from autotune.tuning.events import Proposal
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search

PARENTS = 5
"""The fastest strategies so far, whose neighbours are proposed."""
OPTIMIZER = Budget(1600, 40_000_000, seconds=1200, stale=12)
AGAIN = Budget(400, 10_000_000, seconds=600, stale=12)
"""The optimizer's replays before the first round, about 10 s, and before a later one.

The seconds are a safety limit only."""
POOL_SLICES = 2**21
"""Most slices of the plans of a round's candidates: 1 GB, if each is a message of 0.45 kB."""
SHORTEST_S = 1.0
"""A search that has less time finds nothing that the hand-made strategies do not have."""
CUT_SHORT = (
    "the wall clock ended the search for proposals, "
    "so that the same job may be proposed something else next time"
)
MOST_DRAWS = 300
"""Random strategies that a round draws before it ends without a new one.

The round of a job that scores fewer goes on to the first new one: none at all ends the search.
"""
NEIGHBOURS = 600
"""Most untried neighbours of an incumbent that a round scores, all by replay."""


@dataclass
class Pool:
    """Candidates, the reasons of refused ones, and whether the search for them ran out of time.

    `known`: `Plan.enacted_id` of plans that are no candidates any more. `slices`: of all plans
    together.
    """

    known: set[str]
    candidates: list[Candidate] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    cut_short: bool = False
    slices: int = 0

    def mark_built(self, enacted_id: str) -> None:
        """Note that the candidate with this plan, if there is one, is hand-made, too."""
        for number, candidate in enumerate(self.candidates):
            if candidate.planned.plan.enacted_id == enacted_id:
                self.candidates[number] = replace(candidate, built=True)

    def explained(self, reason: str) -> str:
        """Add whether the optimizer was cut short, and how many strategies were refused."""
        reason, refusals = f"{reason}; {CUT_SHORT}" if self.cut_short else reason, self.refusals
        if not refusals:
            return reason
        if len(refusals) == 1:
            return f"{reason}; left out 1 strategy that cannot be enacted: {refusals[0]}"
        return (
            f"{reason}; left out {len(refusals)} strategies that cannot be enacted, "
            f"the first because of {refusals[0]}"
        )


class PoolBuilder:
    """Collects the candidates of one job's rounds.

    `clock`: seconds, for the safety limit of the optimizer's search. `most_slices`: about the most
    slices of a round's plans. `budgets`: of the optimizer in the first and in a later round.
    """

    def __init__(
        self,
        spec: JobSpec,
        allowed: JobSpace,
        scorer: Scorer,
        clock: Callable[[], float],
        most_slices: int,
        budgets: tuple[Budget, Budget],
    ) -> None:
        self._spec, self._allowed, self._scorer = spec, allowed, scorer
        self._clock, self._most_slices, self._budgets = clock, most_slices, budgets

    def sampled(self, history: History, round_: int, deadline: Deadline) -> Pool:
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
        space = self._allowed.space(history)
        pool = Pool(_tried(history))
        with collection_paused():
            if guided:
                seconds = deadline.share(0.5).left_s
                searched, pool.cut_short = self._searched(history, space, parents, round_, seconds)
                self._add(pool, searched, history, NO_DEADLINE, optimized=True)
                self._add(pool, _passed_over(history), history, NO_DEADLINE, optimized=True)
            sampling = deadline.share(0.5)
            if self._spec.search is not Search.RANDOM:
                seeds = seed_strategies(workload, cluster, space)
                self._add(pool, seeds, history, sampling.share(1 / 3), built=True)
            if mutants:
                mutated = islice(self._mutated(parents, history, space, round_), mutants)
                self._add(pool, mutated, history, sampling.share(1 / 2))
            seed = int(generator(self._spec.seed, "samples", round_).integers(2**31))
            drawn = (("sampled", one) for one in samples(workload, cluster, space, seed))
            count = wanted - mutants
            self._add(pool, islice(drawn, count), history, sampling)
            if not pool.candidates:
                further = islice(drawn, max(0, MOST_DRAWS - count))
                self._add(pool, further, history, sampling, most=1)
        return pool

    def neighbours(
        self, history: History, start: Strategy, round_: int, deadline: Deadline
    ) -> Pool:
        """Collect strategies that were passed over, and up to `NEIGHBOURS` neighbours of `start`.

        They are another sample in every round.
        """
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        pool = Pool(_tried(history))
        with collection_paused():
            self._add(pool, _passed_over(history), history, NO_DEADLINE, optimized=True)
            rng = generator(self._spec.seed, "neighbours", round_)
            space = self._allowed.space(history)
            around = neighbourhood(start, workload, cluster, space, rng)
            neighbours = (("neighbour", strategy) for strategy in around)
            self._add(pool, neighbours, history, deadline.share(0.5), most=NEIGHBOURS)
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
        # numba is heavy, and the baselines do without
        from autotune.optimizer.suggest import suggestions

        assert history.profiled is not None
        steps, workload = self._scorer.extractor(history).steps, history.profiled.workload

        def allowed(one: Plan) -> bool:
            return self._allowed.refusal_reason(one, workload) is None

        seed = int(generator(self._spec.seed, "optimizer", round_).integers(2**31))
        first, again = self._budgets
        budget = again if parents else first
        budget = replace(budget, seconds=max(min(budget.seconds, seconds), SHORTEST_S))
        suggested = suggestions(
            steps,
            space,
            begin=parents,
            avoid=_tried(history),
            budget=budget,
            seed=seed,
            allowed=allowed,
            clock=self._clock,
        )
        searched = [
            (f"optimizer: {suggestion.name}", suggestion.strategy)
            for suggestion in (*suggested.best, *suggested.others)
        ]
        return [*searched, *_other_fusions(searched, history)], suggested.cut_short

    def _add(
        self,
        pool: Pool,
        strategies: Iterable[tuple[str, Strategy]],
        history: History,
        deadline: Deadline,
        optimized: bool = False,
        built: bool = False,
        most: float = math.inf,
    ) -> None:
        """Add at most `most` new strategies that can be enacted, until the deadline.

        They end at about `most_slices` of the whole pool. The pool has at least one candidate
        before the deadline counts.
        """
        assert history.profiled is not None
        workload, most = history.profiled.workload, most + len(pool.candidates)
        for origin, strategy in strategies:
            planned = PlannedStrategy.of(strategy, workload, self._spec.workers)
            if built:
                pool.mark_built(planned.plan.enacted_id)
            if planned.plan.enacted_id not in pool.known:
                pool.known.add(planned.plan.enacted_id)
                refusal = self._allowed.refusal_reason(planned.plan, workload)
                if refusal is None:
                    pool.candidates.append(Candidate(planned, origin, optimized, built))
                    pool.slices += planned.plan.slice_count
                else:
                    pool.refusals.append(refusal)
            if pool.candidates and deadline.passed():
                pool.cut_short = True
                break
            if pool.slices > self._most_slices or len(pool.candidates) >= most:
                break

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


def _tried(history: History) -> set[str]:
    """Return what trials have enacted, as `Plan.enacted_id`."""
    planned = (history.planned(id_) for id_ in {t.request.strategy_id for t in history.trials})
    return {each.plan.enacted_id for each in planned if each is not None}


def _other_fusions(
    searched: Sequence[tuple[str, Strategy]], history: History
) -> Iterator[tuple[str, Strategy]]:
    """The first strategy of a search with each other choice of op fusion, and with none.

    The times of the choices were measured set by set, so trials compare whole steps.
    """
    assert history.profiled is not None
    choices: list[tuple[OpFusionSets, str]] = [((), "no op fusion")]
    choices += [(choice.sets, choice.name) for choice in history.profiled.op_fusions]
    for origin, strategy in searched[:1] if len(choices) > 1 else ():
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


def proposal_of(
    candidate: Candidate,
    history: History,
    predicted_s: float | None = None,
    predicted_sd: float | None = None,
) -> Proposal:
    """The proposal as it is stored; the history keeps its plan."""
    history.keep_plan(candidate.planned)
    return Proposal(candidate.planned.strategy, candidate.origin, predicted_s, predicted_sd)
