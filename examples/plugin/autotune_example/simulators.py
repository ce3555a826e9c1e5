"""A simulator: a perceptron over the global features that learns the residual of the replay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.costs.sync_cost import GLOBAL_FEATURES
from autotune.simulators.batch import FeatureBatch
from autotune.simulators.residual import Architecture, ResidualSimulator
from autotune.simulators.training import TrainingRecipe

WIDTH = 6


class Perceptron(nn.Module):
    """One hidden layer. Its output starts at zero, so that predictions start at the replay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(len(GLOBAL_FEATURES), width)
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(batch.numbers))
        return self.last(hidden).squeeze(1), hidden


def perceptron() -> ResidualSimulator:
    """Build an untrained simulator."""
    architecture = Architecture(
        "perceptron", (WIDTH,), lambda sizes: Perceptron(*sizes), with_shards=False
    )
    return ResidualSimulator(architecture, TrainingRecipe(epochs=5, warm_epochs=2, threads=1))
