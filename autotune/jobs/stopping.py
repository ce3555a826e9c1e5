"""Forward the signals that stop a command to its child process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def signals_passed_on(process: subprocess.Popen[bytes], own_session: bool) -> Iterator[None]:
    """Forward SIGTERM, SIGHUP and, with `own_session`, SIGINT while the block runs.

    A child in its own session does not receive a terminal's Ctrl-C itself.
    """

    def pass_on(number: int, _: object) -> None:
        if own_session or number != signal.SIGINT:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
