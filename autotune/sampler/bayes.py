"""Bayesian optimization by scikit-optimize, the baseline: a Gaussian process over the points of an encoding."""

from __future__ import annotations

import math
import warnings
from typing import Any

from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.encodings import Encoding
from autotune.strategy_space.strategy import Strategy


class BayesianSearch:
    """Ask for the next strategy, tell its step time, repeat.

    One proposal is open at a time: `ask` returns the same one until it is told. So the state is a function
    of the seed and the tells alone, and telling the same results in the same order to a new object restores it.
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
        """The open proposal, or a new one."""
        if self._open is None:
            with _quiet():
                point = self._optimizer.ask()
            self._open = point, self._encoding.strategy(point)
        return self._open[1]

    def tell(self, strategy_id: str, step_s: float) -> None:
        """The step time in seconds of the open proposal (lower is better).

        A failed trial has no step time: tell the slowest one seen, or the time limit of a trial. Raises `InvalidInput` if `strategy_id` is
        not the open proposal's, or if `step_s` is not a finite number above 0.
        """
        strategy = self.ask()
        if strategy.id != strategy_id:
            raise InvalidInput(
                f"a step time must be told for the open proposal {strategy.id}, but is for {strategy_id}; tell in the order of asking"
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
    """Hides warnings about what is normal here: fits on few points, and points at a bound that are asked for twice."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
