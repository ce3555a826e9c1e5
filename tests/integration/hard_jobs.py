"""Small training jobs that combine features which tend to break gradient synchronization.

Tests run each job under DDP and under plans.

| job | features |
|---|---|
| tied | tied weights, a large gradient, BatchNorm, dropout, a scalar, AdamW, accumulation |
| clipped | the same on a module without DDP, SGD, momentum, weight decay, norm clipping |
| dtypes | three dtypes with an optimizer each, channels last, an empty parameter, BatchNorm |
| unused | find_unused_parameters, branches by rank and step, accumulation, BatchNorm, AMSGrad |
| static | static_graph, a layer in two reentrant checkpoints, an unused branch, Nesterov momentum |
| sparse | a sparse embedding, rows with zero gradients, BatchNorm, three optimizers, accumulation |

Every job has a learning-rate schedule for each optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Job:
    """One model and its training.

    `loss` takes (model, rank, number of the micro-batch). `wrapping`: DDP's options. `attached`:
    under plans no DDP wraps the module. `clip`: the largest norm of all gradients together.
    """

    build: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[Optimizer]]
    loss: Callable[[nn.Module, int, int], Tensor]
    micro_batches: int = 1
    clip: float | None = None
    wrapping: dict[str, Any] = field(default_factory=dict)
    attached: bool = False


def numbers(rank: int, batch: int, *shape: int) -> Tensor:
    """Standard normal values, different on every rank and for every batch."""
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    values = torch.randn(shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


def tokens(rank: int, batch: int, count: int, *shape: int) -> Tensor:
    """Ids below `count`, different on every rank and for every batch."""
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    values = torch.randint(0, count, shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(280, 64)  # 72 kB
        self.mix = nn.Linear(64, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.2)
        self.back = nn.Linear(7, 64)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(64, 280, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.mix(self.embedding(words)))))
        return self.head(self.back(hidden)) * self.gain


def loss_of_tied(model: nn.Module, rank: int, batch: int) -> Tensor:
    words = tokens(rank, batch, 280, 12)
    return nn.functional.cross_entropy(model(words), words.roll(1))


def decaying_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay and learn more slowly; vectors and scalars do not decay."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Dtypes(nn.Module):
    """The half-precision head is detached: its rounding would hide differences of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(6)
        self.wide = nn.Sequential(
            nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 2)
        ).double()  # 73 kB inside
        self.narrow = nn.Sequential(
            nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 7)
        ).bfloat16()
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.norm(self.convolution(image))).mean((2, 3))
        wide = self.wide(hidden.double()) * (self.gain + self.empty.sum()) * self.frozen.sum()
        return wide, self.narrow(hidden.detach().bfloat16())


def loss_of_dtypes(model: nn.Module, rank: int, batch: int) -> Tensor:
    image = numbers(rank, batch, 4, 2, 6, 6).to(memory_format=torch.channels_last)
    wide, narrow = model(image)
    return wide.square().mean() + narrow.double().square().mean()


def by_dtype(module: nn.Module) -> list[Optimizer]:
    def of(dtype: torch.dtype) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.dtype == dtype and p.requires_grad]

    return [
        SGD(of(torch.float32), 0.02, momentum=0.9, weight_decay=0.01),
        Adam(of(torch.float64), 0.01, eps=1e-3),
        SGD(of(torch.bfloat16), 0.2, momentum=0.5),
    ]


class Branches(nn.Module):
    """Uses a branch by rank and batch; the last one never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        x = self.norm(x)
        for number in use:
            x = self.branches[number](x)
        return x


USES = [(0, 1), (2,), (1, 0), (1,), (2, 1)]


def loss_of_branches(model: nn.Module, rank: int, batch: int) -> Tensor:
    use = USES[(rank * batch + batch) % len(USES)]
    return model(numbers(rank, batch, 5, 6), use).square().mean()


class Repeated(nn.Module):
    """One layer runs twice. The norm is outside the checkpoint, which would update it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.inner = nn.Linear(16, 16)
        self.idle = nn.Linear(16, 6)
        self.last = nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for _ in range(2):
            x = checkpoint(lambda y: self.drop(torch.tanh(self.inner(y))), x, use_reentrant=True)
        return self.last(x)


def loss_of_repeated(model: nn.Module, rank: int, batch: int) -> Tensor:
    return model(numbers(rank, batch, 6, 5)).square().mean()


class Recommender(nn.Module):
    """One sparse table, since torch's gloo cannot run DDP's several sparse all-reduces at once.

    Users of the first items are masked after the look-up, so that their rows have zero gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(17, 4, sparse=True)
        self.words = nn.EmbeddingBag(11, 3, mode="sum")
        self.item = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(11)
        self.out = nn.Linear(11, 1)

    def forward(self, users: Tensor, words: Tensor, items: Tensor) -> Tensor:
        user = self.user(users) * (items >= 3).unsqueeze(1)
        return self.out(self.norm(torch.cat([user, self.words(words), self.item(items)], 1)))


def loss_of_recommender(model: nn.Module, rank: int, batch: int) -> Tensor:
    users = tokens(rank, batch, 17, 6)
    words = tokens(rank, batch, 11, 6, 2)
    items = tokens(rank, batch, 9, 6)
    return model(users, words, items).sigmoid().square().mean()


def sparse_and_dense(module: nn.Module) -> list[Optimizer]:
    assert isinstance(module, Recommender)
    dense = [*module.item.parameters(), *module.norm.parameters(), *module.out.parameters()]
    return [
        SparseAdam([module.user.weight], lr=0.05),
        SGD([module.words.weight], 0.3),
        Adam(dense, 0.01, eps=1e-3),
    ]


JOBS: dict[str, Job] = {
    # eps: gradients of mere rounding noise must not become full steps.
    "tied": Job(
        Tied, lambda m: [AdamW(decaying_groups(m), 0.02, eps=1e-3)], loss_of_tied, micro_batches=2
    ),
    "clipped": Job(
        Tied,
        lambda m: [SGD(decaying_groups(m), 0.2, momentum=0.9)],
        loss_of_tied,
        micro_batches=2,
        clip=0.5,
        attached=True,
    ),
    "dtypes": Job(Dtypes, by_dtype, loss_of_dtypes),
    "unused": Job(
        Branches,
        lambda m: [Adam(decaying_groups(m), 0.02, eps=1e-3, amsgrad=True)],
        loss_of_branches,
        micro_batches=2,
        wrapping={"find_unused_parameters": True},
    ),
    "static": Job(
        Repeated,
        lambda m: [SGD(decaying_groups(m), 0.1, momentum=0.9, nesterov=True)],
        loss_of_repeated,
        wrapping={"static_graph": True},
    ),
    "sparse": Job(Recommender, sparse_and_dense, loss_of_recommender, micro_batches=2),
}


def sparse_names(module: nn.Module) -> frozenset[str]:
    """The parameters whose gradients are sparse."""
    return frozenset(
        f"{name}.weight"
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    )
