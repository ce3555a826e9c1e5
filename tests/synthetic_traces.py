"""Kineto traces of an invented job with known times: a host thread and two streams per rank.

Every step of a rank launches `layers` kernels and, after each, an all-reduce on a second stream.
Then it waits for the device. An all-reduce ends on all ranks `transfer_us` after the last of them
has begun, plus some `jitter_us`.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.profiling.traces.job import TraceJob, read_job

Event = dict[str, Any]
EPOCH_US = 1_700_000_000_000_000.0

OLD = {
    "cpu_op": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "user_annotation": "Operator",
}


@dataclass
class Job:
    """`offsets_s`: how far each rank's clock is behind the first one's at the start.

    `drifts`: how much it then loses per second. `spread_us`: mean delay of a rank's kernels.
    `devices`: the device number of each rank.
    """

    ranks: int = 2
    steps: int = 3
    layers: int = 4
    kernel_us: float = 300.0
    transfer_us: float = 200.0
    spread_us: float = 100.0
    jitter_us: float = 0.0
    offsets_s: tuple[float, ...] = ()
    drifts: tuple[float, ...] = ()
    devices: tuple[int, ...] = ()
    seed: int = 0
    old: bool = False
    collectives: bool = True
    events: list[list[Event]] = field(default_factory=list)

    def run(self) -> Job:
        """Fill `events`, a list per rank."""
        self.events = [[] for _ in range(self.ranks)]
        rng = np.random.default_rng(self.seed)
        now = np.zeros(self.ranks)
        self._correlation = 100
        for step in range(self.steps):
            begun = now.copy()
            compute, reduce = now.copy(), now.copy()
            for layer in range(self.layers):
                for rank in range(self.ranks):
                    self._span(rank, "cpu_op", f"aten::linear_{layer}", now[rank], 30.0)
                    kernel_us = self.kernel_us + rng.exponential(self.spread_us)
                    compute[rank] = self._launch(
                        rank, now[rank] + 20.0, 7, f"gemm_{layer}", compute[rank] + 1.0, kernel_us
                    )
                    now[rank] += 40.0
                if self.collectives:
                    reduce = self._all_reduce(layer, now, compute, reduce, rng)
                    now += 20.0
            for rank in range(self.ranks):
                idle = max(compute[rank], reduce[rank], now[rank]) + 3.0
                self._span(
                    rank,
                    "cuda_runtime",
                    "cudaDeviceSynchronize",
                    now[rank],
                    idle - now[rank],
                    correlation=self._next(),
                )
                self._span(
                    rank, "user_annotation", f"ProfilerStep#{step}", begun[rank], idle - begun[rank]
                )
                now[rank] = idle + 25.0
        return self

    def _next(self) -> int:
        self._correlation += 1
        return self._correlation

    def _launch(
        self, rank: int, at: float, stream: int, name: str, free: float, us: float, **args: Any
    ) -> float:
        """Add a launch of 6 us and its kernel; return the kernel's end.

        The kernel begins 3 us after the call, or when the stream is free.
        """
        number = self._next()
        self._span(rank, "cuda_runtime", "cudaLaunchKernel", at, 6.0, correlation=number)
        start = max(at + 9.0, free)
        self._span(
            rank, "kernel", name, start, us, stream=stream, correlation=number, device=0, **args
        )
        return start + us

    def _all_reduce(
        self,
        layer: int,
        now: np.ndarray,
        compute: np.ndarray,
        reduce: np.ndarray,
        rng: np.random.Generator,
    ) -> np.ndarray:
        starts = np.maximum(np.maximum(compute + 2.0, now + 16.0), reduce + 1.0)
        ends = (
            starts.max() + self.transfer_us + self.jitter_us * np.abs(rng.normal(size=self.ranks))
        )
        said = {
            "Collective name": "allreduce",
            "In msg nelems": 1000 * (layer + 1),
            "Out msg nelems": 1000 * (layer + 1),
            "dtype": "Float",
        }
        for rank in range(self.ranks):
            self._span(rank, "cpu_op", "record_param_comms", now[rank] + 2.0, 15.0, **said)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
            self._launch(rank, now[rank] + 4.0, 20, name, starts[rank], ends[rank] - starts[rank])
        return ends

    def _span(self, rank: int, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        device = "stream" in args
        shown = ts + EPOCH_US - (self.offsets_s[rank] if self.offsets_s else 0.0) * 1e6
        if self.drifts:
            shown, dur = shown - ts * self.drifts[rank], dur * (1 - self.drifts[rank])
        event: Event = {
            "ph": "X",
            "cat": OLD[cat] if self.old else cat,
            "name": name,
            "ts": shown,
            "dur": dur,
        }
        event["pid"], event["tid"] = (
            (0, f"stream {args['stream']}" if self.old else args["stream"])
            if device
            else (100 + rank, 100 + rank)
        )
        if device and self.devices:
            args["device"] = event["pid"] = self.devices[rank]
        self.events[rank].append({**event, "args": args})

    def write(self, folder: Path, told: bool = True) -> Path:
        """`rank<r>.json.gz` per rank; without distributedInfo where not `told`."""
        for rank, events in enumerate(self.events):
            data: dict[str, Any] = {"schemaVersion": 1, "traceEvents": events}
            if self.devices:
                data["deviceProperties"] = [
                    {"id": device, "name": "gpu"} for device in range(self.ranks)
                ]
            if told:
                data["distributedInfo"] = {
                    "backend": "nccl",
                    "rank": rank,
                    "world_size": self.ranks,
                }
            with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1) as file:
                json.dump(data, file)
        return folder

    def read(self, folder: Path) -> TraceJob:
        return read_job(self.run().write(folder))
