"""Records small models on the processor with the frames of their modules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from autotune.profiling.traces.job import TraceJob, read_job

STEPS = 3


class Residual(nn.Module):
    """A residual block that uses its activation twice."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * stride
        self.conv1 = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Conv2d(channels, wide, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        added: Tensor = self.relu(y + (x if self.skip is None else self.skip(x)))
        return added


class ResNet(nn.Module):
    """A small residual network; its blocks may be recomputed in the backward pass."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(8, 1), Residual(8, 2), Residual(16, 1)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.long))


class Attention(nn.Module):
    """Causal attention of several heads, as GPT computes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A small language model; `tied`: its last layer uses the embedding's weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(3)))
        self.head = nn.Linear(64, 500, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.words(x))).flatten(0, 1), x.flatten())


class Lstm(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 200)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.words(x))[0]).flatten(0, 1), x.flatten())


def _images() -> Tensor:
    return torch.randn(8, 3, 24, 24)


def _words() -> Tensor:
    return torch.randint(200, (4, 32))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (lambda: ResNet(recompute=False), _images),
    "resnet, recomputed": (lambda: ResNet(recompute=True), _images),
    "transformer": (lambda: Transformer(tied=False), _words),
    "transformer, tied": (lambda: Transformer(tied=True), _words),
    "lstm": (Lstm, _words),
}


def recorded(name: str, *, shapes: bool = True) -> TraceJob:
    """Record `STEPS` steps of a model with the frames of its modules."""
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, batch = build(), draw()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=STEPS),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            record_shapes=shapes,
            with_stack=True,
        ) as recording:
            for _ in range(STEPS + 1):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                recording.step()
        return read_job(path)
