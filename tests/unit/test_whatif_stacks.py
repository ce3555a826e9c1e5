"""Traces with Python stacks (`with_stack=True`): frames name the layers and change no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autotune.dfg.graph import NONE
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import Base, steady
from autotune.whatif.recording.recorded import recorded_base


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path_factory.mktemp("stacks") / "rank0.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(16, 32)).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def layers_of(base: Base) -> set[str]:
    layers = base.names.layers
    return {
        layers[layer]
        for name, layer in zip(base.names.ops, base.layer.tolist(), strict=True)
        if layer != NONE and "addmm" in name
    }


def test_frames_name_the_layers(path: Path) -> None:
    base = recorded_base(read_job([path]), 0)
    assert steady(base).step_s == pytest.approx(base.measured_s, rel=0.02)
    assert layers_of(base) == {"Linear_0", "Linear_1"}


def test_the_step_is_the_same_without_frames(path: Path, tmp_path: Path) -> None:
    trace = json.loads(path.read_text())
    frames = [one for one in trace["traceEvents"] if one.get("cat") == "python_function"]
    assert len(frames) > 100
    trace["traceEvents"] = [
        one for one in trace["traceEvents"] if one.get("cat") != "python_function"
    ]
    bare = tmp_path / "rank0.json"
    bare.write_text(json.dumps(trace))
    with_frames, without = (recorded_base(read_job([one]), 0) for one in (path, bare))
    assert steady(with_frames).step_s == pytest.approx(steady(without).step_s, rel=1e-6)
    assert layers_of(without) == {"linear_0", "linear_1"}
