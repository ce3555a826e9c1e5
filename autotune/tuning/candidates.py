"""The candidate trials of a job as columns, so that thousands of them cost milliseconds.

| symbol | meaning |
|---|---|
| C | candidate trials, in order |
| S | strategies, each with a number of its own |
| R | measured references, in order |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.tuning.events import TrialFigures


@dataclass(frozen=True, eq=False)
class CandidateColumns:
    """Each has shape (C,). `median_s` is NaN for a failure; the last two as in `TrialFigures`."""

    numbers: IntArray
    strategies: IntArray
    median_s: FloatArray
    unsteady: BoolArray
    first_look: BoolArray

    @staticmethod
    def of(trials: Sequence[TrialFigures], numbering: dict[str, int]) -> CandidateColumns:
        """`numbering`: strategy id -> its number; new strategies are added."""
        ids = [trial.strategy_id for trial in trials]
        return CandidateColumns(
            np.array([trial.number for trial in trials], dtype=np.int64),
            np.array([numbering.setdefault(id_, len(numbering)) for id_ in ids], dtype=np.int64),
            np.array([trial.median_s for trial in trials], dtype=np.float64),  # None becomes NaN
            np.array([trial.unsteady for trial in trials], dtype=bool),
            np.array([trial.first_look for trial in trials], dtype=bool),
        )

    def then(self, later: CandidateColumns) -> CandidateColumns:
        return CandidateColumns(
            np.concatenate([self.numbers, later.numbers]),
            np.concatenate([self.strategies, later.strategies]),
            np.concatenate([self.median_s, later.median_s]),
            np.concatenate([self.unsteady, later.unsteady]),
            np.concatenate([self.first_look, later.first_look]),
        )

    @property
    def measured(self) -> BoolArray:
        return ~np.isnan(self.median_s)


@dataclass(frozen=True, eq=False)
class ReferenceColumns:
    """Trial numbers and median step times of the measured references, each of shape (R,)."""

    numbers: IntArray
    median_s: FloatArray

    @staticmethod
    def of(references: Sequence[tuple[int, float]]) -> ReferenceColumns:
        return ReferenceColumns(
            np.array([number for number, _ in references], dtype=np.int64),
            np.array([median_s for _, median_s in references], dtype=np.float64),
        )

    def around_s(self, numbers: IntArray) -> tuple[FloatArray, FloatArray]:
        """Times of the references before and after each trial; NaN where there is none."""
        at = np.searchsorted(self.numbers, numbers)
        padded_s = np.concatenate([[np.nan], self.median_s, [np.nan]])
        return padded_s[at], padded_s[at + 1]

    def corrected_s(self, numbers: IntArray, median_s: FloatArray, usual_s: float) -> FloatArray:
        """Times of trials divided by the mean of the references around each, times `usual_s`."""
        before_s, after_s = self.around_s(numbers)
        both_s = (before_s + after_s) / 2
        one_s = np.where(np.isnan(before_s), after_s, before_s)
        return median_s * usual_s / np.where(np.isnan(both_s), one_s, both_s)


def medians(values: FloatArray, groups: IntArray, count: int) -> FloatArray:
    """The median of the values of each group, shape (count,); NaN for a group without values."""
    order = np.lexsort((values, groups))
    ends = np.cumsum(np.bincount(groups, minlength=count))
    begins = np.concatenate([[0], ends[:-1]])
    some = ends > begins
    low = (begins + (ends - begins - 1) // 2)[some]
    high = (begins + (ends - begins) // 2)[some]
    result = np.full(count, np.nan)
    result[some] = (values[order[low]] + values[order[high]]) / 2
    return result
