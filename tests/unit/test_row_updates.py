"""Optimizers of several workers update the rows that any of them touches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from autotune.profiling.traces.job import TraceJob, read_job
from autotune.whatif.base import Base
from autotune.whatif.messages.row_updates import UNKNOWN, with_rows_of_all
from autotune.whatif.question import Gradient, Reading, TouchedRows
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base

ROWS, WIDTH, LOOKED_UP = 500, 8, 50


def recorded(folder: Path) -> TraceJob:
    """Steps of a table and of a layer whose weight has rows of the same width."""
    torch.manual_seed(0)
    table, layer = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 4)
    rows = torch.optim.SparseAdam(table.parameters())
    dense = torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        for _ in range(4):
            rows.zero_grad()
            dense.zero_grad()
            layer(table(torch.randint(ROWS, (LOOKED_UP,)))).sum().backward()
            rows.step()
            dense.step()
            profiler.step()
    path = folder / "rank0.json"
    profiler.export_chrome_trace(str(path))
    return read_job(path)


def known(job: TraceJob) -> tuple[Base, tuple[Gradient, ...]]:
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    assert gradients is not None
    return base, gradients


def test_workers_touch_rows_together() -> None:
    half = TouchedRows(50, 100, 1.0).of_all(2)
    assert (half.optimistic, half.expected, half.pessimistic) == (1.0, 1.5, 2.0)
    all_rows = TouchedRows(100, 100, 1.0).of_all(8)
    assert (all_rows.optimistic, all_rows.expected, all_rows.pessimistic) == (1.0, 1.0, 1.0)
    assert TouchedRows(1, 10**9, 1.0).of_all(4).expected == pytest.approx(4)
    assert TouchedRows(0, 100, 1.0).of_all(4).pessimistic == 1.0
    assert TouchedRows(50, 100, 1.0).of_all(1).pessimistic == 1.0


def test_only_what_works_on_rows_of_the_table_takes_longer(tmp_path: Path) -> None:
    base, gradients = known(recorded(tmp_path))
    (table,) = [one for one in gradients if one.touched is not None]
    assert table.touched is not None
    assert (table.shape, table.touched.count) == ((ROWS, WIDTH), LOOKED_UP)
    changed = with_rows_of_all(base, gradients, 2, Reading.EXPECTED)
    factor = table.touched.of_all(2).expected
    assert factor == pytest.approx(1.9)
    longer = changed.duration_s > base.duration_s
    assert changed.duration_s[longer] == pytest.approx(factor * base.duration_s[longer])
    operators = [base.names.operators[number] for number in base.operator[longer]]
    assert {one.optimizer for one in operators} == {"SparseAdam"}
    assert {"aten::sub", "aten::sqrt_", "aten::index", "aten::add"} <= {
        one.name for one in operators
    }
    assert changed.notes == base.notes
    twice = with_rows_of_all(base, (*gradients, table), 2, Reading.EXPECTED)
    assert (twice.duration_s == changed.duration_s).all(), "two tables of one shape"


def test_an_optimizer_whose_operators_lack_shapes_stays_and_is_noted(tmp_path: Path) -> None:
    base, gradients = known(recorded(tmp_path))
    unnamed = tuple(replace(one, shape=()) for one in gradients)
    changed = with_rows_of_all(base, unnamed, 2, Reading.EXPECTED)
    assert np.array_equal(changed.duration_s, base.duration_s)
    assert changed.notes[-1] == UNKNOWN
