"""How well the rankers order real trials: per domain, on domains never seen, and by the number of trials they learned from.

    python -m benchmarks.ranking --accuracy-trials FOLDER...           # what benchmarks.replay_accuracy collected
    python -m benchmarks.ranking --directory autotune-jobs             # the trial store of one's own jobs

Source: AutoSync, supplement sec. 10 (recipe; ranking accuracy on a test part, mean over 3 runs); its transfer between domains. A domain is
one model on one cluster. Rankers: chance, the paper's max(T_comp, T_sync), the overlap estimate, the replay, and the learned simulators
with and without the replayed time, which are trained on a domain's own trials, on other domains, or on these and then its own. What is
never trained on and tested on at once: `benchmarks.ranking_tasks`. Output: `ranking.md`, `learning-curve.svg` and `rows.csv` in a folder,
and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, InvalidInput
from benchmarks.accuracy_trials import Domain
from benchmarks.ranking_report import FIGURES, curve_plot, means, report, write
from benchmarks.ranking_runs import TIE_BAND, Learned, Maker, Row, Study, Trainer, called, run
from benchmarks.ranking_tasks import HeldOut
from benchmarks.ranking_trials import Point, ReplayedTimes, plans_by_domain, points_of, read_accuracy_trials, read_store

SMALLEST_DOMAIN = 20
"""Plans below which a domain is not tested: a test part of fewer than ten says next to nothing."""
SIZES = (25, 50, 100, 200, 400)
RANKERS = ("linear", "rnn", "gat")


class Progress:
    """Which training runs, how long everything has run and how long it may still take, on stderr."""

    def __init__(self) -> None:
        self._began_s = self._since_s = time.monotonic()
        self._running: tuple[str, int] | None = None
        self._per_example: dict[str, tuple[float, int]] = {}
        self.planned: list[tuple[str, int]] = []
        """(ranker, examples) of every training to come; empty while they are counted."""

    def began(self, ranker: str, examples: int) -> None:
        now = time.monotonic()
        if self._running is not None:
            name, count = self._running
            took_s, seen = self._per_example.get(name, (0.0, 0))
            self._per_example[name] = (took_s + now - self._since_s, seen + count)
        self._running, self._since_s = (ranker, examples), now
        left = self.planned
        eta = "ETA after the first of each ranker"
        if all(name in self._per_example for name, _ in left):
            rates = {name: took_s / seen for name, (took_s, seen) in self._per_example.items()}
            eta = f"ETA {_clock(sum(rates[name] * count for name, count in left))}"
        say(f"{_clock(now - self._began_s)} ({eta}; {len(left)} trainings left): {ranker} on {examples} trials")
        if left:
            left.remove((ranker, examples))


class _Counting:
    """A simulator that is never trained: how many trainings a study has is found by going through it."""

    name = "counting"


def makers(names: Sequence[str], recipe: str, epochs: int | None) -> dict[str, Maker]:
    """The simulators as the tuner trains them, or in the paper's sizes and recipe; `epochs` instead of the recipe's."""
    from autotune.simulators.gat import gat_simulator
    from autotune.simulators.linear import linear_simulator
    from autotune.simulators.registry import simulators
    from autotune.simulators.rnn import rnn_simulator
    from autotune.simulators.training import LINEAR_RECIPE, PAPER_RECIPE
