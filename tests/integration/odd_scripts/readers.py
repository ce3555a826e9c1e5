"""Scripts whose readers call no Python function that could be watched."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from odd_scripts.basics import Net, Run, adam, data, sgd, train


def scripted_validation(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    validate = script(net.b)
    train(run, model, sgd(model), lambda step: run.see(validate(torch.ones(2, 8))))


def script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # still in use
        return torch.jit.script(what)


class Encoding(Net):
    """A method of the scripted module reads weights, and no call of the module."""

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return self.c(x)


def method_of_a_scripted_module(run: Run) -> None:
    net = Encoding()
    model = run.wrap(net)
    scripted = script(net)
    train(run, model, sgd(model), lambda step: run.see(scripted.encode(torch.ones(2, 8))))


def forward_of_a_scripted_module(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    scripted = script(net.b)
    train(run, model, sgd(model), lambda step: run.see(scripted.forward(torch.ones(2, 8))))


def scripted_method_as_forward_of_another_module(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    scripted = script(net.b)
    validate = nn.Module()
    validate.forward = scripted.forward
    train(run, model, sgd(model), lambda step: run.see(validate(torch.ones(2, 8))))


def scripted_module_saved(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    scripted = script(net.b)

    def save(step: int) -> None:
        saved = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(scripted, saved)
            saved.seek(0)
            run.see(torch.jit.load(saved)(torch.ones(2, 8)))

    train(run, model, sgd(model), save)


def scripted_module_copied(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    scripted = script(net.b)
    train(run, model, adam(model), lambda step: run.see(copy.deepcopy(scripted)(torch.ones(2, 8))))


def total(x: Tensor) -> Tensor:
    return x.sum()


def scripted_function(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    function = script(total)
    train(run, model, sgd(model), lambda step: run.see(function(net.a.weight)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])


def transformer_fast_path(run: Run) -> None:
    net = Encoder()
    model = run.wrap(net)

    def validate(step: int) -> None:
        net.eval()
        with torch.no_grad():
            run.see(net(data(run, 100 + step)))
        net.train()

    train(run, model, adam(model), validate)


def traced_validation(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def validate(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(net.b, torch.ones(2, 8))
        run.see(traced(torch.ones(2, 8)))

    train(run, model, sgd(model), validate)
