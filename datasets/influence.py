"""The share of the spread of step times that each choice of a strategy explains in a domain.

| symbol | meaning | shape |
|---|---|---|
| y | log of the steady step time, one value per strategy | (B,) |
| choice | a strategy's level in one aspect, such as its synchronizer | - |
| alone | epsilon squared: share of the variance of y that the levels explain (Kelley, 1935) | - |
| beyond | share that all choices explain together, less the share of the others alone | - |

Both are near 0 for a choice without effect (by chance a little below it) and at most 1. `alone` is
corrected for the number of levels and may include the effect of a correlated choice. `beyond`
excludes what two choices explain equally well.
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
"""Share of the bytes that one kind must have to represent all."""
FEWEST = 24
"""Least number of strategies to explain a domain."""
LEVELS = 4
"""Number of levels of a numeric choice: quartiles."""


@dataclass(frozen=True)
class Influence:
    """Shares of the variance; `levels` counts those that occur."""

    alone: float
    beyond: float
    levels: int


@dataclass(frozen=True)
class Explained:
    """`together`: share of all choices. `noise`: share of repeats of a plan, None without any."""

    strategies: int
    deviation: float
    together: float
    noise: float | None
    choices: Mapping[str, Influence]


def explained(domain: Domain, noise: float | None) -> Explained | None:
    """Explain the undisturbed trials; `noise` is `noise.repeat_noise`.

    None where there are too few strategies, or all take the same time.
    """
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
    influences = {
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
        influences,
    )


def choices(
    domain: Domain, measured: Sequence[tuple[Strategy, Plan, float]]
) -> dict[str, list[str]]:
    """Name of a choice -> its level in every strategy."""
    strategies = [strategy for strategy, _, _ in measured]
    plans = [plan for _, plan, _ in measured]
    largest_bytes = [max(message.grad_bytes for message in plan.messages) for plan in plans]
    shards = [sum(len(choice.shards) for choice in strategy.variables) for strategy in strategies]
    numbers = {
        "messages": [float(len(plan.messages)) for plan in plans],
        "largest message": [size / domain.workload.grad_bytes for size in largest_bytes],
        "shards": [float(count) for count in shards],
    }
    return {
        "synchronizer": [_mostly(one, lambda m: m.synchronizer.operation) for one in plans],
        "compressor": [_mostly(one, _compression) for one in plans],
        "across the step": [str(one.cross_step) for one in plans],
        "issue order": [str(_reordered(strategy)) for strategy in strategies],
        "hierarchical": [_mostly(one, lambda m: str(m.hierarchical)) for one in plans],
        "messages in flight": [str(one.in_flight) for one in plans],
        "ring order": [str(one.ring_order is not None) for one in plans],
        **{name: _quartiles(values) for name, values in numbers.items()},
    }


def _measured(domain: Domain) -> list[tuple[Strategy, Plan, float]]:
    """Each enacted plan, with its first strategy and the median of its steady step times."""
    times_s: dict[str, list[float]] = {}
    enacted: dict[str, tuple[Strategy, Plan]] = {}
    for trial in domain.candidates:
        steady_s = domain.steady_s.get(trial.number)
        if trial.strategy is None or trial.plan is None or trial.disturbed or steady_s is None:
            continue
        enacted.setdefault(trial.plan.id, (trial.strategy, trial.plan))
        times_s.setdefault(trial.plan.id, []).append(steady_s)
    return [(*pair, float(np.median(times_s[plan_id]))) for plan_id, pair in enacted.items()]


def _compression(message: Message) -> str:
    return (
        "cast"
        if message.compressor in CASTS
        else message.compressor.value
        if message.compressor is not Compressor.NONE
        else "none"
    )


def _mostly(plan: Plan, kind: Callable[[Message], str]) -> str:
    """The kind of most bytes, or "mixed"."""
    shares: dict[str, float] = {}
    for message in plan.messages:
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
    """Adjusted R squared of a least-squares fit: epsilon squared for the levels of one choice."""
    if not columns:
        return 0.0
    design = np.hstack([np.ones((len(y), 1)), *columns])
    fitted, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank >= len(y):
        return 0.0
    residual = float(np.sum((y - design @ fitted) ** 2)) / (len(y) - rank)
    return 1.0 - residual / float(np.var(y, ddof=1))
