"""A small model with simple memory, and the two passes that trade memory for time, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """A sequence of linear layers with activations, and a head; `parts`: another sequence."""

    def __init__(
        self,
        width: int = 48,
        layers: int = 4,
        activation: type[nn.Module] = nn.Tanh,
        parts: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.body = nn.Sequential(
            *(
                parts
                or [part for _ in range(layers) for part in (nn.Linear(width, width), activation())]
            )
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class Again(nn.Module):
    """Drops its activations after its forward pass and recomputes them before its backward pass."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *inputs: object) -> object:
        return checkpoint(self.inside, *inputs, use_reentrant=False)


def computed_again(module: nn.Module, runs: Sequence[Sequence[str]]) -> nn.Module:
    """Change the module and return it: each of `runs` is recomputed together."""
    for names in runs:
        outer, _, _ = names[0].rpartition(".")
        parent = module.get_submodule(outer)
        children = [name.rpartition(".")[2] for name in names]
        inside = [parent.get_submodule(child) for child in children]
        setattr(
            parent, children[0], Again(inside[0] if len(inside) == 1 else nn.Sequential(*inside))
        )
        for child in children[1:]:
            setattr(parent, child, nn.Identity())
    return module


def training(module: nn.Module, width: int, batch: int, parts: int = 1) -> Callable[[], None]:
    """Return a training step with Adam, its batch in `parts`."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(parts):
            module(torch.randn(batch // parts, width)).square().mean().backward()
        optimizer.step()

    return step
