"""A Kineto trace of an invented training with shapes: two products, their backward pass, Adam."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

from synthetic_traces import Event, span

from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.traces.job import assemble
from autotune.whatif.base import Base
from autotune.whatif.recording.recorded import recorded_base

ROWS, WIDTH = 64, 128
KERNEL_US, UPDATE_US = 400.0, 100.0
FORWARD, BACKWARD = "cutlass_simt_sgemm_nn", "cutlass_simt_sgemm_tn"
UPDATE = "void at::native::multi_tensor_apply_kernel<float>"
Shapes = list[list[int]]


class _Recording:
    """A host that is far ahead of its device, whose kernels follow each other."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now, self.free, self.number = 0.0, 0.0, 0

    def launch(self, operator: str, shapes: Shapes, kernel: str, us: float, **more: Any) -> None:
        """An operator of 20 us that launches a kernel."""
        self.number += 1
        ids: dict[str, Any] = {"External id": self.number}
        about: dict[str, Any] = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        call: dict[str, Any] = {"cat": "cuda_runtime", "correlation": self.number}
        self.events.append(span(operator, self.now, 20, **about, **ids, **more))
        self.events.append(span("cudaLaunchKernel", self.now + 5, 5, **call, **ids))
        start = max(self.now + 13, self.free)
        place: dict[str, Any] = {"stream": 7, "device": 0, "correlation": self.number}
        self.events.append({**span(kernel, start, us, 7, "kernel", **place, **ids), "pid": 0})
        self.free, self.now = start + us, self.now + 22

    def around(self, name: str, begun: float, cat: str = "cpu_op") -> None:
        self.events.append(span(name, begun, self.now - begun, cat=cat))


def recorded_passes(steps: int = 4, waits: bool = False) -> Base:
    """`waits`: whether the recorder waits for the device at the end of each step."""
    trace = _Recording()
    data, weight = [ROWS, WIDTH], [WIDTH, WIDTH]
    for step in range(steps):
        begun = trace.now
        for layer in range(2):
            sequence: dict[str, Any] = {"Sequence number": 10 * step + layer}
            shapes = [[WIDTH], data, weight]
            trace.launch("aten::addmm", shapes, FORWARD, KERNEL_US, **sequence)
        for _ in range(2):
            node = trace.now
            trace.launch("aten::mm", [data, weight], BACKWARD, KERNEL_US)
            trace.launch("aten::mm", [[WIDTH, ROWS], data], BACKWARD, KERNEL_US)
            trace.around("autograd::engine::evaluate_function: AddmmBackward0", node)
            done = trace.now
            gradient: dict[str, Any] = {"Input Dims": [weight], "Input type": ["float"]}
            trace.events.append(span("torch::autograd::AccumulateGrad", done, 2, **gradient))
            trace.now += 3
        update = trace.now
        for _ in range(4):
            trace.launch("aten::_foreach_add_", [[1]], UPDATE, UPDATE_US)
        trace.around("Optimizer.step#Adam.step", update, "user_annotation")
        if waits:
            until = max(trace.free, trace.now) + 2
            trace.number += 1
            call: dict[str, Any] = {"cat": "cuda_runtime", "correlation": trace.number}
            trace.events.append(span("cudaDeviceSynchronize", trace.now, until - trace.now, **call))
            trace.now = until
        trace.around(f"ProfilerStep#{step}", begun, "user_annotation")
        trace.now += 4
    text = json.dumps({"traceEvents": trace.events}).encode()
    return recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)
