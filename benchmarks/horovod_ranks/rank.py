"""One rank: `python -m benchmarks.horovod_ranks.rank JOB.json`, with the variables of `start`.

It takes the cases of the job one after the other, each in a fork with Horovod's environment of its
own. It writes `case<i>.rank<r>.json` into the job's folder, and runs round-robin if that is
permitted, as the ranks of an emulated accelerator do.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from autotune.workload import Workload
from benchmarks.horovod_ranks.timed_model import TimedModel, TimedUpdate
from runtime_rewriter.horovod.hostname import call_on_interface
from runtime_rewriter.horovod.recording import HorovodLog
from runtime_rewriter.scheduling import take_round_robin

CONNECT_S = 120.0
POLL_S = 1e-4
PLAIN, LOGGED, TIMELINE = "plain", "logged", "timeline"
PROBE, LATENCY = "probe", "latency"
"""Beginnings of the names of probes, as `profiling.graph.horovod_costs` knows them."""
FEWEST_PROBES, MOST_PROBES, LARGE_BYTES = 4, 8, 2**20
PROBE_ROUNDS, LATENCIES = 3, 40


@contextmanager
def connected(number: int, environment: Mapping[str, str]) -> Iterator[Any]:
    """Horovod, initialized with these variables; rank 0 serves the rendezvous meanwhile."""
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
    call_on_interface(os.environ["HOROVOD_GLOO_IFACE"], hvd.init)
    try:
        hvd.barrier()
        if server is not None:
            server._httpd.shutdown()
            server._httpd.server_close()
        yield hvd
    finally:
        hvd.shutdown()


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
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["HOROVOD_RANK"])
    workload = Workload.from_data(job["workload"])
    for number, case in enumerate(job["cases"]):
        if (child := os.fork()) == 0:
            with connected(number, case["environment"]) as hvd:
                result = run_case(hvd, workload, case, Path(job["folder"]), number)
            path = Path(job["folder"]) / f"case{number}.rank{rank}.json"
            path.write_text(json.dumps(result))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"case {number} of rank {rank} ended with status {status}")


def run_case(
    hvd: Any, workload: Workload, case: dict[str, Any], folder: Path, number: int
) -> dict[str, Any]:
    """Blocks of steps, then probes. `blocks`: (what records, steps), after `warmup` steps."""
    torch.manual_seed(hvd.rank())  # every rank touches other rows of tables
    model = TimedModel(workload)
    TimedUpdate.update_s = workload.update_s
    named = model.named_trainable()
    groups = case.get("groups")
    if groups:
        by_name = dict(named)
        groups = [[by_name[name] for name in group] for group in groups]
    optimizer = hvd.DistributedOptimizer(
        TimedUpdate([parameter for _, parameter in named], lr=0.0),
        named_parameters=named,
        groups=groups or None,
        sparse_as_dense=case["sparse_as_dense"],
    )
    log = HorovodLog()
    blocks: list[dict[str, Any]] = []
    for what, steps in [(PLAIN, case["warmup"]), *case["blocks"]]:
        timeline = folder / f"case{number}.timeline.{len(blocks)}.json"
        with log.watching() if what == LOGGED else nullcontext():
            if what == TIMELINE:
                hvd.start_timeline(str(timeline), mark_cycles=True)
            times = [one_step(model, optimizer, log, step) for step in range(steps + 1)]
            if what == TIMELINE:
                hvd.stop_timeline()
        blocks.append({"what": what, "marks_s": times, "timeline": timeline.name})
    if case["probe_bytes"]:
        log.step = -1
        with log.watching():
            for size_bytes in case["probe_bytes"] * PROBE_ROUNDS:
                probe(hvd, size_bytes)
            for number in range(LATENCIES):
                handle = hvd.allreduce_async_(torch.zeros(1), name=f"{LATENCY}.{number}")
                await_quietly(handle)
                hvd.synchronize(handle)
    slowest = hvd.allreduce(_steps(blocks), op=hvd.Max, name="times").tolist()
    return {"blocks": blocks[1:], "slowest": slowest, "calls": [asdict(call) for call in log.calls]}


def one_step(model: TimedModel, optimizer: Any, log: HorovodLog, step: int) -> list[float]:
    """Begin of the passes, end of the backward pass, and of the synchronization with the update."""
    log.step = step
    optimizer.zero_grad()
    model().backward()
    ended_s = time.perf_counter()
    for handle, _ in list(optimizer._handles.values()):
        for operation in operations_of(handle):
            await_quietly(operation)
    optimizer.step()
    return [*model.marks_s, ended_s, time.perf_counter()]


def operations_of(handle: Any) -> list[int]:
    """Return the handles of operations; those of a sparse gradient are in a function's closure."""
    if not callable(handle):
        return [handle]
    held = zip(handle.__code__.co_freevars, handle.__closure__, strict=True)
    return [cell.cell_contents for name, cell in held if name.endswith("_handle")]


def await_quietly(handle: int) -> None:
    """Wait as `synchronize` does, but asleep: its spinning would take the other ranks' cores."""
    while not hvd.poll(handle):
        time.sleep(POLL_S)


def _steps(blocks: list[dict[str, Any]]) -> torch.Tensor:
    """Seconds of every step of the recorded blocks: from its beginning to the next one's."""
    begins = [[marks[0] for marks in block["marks_s"]] for block in blocks[1:]]
    return torch.tensor(
        [after - before for times in begins for before, after in pairwise(times)],
        dtype=torch.float64,
    )


def probe(hvd: Any, size_bytes: int) -> None:
    """All-reduce tensors of one size, one right after the other.

    Tensors of different postscale factors are not fused.
    """
    count = FEWEST_PROBES if size_bytes > LARGE_BYTES else MOST_PROBES
    tensors = [torch.zeros(size_bytes // 4) for _ in range(count)]
    hvd.barrier()
    handles = [
        hvd.allreduce_async_(
            tensor, name=f"{PROBE}.{size_bytes}.{number}", postscale_factor=1 + number / 64
        )
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        await_quietly(handle)
        hvd.synchronize(handle)


if __name__ == "__main__":
    main()
