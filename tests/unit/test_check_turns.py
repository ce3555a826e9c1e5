"""Steps of a checked script are timed on the queue of its device."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime_rewriter.changes.enact import enacted
from runtime_rewriter.changes.turns import Turns, training_device
from runtime_rewriter.control import ControlClosed, ControlLine


class LateQueue:
    """A device that works when somebody waits for it; its clock counts its work."""

    def __init__(self) -> None:
        self._clock_s = 0.0
        self._pending: list[Callable[[], None]] = []

    def work(self, seconds: float) -> None:
        self._pending.append(lambda: self._pass(seconds))

    def mark(self) -> list[float]:
        reached_s: list[float] = []
        self._pending.append(lambda: reached_s.append(self._clock_s))
        return reached_s

    def seconds_between(self, start: list[float], stop: list[float]) -> float:
        self.finish()
        return stop[0] - start[0]

    def finish(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            each()

    def _pass(self, seconds: float) -> None:
        self._clock_s += seconds


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def answers_to(turns_of_steps: list[int], step_s: list[float]) -> list[dict[str, Any]]:
    """The answers of a script whose steps take `step_s` on the device, and no time on the host."""
    ours, theirs = socket.socketpair()
    driver, queue, first, second = ControlLine(theirs), LateQueue(), optimizer(), optimizer()
    with ours, theirs:
        for steps in turns_of_steps:
            driver.send(json.dumps({"steps": steps}))
        theirs.shutdown(socket.SHUT_WR)
        with enacted((), {}) as state, pytest.raises(ControlClosed):
            turns = Turns(ControlLine(ours), state, lambda _: queue)
            for seconds in step_s:
                queue.work(seconds)
                turns.boundary(first)
                turns.boundary(second)  # no step ends here
        answers = [driver.receive(1.0) for _ in turns_of_steps]
    return [json.loads(answer or "null") for answer in answers]


def test_a_step_lasts_as_long_as_the_work_that_the_host_has_queued_in_it() -> None:
    answers = answers_to([3, 2], [9.0, 4.0, 2.0, 2.5, 8.0, 1.0])
    assert [answer["step_s"] for answer in answers] == [[4.0, 2.0, 2.5], [8.0, 1.0]]


def test_a_script_without_a_gpu_is_timed_on_its_processor() -> None:
    queue = training_device(optimizer())
    if not torch.cuda.is_initialized():
        assert queue.device == torch.device("cpu")
    start = queue.mark()
    queue.finish()
    assert queue.seconds_between(start, queue.mark()) >= 0
