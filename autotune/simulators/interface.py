"""What a simulator is: it learns from trials to tell which strategy is faster. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures


@dataclass(frozen=True)
class Example:
    """One measured strategy. `domain` names the workload and the cluster; only examples of one domain are compared.

    Examples of one `group`, the plan, lie on one side of every split, whatever domains they are of; "" is a group of its own.
    """

    features: StrategyFeatures
    step_s: float
    domain: str
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise InvalidInput(
                f"an example needs a measured step time above 0 s, but strategy {self.features.strategy_id} has {self.step_s}"
            )


@dataclass(frozen=True)
class FitReport:
    """What `fit` did: epochs run, the epoch whose weights were kept (0: the untrained start), seconds, why it stopped."""

    epochs: int
    best_epoch: int
    train_s: float
    stopped: str


class Simulator(Protocol):
    """Contract, tested for every implementation in tests/contract/test_simulator_contract.py.

    - `fit(examples, seed)` learns from n >= 2 examples (else `InvalidInput`) of one or more domains. It starts from the
      replay (from the analytic ranker where nothing was replayed), or with `warm_start` from the weights, the
      standardisation and the scale of the previous fit (from the start where there was none). Same examples, seed and
      previous state give the same weights on one machine unless a time limit cuts training short. The examples are not
      kept, and no global random state is touched.
    - `predict_step_s(features)` gives shape (n,) seconds, positive; lower is better. Rows do not influence one another.
    - `embed(features)` gives shape (n, H) hidden states of unit norm (zeros stay zeros).
    - `save(path)` writes a folder of safetensors and JSON; `load(path)` restores it, so that predictions are equal, and
      raises `InvalidInput` if it holds another kind of simulator or other features.
    - `predict_step_s`, `embed` and `save` before `fit` or `load` raise `InvalidInput`.
    """

    @property
    def name(self) -> str: ...

    def fit(
        self, examples: Sequence[Example], seed: int, warm_start: bool = False
    ) -> FitReport: ...

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray: ...

    def embed(self, features: Sequence[StrategyFeatures]) -> FloatArray: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...
