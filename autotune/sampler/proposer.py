"""One round of proposals: sample, score, keep the diverse top K (AutoSync Fig. 1), or one of the baselines.

What is sampled depends on the job, its seed and the history alone; which simulators had the time to be trained
depends on the machine. A round is recorded as an event, so a resumed job never proposes it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.events import Proposal, Proposed
from autotune.features.compute_cost import taken_share
from autotune.features.extract import Extractor, StrategyFeatures
from autotune.history import History
from autotune.job import JobSpec, Search, Similarity
from autotune.optimizer.budget import Budget
from autotune.rng import generator
from autotune.sampler.bayes import BayesianFusion
from autotune.sampler.garbage import collection_paused
from autotune.sampler.random import sample_many
from autotune.sampler.selection import choice_agreement_rows, hidden_cosine, select_diverse
from autotune.simulators.evaluation import REPLAY, UNLEARNED, RankingQuality, choose_ranker, evaluate, k_fold
from autotune.simulators.interface import Example, Simulator
from autotune.strategy_space.builders.catalogue import seed_strategies
from autotune.strategy_space.enactable import scaled_space, why_refused, why_scaled_refused
from autotune.strategy_space.neighbours import mutate
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy

SMALLEST_TRAINING = 8
"""Measured strategies below which nothing is trained: fewer leave no validation part worth the name."""
FOLDS = 4
PARENTS = 5
"""The fastest strategies so far, whose neighbours are proposed."""
REPLAYED = 100
"""Strategies of a round that are replayed, the ones that rank best without: a replay costs as much as a hundred analytic estimates."""
SURVIVORS = 0.3
"""Share of the scored strategies that pass the filter by predicted time, before diversity chooses among them."""
TRAINING_SHARE = 0.2
"""Of the tuning time so far, what cross-validation and training may have taken in all."""
FIRST_EXPLORERS, EXPLORERS = 0.5, 0.17
"""Share of a round's trials (the first, the later ones) that goes to strategies which the ranker would not have tried."""
OPTIMIZER = Budget(replays=200, seconds=30.0)
"""What the optimizer may replay before the first round: a second or two. The seconds only end it where something is wrong."""
LEADERS = 0.5
"""Share of the first round's trials that the optimizer's strategies may take."""
BAYES_ASKS = 20
"""How often in a row a baseline that proposes a known plan again is told its known time."""
FAILED_FACTOR = 2.0
"""What a failed trial is told as, relative to the current setup: slow, but not so slow that it flattens the rest."""


@dataclass(frozen=True)
class _Candidate:
    """`replayed_s`: what the optimizer's replay predicts of its own."""

    strategy: Strategy
    origin: str
    plan: Plan
    replayed_s: float | None = None


@dataclass(frozen=True)
class _Pool:
    """What may be tried, and why each strategy that was left out cannot be enacted."""

    candidates: list[_Candidate]
    refusals: list[str]


@dataclass(frozen=True)
class _Scores:
    """`predicted_s` (n,) seconds; None where nothing is predicted. `ranked` (n,): indices of the candidates, the most promising first.

    `hidden` (n, H) unit norm, if a simulator ranked.
    """

    ranker: str
    reason: str
    predicted_s: NDArray[np.float64] | None
    ranked: NDArray[np.int64]
    hidden: NDArray[np.float64] | None
    quality: tuple[RankingQuality, ...]

    def of(self, numbers: Sequence[int]) -> _Scores:
        """Those of these candidates."""
        predicted_s = self.predicted_s[list(numbers)] if self.predicted_s is not None else None
        return replace(self, predicted_s=predicted_s, hidden=self.hidden[list(numbers)] if self.hidden is not None else None)


