"""Runs the steps of a script in turns that another process hands out.

A step lasts from one call of an optimizer's `step()` to the next one: of the first optimizer that
the script uses. The rank stops there between turns. All ranks stop at the same place, since they
make the same steps.

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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.errors import InvalidInput
from runtime_rewriter.changes.enact import Enacted, enacted
from runtime_rewriter.changes.settings import CheckSettings
from runtime_rewriter.control import ControlLine


@contextmanager
def taking_turns(settings: CheckSettings) -> Iterator[None]:
    """Run what is inside with the changes of the settings, and only in turns."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(settings.address)
    line = ControlLine(end)
    _send(line, {"rank": int(os.environ.get("RANK", "0"))})
    try:
        with enacted(settings.changes, settings.amounts) as state:
            turns = _Turns(line, state)
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


class _Turns:
    """Stops at the boundaries between turns."""

    def __init__(self, line: ControlLine, state: Enacted) -> None:
        self._line, self._state = line, state
        self._first: torch.optim.Optimizer | None = None
        self._times: list[float] = []
        self._left = 0
        self.steps = 0

    def boundary(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._first is None:
            self._first = optimizer
            self._state.check()
        if optimizer is not self._first:
            return
        self.steps += 1
        if self._left:
            self._left -= 1
            if self._left:
                self._times.append(time.perf_counter())
                return
            _finish_queued_work()
            self._times.append(time.perf_counter())
            step_s = [after - before for before, after in pairwise(self._times)]
            _send(self._line, {"step_s": step_s, "notes": self._state.notes})
        asked = json.loads(self._line.receive(None) or "{}")
        if "steps" not in asked:
            _end()
        self._left = int(asked["steps"])
        _finish_queued_work()
        self._times = [time.perf_counter()]


def _finish_queued_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _send(line: ControlLine, message: dict[str, Any]) -> None:
    line.send(json.dumps(message))


def _end() -> None:
    """End without a shutdown: another rank may already be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
