"""Calibrate and correct the replay, and judge it where the tuner decides.

The replay's constants are calibrated on the first own plans of a part that is not tested (`tasks`),
those of the other domains on their first own plans. A Gaussian process corrects what is left.

Each domain is held out in turn. The process learns from the other domains and from the same own
plans. It ranks at full strength, and at the strength that
the other domains support: the one with the best order in the fastest quarter of each of them, by a
process and a kernel that have seen neither that domain nor the tested one.

The tuner's own ranker calibrates on at most `MOST_CALIBRATED` own plans. Until it calibrates,
residuals of other domains by stated constants correct it: of as many domains, and of as many plans
of each, as a job takes from earlier jobs (`earlier_trials`). Its kernel, strength and optimism are
fixed (`TUNER`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.features.timeline import TIMELINE_FEATURES
from autotune.jobs.past_jobs import NEWEST
from autotune.rng import generator
from autotune.sampler.correction import NO_EXPERIENCE, CorrectedTimes, corrected_times, experience
from autotune.sampler.past_jobs import MOST_TRIALS, evenly
from autotune.sampler.scoring import FEWEST_CALIBRATED, calibration_trials
from autotune.simulators.evaluation import REPLAY
from autotune.simulators.gaussian_process import (
    Correction,
    Experience,
    Kernel,
    Residuals,
    learned_kernel,
)
from benchmarks.ranking.calibrations import Calibrate, replaced
from benchmarks.ranking.decisions import (
    DecisionRow,
    Figures,
    TestedPlans,
    ceilings,
    decision_figures,
)
from benchmarks.ranking.runs import Trainer
from benchmarks.ranking.tasks import (
    HeldOut,
    Parts,
    assert_no_leak,
    assert_unseen,
    can_be_split,
    parts_of,
    point_of,
    seen,
    sources_for,
)
from benchmarks.ranking.trials import Point

CALIBRATED = "calibrated replay"
FULL = "calibrated, process"
SUPPORTED = "calibrated, process at supported strength"
TUNER = "as the tuner ranks"
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
OWN = (0, 5, 25, 50)
"""Own trials after which rankers are judged."""
JUDGED = 25
"""Own trials after which strengths are compared, and to which the aims apply."""
STRENGTH_SEEDS = 2
"""Test parts of each other domain on which strengths are compared."""
TEST_SHARE = 0.6
"""Share of a domain's plans that is tested: 50 of 150 plans are left to learn from."""


@dataclass(frozen=True)
class Held:
    """A held-out domain: its parts, its sources and what the process learned from them."""

    parts: Parts
    sources: IntArray
    experience: Experience


@dataclass(frozen=True, eq=False)
class Guess:
    """Predictions of a ranker after `own` trials, (n,) seconds, to rank by.

    `shown_s`: seconds to show; None if they are those to rank by.
    """

    ranker: str
    own: int
    ranking_s: FloatArray
    shown_s: FloatArray | None = None

    def judged(self, domain: str, seed: int, tested: TestedPlans, ceilings: Figures) -> DecisionRow:
        """Return the figures of the order, and the bias of the times that are shown."""
        figures = decision_figures(self.ranking_s, tested)
        shown_s = self.ranking_s if self.shown_s is None else self.shown_s
        bias = _bias(shown_s, tested)
        return DecisionRow(domain, seed, self.ranker, self.own, figures, ceilings, bias)


def features_of(points: Sequence[Point], indices: IntArray) -> FloatArray:
    """Return the features of the replayed steps, shape (n, F)."""
    rows = [_row(points[index]) for index in indices]
    return np.array(rows).reshape(len(rows), len(TIMELINE_FEATURES))


def replayed_of(points: Sequence[Point], indices: IntArray) -> FloatArray:
    return np.array([points[index].example.features.replayed_step_s for index in indices])


def residuals_of(points: Sequence[Point], indices: IntArray) -> Residuals:
    """Return the residuals of these points; campaigns are domains of their own."""
    names = [points[index].example.domain for index in indices]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    measured_s = np.array([points[index].example.step_s for index in indices])
    return Residuals(
        features_of(points, indices),
        np.log(measured_s / replayed_of(points, indices)),
        np.array([numbers[name] for name in names], dtype=np.int64),
    )


def tested_of(points: Sequence[Point], indices: IntArray) -> TestedPlans:
    chosen = [points[index] for index in indices]
    return TestedPlans(
        np.array([point.example.step_s for point in chosen]),
        np.array([point.noise for point in chosen]),
        np.array([point.example.features.strategy.lossless for point in chosen]),
        np.array([point.searched for point in chosen]),
    )


