"""Linear simulator on 12 domain-agnostic features and two models of a step (AutoSync sec. 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.costs.sync_cost import GLOBAL_FEATURES
from autotune.simulators.batch import FeatureBatch
from autotune.simulators.residual import Architecture, ResidualSimulator
from autotune.simulators.training import LINEAR_RECIPE, TrainingRecipe


class _Linear(nn.Module):
    """The hidden state is the standardised input, the base and the disagreement, shape (n, 14)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(
            len(GLOBAL_FEATURES) + 2, 1, bias=False
        )  # a constant would cancel in every pair
        nn.init.zeros_(self.weights.weight)

    def forward(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        hidden = torch.cat(
            [batch.numbers, batch.base.float()[:, None], batch.disagreement[:, None]], dim=1
        )
        return self.weights(hidden).squeeze(1), hidden


def linear_simulator(recipe: TrainingRecipe = LINEAR_RECIPE) -> ResidualSimulator:
    """Return an untrained linear simulator."""
    architecture = Architecture("linear", (), lambda sizes: _Linear(), with_shards=False)
    return ResidualSimulator(architecture, recipe)
