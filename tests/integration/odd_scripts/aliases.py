"""Scripts that hold other tensors, or addresses, on the memory of parameters and gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_world import seeded

from odd_scripts.basics import STEPS, Net, Run, adam, loss_of, sgd, train
from odd_scripts.processes import in_a_process


def alias(run: Run, take: Callable[[nn.Parameter], Any], module: Callable[[], Any] = Net) -> None:
    """Something that the script took from a parameter before training is read after every step."""
    model = run.wrap(module())
    first = next(model.parameters())
    taken = take(first)
    train(run, model, sgd(model), lambda step: run.see(torch.as_tensor(taken).clone()))


def earlier_state_dict(run: Run) -> None:
    model = run.wrap(Net())
    kept: dict[str, Tensor] = {}

    def after(step: int) -> None:
        if step == 2:
            kept.update(model.state_dict())
        run.see({name: value.sum() for name, value in kept.items()})

    train(run, model, adam(model), after)


def memory_by_address(run: Run) -> None:
    """Read through a storage that the script keeps."""
    model = run.wrap(Net())
    first = next(model.parameters())
    storage = first.untyped_storage()

    def read(step: int) -> None:
        raw = ctypes.string_at(storage.data_ptr(), storage.nbytes())
        run.see(torch.frombuffer(bytearray(raw), dtype=torch.float32))

    train(run, model, sgd(model), read)


def tied_through_data(run: Run) -> None:
    net = Net()
    net.b.weight.data = net.a.weight.data.new_empty(8, 8).normal_(generator=seeded(1))
    net.c = nn.Linear(8, 8)
    net.c.weight.data = net.b.weight.data
    model = run.wrap(net)
    train(run, model, sgd(model))


def shared_memory(run: Run) -> None:
    net = Net()
    net.share_memory()
    model = run.wrap(net)
    train(run, model, sgd(model), lambda step: run.see(in_a_process(net.a.weight)))


def gradient_view(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    first = next(model.parameters())
    views: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()
        if step == 2:
            assert first.grad is not None
            views.append(first.grad.view(-1))
        for view in views:
            run.see(view)


def borrowed_memory(run: Run) -> None:
    """A weight on the memory of an array, which the script reads."""
    net = Net()
    array = net.b.weight.detach().numpy().copy()
    net.b.weight = nn.Parameter(torch.from_numpy(array))
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(torch.from_numpy(array.copy())))


def data_replaced(run: Run) -> None:
    model = run.wrap(Net())
    first = next(model.parameters())

    def after(step: int) -> None:
        if step == 3:
            first.data = first.data.clone() * 0.5

    train(run, model, sgd(model), after)
