"""Scripts that read, hold or replace the optimizer's state."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from odd_scripts.basics import Net, Run, adam, sgd, train


def momentum_reset(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def reset(step: int) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()

    train(run, model, optimizer, reset)


def state_cleared(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: optimizer.state.clear())


def state_replaced(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: setattr(optimizer, "state", defaultdict(dict)))


def moments_logged(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    train(run, model, optimizer, lambda step: run.see(optimizer.state[first]["exp_avg"].norm()))


def moments_logged_from_the_instance(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    train(run, model, optimizer, lambda step: run.see(vars(optimizer)["state"][first]["exp_avg"]))


def held(run: Run, take: Callable[[Any, Tensor], Any]) -> None:
    """What the script took from the optimizer after its third step is read after all others."""
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    kept: list[Any] = []

    def after(step: int) -> None:
        if step == 2:
            kept.append(take(optimizer, first))
        for value in kept:
            run.see(value)

    train(run, model, optimizer, after)


def moment_view(optimizer: Any, parameter: Tensor) -> Tensor:
    view: Tensor = optimizer.state[parameter]["exp_avg"].view(-1)
    return view


def moments_loaded(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    saved: list[Any] = []

    def after(step: int) -> None:
        if step == 3:
            saved.append(copy.deepcopy(optimizer.state_dict()))
        if step == 5:
            optimizer.load_state_dict(saved[0])

    train(run, model, optimizer, after)
    run.see(optimizer.state_dict())


def state_dict_loaded_unread(run: Run) -> None:
    """A state saved elsewhere replaces one that nobody reads."""
    model, other = run.wrap(Net()), run.wrap(Net())
    optimizer, source = adam(model), adam(other)
    train(run, other, source, steps=3)
    saved = copy.deepcopy(source.state_dict())
    train(run, model, optimizer, lambda step: optimizer.load_state_dict(saved))


def optimizer_pickled(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: run.see(copied_state(optimizer)))


def copied_state(optimizer: Any) -> Any:
    loaded = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - our own
    return loaded.state_dict(), copy.copy(optimizer).state_dict()["state"]
