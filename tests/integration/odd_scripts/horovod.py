"""Horovod scripts that show what a plan in place of Horovod's own operations could change.

Each is written as for horovodrun, and imports `horovod.torch` itself.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_world import seeded

from odd_scripts.basics import STEPS, Net, Run, data, loss_of


def _wrapped(model: nn.Module, kind: Callable[..., Any] = torch.optim.SGD, **options: Any) -> Any:
    """The optimizer as Horovod's documentation builds it, with rank 0's parameters everywhere."""
    import horovod.torch as hvd

    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), lr=0.05, **settings),
        named_parameters=model.named_parameters(),
        **options,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def plain(run: Run) -> None:
    """The loop of Horovod's documentation; torch.distributed is not initialized."""
    import horovod.torch as hvd

    model = Net()
    optimizer = _wrapped(model, torch.optim.Adam)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        loss.backward()
        optimizer.step()
        run.see(hvd.allreduce(loss.detach(), name="loss"), dist.is_initialized())
    run.see(model.state_dict(), optimizer.state_dict())


def accumulation(run: Run) -> None:
    """Two backward passes per step, the second on another batch; then one per step."""
    model = Net()
    optimizer = _wrapped(model, backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(run, model, 2 * step + part) / 2).backward()
        optimizer.step()
        run.see(model.state_dict())
    optimizer.set_backward_passes_per_step(1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
    run.see(model.state_dict())


def clipping(run: Run) -> None:
    """synchronize(), clip the averages, then step() without another synchronization."""
    model = Net()
    optimizer = _wrapped(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.see(norm, [parameter.grad for parameter in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    run.see(model.state_dict())


def summed(run: Run) -> None:
    """op=Sum."""
    import horovod.torch as hvd

    model = Net()
    optimizer = _wrapped(model, op=hvd.Sum)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
    run.see(model.state_dict())


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(torch.relu(self.stem(x)))


def unused_on_one_rank(run: Run) -> None:
    """Ranks use different layers in some steps, and one layer is never used."""
    model = Branches()
    optimizer = _wrapped(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        left = step < 2 or (step + run.rank) % 3 > 0
        model(data(run, step), left).square().mean().backward()
        optimizer.step()
        run.see([parameter.grad for parameter in model.parameters()])
    run.see(model.state_dict())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def _sparse(run: Run, **options: Any) -> None:
    model = Words()
    optimizer = _wrapped(model, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(0, 20, (6,), generator=seeded(100 * run.rank + step))
        model(tokens).square().mean().backward()
        optimizer.step()
        gradient = model.embedding.weight.grad
        run.see(gradient.to_dense(), gradient.is_sparse)
    run.see(model.state_dict())


def sparse(run: Run) -> None:
    """Rows of an embedding are gathered."""
    _sparse(run)


def sparse_as_dense(run: Run) -> None:
    """Rows of an embedding are summed in a dense tensor."""
    _sparse(run, sparse_as_dense=True)


def two_losses(run: Run) -> None:
    """Two forward passes before one backward pass, and an evaluation before step()."""
    model = Net()
    optimizer = _wrapped(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, 2 * step) + loss_of(run, model, 2 * step + 1)
        loss.backward()
        with torch.no_grad():
            run.see(model(data(run, step)))
        model(data(run, step))
        optimizer.step()
    run.see(model.state_dict())


def two_optimizers(run: Run) -> None:
    """The second model keeps Horovod's own synchronization."""
    first, second = Net(), Net()
    pairs = [(model, _wrapped(model)) for model in (first, second)]
    for step in range(STEPS):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(run, model, step).backward()
            optimizer.step()
    run.see(first.state_dict(), second.state_dict())


def copies(run: Run) -> None:
    """An averaged copy of the model, a pickled state, and a state loaded in mid-training."""
    model = Net()
    optimizer = _wrapped(model, torch.optim.Adam)
    average = copy.deepcopy(model)
    saved: bytes | None = None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
        for kept, now in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.lerp_(now.data, 0.1)
        if step == 3:
            saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    assert saved is not None
    state, of_optimizer = pickle.loads(saved)  # noqa: S301 - our own
    model.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    optimizer.zero_grad()
    loss_of(run, model, 9).backward()
    optimizer.step()
    run.see(model.state_dict(), average.state_dict(), optimizer.state_dict())


def own_hooks(run: Run) -> None:
    """Hooks of the script change gradients; a scheduler and step hooks follow the optimizer."""
    model = Net()
    model.b.weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = _wrapped(model)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
        scheduler.step()
    run.see(model.state_dict(), seen, scheduler.get_last_lr())


def groups(run: Run) -> None:
    """Groups of parameters that Horovod executes together."""
    model = Net()
    optimizer = _wrapped(model, groups=[[model.a.weight, model.c.bias], [model.b.weight]])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
    run.see(model.state_dict())


def own_group(run: Run) -> None:
    """The script has a process group of torch, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = Net()
    optimizer = _wrapped(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.see(total, dist.get_world_size())
    run.see(model.state_dict())


HOROVOD_SCRIPTS: dict[str, Callable[[Run], None]] = {
    script.__name__: script
    for script in (
        plain,
        accumulation,
        clipping,
        summed,
        unused_on_one_rank,
        sparse,
        sparse_as_dense,
        two_losses,
        two_optimizers,
        copies,
        own_hooks,
        groups,
        own_group,
    )
}
