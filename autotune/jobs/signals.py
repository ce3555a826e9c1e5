"""What asks a command to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from autotune.tuning.events import Event
from autotune.tuning.history import History
from autotune.tuning.tuner import Instruction


class Interruption:
    """Remembers that somebody asked; an `Observer` that ends the job between two of its steps.

    Python drops an exception that is raised while it runs a destructor or the callback of a weak reference, and a signal may
    come just then: its `KeyboardInterrupt` would be printed as ignored, and the command go on.
    """

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """A signal's handler."""
        self.asked = True
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
    """SIGTERM ends the command as Ctrl-C does: the workers are stopped, and a job can be resumed.

    Where SIGINT is ignored, as in the background jobs of a shell, it stays ignored.
    """
    interruption = Interruption()
    numbers = [
        signal.SIGTERM,
        *([signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []),
    ]
    before = {number: signal.signal(number, interruption.ask) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
