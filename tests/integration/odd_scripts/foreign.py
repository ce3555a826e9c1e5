"""Scripts that pass parameters, or their addresses, to code that is not Python."""

from __future__ import annotations

import ctypes
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import dlpack

from odd_scripts.basics import STEPS, Net, Run, loss_of, sgd, train


def floats_at(address: int, count: int) -> Tensor:
    """Values that some C code reads."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, 4 * count)), dtype=torch.float32)


def addresses_kept(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    a, b = net.a.weight, net.b.weight
    kept = [(a.data_ptr(), a.numel()), (b.untyped_storage().data_ptr(), b.numel())]

    def read(step: int) -> None:
        run.see([floats_at(*address) for address in kept])
        run.see(floats_at(net.c.weight.data_ptr(), 24))

    train(run, model, sgd(model), read)


def address_of_a_gradient_kept(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    addresses: list[int] = []
    first = next(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()
        if step == 2:
            assert first.grad is not None
            addresses.append(first.grad.data_ptr())
        run.see([floats_at(address, first.numel()) for address in addresses])


def buffers_and_capsules(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    array: Any = net.a.weight.detach().numpy()
    buffer = memoryview(array)
    capsules = [torch.utils.dlpack.to_dlpack(net.b.weight.detach()) for _ in range(STEPS)]

    def read(step: int) -> None:
        run.see(np.array(buffer).tolist(), torch.from_dlpack(capsules[step]).clone())

    train(run, model, sgd(model), read)


LIBRARY = torch.library.Library("odd_scripts", "DEF")
LIBRARY.define("total(Tensor x) -> Tensor")
LIBRARY.impl("total", lambda x: torch.tensor(float(x.numpy().sum())), "CPU")


@torch.no_grad()
def passed_on(run: Run) -> None:
    """To operators of a library, and to collectives of torch and of a process group."""
    net = Net()
    model = run.wrap(net)
    group: Any = dist.group.WORLD

    def read(step: int) -> None:
        run.see(torch.ops.odd_scripts.total.default(net.a.weight))
        run.see(torch.ops.odd_scripts.total(net.a.bias))
        gathered = [torch.empty(8) for _ in range(2)]
        dist.all_gather(gathered, net.b.bias)
        run.see(gathered)
        gathered = [torch.empty(8, 8) for _ in range(2)]
        group.allgather([gathered], [net.b.weight]).wait()
        run.see(gathered)
        dist.broadcast(net.c.weight, 0)

    with torch.enable_grad():
        train(run, model, sgd(model), torch.no_grad()(read))


class Batch(Tensor):
    """A class with torch functions of its own."""


def as_other_types(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def read(step: int) -> None:
        run.see([type(parameter).__name__.encode()[0] for parameter in net.parameters()])
        run.see(nn.Parameter(net.a.weight).clone(), nn.Buffer(net.b.weight).clone())
        run.see(torch.Tensor._make_subclass(Batch, net.c.weight).as_subclass(Tensor).clone())
        run.see(torch.as_tensor(net.b.bias).clone())

    train(run, model, sgd(model), read)


def copied_by_constructors(run: Run) -> None:
    """The first look at a parameter after the step is by a function that asks no class."""
    net = Net()
    model = run.wrap(net)
    weights = [net.a.weight, net.b.weight, net.c.weight, net.b.bias, net.c.bias, net.norm.weight]

    def read(step: int) -> None:
        run.see(torch.tensor(weights[0].requires_grad))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch would rather clone
            run.see(torch.tensor(weights[0]), torch.ones(1).new_tensor(weights[1]))
        run.see(torch.as_tensor(weights[2], dtype=torch.float64))
        run.see(torch.asarray(weights[3], copy=True, requires_grad=False))
        run.see(torch.from_dlpack(dlpack.to_dlpack(weights[4].grad)).clone())
        run.see(torch.tensor([weights[5].detach()[0]]))

    train(run, model, sgd(model), read)


def function_of_another_class(run: Run) -> None:
    """The batch's class passes the parameter on."""
    net = Net()
    model = run.wrap(net)

    def read(step: int) -> None:
        batch = torch.ones(2, 6).as_subclass(Batch)
        run.see(nn.functional.linear(batch, net.a.weight).as_subclass(Tensor))

    train(run, model, sgd(model), read)


def without_torch_functions(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def read(step: int) -> None:
        switch = (
            torch._C.DisableTorchFunctionSubclass if step % 2 else torch._C.DisableTorchFunction
        )
        with switch():
            run.see(net.a.weight.detach().clone())

    train(run, model, sgd(model), read)


def sent_by_multiprocessing(run: Run) -> None:
    """The receiver shares the memory. Another parameter's memory is overwritten."""
    net = Net()
    model = run.wrap(net)
    kept: list[Any] = []

    def send(step: int) -> None:
        if step == 3:
            kept.append(pickle.loads(ForkingPickler.dumps(net.b.weight)))  # noqa: S301 - our own
            storage: Any = net.a.weight.untyped_storage()
            storage.fill_(0)
        run.see(*kept)

    train(run, model, sgd(model), send)


def add_two(x: Tensor) -> Tensor:
    return x + torch.tensor(2.0)


def compiled_function_midway(run: Run) -> None:
    torch._dynamo.trace_rules.clear_lru_cache()  # as in a process that has not compiled
    net = Net()
    model = run.wrap(net)

    def read(step: int) -> None:
        if step == 5:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # dynamo's own
                run.see(torch.compile(torch.sum, backend="eager")(net.a.weight))

    train(run, model, sgd(model), read)
    run.see(torch.compile(add_two, backend="eager", fullgraph=True)(torch.ones(2)))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
