"""One rank: `python -m benchmarks.horovod_ranks.rank JOB.json`, with the variables of `start`.

It takes the cases of the job one after the other, each in a fork with Horovod's environment of its
own. It writes `case<i>.rank<r>.json` into the job's folder, and runs round-robin if that is
permitted, as the ranks of an emulated accelerator do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from autotune.files import write_whole
from autotune.workload import Workload
from benchmarks.horovod_ranks.script import Framework
from runtime_rewriter.horovod.hostname import call_on_interface
from runtime_rewriter.scheduling import take_round_robin

CONNECT_S = 120.0
PLAIN, LOGGED, TIMELINE = "plain", "logged", "timeline"
PROBE_ROUNDS, LATENCIES = 3, 40


def framework_of(name: str) -> Framework:
    """Import the module of `torch` or `tensorflow`."""
    return cast(Framework, import_module(f"benchmarks.horovod_ranks.{name}_script"))


@contextmanager
def connected(framework: Framework, number: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Initialize Horovod with these variables; rank 0 serves the rendezvous meanwhile."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import (
        RendezvousHandler,
        RendezvousHTTPServer,
        RendezvousServer,
    )

    os.environ.update(environment)
    port = int(os.environ["BENCHMARK_PORT"]) + number
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    server = None
    if os.environ["HOROVOD_RANK"] == "0":
        server = RendezvousServer()
        server._httpd = RendezvousHTTPServer((address, port), RendezvousHandler, 0)
        size = int(os.environ["HOROVOD_SIZE"])
        hosts = parse_hosts(os.environ["BENCHMARK_HOSTS"])
        server.init(get_host_assignments(hosts, size, size))
        import threading

        threading.Thread(target=server._httpd.serve_forever, daemon=True).start()
    _wait_for_server(address, port)
    call_on_interface(os.environ["HOROVOD_GLOO_IFACE"], framework.hvd.init)
    try:
        framework.barrier()
        if server is not None:
            server._httpd.shutdown()
            server._httpd.server_close()
        yield
    finally:
        framework.hvd.shutdown()


def _wait_for_server(address: str, port: int) -> None:
    deadline_s = time.monotonic() + CONNECT_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"rank 0 serves no rendezvous at {address}:{port}")


def main() -> None:
    take_round_robin()
    job = json.loads(Path(sys.argv[1]).read_text())
    framework = framework_of(job["framework"])
    rank = int(os.environ["HOROVOD_RANK"])
    workload = Workload.from_data(job["workload"])
    for number, case in enumerate(job["cases"]):
        if (child := os.fork()) == 0:
            framework.prepare()
            with connected(framework, number, case["environment"]):
                result = run_case(framework, workload, case, Path(job["folder"]), number)
            path = Path(job["folder"]) / f"case{number}.rank{rank}.json"
            write_whole(path, json.dumps(result), "the results of a case")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"case {number} of rank {rank} ended with status {status}")


def run_case(
    framework: Framework, workload: Workload, case: dict[str, Any], folder: Path, number: int
) -> dict[str, Any]:
    """Blocks of steps, then probes. `blocks`: (what records, steps), after `warmup` steps."""
    script = framework.script(workload, case)
    blocks: list[dict[str, Any]] = []
    for what, steps in [(PLAIN, case["warmup"]), *case["blocks"]]:
        timeline = folder / f"case{number}.timeline.{len(blocks)}.json"
        with script.logging() if what == LOGGED else nullcontext():
            if what == TIMELINE:
                framework.hvd.start_timeline(str(timeline), mark_cycles=True)
            marks_s = [script.step(step) for step in range(steps + 1)]
            if what == TIMELINE:
                framework.hvd.stop_timeline()
        blocks.append({"what": what, "marks_s": marks_s, "timeline": timeline.name})
    if case["probe_bytes"]:
        with script.logging():
            for size_bytes in case["probe_bytes"] * PROBE_ROUNDS:
                script.probe(size_bytes)
            for latency in range(LATENCIES):
                script.latency(latency)
    return {
        "blocks": blocks[1:],
        "slowest": script.largest(_steps_s(blocks)),
        "calls": [asdict(call) for call in script.calls],
    }


def _steps_s(blocks: list[dict[str, Any]]) -> list[float]:
    """Seconds of every step of the recorded blocks: from its beginning to the next one's."""
    begins = [[marks[0] for marks in block["marks_s"]] for block in blocks[1:]]
    return [after - before for times in begins for before, after in pairwise(times)]


if __name__ == "__main__":
    main()
