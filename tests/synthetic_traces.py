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
OLD_CATEGORIES = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
OLD_CATEGORIES["user_annotation"] = "Operator"


def span(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> Event:
    """A complete event of process 1; times in us."""
    place = {"pid": 1, "tid": tid, "ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, **place, "args": args}


@dataclass
class Job:
    """`offsets_s`: how far each rank's clock is behind the first one's at the start.

    `drifts`: how much it then loses per second. `spread_us`: mean delay of a rank's kernels.
    `devices`: the device number of each rank. `old`: write the first version's categories.
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
            begun, compute, reduce = now.copy(), now.copy(), now.copy()
            for layer in range(self.layers):
                for rank in range(self.ranks):
                    self._span(rank, "cpu_op", f"aten::linear_{layer}", now[rank], 30.0)
                    kernel_us = self.kernel_us + rng.exponential(self.spread_us)
                    at, free = now[rank] + 20.0, compute[rank] + 1.0
                    compute[rank] = self._launch(rank, at, 7, f"gemm_{layer}", free, kernel_us)
                    now[rank] += 40.0
                if self.collectives:
                    reduce = self._all_reduce(layer, now, compute, reduce, rng)
                    now += 20.0
            for rank in range(self.ranks):
                idle = max(compute[rank], reduce[rank], now[rank]) + 3.0
                wait = (now[rank], idle - now[rank])
                number = self._next()
                self._span(rank, "cuda_runtime", "cudaDeviceSynchronize", *wait, correlation=number)
                mark = (begun[rank], idle - begun[rank])
                self._span(rank, "user_annotation", f"ProfilerStep#{step}", *mark)
                now[rank] = idle + 25.0
        return self

    def _next(self) -> int:
        self._correlation += 1
        return self._correlation

    def _launch(
        self, rank: int, at: float, stream: int, name: str, free: float, us: float
    ) -> float:
        """Add a launch of 6 us and its kernel; return the kernel's end.

        The kernel begins 3 us after the call, or when the stream is free.
        """
        number = self._next()
        self._span(rank, "cuda_runtime", "cudaLaunchKernel", at, 6.0, correlation=number)
        start = max(at + 9.0, free)
        place = {"stream": stream, "correlation": number, "device": 0}
        self._span(rank, "kernel", name, start, us, **place)
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
        jitters_us = self.jitter_us * np.abs(rng.normal(size=self.ranks))
        ends = starts.max() + self.transfer_us + jitters_us
        elements = dict.fromkeys(("In msg nelems", "Out msg nelems"), 1000 * (layer + 1))
        args = {"Collective name": "allreduce", **elements, "dtype": "Float"}
        for rank in range(self.ranks):
            self._span(rank, "cpu_op", "record_param_comms", now[rank] + 2.0, 15.0, **args)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
            self._launch(rank, now[rank] + 4.0, 20, name, starts[rank], ends[rank] - starts[rank])
        return ends

    def _span(self, rank: int, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        shown = ts + EPOCH_US - (self.offsets_s[rank] if self.offsets_s else 0.0) * 1e6
        if self.drifts:
            shown -= ts * self.drifts[rank]
            dur *= 1 - self.drifts[rank]
        category = OLD_CATEGORIES[cat] if self.old else cat
        event = span(name, shown, dur, 100 + rank, category, **args)
        event["pid"] = event["tid"]
        if "stream" in args:
            event["tid"] = f"stream {args['stream']}" if self.old else args["stream"]
            event["pid"] = 0
            if self.devices:
                event["args"]["device"] = event["pid"] = self.devices[rank]
        self.events[rank].append(event)

    def write(self, folder: Path, with_ranks: bool = True) -> Path:
        """Write `rank<r>.json.gz` per rank; return the folder."""
        for rank, events in enumerate(self.events):
            data: dict[str, Any] = {"schemaVersion": 1, "traceEvents": events}
            if self.devices:
                devices = [{"id": device, "name": "gpu"} for device in range(self.ranks)]
                data["deviceProperties"] = devices
            if with_ranks:
                info = {"backend": "nccl", "rank": rank, "world_size": self.ranks}
                data["distributedInfo"] = info
            with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1) as file:
                json.dump(data, file)
        return folder

    def read(self, folder: Path) -> TraceJob:
        return read_job(self.run().write(folder))
