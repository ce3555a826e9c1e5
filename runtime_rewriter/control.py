"""The line between a worker's supervisor and the training process: JSON lines over a socket pair.

The two ends are parent and child on one machine; no pickle, sizes bounded, every wait has a timeout.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MAX_LINE_BYTES = 256 * 2**20  # a plan of a large model is some MB; a profile of one too
SEND_TIMEOUT_S = 30.0
"""How long the other end may leave a full line unread before it counts as gone."""
HEARTBEAT_S = 1.0
"""How often a training process says that it still makes steps, at most."""


class ControlClosed(Exception):
    """The other end is gone."""


class ControlLine:
    """One end of the line. Not thread-safe: each end has one reader and one writer."""

    def __init__(self, end: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        end.settimeout(send_timeout_s)  # reading waits in `select` and never here
        self._socket = end
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; raises `ControlClosed`, also when the other end does not read: the line is unusable then."""
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise ControlClosed(str(error)) from error

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None after `timeout_s` without one (None waits until the other end closes)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                message: dict[str, Any] = json.loads(line)
                return message
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._fill()

    def _fill(self) -> None:
        try:
            data = self._socket.recv(2**20)
        except OSError as error:
            raise ControlClosed(str(error)) from error
        if not data:
            raise ControlClosed("the other end closed the line")
        self._buffer += data
        if len(self._buffer) > MAX_LINE_BYTES:
            raise ControlClosed(f"a message may have at most {MAX_LINE_BYTES} bytes")

    def close(self) -> None:
        self._socket.close()
