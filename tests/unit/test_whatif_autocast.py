"""What autocast changes on a processor, predicted from a trace without it and seen in one with it.

The module has what the rules are about: an embedding, a normalization, residual sums, dropout, a
recurrent layer, parameters that are used twice, and a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autotune.profiling.formats.op_inputs import OpInputs
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import Base
from autotune.whatif.kernels.autocast import autocast
from autotune.whatif.recording.recorded import recorded_base


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Linear(8 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images)))
        hidden = torch.relu(self.norm(self.second(hidden)) + hidden)
        result: Tensor = self.head(hidden.flatten(1))
        return result


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.recurrent, self.head = nn.LSTM(16, 12), nn.Linear(12, 10)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.table(words)
        for _ in range(2):
            branch = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
            hidden = hidden + nn.functional.dropout(branch, 0.1)
        result: Tensor = self.head(self.recurrent(hidden)[0]).flatten(0, 1)
        return result


def recorded(model: nn.Module, batch: Tensor, path: Path, *, half: bool) -> Path:
    """Record four steps, with or without autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                logits = model(batch)
                loss = nn.functional.cross_entropy(logits, torch.zeros(len(logits)).long())
            loss.backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def predicted_casts(base: Base) -> Counter[tuple[str, tuple[int, ...]]]:
    """(phase, tensor) -> how often a step is to cast it."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for cast in autocast(base).casts:
        counts["forward", cast.dims] += 1
        counts["backward", cast.dims] += cast.back
    return +counts


def seen_casts(base: Base) -> Counter[tuple[str, tuple[int, ...]]]:
    """(phase, tensor) -> how often the recorded step casts it between float32 and bfloat16."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one in base.names.operators:
        if one.name != "aten::copy_" or one.inputs is None or "aten::_to_copy" not in one.around:
            continue
        if {"float", "c10::BFloat16"} <= set(one.inputs.types):
            back = one.outer.startswith("autograd::engine")
            counts["backward" if back else "forward", one.inputs.dims[0]] += 1
    return counts


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Images(), torch.rand(4, 3, 8, 8)),
        pytest.param(
            Words(),
            torch.arange(24).reshape(6, 4),
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                reason="torch trains no LSTM under autocast on a CPU without AVX-512 or AMX",
            ),
        ),
    ],
)
def test_casts_of_autocast_are_those_of_a_recording_with_it(
    model: nn.Module, batch: Tensor, tmp_path: Path
) -> None:
    plain = recorded(model, batch, tmp_path / "plain.json", half=False)
    base = recorded_base(read_job(plain), 0)
    half = recorded(model, batch, tmp_path / "half.json", half=True)
    assert predicted_casts(base) == seen_casts(recorded_base(read_job(half), 0))
    computed = {base.names.operators[number].name for number in autocast(base).half}
    assert computed & {"aten::native_batch_norm", "aten::gelu"}
    assert "aten::_log_softmax" not in computed and "aten::native_layer_norm" not in computed
    for change in (
        lambda dims: dims[:1],
        lambda dims: tuple((*one[:-1], 0) for one in dims if one),
    ):
        assert autocast(with_inputs(base, change)).half  # damaged traces do not end it


def with_inputs(
    base: Base, change: Callable[[tuple[tuple[int, ...], ...]], tuple[tuple[int, ...], ...]]
) -> Base:
    """The base with other sizes of its operators' inputs; as many types stay."""
    operators = []
    for one in base.names.operators:
        if one.inputs is not None:
            dims = change(one.inputs.dims)
            one = replace(one, inputs=OpInputs(dims, one.inputs.types[: len(dims)]))
        operators.append(one)
    return replace(base, names=replace(base.names, operators=tuple(operators)))
