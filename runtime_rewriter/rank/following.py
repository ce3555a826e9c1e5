"""A rank that hosts a server while rank 0's client drives it: it repeats rank 0's events."""

from __future__ import annotations

import select

from autotune.errors import SynchronizationError
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.protocol import (
    EndScript,
    Heartbeat,
    Probing,
    ScriptFinished,
    decode_event,
    decode_instruction,
)

HEARD_S = 0.0


def follow(leader: ControlLine, supervisor: ControlLine | None) -> None:
    """Send what `leader` sends to the `supervisor` (None: there is none), until the script ends.

    Raises `SynchronizationError` when rank 0 ends without notice.
    """
    lines = [line for line in (leader, supervisor) if line is not None]
    while True:
        ready = select.select(lines, [], [])[0]  # ends with rank 0 or the supervisor
        if supervisor in ready and _ended(supervisor):
            return
        if leader not in ready:
            continue
        try:
            while (text := leader.receive(HEARD_S)) is not None:
                event = decode_event(text)
                if isinstance(event, ScriptFinished):
                    return
                if supervisor is None:
                    continue
                if isinstance(event, Heartbeat | Probing):
                    supervisor.offer(text)
                else:
                    supervisor.send(text)
        except ControlClosed as error:
            raise SynchronizationError(
                f"connection closed by peer: rank 0 ended ({error})"
            ) from None


def _ended(supervisor: ControlLine | None) -> bool:
    """Whether the supervisor ends the script or is gone; rank 0 carries out the other
    instructions."""
    assert supervisor is not None
    try:
        while (text := supervisor.receive(HEARD_S)) is not None:
            if isinstance(decode_instruction(text), EndScript):
                return True
    except ControlClosed:
        return True
    return False
