"""Time of a rank for packing, compressing and summing the elements of messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from autotune.jobs.campaign.step_costs import PAUSE_S
from runtime_rewriter.compression import RowLayout, picked
from runtime_rewriter.pytorch.exchange.direct import sum_in_order
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows
from runtime_rewriter.pytorch.exchange.rows import (
    Form,
    GradientRows,
    RowBuffers,
    gradient_of,
    rows_of,
    summed,
)
from runtime_rewriter.pytorch.exchange.top_k import PickedRows

SMALL, LARGE = 2**14, 2**21
"""Elements of the two messages between which a slope is measured."""
CPU = torch.device("cpu")
RATIO, RANK, COLUMNS, TOGETHER = 0.01, 4, 64, 64
SHARE_S = 0.2


def mean_cpu_s(
    operation: Callable[[], object], pause_s: float = PAUSE_S, share_s: float = SHARE_S
) -> float:
    """Return the mean CPU time of one call after a pause."""
    operation()
    began_s, taken_s, calls = time.perf_counter(), 0.0, 0
    while time.perf_counter() - began_s < share_s or calls < 3:
        if pause_s > 0:
            time.sleep(pause_s)
        start_s = time.process_time()
        operation()
        taken_s += time.process_time() - start_s
        calls += 1
    return taken_s / calls


def line(
    of_elements: Callable[[int], Callable[[], object]], pause_s: float = PAUSE_S
) -> tuple[float, float]:
    """Return (seconds per call, seconds per element)."""
    small, large = (mean_cpu_s(of_elements(count), pause_s) for count in (SMALL, LARGE))
    slope = max(large - small, 0.0) / (LARGE - SMALL)
    return max(small - slope * SMALL, 0.0), slope


def packing(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    def of(count: int) -> Callable[[], object]:
        source, out = torch.randn(count), torch.zeros(count, dtype=dtype)
        return lambda: torch.mul(source, 0.25, out=out)

    return of


def writing(count: int) -> Callable[[], object]:
    """Write `TOGETHER` averages, as the runtime writes all that have arrived."""
    sources, out = ([torch.randn(count // TOGETHER) for _ in range(TOGETHER)] for _ in range(2))
    return lambda: torch._foreach_copy_(out, sources)


def int8(part: str) -> Callable[[int], Callable[[], object]]:
    def of(count: int) -> Callable[[], object]:
        layout = RowLayout.of(count, 4)
        rows, values = QuantisedRows(layout, torch.float32, CPU), torch.randn(layout.elements)
        rows.encode_(values.clone())
        return (lambda: rows.encode_(values)) if part == "encode" else (lambda: rows.decode(values))

    return of


def top_k(count: int) -> Callable[[], object]:
    rows, values = PickedRows(1, picked(count, RATIO), torch.float32, CPU), torch.randn(count)
    return lambda: rows.encode_(values.add_(1e-3))


def top_k_sum(count: int) -> Callable[[], object]:
    rows, out = PickedRows(1, count, torch.float32, CPU), torch.zeros(count)
    rows.indices[0].copy_(torch.randperm(count))
    return lambda: out.index_add_(0, rows.indices[0], rows.values[0])


def owned_sum(count: int) -> Callable[[], object]:
    """Add one rank's part of a direct exchange as its owner does."""
    parts = [torch.randn(count) for _ in range(2)]
    return lambda: sum_in_order(parts, None)


def table_of(count: int) -> tuple[nn.Parameter, list[GradientRows]]:
    """Return a table and the rows of it that four ranks touch: a tenth each, `count` values."""
    touched = count // (4 * COLUMNS)
    parameter = nn.Parameter(torch.zeros(10 * touched, COLUMNS))
    numbers = (torch.randperm(10 * touched)[:touched].sort().values for _ in range(4))
    return parameter, [
        GradientRows(each, torch.randn(touched, COLUMNS), Form.COO) for each in numbers
    ]


def rows_taken(count: int) -> Callable[[], object]:
    """Take `count` values of one rank, in the order of a batch."""
    parameter, (rows, *_) = table_of(4 * count)
    mixed = torch.randperm(rows.count)
    gradient = torch.sparse_coo_tensor(
        rows.indices[mixed][None], rows.values[mixed], parameter.shape, check_invariants=False
    )
    buffers = RowBuffers.of(parameter, None)

    def taken() -> None:
        rows = rows_of(gradient, parameter, 0.25)
        buffers.packed(rows, rows.count)

    return taken


def rows_added(count: int) -> Callable[[], object]:
    _, parts = table_of(count)
    return lambda: summed(parts)


def rows_written(count: int) -> Callable[[], object]:
    """Write a sum of `count` values."""
    parameter, (rows, *_) = table_of(4 * count)
    gradient = gradient_of(GradientRows(rows.indices, rows.values.clone(), Form.COO), parameter)
    return lambda: gradient.copy_(gradient_of(rows, parameter))


def low_rank(count: int) -> Callable[[], object]:
    """Compute the three products for a square matrix of `count` / `RANK` elements."""
    side = math.isqrt(count // RANK)
    values, start = torch.randn(side * side), torch.randn(side, RANK)
    low = LowRank(values, [(side, side)], RANK, 1, lambda _: start)

    def products() -> None:
        low.project()
        low.project_back()
        low.restore()

    return products
