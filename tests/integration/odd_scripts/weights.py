"""Scripts that average, reparametrize, subclass or write the weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from odd_scripts.basics import Net, Run, adam, data, sgd, train


class Named(nn.Parameter):
    """A parameter with a name of its own."""

    def __new__(cls, value: Tensor) -> Named:
        return torch.Tensor._make_subclass(cls, value, True)


def parameter_subclass(run: Run) -> None:
    net = Net()
    net.a.weight = Named(net.a.weight.detach().clone())
    model = run.wrap(net)
    train(run, model, adam(model))


class Loud(nn.Parameter):
    """Counts the functions that are called with it."""

    calls = 0

    def __new__(cls, value: Tensor) -> Loud:
        return torch.Tensor._make_subclass(cls, value, True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def parameter_with_torch_function(run: Run) -> None:
    net = Net()
    net.c.weight = Loud(net.c.weight.detach().clone())
    model = run.wrap(net)
    train(run, model, sgd(model))


def ema(run: Run) -> None:
    model = run.wrap(Net())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(run, model, adam(model), lambda step: average.update_parameters(model.module))
    run.see(average.state_dict())


def ema_by_hand(run: Run) -> None:
    model = run.wrap(Net())
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def after(step: int) -> None:
        for name, value in model.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
        run.see(average)

    train(run, model, adam(model), after)


def swa(run: Run) -> None:
    model = run.wrap(Net())
    average = AveragedModel(model)
    train(run, model, sgd(model), lambda step: average.update_parameters(model))
    update_bn([data(run, step) for step in range(3)], average)
    run.see(average.state_dict())


def weight_norm(run: Run) -> None:
    net = Net()
    parametrizations.weight_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def old_weight_norm(run: Run) -> None:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def spectral_norm(run: Run) -> None:
    net = Net()
    parametrizations.spectral_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def pruning(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def after(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                mask = net.b.weight.abs() > 0.1
                net.b.weight.mul_(mask)

    train(run, model, sgd(model), after)
    prune.l1_unstructured(net.c, "weight", 0.5)
    run.see(net.state_dict())


def clamped(run: Run) -> None:
    model = run.wrap(Net())

    def clamp(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    train(run, model, sgd(model), clamp)


def frozen_midway(run: Run) -> None:
    net = Net()
    model = run.wrap(net, find_unused_parameters=True)

    def freeze(step: int) -> None:
        net.a.requires_grad_(step < 2 or step > 4)

    train(run, model, sgd(model), freeze)


def frozen_before_the_plan(run: Run) -> None:
    """The plan of a trial is loaded while a part is frozen, which trains again later."""
    net = Net()
    model = run.wrap(net, find_unused_parameters=True)
    net.a.requires_grad_(False)
    train(run, model, sgd(model), lambda step: net.a.requires_grad_(step > 3))


def frozen_in_another_forward(run: Run) -> None:
    """As a generator is while a discriminator trains: a trial's plan is loaded then."""
    net = Net()
    model = run.wrap(net)

    def generate(step: int) -> None:
        net.requires_grad_(False)
        run.see(model(data(run, 100 + step)))
        net.requires_grad_(True)

    train(run, model, adam(model), generate)


def parameter_added_midway(run: Run) -> None:
    """DDP averages only those that it wrapped."""
    net = Net()
    model = run.wrap(net)
    net.added = nn.Parameter(torch.ones(2))
    train(run, model, sgd(model))


def rewound(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    saved: list[Any] = []

    def after(step: int) -> None:
        if step == 2:
            saved.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if step == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    train(run, model, optimizer, after)


def vectors(run: Run) -> None:
    model = run.wrap(Net())

    def after(step: int) -> None:
        vector = parameters_to_vector(model.parameters())
        run.see(vector)
        if step == 3:
            vector_to_parameters(vector.detach().clone() * 0.9, model.parameters())

    train(run, model, sgd(model), after)
