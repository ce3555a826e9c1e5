"""A Kineto trace of an invented training: a host thread that launches kernels on one stream."""

from __future__ import annotations

import json
from io import BytesIO

from synthetic_traces import Event, span

from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.traces.job import TraceJob, assemble

LATENCY_US, CALL_US = 3.0, 5.0


def training(host_us: float, kernel_us: float, **settings: float | bool) -> TraceJob:
    """The job of `training_text`."""
    text = training_text(host_us, kernel_us, **settings)  # type: ignore[arg-type]
    return assemble([read_kineto(BytesIO(text).read, "rank0.json")])


def training_text(
    host_us: float,
    kernel_us: float,
    *,
    steps: int = 4,
    kernels: int = 3,
    load_us: float = 0.0,
    waits: bool = False,
    late_us: float = 0.0,
) -> bytes:
    """A thread launches kernels that take longer or shorter than it needs for the next launch.

    `load_us`: data loading at the beginning of a step. `waits`: whether the host waits for the
    device at the end of each step. `late_us`: a delay of each step's second kernel.
    """
    events: list[Event] = []
    now, free, number = 0.0, 0.0, 1
    for step in range(steps):
        begun = now
        now += load_us
        for kernel in range(kernels):
            events.append(span(f"aten::linear_{kernel}", now, host_us))
            events.append(
                span("cudaLaunchKernel", now + 1, CALL_US, cat="cuda_runtime", correlation=number)
            )
            start = max(now + 1 + CALL_US + LATENCY_US, free) + late_us * (kernel == 1)
            place = {"stream": 7, "device": 0, "correlation": number}
            gemm = span(f"gemm_{kernel}", start, kernel_us, 7, "kernel", **place)
            events.append({**gemm, "pid": 0})
            free, now, number = start + kernel_us, now + host_us, number + 1
        if waits:
            until = max(now, free) + 2
            events.append(
                span(
                    "cudaDeviceSynchronize",
                    now,
                    until - now,
                    cat="cuda_runtime",
                    correlation=number,
                )
            )
            now, number = until, number + 1
        events.append(span(f"ProfilerStep#{step}", begun, now - begun, cat="user_annotation"))
        now += 4
    return json.dumps({"traceEvents": events}).encode()
