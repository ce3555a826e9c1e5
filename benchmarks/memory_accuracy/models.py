"""The example models with their own optimizers, losses and batch sizes, on synthetic data."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.repository import ROOT

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class ExampleJob:
    """`step(model)` runs a whole training step of `module` or its wrapper.

    `inputs`: of one forward pass over the whole batch.
    """

    module: nn.Module
    step: Callable[[Any], None]
    inputs: tuple[Tensor, ...] = ()


def example(name: str) -> ModuleType:
    """Import the script as a module without running it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def resnet_digits(batch: int = 16, parts: int = 1) -> ExampleJob:
    network = example("resnet_digits").ResNet(32)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)

    def step(model: Any) -> None:
        optimizer.zero_grad()
        for _ in range(parts):
            images, labels = (
                torch.randn(batch // parts, 1, 32, 32),
                torch.randint(10, (batch // parts,)),
            )
            (F.cross_entropy(model(images), labels) / parts).backward()
        optimizer.step()

    return ExampleJob(network, step, (torch.randn(batch, 1, 32, 32),))


def gpt_text(batch: int = 8, parts: int = 1) -> ExampleJob:
    script = example("gpt_text")
    network = script.GPT(2000, 64, 256, 4, 4, 0.1)
    optimizer = script.make_optimizer(network, 5e-4, 0.1)

    def step(model: Any) -> None:
        optimizer.zero_grad()
        for _ in range(parts):
            tokens = torch.randint(2000, (batch // parts, 65))
            (
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                / parts
            ).backward()
        optimizer.step()

    return ExampleJob(network, step, (torch.randint(2000, (batch, 64)),))


def lstm_text(batch: int = 8) -> ExampleJob:
    """Return the model with its two batches per step."""
    script = example("lstm_text")
    network = script.LanguageModel(256, 2, 0.1)
    optimizer = script.make_optimizer(network, 3e-3, 0.01)

    def step(model: Any) -> None:
        sequences = torch.randint(256, (2 * batch, 65))
        optimizer.zero_grad()
        if hasattr(model, "no_sync"):
            script.accumulate_gradients(model, sequences.split(batch))
        else:
            for part in sequences.split(batch):
                (script.loss_of(model, part) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return ExampleJob(network, step)


def ncf_ratings(batch: int = 256) -> ExampleJob:
    script = example("ncf_ratings")
    network = script.NeuMF(4000, 3000, 64, True)
    optimizers = script.make_optimizers(network, 2e-3)
    taken = torch.rand(4000, 3000) < 0.01

    def step(model: Any) -> None:
        pairs = torch.stack([torch.randint(4000, (batch,)), torch.randint(3000, (batch,))], 1)
        users, items, labels = script.draw_batch(pairs, taken, 4)
        loss: Tensor = F.binary_cross_entropy_with_logits(model(users, items), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return ExampleJob(network, step)


class Clicks(nn.Module):
    """Tables with sparse gradients for many-valued features, as in DLRM, and dense features."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        looked_up = [table(values[:, number]) for number, table in enumerate(self.tables)]
        clicked: Tensor = self.top(torch.cat([self.bottom(dense), *looked_up], dim=1))
        return clicked.squeeze(1)


def clicks(batch: int = 512) -> ExampleJob:
    """Return the model with rows of which some are drawn far more often than others."""
    tables, rows, values = 4, 20_000, 3
    network = Clicks(tables, rows, 32, 13)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step(model: Any) -> None:
        drawn = (torch.rand(batch, tables, values) ** 3 * rows).long()
        loss = F.binary_cross_entropy_with_logits(
            model(torch.randn(batch, 13), drawn), torch.rand(batch).round()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return ExampleJob(network, step)


JOBS: dict[str, Callable[..., ExampleJob]] = {
    job.__name__: job for job in (resnet_digits, gpt_text, lstm_text, ncf_ratings, clicks)
}
OUTSIDE_BYTES = {"ncf_ratings": 4000 * 3000}
"""Data that the script holds in addition to its training step."""
