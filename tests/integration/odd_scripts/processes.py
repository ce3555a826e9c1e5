"""Scripts with other processes and threads, validation, and exceptions within a step."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from odd_scripts.basics import STEPS, Net, Run, data, loss_of, sgd, train


class OfWeights(Dataset[Tensor]):
    """Its items come from the present weights, as in active learning."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.weight.detach().sum() + index


def data_loader_workers(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    # The ranks of these tests come from a fork server; a worker from a second one imports torch.
    workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60}

    def epoch(step: int) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        if step == 5:
            run.see(list(DataLoader(OfWeights(net.a.weight), **workers)))

    train(run, model, sgd(model), epoch)


def forked(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def fork(step: int) -> None:
        if step % 3 == 2:
            run.see(in_a_process(net.a.weight))

    train(run, model, sgd(model), fork)


def in_a_process(tensor: Tensor) -> Any:
    """The values of `tensor` that a forked process sees, which must end."""
    # The ranks of these tests are daemons, which multiprocessing lets have no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send_values, args=(sending, tensor))
    process.start()
    assert receiving.poll(120), "the forked process sent nothing"
    values = torch.tensor(receiving.recv())
    process.join(120)
    assert process.exitcode == 0, "the forked process has not ended"
    return values


def send_values(sending: Any, tensor: Tensor) -> None:
    sending.send(tensor.detach().flatten().tolist())


def read_in_a_thread(run: Run) -> None:
    model = run.wrap(Net())

    def read(step: int) -> None:
        with ThreadPoolExecutor(3) as readers:
            run.see(list(readers.map(Tensor.norm, list(model.parameters()), timeout=120)))

    train(run, model, sgd(model), read)


def forward_in_a_thread(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def validate(step: int) -> Tensor:
        with torch.no_grad():
            return net.b(torch.ones(2, 8))

    def after(step: int) -> None:
        with ThreadPoolExecutor(1) as other:
            run.see(other.submit(validate, step).result(120))

    train(run, model, sgd(model), after)


def forward_without_gradients(run: Run) -> None:
    model = run.wrap(Net())

    def validate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.see(model(data(run, 100 + step)))
        with torch.inference_mode():
            run.see(model(data(run, 200 + step)))
        model.train()

    train(run, model, sgd(model), validate)


def inner_forward_in_training_mode(run: Run) -> None:
    """A penalty whose gradient the script takes by itself."""
    net = Net()
    model = run.wrap(net)

    def probe(step: int) -> None:
        out = net.b(torch.ones(2, 8)).square().sum()
        run.see(torch.autograd.grad(out, list(net.b.parameters())))

    train(run, model, sgd(model), probe)


class Failing(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        if self.fails:
            raise MemoryError
        return self.c(torch.relu(self.b(torch.relu(hidden))))


def failed_forward(run: Run) -> None:
    net = Failing()
    model = run.wrap(net)

    def fail(step: int) -> None:
        if step % 3 == 2:
            net.fails = True
            with suppress(MemoryError):
                model(data(run, 50))
            net.fails = False

    train(run, model, sgd(model), fail)


def failed_loss(run: Run) -> None:
    """A batch is given up between the forward and the backward pass."""
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with suppress(ZeroDivisionError):
            loss = loss_of(run, model, step)
            if step % 3 == 2:
                raise ZeroDivisionError
            loss.backward()
            optimizer.step()
        run.see(next(model.parameters()))
