"""Times the step of an optimizer of torch with and without its fused version."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

WARM_UP, FEWEST_TURNS, MOST_TURNS = 2, 3, 40
EVICTED_BYTES = 64 * 2**20
"""As much memory is written between two steps: a training leaves little of an update in caches."""


@dataclass(frozen=True)
class Updated:
    """An optimizer of torch.optim by its class, the shapes of its parameters, and its options."""

    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def step_times_s(updated: Updated, budget_s: float) -> tuple[float, float]:
    """Seconds of a step on this machine's processor: as recorded, and fused.

    Both take turns, for `budget_s` or `MOST_TURNS` turns; the shortest of each met the least other
    work. Raises what torch raises for options that
    do not go together with `fused`.
    """
    torch.manual_seed(0)
    sides = [_built(updated, fused=False), _built(updated, fused=True)]
    evicted = torch.empty(EVICTED_BYTES // 4)
    taken_s: list[list[float]] = [[], []]
    end_s = time.perf_counter() + budget_s
    for turn in range(WARM_UP + MOST_TURNS):
        for side, optimizer in enumerate(sides):
            evicted.fill_(turn)
            start_s = time.perf_counter()
            optimizer.step()
            if turn >= WARM_UP:
                taken_s[side].append(time.perf_counter() - start_s)
        if turn + 1 >= WARM_UP + FEWEST_TURNS and time.perf_counter() > end_s:
            break
    return min(taken_s[0]), min(taken_s[1])


def _built(updated: Updated, *, fused: bool) -> torch.optim.Optimizer:
    kind: Any = vars(torch.optim)[updated.optimizer]
    parameters = [torch.randn(shape, requires_grad=True) for shape in updated.shapes]
    for one in parameters:
        one.grad = torch.randn_like(one)
    options = dict(updated.options) | ({"fused": True, "foreach": None} if fused else {})
    built: torch.optim.Optimizer = kind(parameters, lr=1e-3, **options)
    return built
