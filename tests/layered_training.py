"""A Kineto trace of an invented model: operators of named layers that launch kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from synthetic_traces import Event, span

from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.traces.job import TraceJob, assemble

LATENCY_US, CALL_US = 3.0, 5.0
IMAGE = (8, 16, 32, 32)
WEIGHT = (16, 16, 3, 3)
MAP_BYTES = 8 * 16 * 32 * 32 * 4
_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel"
ADD_KERNEL = f"{_ELEMENTWISE}<4, CUDAFunctor_add<float>, std::array<char*, 3ul> >"
MUL_KERNEL = f"{_ELEMENTWISE}<4, AUnaryFunctor<float>, std::array<char*, 2ul> >"


@dataclass(frozen=True)
class Work:
    """An operator that launches one kernel, or none where `kernel` is "".

    `node`: its node in the backward pass, "" in the forward pass. `update`: it is of the optimizer.
    """

    operator: str
    kernel: str
    kernel_us: float = 100.0
    dims: tuple[tuple[int, ...], ...] = ()
    node: str = ""
    layer: str = ""
    sequence: int = 0
    update: bool = False


def conv(number: int, us: float = 100.0) -> Work:
    name, dims = f"conv{number}", (IMAGE, WEIGHT)
    return Work("aten::cudnn_convolution", f"fprop_{number}", us, dims, "", name, number)


def conv_back(number: int, us: float = 100.0) -> Work:
    kernel, dims = f"wgrad_{number}", (IMAGE, IMAGE, WEIGHT)
    return Work("aten::convolution_backward", kernel, us, dims, "ConvolutionBackward0", "", number)


def norm(number: int, us: float = 100.0) -> Work:
    return Work(
        "aten::cudnn_batch_norm", "bn_fw_tr", us, (IMAGE,), "", f"norm{number}", 100 + number
    )


def norm_back(number: int, us: float = 100.0) -> Work:
    node = "CudnnBatchNormBackward0"
    return Work("aten::cudnn_batch_norm_backward", "bn_bw", us, (IMAGE,), node, "", 100 + number)


def relu(number: int, us: float = 100.0) -> Work:
    return Work("aten::relu", "clamp", us, (IMAGE,), "", f"relu{number}", 200 + number)


def relu_back(number: int, us: float = 100.0) -> Work:
    dims = (IMAGE, IMAGE)
    return Work("aten::threshold_backward", "clamp_b", us, dims, "ReluBackward0", "", 200 + number)


def layered(
    works: Sequence[Work],
    *,
    steps: int = 4,
    host_us: float = 10.0,
    load_us: float = 0.0,
    copy_bytes: float = 0.0,
    waits: bool = False,
    reads: bool = False,
    info: dict[str, Any] | None = None,
) -> TraceJob:
    """A thread calls every operator in turn, each for `host_us`, and launches its kernel.

    `load_us`: data loading at the beginning of each step, as torch annotates it. `copy_bytes`: a
    copy of 1 GB/s to the device follows it. `waits`: the host waits for the device at each end.
    `reads`: it waits for a copy of 2 us to the host, as `loss.item()` does.
    """
    trace = _Trace()
    for step in range(steps):
        begun = trace.now
        if load_us:
            trace.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", load_us)
        if copy_bytes:
            trace.copy(copy_bytes)
        for work in works:
            trace.call(work, host_us)
        if reads:
            trace.read()
        if waits:
            trace.wait()
        mark = span(f"ProfilerStep#{step}", begun, trace.now - begun, cat="user_annotation")
        trace.events.append(mark)
        trace.now += 4
    text = json.dumps({**(info or {}), "traceEvents": trace.events}).encode()
    return assemble([read_kineto(BytesIO(text).read, "rank0.json")])


class _Trace:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now, self.free, self.number = 0.0, 0.0, 1

    def mark(self, name: str, us: float) -> None:
        self.events.append(span(name, self.now, us, cat="user_annotation"))
        self.now += us

    def call(self, work: Work, host_us: float) -> None:
        now, number = self.now, self.number
        args: dict[str, Any] = {"External id": number}
        if work.dims:
            args |= {"Input Dims": work.dims, "Input type": ["float"] * len(work.dims)}
        ids: dict[str, Any] = {"Sequence number": work.sequence}
        if work.layer:
            self.events.append(span(work.layer, now, host_us, cat="user_annotation"))
        if work.update:
            self.events.append(span("Optimizer.step#SGD.step", now, host_us, cat="user_annotation"))
            ids = {}
        if work.node:
            outer = f"autograd::engine::evaluate_function: {work.node}"
            self.events.append(span(outer, now, host_us, **ids))
            ids = {}
        inset = 0.5 if work.node else 0.0
        if work.operator:
            length = host_us - 2 * inset
            self.events.append(span(work.operator, now + inset, length, **ids, **args))
        if work.kernel:
            self._launch("cudaLaunchKernel", work.kernel, "kernel", work.kernel_us)
        self.now = now + host_us

    def copy(self, size: float) -> None:
        now = self.now
        ids: dict[str, Any] = {"External id": self.number}
        self.events.append(span("aten::copy_", now, 10, **ids))
        name = "Memcpy HtoD (Pinned -> Device)"
        self._launch("cudaMemcpyAsync", name, "gpu_memcpy", size / 1e3, bytes=size)
        self.now = now + 10

    def _launch(self, call: str, name: str, cat: str, us: float, **args: float) -> None:
        ids: dict[str, Any] = {"correlation": self.number, "External id": self.number}
        self.events.append(span(call, self.now + 1, CALL_US, cat="cuda_runtime", **ids))
        start = max(self.now + 1 + CALL_US + LATENCY_US, self.free)
        place: dict[str, Any] = {"stream": 7, "device": 0, **ids, **args}
        self.events.append({**span(name, start, us, 7, cat, **place), "pid": 0})
        self.free, self.number = start + us, self.number + 1

    def read(self) -> None:
        start = max(self.now + 1 + LATENCY_US, self.free)
        ids: dict[str, Any] = {"correlation": self.number, "External id": self.number}
        call = span(
            "cudaMemcpyAsync", self.now + 1, start + 3 - self.now, cat="cuda_runtime", **ids
        )
        name = "Memcpy DtoH (Device -> Pageable)"
        copy = span(name, start, 2, 7, "gpu_memcpy", stream=7, device=0, bytes=4, **ids)
        self.events += [call, {**copy, "pid": 0}]
        self.now, self.free, self.number = start + 4, start + 2, self.number + 1

    def wait(self) -> None:
        until = max(self.now, self.free) + 2
        self.events.append(
            span(
                "cudaDeviceSynchronize",
                self.now,
                until - self.now,
                cat="cuda_runtime",
                correlation=self.number,
            )
        )
        self.now, self.number = until, self.number + 1
