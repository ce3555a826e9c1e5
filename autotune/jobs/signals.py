"""End a command on SIGTERM, SIGHUP or Ctrl-C so that a job can be resumed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from autotune.tuning.events import Event
from autotune.tuning.history import History
from autotune.tuning.instructions import Instruction

AGAIN_S = 2.0
"""A signal that comes again within this time is the same request: `timeout` sends its signal to
the command and to the command's group. Another exception would end the clean-up of the first."""


class Interruption:
    """An `Observer` that ends the job at its next event after a signal.

    Python drops an exception raised in a destructor or in the callback of a weak reference. A
    signal may arrive there; its `KeyboardInterrupt` would be lost and the command would continue.
    """

    def __init__(self) -> None:
        self.asked = False
        self._asked_s: dict[int, float] = {}

    def ask(self, number: int, _: object = None) -> None:
        """Handle a signal."""
        self.asked = True
        now_s = time.monotonic()
        before_s = self._asked_s.get(number)
        self._asked_s[number] = now_s
        if before_s is None or now_s - before_s > AGAIN_S:
            self.obey()

    def obey(self) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def started(self, instruction: Instruction, history: History) -> None:
        self.obey()

    def recorded(self, event: Event, history: History) -> None:
        self.obey()


@contextlib.contextmanager
def terminable() -> Iterator[Interruption]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: stop the workers; the job can be resumed.

    An ignored SIGINT, as in the background jobs of a shell, stays ignored, as does a SIGHUP that
    nohup ignores.
    """
    interruption = Interruption()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a closed terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interruption.ask) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
