"""The memory of a step from the blocks that torch's profiler states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.errors import InvalidInput
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.recordings.memory_profile import MemoryProfile, TensorRole
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.recording.traced_memory import traced_memory

WIDTH, LAYERS = 64, 4


def recorded(folder: Path, batch: int, *, model_first: bool = False) -> Path:
    """Record four steps; the blocks of the model are stated if it is built while recording."""
    path = folder / f"rank0.{batch}.{model_first}.json"
    activities = [torch.profiler.ProfilerActivity.CPU]

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers)
        momentum = 0.0 if model_first else 0.9
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    built = build() if model_first else None
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True
    ) as profiler:
        model, optimizer = built or build()
        profiler.step()
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(batch, WIDTH)).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def memory_of(job: TraceJob) -> MemoryProfile | None:
    base = recorded_base(job, 0)
    return traced_memory(job.ranks[0], base, gradients_of(job, 0, base))


def test_blocks_show_the_peak_and_what_grows_with_the_batch(tmp_path: Path) -> None:
    small, large = (memory_of(read_job([recorded(tmp_path, batch)])) for batch in (256, 512))
    assert small is not None and large is not None
    parameter_bytes = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    assert small.bytes_of(TensorRole.PARAMETER) == parameter_bytes
    assert small.bytes_of(TensorRole.GRADIENT) == parameter_bytes
    assert small.bytes_of(TensorRole.OPTIMIZER) >= parameter_bytes  # momentum
    # activations of all layers, and the gradient of one
    least = 3 * parameter_bytes + LAYERS * 256 * WIDTH * 4
    assert least <= small.live_bytes.max() <= least + 3 * 256 * WIDTH * 4 + 4096
    replica = ReplicaMemory(small, batch=256, device_bytes=int(large.live_bytes.max()))
    assert replica.batch_times == pytest.approx(2.0, rel=0.02)


def test_totals_without_the_model_are_refused(tmp_path: Path) -> None:
    job = read_job([recorded(tmp_path, 8, model_first=True)])
    with pytest.raises(InvalidInput, match="begin it before the model is built"):
        memory_of(job)


def test_traces_without_blocks_or_sizes_have_no_memory(tmp_path: Path) -> None:
    path = recorded(tmp_path, 8)
    job = read_job([path])
    base = recorded_base(job, 0)
    with pytest.raises(InvalidInput, match="sizes of its gradients"):
        traced_memory(job.ranks[0], base, None)
    on_device = replace(base, on_device=base.on_device | True)
    with pytest.raises(InvalidInput, match="only those of the host"):
        traced_memory(job.ranks[0], on_device, gradients_of(job, 0, base))
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:  # as before torch 1.10
        if event.get("name") == "[memory]":
            del event["args"]["Total Allocated"]
    path.write_text(json.dumps(trace))
    old = read_job([path])
    assert memory_of(old) is None
    assert old.ranks[0].dropped