class Kernels:
    """Learns kernels from points, each only once."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._learned: dict[tuple[int, ...], Kernel] = {}

    def without(self, *domains: str) -> Kernel:
        """Return the kernel of domains whose models are none of these domains' models.

        So no plan that is tested in one of them is among the kernel's trials.
        """
        sources = kernel_sources(self._points, domains)
        key = tuple(sources.tolist())
        if key not in self._learned:
            names = sorted({self._points[index].domain for index in sources})
            draw = generator(0, "kernel", *names)
            self._learned[key] = learned_kernel(residuals_of(self._points, sources), draw)
        return self._learned[key]


def kernel_sources(points: Sequence[Point], domains: Sequence[str]) -> IntArray:
    """Return the points of other models than these domains have."""
    nothing = np.zeros(0, dtype=np.int64)
    sources = sources_for(points, domains[0], HeldOut.MODEL, None, nothing)
    for domain in domains:
        sources = _unseen(points, sources, domain, HeldOut.MODEL)
        assert_unseen(points, sources, domain, HeldOut.MODEL)
    return sources


def held_out(
    points: Sequence[Point], domain: str, seed: int, kernel: Kernel, also: str | None = None
) -> Held:
    """Hold out a domain, and also a second one; tested plans are in no source."""
    parts = parts_of(points, domain, seed, OWN[1:], TEST_SHARE)
    sources = sources_for(points, domain, HeldOut.DOMAIN, None, parts.test)
    if also is not None:
        sources = _unseen(points, sources, also, HeldOut.DOMAIN)
        assert_unseen(points, sources, also, HeldOut.DOMAIN)
    return Held(parts, sources, Experience(kernel, residuals_of(points, sources)))


def _unseen(points: Sequence[Point], sources: IntArray, domain: str, held_out: HeldOut) -> IntArray:
    """Return the sources that do not share the held-out property of the domain."""
    target = point_of(points, domain)
    unseen = [index for index in sources if not seen(points[index], target, held_out)]
    return np.array(unseen, dtype=np.int64)


def corrected(points: Sequence[Point], held: Held, own: int) -> tuple[Correction, IntArray]:
    """Return the correction of the test part after the first `own` plans, and these."""
    training = own_part(held.parts, own)
    assert_no_leak(points, held.sources, training, held.parts.test, HeldOut.DOMAIN)
    known = residuals_of(points, training)
    x = features_of(points, held.parts.test)
    return held.experience.correct(x, known.x, known.r), training


def own_part(parts: Parts, own: int) -> IntArray:
    """Return the first `own` plans of the training part; all of them if there are fewer."""
    if own == 0:
        return np.zeros(0, dtype=np.int64)
    return parts.own[own] if own in parts.own else parts.own[max(parts.own)]


def learned_points(points: Sequence[Point], calibrate: Calibrate) -> list[Point]:
    """Return the points as later jobs know them: each domain after `JUDGED` own plans.

    A domain that is too small to be split keeps its stated replays.
    """
    others: list[Point] = []
    for domain in sorted({point.domain for point in points}):
        if can_be_split(points, domain):
            parts = parts_of(points, domain, 0, OWN[1:], TEST_SHARE)
            others += calibrate(domain, own_part(parts, JUDGED))
    return replaced(points, others)


def other_domains(points: Sequence[Point], domain: str) -> list[str]:
    """Return the domains whose model and cluster are not both those of this one."""
    target = point_of(points, domain)
    return sorted({point.domain for point in points if not seen(point, target, HeldOut.DOMAIN)})


def supported_strength(
    learned: Sequence[Point], domain: str, kernels: Kernels, calibrate: Calibrate
) -> float:
    """Return the strength that orders the fastest quarters of the other domains best.

    0 if none of them can be split, since then no domain supports a correction.
    """
    totals = np.zeros(len(STRENGTHS))
    others = [name for name in other_domains(learned, domain) if can_be_split(learned, name)]
    for other, seed in product(others, range(STRENGTH_SEEDS)):
        held = held_out(learned, other, seed, kernels.without(domain, other), also=domain)
        points = replaced(learned, calibrate(other, own_part(held.parts, JUDGED)))
        correction, _ = corrected(points, held, JUDGED)
        tested = tested_of(points, held.parts.test)
        replayed_s = replayed_of(points, held.parts.test)
        figures = [
            decision_figures(replayed_s * np.exp(strength * correction.mean), tested)
            for strength in STRENGTHS
        ]
        totals += np.nan_to_num([row["fastest_quarter"] for row in figures])
    return STRENGTHS[int(np.argmax(totals))]


def as_the_tuner(
    points: Sequence[Point], held: Held, own: int, calibrate: Calibrate
) -> CorrectedTimes:
    """Return the times of the test part after the first `own` plans, by the tuner's own code.

    `points` are replayed with stated constants, as earlier jobs are in a job without a calibration.
    """
    training = own_part(held.parts, own)
    others = NO_EXPERIENCE
    if own < FEWEST_CALIBRATED:
        earlier = earlier_trials(points, held.sources, held.parts.domain)
        others = experience(residuals_of(points, earlier))
    calibrating = _calibrating(points, training)
    calibrated = replaced(points, calibrate(held.parts.domain, calibrating))
    return corrected_times(
        [calibrated[index].example for index in training],
        [calibrated[index].example.features for index in held.parts.test],
        others,
    )


def earlier_trials(points: Sequence[Point], sources: IntArray, domain: str) -> IntArray:
    """Return the sources from which the tuner learns, if each other campaign was an earlier job.

    As in `autotune.jobs.past_jobs` and `autotune.sampler.past_jobs`: jobs in the same kind of
    runtime, at most `NEWEST`, and of each at most `MOST_TRIALS`, evenly from the fastest to the
    slowest. Campaigns of datasets have no common order of age, so the jobs are drawn.
    """
    runtime = point_of(points, domain).runtime
    jobs: dict[str, list[int]] = {}
    for index in sources.tolist():
        if points[index].runtime == runtime:
            jobs.setdefault(points[index].example.domain, []).append(index)
    names = sorted(jobs)
    chosen: list[int] = []
    for number in generator(0, "earlier jobs", domain).permutation(len(names))[:NEWEST]:
        ranked = sorted(
            jobs[names[number]],
            key=lambda index: (points[index].example.step_s, points[index].plan_id),
        )
        chosen += [ranked[place] for place in evenly(len(ranked), MOST_TRIALS)]
    return np.array(sorted(chosen), dtype=np.int64)


def _calibrating(points: Sequence[Point], training: IntArray) -> IntArray:
    """Return the plans on which the tuner calibrates each campaign."""
    chosen: list[int] = []
    for name in sorted({points[index].example.domain for index in training}):
        places = {
            points[index].plan_id: int(index)
            for index in training
            if points[index].example.domain == name
        }
        times_s = {plan: points[place].example.step_s for plan, place in places.items()}
        chosen += [places[plan] for plan in calibration_trials(times_s)]
    return np.array(sorted(chosen), dtype=np.int64)


def judged(
    points: Sequence[Point],
    domains: Sequence[str],
    seeds: int,
    trainer: Trainer,
    source_plans: int,
    calibrate: Calibrate,
) -> tuple[list[DecisionRow], dict[str, float]]:
    """Return a row per domain, seed, ranker and number of own trials, and the strengths used.

    `trainer` makes the simulators, which learn from `source_plans` plans of each other domain.
    """
    rows: list[DecisionRow] = []
    strengths = {}
    learned = learned_points(points, calibrate)
    kernels = Kernels(learned)
    for domain in domains:
        kernel = kernels.without(domain)
        strengths[domain] = supported_strength(learned, domain, kernels, calibrate)
        for seed in range(seeds):
            held = held_out(learned, domain, seed, kernel)
            tested = tested_of(points, held.parts.test)
            most = ceilings(tested, generator(seed, "ceiling", domain))
            stated_s = replayed_of(points, held.parts.test)
            guesses: list[Guess] = []
            for own in OWN:
                training = own_part(held.parts, own)
                mixed = replaced(learned, calibrate(domain, training))
                correction, _ = corrected(mixed, held, own)
                replayed_s = replayed_of(mixed, held.parts.test)
                scaled_s = _scale(mixed, training) * replayed_s
                tuner = as_the_tuner(points, held, own, calibrate)
                guesses += [
                    Guess(REPLAY, own, _scale(points, training) * stated_s),
                    Guess(CALIBRATED, own, scaled_s),
                    Guess(FULL, own, replayed_s * np.exp(correction.mean)),
                    Guess(SUPPORTED, own, scaled_s * np.exp(strengths[domain] * correction.mean)),
                    Guess(TUNER, own, tuner.ranking_s, tuner.shown_s),
                ]
            guesses += _simulated(points, held, trainer, source_plans)
            rows += [guess.judged(domain, seed, tested, most) for guess in guesses]
    return rows, strengths


def _simulated(
    points: Sequence[Point], held: Held, trainer: Trainer, source_plans: int
) -> Iterator[Guess]:
    """Yield what each simulator predicts after other domains, and then after own trials."""
    parts = held.parts
    for name in trainer.makers:
        few = sources_for(points, parts.domain, HeldOut.DOMAIN, source_plans, parts.test)
        start, _, _ = trainer.fit((name, True), few, parts.seed)
        for own in (0, *OWN[1:]):
            simulator, training = start, own_part(parts, own)
            assert_no_leak(points, few, training, parts.test, HeldOut.DOMAIN)
            if own:
                simulator, _, _ = trainer.fit((name, True), training, parts.seed, start)
            yield Guess(name, own, simulator.predict_step_s(trainer.features(parts.test)))


def _scale(points: Sequence[Point], training: IntArray) -> float:
    """Return the median of measured over replayed, by which the tuner scales its predictions."""
    if not len(training):
        return 1.0
    return float(np.exp(np.median(residuals_of(points, training).r)))


def _bias(shown_s: FloatArray, tested: TestedPlans) -> float:
    if not tested.searched.any():
        return math.nan
    ratios = tested.measured_s[tested.searched] / shown_s[tested.searched]
    return float(np.mean(np.log(ratios)))


def _row(point: Point) -> FloatArray:
    timeline = point.example.features.timeline
    assert timeline is not None, "points are replayed with their timeline"
    return timeline.row
