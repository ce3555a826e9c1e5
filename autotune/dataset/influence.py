"""What matters most in a domain: how much of the spread of step times each choice of a strategy explains.

| symbol | meaning | shape |
|---|---|---|
| y | log of the steady step time, one value per strategy | (B,) |
| choice | a strategy's level in one aspect, such as its synchronizer | - |
| alone | epsilon squared: share of the variance of y that the levels explain, corrected for their number (Kelley, 1935) | - |
| beyond | how much of the variance all choices together explain, less what the others explain without this one | - |

Both lie near 0 for a choice that does nothing (a little below it by chance) and at most at 1. `alone` may count what a correlated choice
does; `beyond` leaves out what two choices can explain alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.dataset.trials import Domain
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import CASTS, Compressor, Strategy

MOSTLY = 0.8
"""Share of the bytes that one kind must have to stand for all."""
FEWEST = 24
"""Strategies below which nothing is said of a domain."""
LEVELS = 4
"""Of a choice that is a number: quartiles."""


@dataclass(frozen=True)
class Influence:
    """Shares of the variance; the levels of a choice are those that occur."""

    alone: float
    beyond: float
    levels: int


@dataclass(frozen=True)
class Explained:
    """`together`: by all choices. `noise`: what repeats of one plan differ by, as a share of the variance; None where nothing repeats."""

    strategies: int
    deviation: float
    together: float
    noise: float | None
    choices: Mapping[str, Influence]


def explained(domain: Domain, noise: float | None) -> Explained | None:
    """Of the undisturbed trials; `noise` as `noise.repeat_noise` gives it. None where there are too few strategies, or all are alike."""
    measured = _measured(domain)
    if len(measured) < FEWEST:
        return None
    y = np.log(np.array([step_s for _, _, step_s in measured]))
    variance = float(np.var(y))
    if variance == 0:
        return None
    levels = {
        name: column for name, column in choices(domain, measured).items() if len(set(column)) > 1
    }
    columns = {name: _dummies(column) for name, column in levels.items()}
    together = _adjusted(y, list(columns.values()))
    found = {
        name: Influence(
            _adjusted(y, [column]),
            together - _adjusted(y, [other for key, other in columns.items() if key != name]),
            column.shape[1] + 1,
        )
        for name, column in columns.items()
    }
    return Explained(
        len(measured),
        math.sqrt(variance),
        together,
        None if noise is None else noise**2 / variance,
        found,
    )


def choices(
    domain: Domain, measured: Sequence[tuple[Strategy, Plan, float]]
) -> dict[str, list[str]]:
    """Name of a choice -> its level in every strategy."""
    strategies, plans = [strategy for strategy, _, _ in measured], [made for _, made, _ in measured]
    numbers = {
        "messages": [float(len(made.messages)) for made in plans],
        "largest message": [
            max(message.grad_bytes for message in made.messages) / domain.workload.grad_bytes
            for made in plans
        ],
        "shards": [
            float(sum(len(choice.shards) for choice in strategy.variables))
            for strategy in strategies
        ],
    }
    return {
        "synchronizer": [
            _mostly(made, lambda message: message.synchronizer.operation) for made in plans
        ],
        "compressor": [_mostly(made, _compression) for made in plans],
        "across the step": [str(made.cross_step) for made in plans],
        "issue order": [str(_reordered(strategy)) for strategy in strategies],
        "hierarchical": [
            _mostly(made, lambda message: str(message.hierarchical)) for made in plans
        ],
        "messages in flight": [str(made.in_flight) for made in plans],
        "ring order": [str(made.ring_order is not None) for made in plans],
        **{name: _quartiles(values) for name, values in numbers.items()},
    }


def _measured(domain: Domain) -> list[tuple[Strategy, Plan, float]]:
    """Each plan that was enacted, with the strategy that first made it and the median of its steady step times."""
    found: dict[str, tuple[Strategy, Plan, list[float]]] = {}
    for trial in domain.candidates:
        if (
            trial.strategy is not None
            and trial.plan is not None
            and not trial.disturbed
            and trial.number in domain.steady_s
        ):
            found.setdefault(trial.plan.id, (trial.strategy, trial.plan, []))[2].append(
                domain.steady_s[trial.number]
            )
    return [(strategy, made, float(np.median(values))) for strategy, made, values in found.values()]


def _compression(message: Message) -> str:
    return (
        "cast"
        if message.compressor in CASTS
        else message.compressor.value
        if message.compressor is not Compressor.NONE
        else "none"
    )


def _mostly(made: Plan, kind: Callable[[Message], str]) -> str:
    """What most bytes have, or "mixed"."""
    shares: dict[str, float] = {}
    for message in made.messages:
        shares[kind(message)] = shares.get(kind(message), 0.0) + max(message.grad_bytes, 1)
    name, most = max(shares.items(), key=lambda entry: entry[1])
    return name if most >= MOSTLY * sum(shares.values()) else "mixed"


def _reordered(strategy: Strategy) -> bool:
    return len({shard.priority for choice in strategy.variables for shard in choice.shards}) > 1


def _quartiles(values: Sequence[float]) -> list[str]:
    edges = np.unique(np.quantile(values, np.arange(1, LEVELS) / LEVELS))
    return [str(int(level)) for level in np.searchsorted(edges, values, side="left")]


def _dummies(levels: Sequence[str]) -> FloatArray:
    """Shape (B, levels - 1)."""
    names = sorted(set(levels))[1:]
    columns: FloatArray = np.array([[float(level == name) for name in names] for level in levels])
    return columns


def _adjusted(y: FloatArray, columns: Sequence[FloatArray]) -> float:
    """Adjusted R squared of a least-squares fit on the columns; epsilon squared where they are one choice's levels."""
    if not columns:
        return 0.0
    design = np.hstack([np.ones((len(y), 1)), *columns])
    fitted, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank >= len(y):
        return 0.0
    residual = float(np.sum((y - design @ fitted) ** 2)) / (len(y) - rank)
    return 1.0 - residual / float(np.var(y, ddof=1))
