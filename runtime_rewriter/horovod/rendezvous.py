"""The key-value server over which Horovod's ranks find each other.

It speaks the protocol of `horovod.runner.http.http_server`: PUT, GET and DELETE of /SCOPE/KEY.
Horovod's own server listens on all interfaces until the job ends. This one listens on one address,
and only while ranks connect. It stores bytes, and interprets none.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from autotune.errors import LaunchError

REQUEST_TIMEOUT_S = 3.0
"""As Horovod's own server waits for the rest of a request."""
MOST_BYTES = 1 << 20
"""A value holds a few addresses of a rank."""
_POLL_S = 0.02


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    values: ClassVar[dict[str, bytes]]
    lock: ClassVar[threading.Lock]

    def do_GET(self) -> None:
        with self.lock:
            value = self.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self._answer(400)
            return
        value = self.rfile.read(int(length))
        with self.lock:
            self.values[self.path] = value
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def rendezvous_server(address: str) -> Iterator[int]:
    """Serve at `address` inside, and yield the port, which the kernel chooses.

    Raises `LaunchError` if the address is not one of this host.
    """
    kind = type("Handler", (_Handler,), {"values": {}, "lock": threading.Lock()})
    try:
        server = ThreadingHTTPServer((address, 0), kind)
    except OSError as error:
        raise LaunchError(
            f"Horovod's ranks must find each other at {address}, but rank 0 cannot listen there: "
            f"{error.strerror}; MASTER_ADDR must be an address of rank 0's host"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RendezvousClient:
    """Values of other ranks, read from the server at `address`. Every call ends at `deadline_s`."""

    def __init__(self, address: str, port: int, deadline_s: float) -> None:
        self._address, self._port, self._deadline_s = address, port, deadline_s

    def put(self, key: str, value: str) -> None:
        """Store a value, once the server is up."""
        self._request("PUT", key, value.encode())

    def wait_for(self, key: str) -> str:
        """The value, once it is there."""
        value = self._request("GET", key, None)
        return value.decode()

    def _request(self, method: str, key: str, body: bytes | None) -> bytes:
        while time.monotonic() < self._deadline_s:
            connection = http.client.HTTPConnection(
                self._address, self._port, timeout=REQUEST_TIMEOUT_S
            )
            with suppress(OSError, http.client.HTTPException):
                connection.request(method, f"/autotune/{key}", body)
                response = connection.getresponse()
                if response.status == 200:
                    return response.read()
            connection.close()
            time.sleep(_POLL_S)
        raise LaunchError(
            f"every rank must call hvd.init(), but {key!r} did not appear at "
            f"{self._address}:{self._port} in time; look at the other ranks' logs"
        )
