"""Algorithm 1 of dPRO (sec. 5.2): passes propose from the critical path, the replay decides.

The printed algorithm applies every decision of a sweep at once and stops when the step gets no
faster. Here a pass proposes sweeps and single decisions; each is replayed, and the fastest is kept:
a theorem speaks of one chain, the replay of the graph. The search starts from several strategies,
since the space has several valleys (within the step and across it). If no pass finds a gain, random
neighbors of the best states are replayed until the budget is spent.

The budget counts replays and their ops, so equal inputs give equal results on any machine. The
problem's deadline ends a search of more variables than its seconds allow; the result reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.lowering.kept import KEPT_SLICES, Kept
from autotune.optimizer.budget import Budget, TimeUp
from autotune.optimizer.replays import Replays
from autotune.optimizer.state import Pass, Problem, State
from autotune.rng import generator
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import Plan

GAIN = 1e-5
"""Share of the step below which a gain is ignored: it would be noise in any trial."""
CLIMBS = 3
"""Starts from which Alg. 1 runs."""
HIDDEN = 5e-4
"""Exposed share of the computation up to which a walk among neighbors is not worth it."""
NEIGHBOURS = 8
"""Random neighbors of a state; the fastest begins a climb."""
APART = 0.002
"""Relative difference of predicted times below which two plans are nearly equal."""
WORTH = 1e-4
"""Share of the step that a round of all passes, or a climb from a neighbor, must gain to go on."""

LaterStarts = Callable[[float], Sequence[tuple[str, State]]]


@dataclass(frozen=True)
class Improvement:
    """An entry of the log: a faster state, and the pass or start that found it."""

    by: str
    step_s: float
    replays: int
    seconds: float


@dataclass
class SearchResult:
    """The best states, overall and by family.

    A family is a value of `Strategy.limit`: within the step, across steps with one message in
    flight, or with more. `optima`: the fastest state of each climb by `Plan.enacted_id`, without
    plans to avoid and states less than `APART` from these. `dropped`: proposals outside the space
    or refused.
    """

    best: State | None = None
    step_s: float = float("inf")
    families: dict[int | None, tuple[float, State]] = field(default_factory=dict)
    optima: dict[str, tuple[float, State]] = field(default_factory=dict)
    starts_s: dict[str, float] = field(default_factory=dict)
    log: list[Improvement] = field(default_factory=list)
    rounds: int = 0
    dropped: int = 0
    cut_short: bool = False


class Search:
    """One search over one problem, whose deadline it keeps.

    `allowed` may refuse further plans. `avoid`: the `Plan.enacted_id` of plans that never become
    `optima`.
    """

    def __init__(
        self,
        problem: Problem,
        replays: Replays,
        passes: Sequence[Pass],
        budget: Budget,
        seed: int = 0,
        allowed: Callable[[Plan], bool] = lambda plan: True,
        avoid: Collection[str] = (),
    ) -> None:
        self.problem = problem
        self.replays = replays
        self.passes = passes
        self.budget = budget
        self.seed = seed
        self.allowed = allowed
        self.result = SearchResult()
        self._clock = problem.deadline.clock
        self._avoid = avoid
        self._avoided_s: list[float] = []
        self._climbed: tuple[float, State] | None = None  # the fastest state of the current climb
        self._began_s = self._clock()
        self._replays_before = replays.whole
        self._ops_before = replays.ops
        self._step_s: Kept[float] = Kept(budget.replays, KEPT_SLICES)

    def run(
        self, starts: Sequence[tuple[str, State]], later: LaterStarts | None = None
    ) -> SearchResult:
        """Climb from the fastest starts, one of each family at least, then from neighbors.

        `later` builds further starts, after the climb from the fastest of `starts`, whose step it
        gets.
        """
        try:
            self._run(starts, later)
        except TimeUp:
            self.result.cut_short = True
        return self.result

    def _run(self, starts: Sequence[tuple[str, State]], later: LaterStarts | None) -> None:
        replayed = self._replayed(starts, 0)
        climbed: tuple[float, int, State] | None = None
        if later is not None and replayed and not self._spent():
            climbed = min(replayed, key=lambda start: start[:2])
            replayed.remove(climbed)
            self.climb(climbed[2], climbed[0])
        if later is not None:
            replayed += self._replayed(later(self.result.step_s), len(starts))
        replayed.sort(key=lambda start: start[:2])
        fastest: dict[int | None, tuple[float, int, State]] = {}
        for start in replayed:
            fastest.setdefault(start[2].strategy.limit, start)
        if climbed is not None:
            family = climbed[2].strategy.limit
            if family in fastest and fastest[family][0] > climbed[0]:
                del fastest[family]
        chosen = list(fastest.values())
        numbers = {number for _, number, _ in chosen}
        others = [start for start in replayed if start[1] not in numbers]
        chosen += others[: max(CLIMBS - len(chosen) - (climbed is not None), 0)]
        for step_s, _, state in chosen:
            if not self._spent():
                self.climb(state, step_s)
        self._wander()

    def _replayed(
        self, starts: Sequence[tuple[str, State]], first: int
    ) -> list[tuple[float, int, State]]:
        """(step, number from `first`, state) of each start that could be replayed."""
        replayed = []
        for number, (name, state) in enumerate(starts, first):
            step_s = self.step_s(state)
            if step_s is not None:
                self.result.starts_s[name] = step_s
                self._keep(state, step_s, name)
                replayed.append((step_s, number, state))
        return replayed

    def step_s(self, state: State) -> float | None:
        """The replayed step; None if the state is not allowed or the budget is spent."""
        if self._spent():
            return None
        plan = self.replays.plan_of(state)
        own = (state.fusion, state.compute_factor)
        limits = (plan.limit, plan.in_flight)
        key = (plan.messages, *limits, plan.ring_order, plan.op_fusion, *own)
        step_s = self._step_s.get(key)
        if step_s is None:
            problem = self.problem
            outside = problem.space.violation(state.strategy, problem.workload, problem.cluster)
            refused = refusal_reason(plan, rewrites_graph=bool(problem.space.op_fusions))
            if outside is not None or refused is not None or not self.allowed(plan):
                self.result.dropped += 1
                return None
            step_s = self.replays.step_s(state, plan)
            self._step_s.put(key, plan.slice_count, step_s)
        return step_s

    def climb(self, state: State, step_s: float) -> tuple[State, float]:
        """Rounds of all passes until one gains too little."""
        self._climbed = None
        self._note(state, step_s)
        gained = True
        while gained and not self._spent():
            before_s = step_s
            self.result.rounds += 1
            for one_pass in self.passes:
                if self._spent():
                    break
                better = self._best_of(one_pass, state, step_s)
                if better is not None:
                    state, step_s = better
                    self._keep(state, step_s, one_pass.name)
            gained = step_s <= before_s * (1 - WORTH)
        if self._climbed is not None:
            enacted_id = self.replays.plan_of(self._climbed[1]).enacted_id
            self.result.optima.setdefault(enacted_id, self._climbed)
        return state, step_s

    def _note(self, state: State, step_s: float) -> None:
        """Remember the fastest state of this climb that need not be avoided."""
        if self._avoid and self.replays.plan_of(state).enacted_id in self._avoid:
            self._avoided_s.append(step_s)
            return
        apart = all(abs(step_s - avoided_s) >= APART * avoided_s for avoided_s in self._avoided_s)
        if apart and (self._climbed is None or step_s < self._climbed[0]):
            self._climbed = step_s, state

    def _best_of(self, one_pass: Pass, state: State, step_s: float) -> tuple[State, float] | None:
        best: tuple[State, float] | None = None
        limit_s = step_s * (1 - GAIN)
        try:
            for candidate in one_pass.propose(state, self.replays.path(state)):
                candidate_s = self.step_s(candidate)
                if candidate_s is None:
                    continue
                self._note(candidate, candidate_s)
                if candidate_s < limit_s:
                    best = (candidate, candidate_s)
                    limit_s = candidate_s
        except TimeUp:
            self.result.cut_short = True
        return best

    def _wander(self) -> None:
        """Climb from random neighbors of the best states.

        Two times in three they are of the fastest family, otherwise of the others in turn.
        """
        rng, stale = generator(self.seed, "optimizer"), 0
        families = self.result.families
        while not self._spent() and families and stale < self.budget.stale and not self._hidden():
            ranked = sorted(families.values(), key=lambda best: best[0])
            turn = 0 if stale % 3 < 2 or len(ranked) < 2 else 1 + stale // 3 % (len(ranked) - 1)
            neighbours = [self._neighbour(ranked[turn][1], rng) for _ in range(NEIGHBOURS)]
            replayed = [
                (step_s, number)
                for number, state in enumerate(neighbours)
                if (step_s := self.step_s(state)) is not None
            ]
            stale += 1
            if not replayed:
                continue
            step_s, number = min(replayed)
            before_s = {limit: best_s for limit, (best_s, _) in families.items()}
            self._keep(neighbours[number], step_s, "neighbour")
            self.climb(neighbours[number], step_s)
            if any(
                best_s < before_s.get(limit, float("inf")) * (1 - WORTH)
                for limit, (best_s, _) in families.items()
            ):
                stale = 0

    def _neighbour(self, state: State, rng: np.random.Generator) -> State:
        problem = self.problem
        for _ in range(int(rng.integers(1, 4))):
            problem.deadline.check()
            known = self.replays.plan_of(state)
            strategy = mutate(
                state.strategy, problem.workload, problem.cluster, problem.space, rng, known
            )
            state = state.with_strategy(strategy)
        return state

    def _hidden(self) -> bool:
        """Whether the best step has almost only computation left."""
        best = self.result.best
        if best is None:
            return False
        compute_s = self.replays.workload_of(best).compute_s
        return self.result.step_s <= compute_s * (1 + HIDDEN)

    def _keep(self, state: State, step_s: float, by: str) -> None:
        result, family = self.result, state.strategy.limit
        if family not in result.families or step_s < result.families[family][0]:
            result.families[family] = (step_s, state)
        if step_s < result.step_s:
            result.best = state
            result.step_s = step_s
            replays = self.replays.whole - self._replays_before
            result.log.append(Improvement(by, step_s, replays, self._clock() - self._began_s))

    def _spent(self) -> bool:
        if self.problem.deadline.passed():
            self.result.cut_short = True
        replays = self.replays.whole - self._replays_before
        ops = self.replays.ops - self._ops_before
        spent = replays >= self.budget.replays or ops >= self.budget.ops
        return self.result.cut_short or spent
