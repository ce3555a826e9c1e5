"""Time one TCP stream at its receiver: `receive SECONDS` in one place, `send ADDRESS` in another.

The receiver prints the payload in bytes per second between `SETTLE_S` after the first byte and
`SECONDS` later. Neither end copies the payload, so a machine with few cores shows what its links
carry.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time

PORT = 7777
SETTLE_S = 1.5  # slow start; longer if acknowledgements wait behind another stream
WAIT_S = 20.0
CHUNK_BYTES = 2**20


def receive(seconds: float) -> float:
    """Return the payload per second of the first stream."""
    with socket.create_server(("", PORT)) as server:
        server.settimeout(WAIT_S)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(WAIT_S)
        buffer = bytearray(CHUNK_BYTES)
        began_s = time.perf_counter() + (
            SETTLE_S if stream.recv_into(buffer, 0, socket.MSG_TRUNC) else 0.0
        )
        counted, first_s = 0, 0.0
        while got := stream.recv_into(buffer, 0, socket.MSG_TRUNC):
            now_s = time.perf_counter()
            if now_s < began_s:
                continue
            if not first_s:
                first_s = now_s  # what arrived until now is not counted
                continue
            counted += got
            if now_s - first_s >= seconds:
                return counted / (now_s - first_s)
    raise SystemExit("the sender ended too early")


def send(address: str) -> None:
    """Send until the receiver closes the stream."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            stream = socket.create_connection((address, PORT), timeout=WAIT_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    with stream, tempfile.TemporaryFile() as data:
        data.write(bytes(CHUNK_BYTES))
        try:
            while True:
                data.seek(0)
                stream.sendfile(data)
        except (ConnectionResetError, BrokenPipeError):
            return


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(float(sys.argv[2])))
    else:
        send(sys.argv[2])
