"""Algorithm 1 of dPRO (sec. 5.2): replay, look at the critical path, let the passes propose, keep what the replay says is faster.

Differences from the printed algorithm. It applies every decision of a sweep at once and stops where the step gets no faster. Here a pass
proposes sweeps and single decisions, each is replayed, and the fastest is kept: a theorem speaks of one chain, the replay of the graph.
It starts from several strategies instead of one, since the space has more than one valley (within the step and across it), and where
no pass finds more, random neighbours of the best are replayed until the budget is spent.

The budget is counted in replays and their ops, not in seconds, so that equal inputs give equal results on any machine, however busy. A far
limit in seconds cuts a search short where something is wrong; the result says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.optimizer.budget import Budget
from autotune.optimizer.replays import Replays
from autotune.optimizer.state import Pass, Problem, State
from autotune.rng import generator
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import Plan

GAIN = 1e-5
"""Share of the step below which a gain is not taken: it would be noise in any trial."""
CLIMBS = 3
"""Starting points from which Alg. 1 is run."""
HIDDEN = 5e-4
"""Share of the computation up to which what is not hidden behind it is not worth a walk among neighbours."""
NEIGHBOURS = 8
"""Random neighbours of a state, of which the fastest is climbed from."""
APART = 0.002
"""Relative difference below which two predicted times say that hardly anything else is sent when."""
STALE = 12
"""Climbs without a gain, after which the search ends."""


@dataclass(frozen=True)
class Kept:
    """One entry of the log: what was kept, why, and what it takes."""

    by: str
    step_s: float
    replays: int
    seconds: float


@dataclass
class Found:
    """The best states by family (`Strategy.limit`: within the step, across steps one by one or with more in flight) and in all.

    `optima`: the fastest that each climb looked at, by plan, without those to avoid and what is less than `APART` from these. `dropped`:
    proposals outside the space or not enactable.
    """

    best: State | None = None
    step_s: float = float("inf")
    families: dict[int | None, tuple[float, State]] = field(default_factory=dict)
    optima: dict[str, tuple[float, State]] = field(default_factory=dict)
    starts_s: dict[str, float] = field(default_factory=dict)
    log: list[Kept] = field(default_factory=list)
    rounds: int = 0
    dropped: int = 0
    cut_short: bool = False


class Search:
    """One search over one problem. `allowed` may refuse plans beyond what the space and the runtime do. `avoid`: ids of plans that the
    search may go through, but that are none of its `optima`. `clock`: seconds.
    """

    def __init__(
        self,
        problem: Problem,
        replays: Replays,
        passes: Sequence[Pass],
        budget: Budget,
        seed: int = 0,
        allowed: Callable[[Plan], bool] = lambda plan: True,
        clock: Callable[[], float] = time.monotonic,
        avoid: Collection[str] = (),
    ) -> None:
        self.problem, self.replays, self.passes, self.budget, self.seed, self.allowed = (
            problem,
            replays,
            passes,
            budget,
            seed,
            allowed,
        )
        self.found = Found()
        self._clock, self._avoid = clock, avoid
        self._avoided_s: list[float] = []
        self._fastest: tuple[float, State] | None = None  # of the climb that goes on
        self._began_s, self._replays_before, self._ops_before = clock(), replays.whole, replays.ops
        self._known: dict[object, float] = {}

    def run(self, starts: Sequence[tuple[str, State]]) -> Found:
        """From the fastest of the starts, of every family, by the passes; then among the neighbours of what they found."""
        scored = []
        for number, (name, state) in enumerate(starts):
            step_s = self.step_s(state)
            if step_s is not None:
                self.found.starts_s[name] = step_s
                self._keep(state, step_s, name)
                scored.append((step_s, number, state))
        scored.sort(key=lambda entry: entry[:2])
        firsts: dict[int | None, tuple[float, int, State]] = {}
        for entry in scored:
            firsts.setdefault(entry[2].strategy.limit, entry)
        chosen = list(firsts.values())
        chosen += [entry for entry in scored if all(entry is not other for other in chosen)][
            : max(CLIMBS - len(chosen), 0)
        ]
        for step_s, _, state in chosen:
            if not self._spent():
                self.climb(state, step_s)
        self._wander()
        return self.found

    def step_s(self, state: State) -> float | None:
        """The replayed step; None where the state may not be used, or nothing is left of the budget."""
        if self._spent():
            return None
        made = self.replays.plan_of(state)
        key = (made.messages, made.limit, made.ring_order, state.fusion, state.compute_factor)
        if key not in self._known:
            outside = self.problem.space.violation(
                state.strategy, self.problem.workload, self.problem.cluster
            )
            if outside is not None or refusal_reason(made) is not None or not self.allowed(made):
                self.found.dropped += 1
                return None
            self._known[key] = self.replays.step_s(state, made)
        return self._known[key]

    def climb(self, state: State, step_s: float) -> tuple[State, float]:
        """Rounds of all passes until one keeps nothing."""
        self._fastest = None
        self._note(state, step_s)
        gained = True
        while gained and not self._spent():
            gained = False
            self.found.rounds += 1
            for own in self.passes:
                if self._spent():
                    break
                better = self._best_of(own, state, step_s)
                if better is not None:
                    (state, step_s), gained = better, True
                    self._keep(state, step_s, own.name)
        if self._fastest is not None:
            self.found.optima.setdefault(self.replays.plan_of(self._fastest[1]).id, self._fastest)
        return state, step_s

    def _note(self, state: State, step_s: float) -> None:
        """The fastest of this climb that need not be avoided."""
        if self._avoid and self.replays.plan_of(state).id in self._avoid:
            self._avoided_s.append(step_s)
            return
        apart = all(abs(step_s - avoided_s) >= APART * avoided_s for avoided_s in self._avoided_s)
        if apart and (self._fastest is None or step_s < self._fastest[0]):
            self._fastest = step_s, state

    def _best_of(self, own: Pass, state: State, step_s: float) -> tuple[State, float] | None:
        best: tuple[State, float] | None = None
        limit_s = step_s * (1 - GAIN)
        for candidate in own.propose(state, self.replays.path(state)):
            found_s = self.step_s(candidate)
            if found_s is None:
                continue
            self._note(candidate, found_s)
            if found_s < limit_s:
                best, limit_s = (candidate, found_s), found_s
        return best

    def _wander(self) -> None:
        """Climbs from random neighbours of the best states: of the fastest family's two times in three, else of the others in turn."""
        rng, stale = generator(self.seed, "optimizer"), 0
        while not self._spent() and self.found.families and stale < STALE and not self._hidden():
            families = sorted(self.found.families.values(), key=lambda entry: entry[0])
            turn = 0 if stale % 3 < 2 or len(families) < 2 else 1 + stale // 3 % (len(families) - 1)
            neighbours = [self._neighbour(families[turn][1], rng) for _ in range(NEIGHBOURS)]
            scored = [
                (step_s, number)
                for number, state in enumerate(neighbours)
                if (step_s := self.step_s(state)) is not None
            ]
            stale += 1
            if not scored:
                continue
            step_s, number = min(scored)
            before_s = {limit: own_s for limit, (own_s, _) in self.found.families.items()}
            self._keep(neighbours[number], step_s, "neighbour")
            self.climb(neighbours[number], step_s)
            if any(
                own_s < before_s.get(limit, float("inf")) * (1 - GAIN)
                for limit, (own_s, _) in self.found.families.items()
            ):
                stale = 0

    def _neighbour(self, state: State, rng: np.random.Generator) -> State:
        strategy, problem = state.strategy, self.problem
        for _ in range(int(rng.integers(1, 4))):
            strategy = mutate(strategy, problem.workload, problem.cluster, problem.space, rng)
        return state.with_strategy(strategy)

    def _hidden(self) -> bool:
        """Whether the best has next to nothing but its computation left."""
        best = self.found.best
        return best is not None and self.found.step_s <= self.problem.workload_of(
            best
        ).compute_s * (1 + HIDDEN)

    def _keep(self, state: State, step_s: float, by: str) -> None:
        found, family = self.found, state.strategy.limit
        if family not in found.families or step_s < found.families[family][0]:
            found.families[family] = (step_s, state)
        if step_s < found.step_s:
            found.best, found.step_s = state, step_s
            found.log.append(
                Kept(
                    by,
                    step_s,
                    self.replays.whole - self._replays_before,
                    self._clock() - self._began_s,
                )
            )

    def _spent(self) -> bool:
        if self._clock() - self._began_s > self.budget.seconds:
            self.found.cut_short = True
        replays, ops = (
            self.replays.whole - self._replays_before,
            self.replays.ops - self._ops_before,
        )
        return self.found.cut_short or replays >= self.budget.replays or ops >= self.budget.ops
