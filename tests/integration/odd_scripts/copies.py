"""Scripts that save, copy, print or transform the model."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor

from odd_scripts.basics import Net, Run, adam, sgd, train


def saved_after_the_step(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)

    def save(step: int) -> None:
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        run.see(torch.load(saved, weights_only=True))

    train(run, model, optimizer, save)


def deep_copies(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizer = adam(model)

    def after(step: int) -> None:
        run.see(copy.deepcopy(net).state_dict())
        if step == 4:
            copied, its_optimizer = copy.deepcopy((net, optimizer))
            run.see(its_optimizer.state_dict(), copied.a.weight)

    train(run, model, optimizer, after)


class Transforming(Net):
    """Differentiates by its own parameters before it reads them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.a(x)))
        values = dict(self.b.named_parameters())

        def output(values: Any) -> Tensor:
            return torch.func.functional_call(self.b, values, (hidden,)).square().mean()

        slope = torch.func.grad(output)(values)["bias"].detach()
        return self.c(self.b(hidden)) * (1 + 0.01 * slope.norm())


def transforms_in_the_forward_pass(run: Run) -> None:
    model = run.wrap(Transforming())
    train(run, model, sgd(model))


def functional(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def after(step: int) -> None:
        parameters = dict(net.b.named_parameters())

        def loss(values: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(net.b, values, (x,)).square().sum()

        run.see(torch.func.grad(loss)(parameters, torch.ones(2, 8)))
        run.see(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.ones(3, 2, 8)))

    train(run, model, sgd(model), after)


def printed(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    show = lambda step: run.see(list(repr(net.a.weight).encode()), net.a.bias.tolist())  # noqa: E731
    train(run, model, sgd(model), show)
