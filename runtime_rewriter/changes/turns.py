"""Runs the steps of a script in turns that another process hands out.

A step lasts from one call of an optimizer's `step()` to the next one: of the first optimizer that
the script uses. The rank stops there between turns. All ranks stop at the same place, since they
make the same steps.

Steps are timed on the queue of the device that trains: the host may be ahead of it by steps. The
first step of a turn begins on an idle device, so it lasts longer than those that follow.

Messages are lines of JSON over a Unix socket: `{"rank": 0}` at the start, then for each line
`{"steps": 5}` the answer `{"step_s": [...], "notes": [...]}`, or `{"refused": "..."}`; the line
`{"stop": true}` ends the script.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.errors import InvalidInput
from runtime_rewriter.changes.enact import Enacted, enacted
from runtime_rewriter.changes.settings import CheckSettings
from runtime_rewriter.control import ControlLine
from runtime_rewriter.pytorch.exchange.device import Device


@contextmanager
def taking_turns(settings: CheckSettings) -> Iterator[None]:
    """Run what is inside with the changes of the settings, and only in turns."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(settings.address)
    line = ControlLine(end)
    _send(line, {"rank": int(os.environ.get("RANK", "0"))})
    try:
        with enacted(settings.changes, settings.amounts) as state:
            turns = Turns(line, state)
            handle = register_optimizer_step_pre_hook(turns.boundary)
            try:
                yield
            finally:
                handle.remove()
        _send(line, {"ended": turns.steps})
    except InvalidInput as refusal:
        _send(line, {"refused": str(refusal)})
        raise
    finally:
        line.close()


class DeviceQueue(Protocol):
    """The work of a device in its order; see `Device`."""

    def mark(self) -> Any:
        """A point in time on the queue, without waiting for it."""

    def seconds_between(self, start: Any, stop: Any) -> float:
        """Seconds from one mark to another."""

    def finish(self) -> None:
        """Wait until no work is left."""


def training_device(optimizer: torch.optim.Optimizer) -> Device:
    """The device of the optimizer's parameters; the current GPU if only other work runs on one."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    on_gpu = next((one.device for one in parameters if one.is_cuda), None)
    if on_gpu is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        on_gpu = torch.device("cuda", torch.cuda.current_device())
    return Device(on_gpu or torch.device("cpu"))


class Turns:
    """Stops at the boundaries between turns, and times the steps between them."""

    def __init__(
        self,
        line: ControlLine,
        state: Enacted,
        queue_of: Callable[[torch.optim.Optimizer], DeviceQueue] = training_device,
    ) -> None:
        self._line, self._state, self._queue_of = line, state, queue_of
        self._first: torch.optim.Optimizer | None = None
        self._queue: DeviceQueue | None = None
        self._marks: list[Any] = []
        self._left = 0
        self.steps = 0

    def boundary(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._queue is None:
            self._first, self._queue = optimizer, self._queue_of(optimizer)
            self._state.check()
        if optimizer is not self._first:
            return
        self.steps += 1
        if self._left:
            self._left -= 1
            self._marks.append(self._queue.mark())
            if self._left:
                return
            self._queue.finish()
            step_s = [self._queue.seconds_between(*marks) for marks in pairwise(self._marks)]
            _send(self._line, {"step_s": step_s, "notes": self._state.notes})
        asked = json.loads(self._line.receive(None) or "{}")
        if "steps" not in asked:
            _end()
        self._left = int(asked["steps"])
        self._queue.finish()
        self._marks = [self._queue.mark()]


def _send(line: ControlLine, message: dict[str, Any]) -> None:
    line.send(json.dumps(message))


def _end() -> None:
    """End without a shutdown: another rank may already be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
