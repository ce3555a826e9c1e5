"""How many trials a domain will about have, for the time that is left."""

from __future__ import annotations

from benchmarks.outcome.ddp_options import REPEATS, SINGLE
from benchmarks.outcome.freeze import MOST_INCUMBENTS
from benchmarks.outcome.kept import OutcomeSettings
from benchmarks.outcome.sweeps import FINALISTS

SWEPT_RIVALS = 5
"""DDP, ByteScheduler-like, BytePS-like, ZeRO-2-like and parameter servers."""
BASELINES = 2
"""Random search and scikit-optimize."""
LOOKS = 4
"""Trials of a mark's second look, with a reference."""
REFERENCES = 7 / 6
"""A reference follows every sixth trial of a search."""


def expected_trials(settings: OutcomeSettings) -> int:
    """Return about how many trials the settings need; equal plans make it less."""
    ours = 1 + settings.lossy
    searches = ours + BASELINES * settings.baselines + settings.parts + len(settings.more_seeds)
    looks = LOOKS * (searches + ours * (len(settings.marks) - 1))
    searched = searches * settings.budget + max(settings.long - settings.budget, 0)
    sides = 3 + SWEPT_RIVALS + searches + ours * (len(settings.marks) - 1 + MOST_INCUMBENTS)
    options = REPEATS * (2 + len(SINGLE)) * settings.options
    total = SWEPT_RIVALS * (settings.budget + FINALISTS) + REFERENCES * searched + looks + options
    return round(total + settings.rounds * sides)
