"""Scores a job's candidates by the replay, or by a simulator that beats it (`ranking`).

Simulators are compared on the trials that this job has measured. Scoring ends at a deadline:
candidates that have no score by then are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autotune.features.extract import Extractor, StrategyFeatures, job_extractor
from autotune.optimizer.budget import NO_DEADLINE, Deadline
from autotune.records import Constants, RankingQuality
from autotune.rng import generator
from autotune.sampler.correction import NO_EXPERIENCE, experience
from autotune.sampler.past_jobs import PastJob, PastJobs, evenly, no_past_jobs, past_residuals
from autotune.sampler.ranking import NO_TIMES, Candidate, Scores, are_times, rank_candidates
from autotune.simulators.calibration import OutOfTime, calibrate
from autotune.simulators.constants import with_constants
from autotune.simulators.contradictions import contradicted
from autotune.simulators.evaluation import REPLAY, UNLEARNED, choose_ranker, evaluate, k_fold
from autotune.simulators.gaussian_process import Experience
from autotune.simulators.interface import Example, Simulator
from autotune.simulators.replay_settings import ReplaySettings
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search

SMALLEST_TRAINING = 8
"""Fewest measured strategies to train on; fewer leave too small a validation part."""
FOLDS = 4
FEWEST_CALIBRATED, MOST_CALIBRATED = 5, 40
"""Measured strategies on which the replay's constants are calibrated."""
REPLAYED = 100
"""Strategies of a round that are replayed; a replay costs as much as 100 analytic estimates."""
TRAINING_SHARE = 0.2
"""Largest share of the tuning time so far for all cross-validation and training."""
LEARNING = 0.75
"""Share of the time for scoring in which simulators may learn; cheap models need little of it."""
TRAINED_SHARDS = 2**17
"""Most shards of all measured strategies from which a simulator of shards learns.

A batch of training takes 11 kB per shard (gat, measured), 1.4 GB in all.
"""


