"""Bayesian optimization by scikit-optimize, a baseline: a Gaussian process over an encoding's
points.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.encodings import Encoding
from autotune.strategy_space.strategy import Strategy


class BayesianSearch:
    """Ask for a strategy, tell its step time, repeat.

    One proposal is open at a time, and `ask` returns it until `tell`. So the state is a
    function of the seed and the tells; telling a new object the same results in the same order
    restores it.
    """

    def __init__(self, encoding: Encoding, seed: int) -> None:
        from skopt import Optimizer

        self._encoding = encoding
        self._optimizer: Any = Optimizer(
            encoding.dimensions(),
            base_estimator="GP",
            n_initial_points=encoding.initial,
            random_state=int(generator(seed, "bayes").integers(2**31)),
        )
        self._open: tuple[list[Any], Strategy] | None = None

    def ask(self) -> Strategy:
        """Return the open proposal, or a new one."""
        if self._open is None:
            with _quiet():
                point = self._optimizer.ask()
            self._open = point, self._encoding.strategy(point)
        return self._open[1]

    def tell(self, strategy_id: str, step_s: float) -> None:
        """Give the step time of the open proposal, in seconds (lower is better).

        For a failed trial, give the slowest time so far or a trial's time limit. Raises
        `InvalidInput` if `strategy_id` is not the open proposal's, or if `step_s` is not a finite
        number above 0.
        """
        strategy = self.ask()
        if strategy.id != strategy_id:
            raise InvalidInput(
                f"`tell` needs the step time of the open proposal {strategy.id}, "
                f"but is for {strategy_id}; tell in the order of asking"
            )
        if not (math.isfinite(step_s) and step_s > 0):
            raise InvalidInput(
                f"a step time must be a finite number of seconds above 0, but is {step_s}"
            )
        assert self._open is not None
        with _quiet():
            self._optimizer.tell(self._open[0], float(step_s))
        self._open = None


def _quiet() -> warnings.catch_warnings:
    """Hide warnings about normal conditions: fits on few points, and repeated points at a bound."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
