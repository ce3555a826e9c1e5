"""Measure a testbed's latency relay: `python -m benchmarks.testbed_latency` (root, half a minute).

Two hosts at 1 Gbit/s. Round trip: the median of one byte between two Python processes. Goodput:
payload of one stream, and of the slower of two in both directions. Share of a core: CPU of the
relay meanwhile (0 with the kernel's netem). The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from autotune.cluster import Cluster, Host
from autotune.testbed.bed import Testbed, running
from autotune.testbed.state import States
from autotune.units import format_seconds
from benchmarks.repository import run_benchmark
from benchmarks.testbed_fidelity.processes import inside, output, streams

LATENCIES_S = (5e-5, 5e-4, 2e-3, 5e-3)
BYTES_PER_S = 1.25e8
BYTE_SOCKET = "stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)"
ECHO = f"""
import socket
server = socket.create_server(("", 5000)); print(flush=True)
stream, _ = server.accept(); {BYTE_SOCKET}
while word := stream.recv(64): stream.sendall(word)
"""
PING = f"""
import socket, statistics, sys, time
stream = socket.create_connection((sys.argv[1], 5000)); {BYTE_SOCKET}; times = []
for _ in range(200):
    began = time.perf_counter(); stream.sendall(b"x"); stream.recv(64)
    times.append(time.perf_counter() - began)
print(statistics.median(times))
"""


def round_trip_s(bed: Testbed) -> float:
    server = inside(bed, 1, [sys.executable, "-c", ECHO])
    assert server.stdout is not None and server.stdout.readline()
    return float(output(inside(bed, 0, [sys.executable, "-c", PING, bed.hosts[1].address])))


def relay_cpu_s(bed: Testbed) -> float:
    """Return the relay's CPU time until now (fields 14 and 15 of /proc/PID/stat)."""
    record = States().read(bed.name)
    if record is None or record.relay is None:
        return 0.0
    fields = Path(f"/proc/{record.relay.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def goodput(bed: Testbed, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Return (Mbit/s of the slowest stream, the relay's share of a core)."""
    began_s, cpu_s = time.monotonic(), relay_cpu_s(bed)
    slowest = min(streams(bed, pairs).values()) * 8e-6
    return slowest, (relay_cpu_s(bed) - cpu_s) / (time.monotonic() - began_s)


def main() -> None:
    results = []
    for latency_s in LATENCIES_S:
        cluster = Cluster(
            "latency", tuple(Host(name, 1, BYTES_PER_S, latency_s, 1e10, 5e-6) for name in "ab")
        )
        with running(cluster, name=f"latency-{os.getpid()}") as bed:
            trip_s, one, both = (
                round_trip_s(bed),
                goodput(bed, [(0, 1)]),
                goodput(bed, [(0, 1), (1, 0)]),
            )
        print(
            f"{format_seconds(latency_s)}: {format_seconds(trip_s)}, "
            f"{one[0]:.0f} and {both[0]:.0f} Mbit/s",
            file=sys.stderr,
        )
        results.append(
            {
                "latency_s": latency_s,
                "round_trip_s": trip_s,
                "mbit": [one[0], both[0]],
                "relay_cores": [one[1], both[1]],
            }
        )
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count(), "results": results}))


if __name__ == "__main__":
    run_benchmark(main)
