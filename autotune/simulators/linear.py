"""Linear simulator on the 12 domain-agnostic numbers and the two models of a step (AutoSync sec. 3.1; Adam with 0.01)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.costs.sync_cost import GLOBAL_FEATURES
from autotune.simulators.batch import FeatureBatch
from autotune.simulators.residual import Architecture, ResidualSimulator
from autotune.simulators.training import LINEAR_RECIPE, TrainingRecipe


class _Linear(nn.Module):
    """The hidden state is the standardised input itself, the base and how far the analytic time is from it, shape (n, 14)."""

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
    """A fresh linear simulator."""
    return ResidualSimulator(Architecture("linear", (), lambda sizes: _Linear()), recipe)
