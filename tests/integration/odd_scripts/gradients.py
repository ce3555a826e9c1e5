"""Scripts that log, clip, scale, accumulate or drop gradients."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from odd_scripts.basics import STEPS, Net, Run, adam, loss_of, sgd, train


def gradients_logged(run: Run) -> None:
    model = run.wrap(Net())

    def log(step: int) -> None:
        run.see([p.grad.norm() for p in model.parameters()])

    train(run, model, sgd(model), before=log)


def gradients_logged_now_and_then(run: Run) -> None:
    model = run.wrap(Net())

    def log(step: int) -> None:
        if step % 4 == 3:
            run.see([p.grad.norm() for p in model.parameters()])

    train(run, model, sgd(model), after=log, before=log)


def clipped_by_norm(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model), before=lambda step: clip_grad_norm_(model.parameters(), 0.1))


def clipped_by_value(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model), before=lambda step: clip_grad_value_(model.parameters(), 0.01))


def scaled(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(run, model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


def zero_grad_to_zero(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()


def zero_grad_of_the_model_after_the_step(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, adam(model), lambda step: model.zero_grad())


def gradients_dropped_by_hand(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)

    def drop(step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            if step % 3 == 2 and number % 2:
                parameter.grad = None

    train(run, model, optimizer, before=drop)


def accumulation(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            with nullcontext() if part else model.no_sync():
                loss_of(run, model, 2 * step + part).backward()
        optimizer.step()
        optimizer.zero_grad()
