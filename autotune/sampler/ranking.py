"""Ranks candidates by one ranker: the replay, or a simulator.

The simulator, or without one the analytic estimate, first orders all candidates. The most promising
are then replayed and ranked anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.features.extract import Extractor
from autotune.optimizer.budget import NO_DEADLINE, Deadline
from autotune.records import RankingQuality
from autotune.sampler.correction import corrected_times
from autotune.simulators.evaluation import REPLAY
from autotune.simulators.gaussian_process import Experience
from autotune.simulators.interface import Example, Simulator
from autotune.strategy_space.plan import PlannedStrategy

SCORED_SHARDS = 2**15
"""Shards of the candidates that a simulator of shards scores at once, 10 MB of features."""
INCUMBENT = "incumbent"
"""Origin of the candidate with which its neighbours are compared."""
NO_TIMES = "times that are no finite numbers above 0"


@dataclass(frozen=True)
class Candidate:
    """`optimized`: found by the optimizer, whose replays are cached. `built`: hand-made."""

    planned: PlannedStrategy
    origin: str
    optimized: bool = False
    built: bool = False


@dataclass(frozen=True)
class Scores:
    """`predicted_s` (n,) seconds to choose by, or None. `ranked` (n,): the most promising first.

    `hidden` (n, H): hidden states of unit norm, if a simulator ranked. `shown_s` (n,): seconds to
    show, None if they are those to choose by; `sd` (n,): relative standard deviations of
    measurements around these, NaN where unknown, or None. n: the first candidates, all that were
    scored before the deadline. `cut_short`: whether more time could have changed them.
    """

    ranker: str
    reason: str
    predicted_s: FloatArray | None
    ranked: IntArray
    hidden: FloatArray | None
    quality: tuple[RankingQuality, ...]
    shown_s: FloatArray | None = None
    sd: FloatArray | None = None
    cut_short: bool = False

    def of_one(self, number: int) -> float | None:
        """Predicted seconds of this candidate; None without a prediction."""
        seconds = self.predicted_s if self.shown_s is None else self.shown_s
        if seconds is None or number >= len(self.ranked):
            return None
        return float(seconds[number])

    def sd_of_one(self, number: int) -> float | None:
        """Relative standard deviation of a measurement around `of_one`; None if it is unknown."""
        if self.sd is None or number >= len(self.ranked) or np.isnan(self.sd[number]):
            return None
        return float(self.sd[number])

    def of(self, numbers: Sequence[int]) -> Scores:
        """The scores of these candidates."""
        chosen = np.array(numbers, dtype=np.int64)
        place = np.full(len(self.ranked), -1)
        place[chosen] = np.arange(len(chosen))
        ranked = place[self.ranked]
        predicted_s = self.predicted_s[chosen] if self.predicted_s is not None else None
        hidden = self.hidden[chosen] if self.hidden is not None else None
        ranked = ranked[ranked >= 0]
        return Scores(self.ranker, self.reason, predicted_s, ranked, hidden, self.quality)


def rank_candidates(
    ranker: str,
    reason: str,
    pool: Sequence[Candidate],
    extractor: Extractor,
    simulator: Simulator | None,
    examples: Sequence[Example],
    past: Experience,
    quality: tuple[RankingQuality, ...],
    deadline: Deadline,
    replayed: int,
) -> Scores:
    """Rank candidates without a replay, then replay the incumbent, the optimizer's and the best and
    rank these anew.

    The others follow them. Without a simulator, `examples` and the `past` of earlier jobs correct
    the replay. The first half of the time is for the first ranking.
    """
    guessed = list(_guesses(pool, extractor, simulator, deadline.share(0.5)))
    predicted_s = np.concatenate([guess.step_s for guess in guessed])
    if simulator is not None and not are_times(predicted_s):
        reason = f"{reason}; but it predicts {NO_TIMES}, so the replay ranks"
        return rank_candidates(
            REPLAY, reason, pool, extractor, None, examples, past, quality, deadline, replayed
        )
    guesses = pool[: len(predicted_s)]
    others = np.array([not candidate.optimized for candidate in guesses])
    not_compared = np.array([candidate.origin != INCUMBENT for candidate in guesses])
    first = np.lexsort((predicted_s, others, not_compared))
    described = []
    replaying = deadline if simulator is None else deadline.share(0.5)
    for index in first[:replayed].tolist():
        planned = pool[index].planned
        features = extractor.features(planned, with_shards=False)
        described.append(extractor.described(features, planned.plan))
        if replaying.passed():
            break
    cut_short = len(predicted_s) < len(pool) or len(described) < len(first[:replayed])
    shortlist, rest = first[: len(described)], first[len(described) :]
    hidden = shown_s = sd = None
    if simulator is None:
        corrected = corrected_times(examples, described, past)
        shown_s = predicted_s * float(np.median(corrected.shown_s / predicted_s[shortlist]))
        predicted_s *= float(np.median(corrected.ranking_s / predicted_s[shortlist]))
        sd = np.full(len(predicted_s), np.nan)
        predicted_s[shortlist], shown_s[shortlist] = corrected.ranking_s, corrected.shown_s
        sd[shortlist] = corrected.sd
    else:
        short = [pool[index] for index in shortlist]
        again = list(_guesses(short, extractor, simulator, NO_DEADLINE, replayed=True))
        predicted_s[shortlist] = np.concatenate([guess.step_s for guess in again])
        hidden = np.concatenate([guess.hidden for guess in guessed])
        hidden[shortlist] = np.concatenate([guess.hidden for guess in again])
    shortlist = shortlist[np.argsort(predicted_s[shortlist], kind="stable")]
    order = np.concatenate([shortlist, rest])
    return Scores(ranker, reason, predicted_s, order, hidden, quality, shown_s, sd, cut_short)


@dataclass(frozen=True)
class _Guess:
    """Predicted seconds (n,) and hidden states (n, H) of some candidates; H is 0 without any."""

    step_s: FloatArray
    hidden: FloatArray


def _guesses(
    pool: Sequence[Candidate],
    extractor: Extractor,
    simulator: Simulator | None,
    deadline: Deadline,
    replayed: bool = False,
) -> Iterator[_Guess]:
    """Guess in parts, whose features need not be in memory together, until the deadline."""
    with_shards = simulator is not None and simulator.reads_shards
    for part in _parts(pool):
        features = []
        for candidate in part:
            one = extractor.features(candidate.planned, with_shards)
            features.append(extractor.replayed(one, candidate.planned.plan) if replayed else one)
            if deadline.passed():
                break
        if simulator is None:
            step_s = np.array([one.analytic_step_s for one in features])
            yield _Guess(step_s, np.zeros((len(features), 0)))
        else:
            yield _Guess(simulator.predict_step_s(features), simulator.embed(features))
        if deadline.passed():
            break


def _parts(pool: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    """Consecutive candidates with at most `SCORED_SHARDS` shards together, at least one."""
    start, shards = 0, 0
    for stop, candidate in enumerate(pool):
        count = candidate.planned.plan.slice_count
        if stop > start and shards + count > SCORED_SHARDS:
            yield pool[start:stop]
            start, shards = stop, 0
        shards += count
    yield pool[start:]


def are_times(step_s: FloatArray) -> bool:
    """Whether all are finite and above 0, which a simulator of a plugin may break."""
    return bool(np.all(np.isfinite(step_s) & (step_s > 0)))
