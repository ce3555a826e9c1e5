"""Horovod scripts that are refused, and a part of each one's message."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch_world import seeded

from odd_scripts.basics import Net


def never_called() -> None:
    """Two steps call the module's forward() only, which bypasses its hooks."""
    import horovod.torch as hvd

    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        model.forward(torch.randn(5, 6, generator=seeded(step))).sum().backward()
        optimizer.step()


def own_autotuner() -> None:
    """Horovod tunes itself."""
    import horovod.torch as hvd

    hvd.shutdown()
    os.environ["HOROVOD_AUTOTUNE"] = "1"
    try:
        hvd.init()
    finally:
        del os.environ["HOROVOD_AUTOTUNE"]


REFUSED: dict[Callable[[], None], str] = {
    never_called: "(Net), but two steps called only its methods",
    own_autotuner: "but HOROVOD_AUTOTUNE=1 turns it on; leave that out",
}
