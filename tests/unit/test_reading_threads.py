"""Other threads of a script may read variables at any time: they get the value or wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping

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


def test_a_step_keeps_every_update_while_another_thread_reads() -> None:
    parameters = [Parameter(torch.zeros(1)) for _ in range(VARIABLES)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)

    def write(gradients: Mapping[int, Tensor | None]) -> None:
        for gradient in gradients.values():
            gradient.fill_(1.0)

    cross_step = CrossStepUpdates(parameters, Device(torch.device("cpu")), write)
    messages = [Message(number) for number in range(VARIABLES)]
    cross_step.enable([[message] for message in messages])
    errors: list[Exception] = []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.zeros(1)
        cross_step.defer(messages, range(VARIABLES))
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