class Proposer:
    """Proposes for one job. `simulators` builds each learned simulator anew."""

    def __init__(self, spec: JobSpec, simulators: dict[str, Callable[[], Simulator]]) -> None:
        self._spec = spec
        self._make = {name: make for name, make in simulators.items() if name in spec.simulators}
        self._bayes: BayesianFusion | None = None
        self._training_s: dict[str, float] = {}
        self._last_training_s: dict[str, float] = {}
        self._trained: dict[str, Simulator] = {}
        self._kept: Extractor | None = None

    def propose(self, history: History, round_: int, count: int) -> Proposed:
        """At most `count` strategies whose plans were not tried; none when the space has nothing new."""
        if self._spec.search is Search.BAYES:
            return self._propose_bayes(history, round_)
        found = self._pool(history, round_)
        pool, refusals = found.candidates, found.refusals
        if not pool:
            return Proposed(round_, (), "none", _said("no strategy was sampled that had not been tried", refusals), 0, (), 0.0)
        if self._spec.search is Search.RANDOM:
            proposals = tuple(Proposal(candidate.strategy, candidate.origin) for candidate in pool[:count])
            return Proposed(round_, proposals, "random", _said("random search was asked for", refusals), len(pool), (), 0.0)
        scores = self._score(history, round_, pool)
        leading = [i for i, candidate in enumerate(pool) if candidate.replayed_s is not None][: max(1, round(LEADERS * count))]
        rest = [i for i in range(len(pool)) if i not in leading]
        if rest and len(leading) < count:
            chosen = self._choose([pool[i] for i in rest], scores.of(rest), count - len(leading), round_)
            leading += [rest[i] for i in chosen]
        proposals = tuple(_proposal(pool[i], scores, i) for i in leading)
        return Proposed(round_, proposals, scores.ranker, _said(scores.reason, refusals), len(pool), scores.quality, 0.0)

    def _pool(self, history: History, round_: int) -> _Pool:
        """Distinct untried plans that can be enacted: the field's hand-made strategies, random ones, and neighbours of the fastest."""
        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        parents = [history.proposals[key].strategy for key, _ in history.ranking()[:PARENTS]]
        wanted = self._spec.samples_per_round
        guided = self._spec.search is Search.AUTOSYNC
        mutants = wanted // 2 if guided and parents else 0
        rng = generator(self._spec.seed, "mutations", round_)
        space = self._space(history)
        found: list[tuple[str, Strategy]] = []
        with collection_paused():
            searched = self._searched(history, space) if guided and round_ == 0 else []
            if self._spec.search is not Search.RANDOM:
                found += seed_strategies(workload, cluster, space)
            found += [("mutated", self._walk(parents[int(rng.integers(len(parents)))], history, space, rng)) for _ in range(mutants)]
            seed = int(generator(self._spec.seed, "samples", round_).integers(2**31))
            found += [("sampled", strategy) for strategy in sample_many(workload, cluster, space, wanted - mutants, seed)]
            return self._untried([*searched, *((origin, strategy, None) for origin, strategy in found)], history)

    def _searched(self, history: History, space: SearchSpace) -> list[tuple[str, Strategy, float | None]]:
        """What the optimizer finds by replay, fastest first: one strategy for each family of the space (`optimizer.suggestions`)."""
        from autotune.optimizer.suggest import suggestions  # numba is heavy, and the baselines do without

        assert history.profiled is not None
        workload, cluster = history.profiled.workload, history.profiled.cluster
        found = suggestions(
            workload,
            cluster,
            space,
            budget=OPTIMIZER,
            seed=self._spec.seed,
            allowed=lambda made: self._why_refused(made) is None,
            taken_share=taken_share(workload, cluster),
        )
        return [(f"optimizer: {own.name}", own.strategy, own.predicted_step_s) for own in found]

    def _untried(self, found: Sequence[tuple[str, Strategy, float | None]], history: History) -> _Pool:
        assert history.profiled is not None
        seen = {trial.plan_id for trial in history.trials}
        pool: list[_Candidate] = []
        refusals: list[str] = []
        for origin, strategy, replayed_s in found:
            candidate = _Candidate(strategy, origin, plan(strategy, history.profiled.workload, self._spec.workers), replayed_s)
            if candidate.plan.id in seen or strategy.id in history.proposals:
                continue
            seen.add(candidate.plan.id)
            refusal = self._why_refused(candidate.plan)
            if refusal is None:
                pool.append(candidate)
            else:
                refusals.append(refusal)
        return _Pool(pool, refusals)

    def _why_refused(self, wanted: Plan) -> str | None:
        return why_refused(wanted) or why_scaled_refused(wanted, self._spec.conditions.byte_scale)

    def _space(self, history: History) -> SearchSpace:
        """What the job and its conditions allow and its script can do."""
        assert history.profiled is not None
        space = scaled_space(SearchSpace.default(lossy=self._spec.lossy), self._spec.conditions.byte_scale)
        refused = history.profiled.cross_step_refused
        return space.without_cross_step(refused) if refused else space

    @staticmethod
    def _walk(strategy: Strategy, history: History, space: SearchSpace, rng: np.random.Generator) -> Strategy:
        """One to four moves away: near enough to inherit, far enough to differ measurably."""
        assert history.profiled is not None
        for _ in range(int(rng.integers(1, 5))):
            strategy = mutate(strategy, history.profiled.workload, history.profiled.cluster, space, rng)
        return strategy

    def _score(self, history: History, round_: int, pool: Sequence[_Candidate]) -> _Scores:
        if self._spec.search is Search.NO_SIMULATOR:
            reason = "AutoSync without a simulator: only the constraints and diversity choose"
            return _Scores("none", reason, None, np.arange(len(pool)), None, ())
        assert history.profiled is not None
        extractor = self._extractor(history)
        features = [extractor.features(candidate.strategy, candidate.plan) for candidate in pool]
        examples = self.examples(history)
        if len(examples) < SMALLEST_TRAINING:
            reason = f"{len(examples)} measured strategies are too few to train on, so the replay ranks"
            return self._ranked(REPLAY, reason, pool, features, extractor, 1.0, ())
        quality = self._train(examples, history)
        choice = choose_ranker(quality)
        return self._ranked(choice.ranker, choice.reason, pool, features, extractor, self._scale(examples), quality)

    def _ranked(
        self,
        ranker: str,
        reason: str,
        pool: Sequence[_Candidate],
        features: list[StrategyFeatures],
        extractor: Extractor,
        scale: float,
        quality: tuple[RankingQuality, ...],
    ) -> _Scores:
        """All candidates without a replay first, then the best of them with one; the others stay behind these.

        `scale`: what the unlearned rankers' times are multiplied by.
        """
        simulator = None if ranker in UNLEARNED else self._trained[ranker]
        if simulator is None:
            predicted_s = np.array([feature.analytic_step_s for feature in features])
        else:
            predicted_s = simulator.predict_step_s(features)
        first = np.argsort(predicted_s, kind="stable")
        shortlist, rest = first[:REPLAYED], first[REPLAYED:]
        for index in shortlist.tolist():
            features[index] = extractor.replayed(features[index], pool[index].plan)
        replayed_s = np.array([features[index].replayed_step_s for index in shortlist])
        if simulator is None:
            predicted_s *= scale * float(np.median(replayed_s / predicted_s[shortlist]))
            predicted_s[shortlist] = scale * replayed_s
        else:
            predicted_s[shortlist] = simulator.predict_step_s([features[index] for index in shortlist])
        shortlist = shortlist[np.argsort(predicted_s[shortlist], kind="stable")]
        hidden = None if simulator is None else simulator.embed(features)
        return _Scores(ranker, reason, predicted_s, np.concatenate([shortlist, rest]), hidden, quality)

    def finish(self, history: History) -> dict[str, Simulator]:
        """Every simulator, fitted once more on all that was measured: what is kept for later jobs. May be none."""
        if self._spec.search is not Search.AUTOSYNC or history.profiled is None:
            return {}
        examples = self.examples(history)
        if len(examples) < SMALLEST_TRAINING:
            return {}
        trained = {name: make() for name, make in self._make.items()}
        for simulator in trained.values():
            simulator.fit(examples, self._spec.seed)
        return trained

    def _train(self, examples: Sequence[Example], history: History) -> tuple[RankingQuality, ...]:
        """Cross-validate and fit every simulator that the time allows; the quality of those, and of the analytic rankers.

        Training holds up the trials, so it may take `TRAINING_SHARE` of the job's time: a simulator whose last training
        was too long for what is left of that sits the round out.
        """
        splits = k_fold(examples, FOLDS, self._spec.seed)
        quality = evaluate(examples, {}, splits, self._spec.seed, history.noise)
        known = {figures.ranker for figures in quality}
        for name, make in self._make.items():
            left_s = TRAINING_SHARE * history.elapsed_s - sum(self._training_s.values())
            if self._last_training_s.get(name, 0.0) > left_s:
                continue
            began_s = time.monotonic()
            found = evaluate(examples, {name: make}, splits, self._spec.seed, history.noise)
            quality += [figures for figures in found if figures.ranker not in known]
            self._trained[name] = make()
            self._trained[name].fit(examples, self._spec.seed)
            self._last_training_s[name] = time.monotonic() - began_s
            self._training_s[name] = self._training_s.get(name, 0.0) + self._last_training_s[name]
        return tuple(quality)

    @staticmethod
    def _scale(examples: Sequence[Example]) -> float:
        """What the replayed time must be multiplied by to meet the measured ones in the median."""
        ratios = [example.step_s / (example.features.replayed_step_s or example.features.analytic_step_s) for example in examples]
        return float(np.median(ratios))

    def _extractor(self, history: History) -> Extractor:
        """One for the whole job, so that nothing is replayed twice."""
        profiled = history.profiled
        assert profiled is not None
        if self._kept is None or (self._kept.workload, self._kept.cluster) != (profiled.workload, profiled.cluster):
            self._kept = Extractor(profiled.workload, profiled.cluster)
        return self._kept

    def examples(self, history: History) -> list[Example]:
        """Everything that was measured in this job, with its features, in an order that says nothing about the time."""
        assert history.profiled is not None
        domain = f"{history.profiled.workload.id}/{history.profiled.cluster.id}"
        extractor = self._extractor(history)
        found = []
        for strategy_id, step_s in history.measured_s.items():
            strategy = history.proposals[strategy_id].strategy
            enacted = plan(strategy, history.profiled.workload, self._spec.workers)
            found.append(Example(extractor.replayed(extractor.features(strategy, enacted), enacted), step_s, domain))
        return [found[index] for index in generator(self._spec.seed, "examples").permutation(len(found))]

    def _choose(self, pool: Sequence[_Candidate], scores: _Scores, count: int, round_: int) -> list[int]:
        """Filter by predicted time, then the greedy minimum of Eq. 11; a few more at random from what did not pass.

        Without the random ones a simulator would only ever see strategies that its predecessor liked, and could not
        learn what makes the others slow (AutoSync trains on random samples for that reason).
        """
        predicted = scores.predicted_s if scores.predicted_s is not None else np.ones(len(pool))
        kept, explorers = np.arange(len(pool)), np.arange(0)
        if scores.predicted_s is not None:
            ranked = scores.ranked
            passed = min(len(pool), max(count, round(SURVIVORS * len(pool))))
            kept = ranked[:passed]
            wanted = min(round(count * (FIRST_EXPLORERS if round_ == 0 else EXPLORERS)), len(pool) - passed)
            explorers = generator(self._spec.seed, "explorers", round_).choice(ranked[passed:], wanted, replace=False)
            count -= len(explorers)
        if self._spec.similarity is Similarity.HIDDEN and scores.hidden is not None:
            agreement = hidden_cosine(scores.hidden[kept])
            picked = select_diverse(predicted[kept], agreement, count, self._spec.diversity)
        else:
            rows = choice_agreement_rows([pool[int(i)].strategy for i in kept])
            picked = select_diverse(predicted[kept], rows, count, self._spec.diversity)
        return [int(kept[i]) for i in picked] + explorers.tolist()

    def _propose_bayes(self, history: History, round_: int) -> Proposed:
        """scikit-optimize on two scalars, told everything again. A plan that is known already is told its time at once.

        Its plans are uncompressed flat all-reduces of whole variables, which are always enacted.
        """
        assert history.profiled is not None
        workload = history.profiled.workload
        # Asking and telling in order rebuilds the state, so a resumed job goes on where it was.
        search = self._bayes = self._bayes or BayesianFusion(workload, self._spec.seed)
        failed_s = FAILED_FACTOR * history.references[0][1]
        times = {trial.plan_id: history.measured_s.get(trial.request.strategy_id, failed_s) for trial in history.candidates}
        told: set[str] = set()
        repeats = 0
        while repeats < BAYES_ASKS:
            strategy = search.ask()
            plan_id = plan(strategy, workload, self._spec.workers).id
            if plan_id not in times:
                reason = "Bayesian optimization of fusion threshold and cycle time was asked for"
                return Proposed(round_, (Proposal(strategy, "bayes"),), "gaussian process", reason, 1, (), 0.0)
            search.tell(strategy.id, times[plan_id])
            repeats = repeats + 1 if plan_id in told else 0
            told.add(plan_id)
        reason = "the two scalars yield no plan that was not tried"
        return Proposed(round_, (), "gaussian process", reason, BAYES_ASKS, (), 0.0)


def _proposal(candidate: _Candidate, scores: _Scores, number: int) -> Proposal:
    """With the time that chose it: the optimizer's replay for its own, the ranker's for the others."""
    predicted_s = candidate.replayed_s
    if predicted_s is None and scores.predicted_s is not None:
        predicted_s = float(scores.predicted_s[number])
    return Proposal(candidate.strategy, candidate.origin, predicted_s)


def _said(reason: str, refusals: Sequence[str]) -> str:
    """`reason`, and what was left out before a trial was spent on it."""
    if not refusals:
        return reason
    if len(refusals) == 1:
        return f"{reason}; left out 1 strategy that cannot be enacted: {refusals[0]}"
    return f"{reason}; left out {len(refusals)} strategies that cannot be enacted, the first because of {refusals[0]}"
