"""Deferred updates while other threads read variables, and when an accelerator plays them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.reads import unwatch, watch

VARIABLES, STEPS = 100, 40


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Let threads take turns after every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Message:
    """A message that has arrived when somebody waits for it."""

    arrived = False

    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        """It is there."""


def read_meanwhile(tensors: list[Parameter] | list[Tensor], errors: list[Exception]) -> None:
    try:
        for tensor in tensors:
            tensor.sum()
    except Exception as error:  # noqa: BLE001 - the test reports it
        errors.append(error)


def crossing(parameters: Sequence[Parameter]) -> CrossStepUpdates:
    """Averages of ones, a message for each variable."""

    def write(gradients: Mapping[int, Tensor | None]) -> None:
        for gradient in gradients.values():
            gradient.fill_(1.0)

    cross_step = CrossStepUpdates(parameters, Device(torch.device("cpu")), write)
    cross_step.enable([[Message(number)] for number in range(len(parameters))])
    return cross_step


def end_backward_pass(cross_step: CrossStepUpdates, parameters: Sequence[Parameter]) -> None:
    """Leave all messages under way."""
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    count = len(parameters)
    cross_step.defer([Message(number) for number in range(count)], range(count))


def test_a_step_keeps_every_update_while_another_thread_reads() -> None:
    parameters = [Parameter(torch.zeros(1)) for _ in range(VARIABLES)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    cross_step = crossing(parameters)
    errors: list[Exception] = []
    for step in range(STEPS):
        end_backward_pass(cross_step, parameters)
        reader = threading.Thread(target=read_meanwhile, args=(parameters[::-1], errors))
        reader.start()
        optimizer.step()
        reader.join()
        assert errors == []
        cross_step.flush()
        assert [parameter.item() for parameter in parameters] == [-1.0 - step] * VARIABLES
        assert all(parameter.grad is not None for parameter in parameters)
    cross_step.close()


def test_a_value_may_arrive_while_another_thread_begins_to_read_it() -> None:
    tensor = torch.zeros(1)
    errors: list[Exception] = []
    reader = threading.Thread(target=read_meanwhile, args=([tensor] * 20_000, errors))
    reader.start()
    while reader.is_alive():
        watch(tensor, lambda tensor: None)
        unwatch(tensor)
    reader.join()
    assert errors == []


def test_an_update_that_an_emulated_accelerator_plays_leaves_no_guard_behind() -> None:
    parameters = [Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    cross_step = crossing(parameters)
    cross_step.updates_played = True
    end_backward_pass(cross_step, parameters)
    optimizer.step()
    assert type(optimizer) is not torch.optim.SGD, "the update is due"
    cross_step.flush()
    assert type(optimizer) is torch.optim.SGD
    assert parameters[0].item() == 0.0
    cross_step.close()
