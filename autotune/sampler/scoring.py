"""Which candidates are promising, by the replay or by a simulator that beats it.

Simulators are compared on the trials that this job has measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.features.extract import Extractor, StrategyFeatures, job_extractor
from autotune.records import RankingQuality
from autotune.rng import generator
from autotune.simulators.evaluation import REPLAY, UNLEARNED, choose_ranker, evaluate, k_fold
from autotune.simulators.interface import Example, Simulator
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search

SMALLEST_TRAINING = 8
"""Fewest measured strategies to train on; fewer leave too small a validation part."""
FOLDS = 4
REPLAYED = 100
"""Strategies of a round that are replayed; a replay costs as much as 100 analytic estimates."""
TRAINING_SHARE = 0.2
"""Largest share of the tuning time so far for all cross-validation and training."""


@dataclass(frozen=True)
class Candidate:
    """`optimized`: found by the optimizer, whose replays are cached."""

    planned: PlannedStrategy
    origin: str
    optimized: bool = False


@dataclass(frozen=True)
class Scores:
    """`predicted_s` (n,) seconds, or None. `ranked` (n,): candidates, the most promising first.

    `hidden` (n, H): hidden states of unit norm, if a simulator ranked.
    """

    ranker: str
    reason: str
    predicted_s: FloatArray | None
    ranked: IntArray
    hidden: FloatArray | None
    quality: tuple[RankingQuality, ...]

    def of(self, numbers: Sequence[int]) -> Scores:
        """The scores of these candidates."""
        chosen = np.array(numbers, dtype=np.int64)
        place = np.full(len(self.ranked), -1)
        place[chosen] = np.arange(len(chosen))
        ranked = place[self.ranked]
        predicted_s = self.predicted_s[chosen] if self.predicted_s is not None else None
        hidden = self.hidden[chosen] if self.hidden is not None else None
        return replace(self, predicted_s=predicted_s, ranked=ranked[ranked >= 0], hidden=hidden)


class Scorer:
    """Scores the candidates of one job. `simulators` builds each learned simulator anew."""

    def __init__(self, spec: JobSpec, simulators: Mapping[str, Callable[[], Simulator]]) -> None:
        self._spec = spec
        self._make = {name: simulators[name] for name in simulators if name in spec.simulators}
        self._training_s: dict[str, float] = {}
        self._last_training_s: dict[str, float] = {}
        self._trained: dict[str, Simulator] = {}
        self._kept: Extractor | None = None

    def score(self, history: History, pool: Sequence[Candidate]) -> Scores:
        """Score each candidate, after learning from all measurements so far."""
        if self._spec.search is Search.NO_SIMULATOR:
            reason = "AutoSync without a simulator: only the constraints and diversity choose"
            return Scores("none", reason, None, np.arange(len(pool)), None, ())
        assert history.profiled is not None
        extractor = self.extractor(history)
        features = [extractor.features(candidate.planned) for candidate in pool]
        examples = self.examples(history)
        if len(examples) < SMALLEST_TRAINING:
            count = len(examples)
            reason = f"{count} measured strategies are too few to train on, so the replay ranks"
            return self._ranked(REPLAY, reason, pool, features, extractor, 1.0, ())
        quality = self._train(examples, history)
        choice = choose_ranker(quality)
        return self._ranked(
            choice.ranker, choice.reason, pool, features, extractor, self._scale(examples), quality
        )

    def _ranked(
        self,
        ranker: str,
        reason: str,
        pool: Sequence[Candidate],
        features: list[StrategyFeatures],
        extractor: Extractor,
        scale: float,
        quality: tuple[RankingQuality, ...],
    ) -> Scores:
        """Rank all candidates without a replay, then replay the optimizer's and the best and rank
        these anew.

        The others follow them. `scale`: factor on the times of rankers that are not learned.
        """
        simulator = None if ranker in UNLEARNED else self._trained[ranker]
        if simulator is None:
            predicted_s = np.array([feature.analytic_step_s for feature in features])
        else:
            predicted_s = simulator.predict_step_s(features)
        first = np.lexsort((predicted_s, np.array([not candidate.optimized for candidate in pool])))
        shortlist, rest = first[:REPLAYED], first[REPLAYED:]
        for index in shortlist.tolist():
            features[index] = extractor.replayed(features[index], pool[index].planned.plan)
        replayed = [features[index] for index in shortlist]
        replayed_s = np.array([feature.replayed_step_s for feature in replayed])
        if simulator is None:
            predicted_s *= scale * float(np.median(replayed_s / predicted_s[shortlist]))
            predicted_s[shortlist] = scale * replayed_s
        else:
            predicted_s[shortlist] = simulator.predict_step_s(replayed)
        shortlist = shortlist[np.argsort(predicted_s[shortlist], kind="stable")]
        hidden = None if simulator is None else simulator.embed(features)
        order = np.concatenate([shortlist, rest])
        return Scores(ranker, reason, predicted_s, order, hidden, quality)

    def finish(self, history: History) -> dict[str, Simulator]:
        """Fit each simulator on all measurements, to keep for later jobs; may return none."""
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
        """Cross-validate and fit the simulators that the time allows; return every ranker's
        quality.

        Training delays the trials, so it may take `TRAINING_SHARE` of the job's time. A simulator
        whose last training took longer than the rest of that share skips the round.
        """
        splits = k_fold(examples, FOLDS, self._spec.seed)
        quality = evaluate(examples, {}, splits, self._spec.seed, history.noise)
        known = {one.ranker for one in quality}
        for name, make in self._make.items():
            left_s = TRAINING_SHARE * history.elapsed_s - sum(self._training_s.values())
            if self._last_training_s.get(name, 0.0) > left_s:
                continue
            began_s = time.monotonic()
            figures = evaluate(examples, {name: make}, splits, self._spec.seed, history.noise)
            quality += [one for one in figures if one.ranker not in known]
            self._trained[name] = make()
            self._trained[name].fit(examples, self._spec.seed)
            self._last_training_s[name] = time.monotonic() - began_s
            self._training_s[name] = self._training_s.get(name, 0.0) + self._last_training_s[name]
        return tuple(quality)

    @staticmethod
    def _scale(examples: Sequence[Example]) -> float:
        """Factor by which the median measured time exceeds the replayed one."""
        ratios = [
            example.step_s / (example.features.replayed_step_s or example.features.analytic_step_s)
            for example in examples
        ]
        return float(np.median(ratios))

    def extractor(self, history: History) -> Extractor:
        """One for the whole job and the optimizer's replays, so that nothing is replayed twice."""
        profiled = history.profiled
        assert profiled is not None
        workload, cluster = profiled.workload, profiled.cluster
        extractor = self._kept
        if extractor is None or (extractor.workload, extractor.cluster) != (workload, cluster):
            extractor = job_extractor(workload, cluster, self._spec.conditions.accelerators)
        self._kept = extractor
        return extractor

    def examples(self, history: History) -> list[Example]:
        """Every measurement of this job with its features, in an order independent of the time."""
        assert history.profiled is not None
        domain = f"{history.profiled.workload.id}/{history.profiled.cluster.id}"
        extractor = self.extractor(history)
        examples = []
        for strategy_id, step_s in history.measured_s.items():
            planned = history.planned(strategy_id)
            assert planned is not None, "the current setup is no candidate"
            features = extractor.replayed(extractor.features(planned), planned.plan)
            examples.append(Example(features, step_s, domain))
        order = generator(self._spec.seed, "examples").permutation(len(examples))
        return [examples[index] for index in order]
