"""The interface of simulators, which learn from trials which strategy is faster. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures


@dataclass(frozen=True)
class Example:
    """One measured strategy.

    `domain` names the workload and the cluster; only examples of one domain are compared. Examples
    of one `group`, the plan, are on one side of every split, in any domain; "" is no group.
    """

    features: StrategyFeatures
    step_s: float
    domain: str
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise InvalidInput(
                "an example needs a measured step time above 0 s, "
                f"but strategy {self.features.strategy_id} has {self.step_s}"
            )


@dataclass(frozen=True)
class FitReport:
    """The result of `fit`. `best_epoch`: the epoch of the kept weights (0: the untrained start)."""

    epochs: int
    best_epoch: int
    train_s: float
    stopped: str


class Simulator(Protocol):
    """The contract; tests/contract/test_simulator_contract.py tests it for every implementation.

    - `fit(examples, seed)` learns from n >= 2 examples (else `InvalidInput`) of one or more
      domains. It starts from the replay, or from the analytic ranker if nothing was replayed. With
      `warm_start` it continues from the weights, standardisation and scale of the previous fit.
      The same examples, seed and previous state give the same weights on one machine, unless
      training ends early after `limit_s`. It keeps no examples and touches no global random state.
    - `reads_shards`: whether it needs `StrategyFeatures.shards`, which models of many variables
      do not have.
    - `predict_step_s(features)` returns positive seconds, shape (n,); lower is better. Rows do not
      influence one another.
    - `embed(features)` returns hidden states of unit norm, shape (n, H); zeros stay zeros.
    - `save(path)` writes a folder of safetensors and JSON. `load(path)` restores it with equal
      predictions, and raises `InvalidInput` for another kind of simulator or other features.
    - `predict_step_s`, `embed` and `save` raise `InvalidInput` before `fit` or `load`.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads_shards(self) -> bool: ...

    def fit(
        self,
        examples: Sequence[Example],
        seed: int,
        warm_start: bool = False,
        limit_s: float = math.inf,
    ) -> FitReport: ...

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray: ...

    def embed(self, features: Sequence[StrategyFeatures]) -> FloatArray: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...