class Scorer:
    """Scores the candidates of one job. `simulators` builds each learned simulator anew.

    `trained_shards`: most shards of all measured strategies from which simulators learn. `past`
    loads earlier jobs. The replay is corrected by them until it is calibrated on this
    job's own trials, since their residuals are those of stated constants.
    """

    def __init__(
        self,
        spec: JobSpec,
        simulators: Mapping[str, Callable[[], Simulator]],
        trained_shards: int = TRAINED_SHARDS,
        past: PastJobs = no_past_jobs,
    ) -> None:
        self._spec, self._trained_shards = spec, trained_shards
        self._past = past
        self._past_jobs: Sequence[PastJob] | None = None
        self._others: Experience | None = None
        self._make = {name: simulators[name] for name in simulators if name in spec.simulators}
        self._training_s: dict[str, float] = {}
        self._last_training_s: dict[str, float] = {}
        self._trained: dict[str, Simulator] = {}
        self._stated: Extractor | None = None
        self._calibrated: tuple[Extractor, Constants, tuple[str, ...]] | None = None
        self._calibrated_on: dict[str, float] | None = {}
        self._measured: dict[str, StrategyFeatures] = {}

    def score(
        self,
        history: History,
        pool: Sequence[Candidate],
        deadline: Deadline = NO_DEADLINE,
        replayed: int = REPLAYED,
    ) -> Scores:
        """Score the candidates, at least one, after learning from the measurements so far.

        At most `replayed` candidates are replayed.
        """
        if self._spec.search is Search.NO_SIMULATOR:
            reason = "AutoSync without a simulator: only the constraints and diversity choose"
            return Scores("none", reason, None, np.arange(len(pool)), None, ())
        assert history.profiled is not None
        extractor = self.extractor(history)
        learning = deadline.share(LEARNING)
        examples = self.examples(history, learning)
        all_known = len(examples) == len(history.measured_s)
        if len(examples) < SMALLEST_TRAINING:
            count = len(examples)
            reason = f"{count} measured strategies are too few to train on, so the replay ranks"
            if not all_known:
                reason = f"only {count} measured strategies were replayed, so the replay ranks"
            others, all_read = self._experience(history, learning)
            if others.trials:
                reason = f"{reason}, corrected by {others.trials} strategies of earlier jobs"
            scores = rank_candidates(
                REPLAY, reason, pool, extractor, None, examples, others, (), deadline, replayed
            )
            all_known = all_known and all_read
            return replace(scores, cut_short=scores.cut_short or not all_known)
        quality, left_out = self._train(examples, history, learning)
        choice = choose_ranker(quality)
        simulator = None if choice.ranker in UNLEARNED else self._trained[choice.ranker]
        reason = "; ".join([choice.reason, *left_out])
        others, all_read = self._experience(history, learning)
        scores = rank_candidates(
            choice.ranker,
            reason,
            pool,
            extractor,
            simulator,
            examples,
            others,
            quality,
            deadline,
            replayed,
        )
        if scores.ranker in UNLEARNED:  # a simulator's ranking does without earlier jobs
            all_known = all_known and all_read
        return replace(scores, cut_short=scores.cut_short or not all_known)

    def finish(self, history: History, deadline: Deadline = NO_DEADLINE) -> dict[str, Simulator]:
        """Fit each simulator on all measurements, to keep for later jobs; may return none.

        Simulators that the last round could not train are left out, and those that are not trained
        by the deadline.
        """
        if self._spec.search is not Search.AUTOSYNC or history.profiled is None:
            return {}
        examples = self.examples(history, deadline)
        if len(examples) < SMALLEST_TRAINING:
            return {}
        trained = {name: make() for name, make in self._make.items()}
        if not _have_shards(examples):
            trained = {name: each for name, each in trained.items() if not each.reads_shards}
        left_out = self._last_training_s.keys() - self._trained.keys()
        trained = {name: each for name, each in trained.items() if name not in left_out}
        in_time: dict[str, Simulator] = {}
        for name, simulator in trained.items():
            left_s = deadline.left_s
            if left_s == 0:
                break
            simulator.fit(examples, self._spec.seed, limit_s=left_s)
            if not deadline.passed():
                in_time[name] = simulator
        return in_time

    def _experience(self, history: History, deadline: Deadline) -> tuple[Experience, bool]:
        """Learn from earlier jobs how wrong replays with stated constants are.

        Also return whether there was time for all of them. If not, the next round tries again.
        """
        assert history.profiled is not None
        if self._calibrated is not None:
            return NO_EXPERIENCE, True
        if self._others is not None:
            return self._others, True
        if self._past_jobs is None:
            self._past_jobs = self._past(history.profiled.software)
        residuals, complete = past_residuals(self._past_jobs, deadline)
        others = experience(residuals)
        if complete:
            self._others, self._past_jobs = others, None
        return others, complete

    def _train(
        self, examples: Sequence[Example], history: History, deadline: Deadline
    ) -> tuple[tuple[RankingQuality, ...], list[str]]:
        """Cross-validate and fit the simulators that the time allows.

        The replays in the examples are calibrated on all of them. A calibration per fold would take
        `FOLDS` times as long. Simulators start at the same replay, so it does not favour them.

        Return every ranker's quality, and for people which simulators are left out for their size.

        Training delays the trials, so it may take `TRAINING_SHARE` of the job's time. A simulator
        whose last training took longer than the rest of that share skips the round. So does one
        whose first fit shows that all would pass the deadline.
        """
        splits = k_fold(examples, FOLDS, self._spec.seed)
        quality = evaluate(examples, {}, splits, self._spec.seed, history.noise)
        known = {one.ranker for one in quality}
        clock, too_large, unusable = deadline.clock, [], []
        for name, make in self._make.items():
            left_s = TRAINING_SHARE * history.elapsed_s - sum(self._training_s.values())
            if self._last_training_s.get(name, 0.0) > left_s:
                continue
            simulator = make()
            if simulator.reads_shards and not _have_shards(examples):
                too_large.append(name)
                continue
            began_s, limit_s = clock(), deadline.left_s / (FOLDS + 1)
            if limit_s == 0:
                self._last_training_s.setdefault(name, 0.0)
                continue
            simulator.fit(examples, self._spec.seed, limit_s=limit_s)
            fit_s = clock() - began_s
            self._trained.pop(name, None)
            usable = are_times(simulator.predict_step_s([each.features for each in examples]))
            if usable and fit_s <= limit_s:
                figures = evaluate(examples, {name: make}, splits, self._spec.seed, history.noise)
                new = [one for one in figures if one.ranker not in known]
                # Kendall's tau of predictions that are no numbers is none either
                if usable := all(math.isfinite(one.kendall_tau) for one in new):
                    quality += new
                    self._trained[name] = simulator
            if not usable:
                unusable.append(f"{name} left out: it predicts {NO_TIMES}")
            took_s = clock() - began_s
            self._last_training_s[name] = max(took_s, (FOLDS + 1) * fit_s)
            self._training_s[name] = self._training_s.get(name, 0.0) + took_s
        return tuple(quality), _too_large(too_large, self._trained_shards) + unusable

    def extractor(self, history: History) -> Extractor:
        """One for the whole round and the optimizer's replays, so that nothing is replayed twice.

        It replays with the constants that `calibrate` found last.
        """
        stated = self._as_stated(history)
        return stated if self._calibrated is None else self._calibrated[0]

    def replay_settings(self, history: History) -> ReplaySettings:
        """Settings of the replays of `extractor`."""
        stated, profiled = self._as_stated(history), history.profiled
        assert profiled is not None
        constants = self.constants or Constants()
        return ReplaySettings(stated.costs, constants, tuple(profiled.op_fusions))

    @property
    def constants(self) -> Constants | None:
        """Those that `calibrate` found last; None: the stated ones."""
        return None if self._calibrated is None else self._calibrated[1]

    def calibrate(self, history: History, deadline: Deadline = NO_DEADLINE) -> tuple[str, ...]:
        """Fit the constants of the replays to the measurements so far.

        Return which stated constants they contradict, for people. A calibration that takes too long
        is given up for this job (`calibration_given_up`).
        """
        stated, measured_s = self._as_stated(history), dict(history.measured_s)
        enough = len(measured_s) >= FEWEST_CALIBRATED
        if enough and self._calibrated_on is not None and measured_s != self._calibrated_on:
            chosen = calibration_trials(measured_s)
            planned = [history.planned(strategy_id) for strategy_id in chosen]
            trials = [each for each in planned if each is not None]
            assert len(trials) == len(chosen), "the current setup is no candidate"
            times_s = np.array([measured_s[strategy_id] for strategy_id in chosen])
            try:
                calibration = calibrate(stated, trials, times_s, deadline.passed)
            except OutOfTime:
                self._calibrated_on = None
            else:
                constants = calibration.constants
                extractor = with_constants(stated, constants)
                self._calibrated = extractor, constants, contradicted(stated, calibration)
                self._calibrated_on = measured_s
                self._measured = {}
        return () if self._calibrated is None else self._calibrated[2]

    @property
    def calibration_given_up(self) -> bool:
        return self._calibrated_on is None

    @property
    def is_calibrated(self) -> bool:
        """Whether a calibration has succeeded, perhaps on fewer trials than there are now."""
        return self._calibrated is not None

    def _as_stated(self, history: History) -> Extractor:
        """The extractor with the constants that were probed or assumed."""
        profiled = history.profiled
        assert profiled is not None
        workload, cluster = profiled.workload, profiled.cluster
        stated = self._stated
        if stated is None or (stated.workload, stated.cluster) != (workload, cluster):
            stated = job_extractor(
                workload,
                cluster,
                self._spec.conditions.accelerators,
                profiled.software,
                profiled.op_fusions,
            )
            # A resumed job goes on with the constants of its last round.
            last = history.rounds[-1] if history.rounds else None
            self._calibrated = None
            if last is not None and last.constants is not None:
                extractor = with_constants(stated, last.constants)
                self._calibrated = extractor, last.constants, last.contradicted
        self._stated = stated
        return stated

    def examples(self, history: History, deadline: Deadline = NO_DEADLINE) -> list[Example]:
        """The measurements of this job with their features, in an order independent of the time.

        Their shards are left out if they are more than `trained_shards` together. A resumed job
        replays its measured strategies again, until the deadline.
        """
        assert history.profiled is not None
        domain = f"{history.profiled.workload.id}/{history.profiled.cluster.id}"
        measured: dict[str, PlannedStrategy] = {}
        for strategy_id in history.measured_s:
            if strategy_id not in self._measured and deadline.passed():
                continue
            planned = history.planned(strategy_id)
            assert planned is not None, "the current setup is no candidate"
            measured[strategy_id] = planned
        shards = sum(planned.plan.slice_count for planned in measured.values())
        examples = []
        for strategy_id, planned in measured.items():
            if strategy_id not in self._measured and deadline.passed():
                continue
            features = self._features(history, planned, strategy_id, shards <= self._trained_shards)
            step_s, group = history.measured_s[strategy_id], planned.plan.enacted_id
            examples.append(Example(features, step_s, domain, group))
        order = generator(self._spec.seed, "examples").permutation(len(examples))
        return [examples[index] for index in order]

    def _features(
        self, history: History, planned: PlannedStrategy, strategy_id: str, with_shards: bool
    ) -> StrategyFeatures:
        """The replayed features of a measured strategy, computed once."""
        features = self._measured.get(strategy_id)
        if features is None:
            extractor = self.extractor(history)
            features = extractor.features(planned, with_shards)
            features = extractor.described(features, planned.plan)
        elif not with_shards:
            features = features.without_shards()
        self._measured[strategy_id] = features
        return features


def calibration_trials(measured_s: Mapping[str, float]) -> list[str]:
    """Return at most `MOST_CALIBRATED` strategies, evenly from the fastest to the slowest."""
    ranked = sorted(measured_s, key=lambda strategy_id: (measured_s[strategy_id], strategy_id))
    return [ranked[place] for place in evenly(len(ranked), MOST_CALIBRATED)]


def _have_shards(examples: Sequence[Example]) -> bool:
    return all(len(example.features.shards) for example in examples)


def _too_large(names: Sequence[str], trained_shards: int) -> list[str]:
    """Why these simulators are not trained; nothing if there are none."""
    if not names:
        return []
    return [
        f"{' and '.join(names)} left out: the measured strategies have more than "
        f"{trained_shards:,} shards together"
    ]
