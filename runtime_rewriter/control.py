"""The line between a supervisor and its training process: lines of text over a socket pair.

Both ends are on one machine. Their size is bounded, and every wait has a timeout.
"""

from __future__ import annotations

import select
import socket
import time

MAX_LINE_BYTES = 256 * 2**20  # a plan or a profile of a large model has some MB
SEND_TIMEOUT_S = 30.0
"""The other end counts as gone if it leaves a full line unread for this long."""


class ControlClosed(Exception):
    """The other end is gone."""


class ControlLine:
    """One end of the line. Not thread-safe: each end has one reader and one writer."""

    def __init__(self, end: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        end.settimeout(send_timeout_s)  # reading waits in `select` and never here
        self._send_timeout_s = send_timeout_s
        self._socket = end
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, line: str) -> None:
        """Write one line without line breaks inside.

        Raises `ControlClosed`, also if the other end does not read; the line is unusable then.
        """
        data = line.encode() + b"\n"
        try:
            if rest := data[self._sent(data) :]:
                self._socket.sendall(rest)
        except OSError as error:
            raise ControlClosed(str(error)) from error

    def _sent(self, data: bytes) -> int:
        """The number of bytes sent without waiting.

        A socket with a timeout would wait until most of its buffer is free.
        """
        self._socket.settimeout(0.0)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        finally:
            self._socket.settimeout(self._send_timeout_s)

    def offer(self, line: str) -> None:
        """Write one short line, or drop it if the other end has left much unread.

        Never waits and never writes a part: the kernel calls a line writable while most of its
        buffer is free. The rest is left to `send`. Raises `ControlClosed` if the other end is gone.
        """
        if select.select([], [self._socket], [], 0.0)[1]:
            self.send(line)

    def receive(self, timeout_s: float | None) -> str | None:
        """The next line, or None after `timeout_s` without one.

        Without a timeout, wait until the other end closes.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line.decode()
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
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
