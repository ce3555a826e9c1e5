"""Points whose replays are calibrated on some of their own plans, remembered in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.arrays import IntArray
from autotune.records import Constants
from autotune.simulators.calibration import calibrate
from autotune.simulators.constants import with_constants
from autotune.strategy_space.plan import PlannedStrategy
from benchmarks.ranking.json_lines import JsonLines
from benchmarks.ranking.trials import Campaign, Point, ReplayedTimes, points_of

Calibrate = Callable[[str, IntArray], list[Point]]
"""Takes a domain and indices of its points. Returns its points, with the replays of each campaign
calibrated on those of the indices that belong to it."""


class Calibrations:
    """Calibrates the replays of campaigns whose `points` are given."""

    def __init__(
        self,
        campaigns: Sequence[Campaign],
        points: Sequence[Point],
        replayed: ReplayedTimes,
        path: Path,
    ) -> None:
        self._campaigns, self._points, self._replayed = campaigns, points, replayed
        self._lines = JsonLines(path)
        entries = map(_entry, self._lines.values)
        self._known = dict(entry for entry in entries if entry is not None)

    def of(self, domain: str, training: IntArray) -> list[Point]:
        """As `Calibrate` states."""
        chosen = [self._points[index] for index in training]
        calibrated = []
        for number, campaign in enumerate(self._of_domain(domain), start=1):
            name = f"{domain} #{number}"
            measured = sorted(
                (point for point in chosen if point.example.domain == name),
                key=lambda point: point.plan_id,
            )
            extractor = with_constants(campaign.extractor, self._constants(campaign, measured))
            calibrated.append(replace(campaign, extractor=extractor))
        return points_of(calibrated, self._replayed)

    def _of_domain(self, domain: str) -> list[Campaign]:
        return [campaign for campaign in self._campaigns if campaign.domain == domain]

    def _constants(self, campaign: Campaign, measured: Sequence[Point]) -> Constants:
        """The constants after these points, at best from the file."""
        if not measured:
            return Constants()
        key = self._replayed.key(
            campaign, [f"{point.plan_id} {point.example.step_s!r}" for point in measured]
        )
        if key not in self._known:
            planned = {
                enacted.enacted_id: PlannedStrategy(strategy, enacted)
                for strategy, enacted, _ in campaign.measured
            }
            constants = calibrate(
                campaign.extractor,
                [planned[point.plan_id] for point in measured],
                np.array([point.example.step_s for point in measured]),
            ).constants
            self._known[key] = constants
            self._lines.append([key, dict(constants.logs), dict(constants.limits)])
        return self._known[key]


def replaced(points: Sequence[Point], others: Sequence[Point]) -> list[Point]:
    """Return the points in their order, those of `others` in place of their originals."""
    known = {(point.example.domain, point.plan_id): point for point in others}
    return [known.get((point.example.domain, point.plan_id), point) for point in points]


def _entry(value: Any) -> tuple[str, Constants] | None:
    """Return the entry of a line, or None if it is none."""
    try:
        key, logs, limits = value
        return str(key), Constants(dict(logs), dict(limits))
    except (ValueError, TypeError):
        return None
