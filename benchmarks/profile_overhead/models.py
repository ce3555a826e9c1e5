"""The training steps of the example scripts at their default sizes.

Each function returns the module that the script wraps, and a function that builds the script's step
of the wrapped module: its own optimizers, accumulation and clipping, without reading data and
printing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.repository import ROOT

sys.path.insert(0, str(ROOT / "examples"))

Step = Callable[[], None]
Example = tuple[nn.Module, Callable[[DistributedDataParallel], Step]]


def _step(
    optimizers: list[torch.optim.Optimizer],
    backward: Callable[[], None],
    clip: Callable[[], object] = lambda: None,
) -> Step:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()

    return step


def resnet() -> Example:
    """examples/resnet_digits.py: batches of 16 images."""
    from resnet_digits import ResNet

    images, labels = torch.randn(16, 1, 32, 32), torch.randint(0, 10, (16,))

    def step_of(model: DistributedDataParallel) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        return _step([optimizer], lambda: F.cross_entropy(model(images), labels).backward())

    return ResNet(32), step_of


def gpt() -> Example:
    """examples/gpt_text.py: batches of 8 sequences."""
    from gpt_text import GPT, make_optimizer

    tokens = torch.randint(0, 2000, (8, 65))

    def step_of(model: DistributedDataParallel) -> Step:
        def backward() -> None:
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

        return _step([make_optimizer(model, 1e-3, 0.1)], backward)

    return GPT(2000, 64, 256, 4, 4, 0.1), step_of


def lstm() -> Example:
    """examples/lstm_text.py: two batches of 8 sequences per update, the first under `no_sync`."""
    from lstm_text import LanguageModel, accumulate_gradients, make_optimizer

    batches = torch.randint(0, 256, (16, 65)).split(8)

    def step_of(model: DistributedDataParallel) -> Step:
        def backward() -> None:
            accumulate_gradients(model, batches)

        return _step(
            [make_optimizer(model, 3e-3, 0.01)],
            backward,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        )

    return LanguageModel(256, 2, 0.1), step_of


def ncf() -> Example:
    """examples/ncf_ratings.py: 256 ratings, four negatives each, a sparse table."""
    from ncf_ratings import NeuMF, make_optimizers

    users, items, labels = (
        torch.randint(0, 4000, (1280,)),
        torch.randint(0, 3000, (1280,)),
        torch.rand(1280).round(),
    )

    def step_of(model: DistributedDataParallel) -> Step:
        optimizers = make_optimizers(model.module, 2e-3)
        return _step(
            optimizers,
            lambda: F.binary_cross_entropy_with_logits(model(users, items), labels).backward(),
        )

    return NeuMF(4000, 3000, 64, sparse=True), step_of


MODELS: dict[str, Callable[[], Example]] = {"resnet": resnet, "gpt": gpt, "lstm": lstm, "ncf": ncf}
