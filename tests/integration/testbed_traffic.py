"""Small testbeds, with streams and round trips between processes inside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster, Host, PairLink
from autotune.testbed import bed
from autotune.testbed.capabilities import capabilities

ABLE = capabilities()
TRIES = 20

RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 5000)); print("ready", flush=True)
stream, _ = server.accept(); buffer = bytearray(1 << 20)
total = warm = 0; began = now = time.perf_counter(); first = None
while count := stream.recv_into(buffer):
    total += count; now = time.perf_counter()
    if first is None and now - began > 0.25: first, warm = now, total
print((total - warm) / (now - first) if first and now > first else 0.0)
"""
SEND = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], 5000))
end = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end: stream.sendall(bytes(1 << 16))
"""
ECHO = """
import socket
server = socket.create_server(("", 5000)); print("ready", flush=True)
stream, _ = server.accept(); stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while word := stream.recv(64): stream.sendall(word)
"""
PING = """
import socket, statistics, sys, time
stream = socket.create_connection((sys.argv[1], 5000))
stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); times = []
for _ in range(40):
    began = time.perf_counter(); stream.sendall(b"x"); stream.recv(64)
    times.append(time.perf_counter() - began)
print(min(times), statistics.median(times))
"""

BOTH_WAYS = """
import socket, sys, threading, time
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if address: stream = socket.create_connection((address, port))
else:
    server = socket.create_server(("", port)); print("ready", flush=True)
    stream, _ = server.accept()
def send():
    end = time.perf_counter() + seconds
    while time.perf_counter() < end: stream.sendall(bytes(1 << 16))
    stream.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send); thread.start()
while stream.recv(1 << 16): pass
thread.join()
"""


def cluster(
    *mbit: float, latency_s: float = 5e-5, links: tuple[PairLink, ...] = (), inner: float = 1e10
) -> Cluster:
    hosts = (Host(f"h{i}", 1, rate * 1.25e5, latency_s, inner, 5e-6) for i, rate in enumerate(mbit))
    return Cluster("c", tuple(hosts), links)


def started(host: bed.BedHost, program: str, *words: str) -> subprocess.Popen[str]:
    command = [*bed.words_inside(host.namespace), sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if program in (RECEIVE, ECHO) or (program == BOTH_WAYS and not words[0]):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def answer(server: subprocess.Popen[str], client: subprocess.Popen[str]) -> tuple[str, str]:
    outputs = server.communicate(timeout=120)[0], client.communicate(timeout=120)[0]
    assert server.returncode == client.returncode == 0
    return outputs


def goodput_mbit(
    testbed: bed.Testbed, pairs: list[tuple[int, int]], seconds: float = 0.9
) -> list[float]:
    """Payload of simultaneous streams between pairs of hosts; no host has two of one direction."""
    receivers = [started(testbed.hosts[target], RECEIVE) for _, target in pairs]
    senders = [
        started(testbed.hosts[source], SEND, testbed.hosts[target].address, str(seconds))
        for source, target in pairs
    ]
    return [float(answer(*both)[0]) * 8e-6 for both in zip(receivers, senders, strict=True)]


def round_trip_s(testbed: bed.Testbed, source: int = 0, target: int = 1) -> tuple[float, float]:
    """Smallest and median of 40."""
    server = started(testbed.hosts[target], ECHO)
    client = started(testbed.hosts[source], PING, testbed.hosts[target].address)
    smallest, median = answer(server, client)[1].split()
    return float(smallest), float(median)


def stream(testbed: bed.Testbed, connections: list[tuple[int, int, bool]], seconds: float) -> None:
    """Simultaneous connections (source, target, whether data also flows back)."""
    servers, clients = [], []
    for port, (_, target, back) in enumerate(connections, 6000):
        back_s = seconds if back else 0.0
        servers.append(started(testbed.hosts[target], BOTH_WAYS, "", str(port), str(back_s)))
    for port, (source, target, _) in enumerate(connections, 6000):
        words = (testbed.hosts[target].address, str(port), str(seconds))
        clients.append(started(testbed.hosts[source], BOTH_WAYS, *words))
    for both in zip(servers, clients, strict=True):
        answer(*both)


def counted(host: bed.BedHost, counter: str) -> int:
    """One of a host's extended TCP counters since its creation (`/proc/net/netstat`)."""
    names, values, *_ = inside(host, "cat", "/proc/net/netstat").splitlines()
    return int(values.split()[names.split().index(counter)])


def inside(host: bed.BedHost, *words: str) -> str:
    return subprocess.run(
        [*bed.words_inside(host.namespace), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout


def assert_reaches(
    testbed: bed.Testbed,
    pairs: list[tuple[int, int]],
    expected_mbit: list[float],
    seconds: float = 0.9,
) -> None:
    """Simultaneous streams get their rates. A busy machine may spoil some tries, but not all."""
    tries: list[Any] = []
    while len(tries) < TRIES:
        tries.append(goodput_mbit(testbed, pairs, seconds))
        rates = zip(tries[-1], expected_mbit, strict=True)
        if all(0.8 * expected <= rate <= 1.05 * expected for rate, expected in rates):
            return
    raise AssertionError(f"expected {expected_mbit} Mbit/s, got {tries}")


def assert_nothing_is_left(directory: Path, names: tuple[str, ...]) -> None:
    assert bed.testbeds(directory=directory) == ()
    assert [path.name for path in directory.iterdir()] == ["lock"]
    namespaces = [f"{path.name}." for path in Path("/run/netns").iterdir()]
    prefixes = tuple(f"autotune.{name}." for name in names)
    assert not [namespace for namespace in namespaces if namespace.startswith(prefixes)]
