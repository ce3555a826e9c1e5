"""Scripts with several, changed or unusual optimizers, closures and schedulers."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from odd_scripts.basics import STEPS, Net, Run, adam, loss_of, sgd, train


def lbfgs(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    for step in range(STEPS):
        optimizer.step(partial(closure_of, run, model, optimizer, step))


def closure_of(run: Run, model: Any, optimizer: Any, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(run, model, step)
    loss.backward()
    return loss


def closure(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.see(optimizer.step(partial(closure_of, run, model, optimizer, step)))


def closure_midway(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    train(run, model, optimizer)
    for step in range(3):
        run.see(optimizer.step(partial(closure_of, run, model, optimizer, step)))


def step_none(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step(None)


def several_optimizers(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizers = [
        torch.optim.SGD(net.a.parameters(), 0.1, momentum=0.9),
        torch.optim.Adam([*net.norm.parameters(), *net.b.parameters()], 0.01),
        torch.optim.RMSprop(net.c.parameters(), 0.01),
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(run, model, step).backward()
        for number, optimizer in enumerate(optimizers):
            if (step + number) % 3:
                optimizer.step()


def schedulers(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    train(run, model, optimizer, lambda step: schedule.step())


def changed_hyperparameters(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["momentum"] = 0.1 * step

    train(run, model, optimizer, after)


def added_group(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizer = torch.optim.SGD([*net.a.parameters(), *net.norm.parameters()], 0.1, momentum=0.9)

    def after(step: int) -> None:
        if step == 4:
            optimizer.add_param_group({"params": list(net.b.parameters()), "lr": 0.05})

    train(run, model, optimizer, after)


class Shrinking(torch.optim.SGD):
    """Overrides what its `step` calls."""

    def _init_group(self, group: Any, params: Any, *rest: Any) -> Any:
        found = super()._init_group(group, params, *rest)
        for parameter in params:
            parameter.grad.div_(float(len(params)))
        return found


def overridden_init_group(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, Shrinking(model.parameters(), 0.1, momentum=0.9))


def replaced_method(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    own = torch.optim.SGD._init_group
    optimizer._init_group = lambda group, params, *rest: shrunk(  # type: ignore[method-assign]
        own(optimizer, group, params, *rest), params
    )
    train(run, model, optimizer)


def shrunk(found: Any, params: Any) -> Any:
    for parameter in params:
        parameter.grad.div_(float(len(params)))
    return found


def replaced_step_under_a_scheduler(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    own = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        clip_grad_norm_(model.parameters(), 0.05)
        return own(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(run, model, optimizer, lambda step: schedule.step())
