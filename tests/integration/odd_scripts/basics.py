"""What all odd scripts share: the model, its data and the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_world import seeded

STEPS = 7


class Run(Protocol):
    """What a script gets."""

    rank: int

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """The module under DDP."""

    def see(self, *values: Any) -> None:
        """Record values that the script looks at."""


Script = Callable[[Run], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))))))


def data(run: Run, step: int) -> Tensor:
    return torch.randn(5, 6, generator=seeded(1000 * run.rank + step))


def loss_of(run: Run, model: Any, step: int) -> Tensor:
    return model(data(run, step)).square().mean()


def nothing(step: int) -> None:
    """Do nothing between two steps."""


def train(
    run: Run,
    model: Any,
    optimizer: Any,
    after: Callable[[int], object] = nothing,
    before: Callable[[int], object] = nothing,
    steps: int = STEPS,
) -> None:
    """`before` runs between backward() and step(), `after` after step()."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        loss.backward()
        before(step)
        optimizer.step()
        after(step)
        run.see(loss)


def sgd(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adam(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 0.01)


def plain_sgd(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model))


def plain_adam(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, adam(model))
