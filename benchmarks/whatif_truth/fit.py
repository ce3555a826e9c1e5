"""Fits a `FactorTable` to the recordings and unrecorded times of some models.

Each model gives its own values once (`Facts`). A table holds their medians, and ranges that hold
the next model's value with 80 %. So a table without one model costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from autotune.arrays import FloatArray
from autotune.dfg.graph import NONE, Kind
from autotune.profiling.graph.host_units import ACCUMULATE
from autotune.whatif.base import Base, steady
from autotune.whatif.changes.batch import batch
from autotune.whatif.changes.precision import LAYOUT_KERNEL, PRODUCTS, product_calls, tf32
from autotune.whatif.kernels.factors import FactorTable, Roofline
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.kernels.kernel_classes import KernelClass, kernel_classes
from autotune.whatif.kernels.operator_work import ALIGNED, ProductWork
from autotune.whatif.primitives import select
from autotune.whatif.question import Factor, Question
from autotune.whatif.recording.recording_cost import (
    RecordingCost,
    recorded_events,
    without_recording,
)
from benchmarks.whatif_truth.recorded_models import BF16, PLAIN, RecordedModel, Timed

SHORTEST_S = 0.2e-3
"""A class needs this much time in a model for a ratio."""
_CASTS = ("bfloat16_copy_kernel", "direct_copy_kernel")
Rows = list[tuple[ProductWork, float]]


@dataclass(frozen=True)
class Tf32:
    """Device time of all products in TF32 and in bf16, and how many directions they have."""

    tf32_s: float
    bf16_s: float
    directions: dict[KernelClass, int]
    layouts: int

    def factor(self, products: Mapping[KernelClass, Roofline], layout_s: float) -> float:
        """`FactorTable.tf32`, given the fixed parts."""
        fixed_s = sum(products[one].fixed_s * count for one, count in self.directions.items())
        fixed_s += layout_s * self.layouts
        return (self.tf32_s - fixed_s) / (2 * (self.bf16_s - fixed_s))


@dataclass(frozen=True)
class Facts:
    """What one model shows; None or absent where it shows nothing. Times in seconds."""

    model: str
    products: Rows
    layout: list[tuple[float, int, float]]  # bytes, directions, seconds
    casts: tuple[float, float]  # bytes, seconds
    classes: dict[KernelClass, float]
    tf32: Tf32 | None
    fixed_s: float | None
    fused: float | None
    each_host_s: float | None
    cast_host_s: float | None
    recording: list[tuple[int, int, float]]  # operators, calls, seconds too much
    replay_error: float
    repetition: float  # half the range of repeated measurements, relative


def facts(model: RecordedModel) -> Facts:
    plain = without_recording(model.plain, H100.recording)
    products, layout = _products(model.bf16)
    tensors = _tensors(model.plain)
    return Facts(
        model.name,
        products,
        layout,
        _casts(model.bf16),
        _classes(model),
        _tf32(model, plain),
        _fixed_s(model, plain),
        _fused(model),
        _each_host_s(model, tensors),
        _cast_host_s(model),
        [*_recording(model, model.plain, "fp32"), *_recording(model, model.bf16, BF16)],
        steady(plain).step_s / model.plain_s - 1,
        float(np.ptp([one.step_s for one in model.times(PLAIN)])) / 2 / model.plain_s,
    )


def _products(base: Base) -> tuple[Rows, list[tuple[float, int, float]]]:
    classes = kernel_classes(base)
    rows: Rows = []
    layout: list[tuple[float, int, float]] = []
    for call in product_calls(base):
        changes = np.array([classes[op] is KernelClass.LAYOUT for op in call.ops])
        rows.append((call.work, float(base.duration_s[call.ops[~changes]].sum())))
        if changes.any():
            seconds = float(base.duration_s[call.ops[changes]].sum())
            layout.append((4 * call.work.layout, call.work.directions, seconds))
    return rows, layout


def _casts(base: Base) -> tuple[float, float]:
    """Bytes and seconds of the casts whose operators state shapes."""
    total_bytes, total_s = 0.0, 0.0
    for op in np.flatnonzero(base.on_device).tolist():
        call = int(base.operator[op])
        if call == NONE or not any(name in base.names.ops[op] for name in _CASTS):
            continue
        inputs = base.names.operators[call].inputs
        if inputs is not None and inputs.dims[0]:
            total_bytes += 6 * float(np.prod(inputs.dims[0]))
            total_s += float(base.duration_s[op])
    return total_bytes, total_s


def _class_seconds(base: Base) -> dict[KernelClass, float]:
    seconds = dict.fromkeys(KernelClass, 0.0)
    for op, one in enumerate(kernel_classes(base)):
        if one is not None and not any(name in base.names.ops[op] for name in _CASTS):
            seconds[one] += float(base.duration_s[op])
    return seconds


def _classes(model: RecordedModel) -> dict[KernelClass, float]:
    before, after = _class_seconds(model.plain), _class_seconds(model.bf16)
    for seconds in (before, after):  # where shapes are unknown, layouts are a part of convolutions
        seconds[KernelClass.CONVOLUTION] += seconds[KernelClass.LAYOUT]
    return {
        one: after[one] / before[one]
        for one in KernelClass
        if before[one] >= SHORTEST_S and one is not KernelClass.LAYOUT
    }


def _device_bound(model: RecordedModel, variant: str) -> Timed | None:
    timed = [one for one in model.times(variant) if not one.host_bound]
    return timed[0] if timed else None


def _tf32(model: RecordedModel, plain: Base) -> Tf32 | None:
    """The time of products that explains the step in TF32."""
    timed = _device_bound(model, "tf32")
    if timed is None:
        return None
    rows, layout = _products(model.bf16)
    bf16_s = sum(seconds for _, seconds in rows) + sum(seconds for *_, seconds in layout)
    table = replace(H100, tf32=ONE)
    changed = tf32(plain, Question(), table)
    predicted_s = float(changed.duration_s.sum() - plain.duration_s.sum())
    predicted_s += sum(float(plain.duration_s[call.ops].sum()) for call in product_calls(plain))
    inserted = select(changed, name=f"launch {re.escape(LAYOUT_KERNEL)}")
    predicted_s -= float(changed.duration_s[inserted].sum())
    off_s = timed.step_s - steady(changed).step_s + steady(plain).step_s - model.plain_s
    directions = dict.fromkeys(PRODUCTS, 0)
    for work, _ in rows:
        directions[work.kind] += work.directions
    return Tf32(predicted_s + off_s, bf16_s, directions, sum(count for _, count, _ in layout))


def _fixed_s(model: RecordedModel, plain: Base) -> float | None:
    """The fixed time of a kernel that explains the step of half a batch."""
    timed = _device_bound(model, "half_batch")
    if timed is None:
        return None
    question = Question(amounts={"batch": 0.5})

    def step_s(fixed_s: float) -> float:
        table = replace(H100, fixed_s=Factor(fixed_s, fixed_s, fixed_s, "tried"))
        return steady(batch(plain, question, table)).step_s

    without_s, with_s = step_s(0.0), step_s(10e-6)
    wanted_s = timed.step_s + steady(plain).step_s - model.plain_s
    return max(0.0, (wanted_s - without_s) / (with_s - without_s) * 10e-6)


def _update_s(base: Base) -> float:
    return float(base.duration_s[base.on_device & (base.kind == Kind.UPDATE)].sum())


def _fused(model: RecordedModel) -> float | None:
    timed = _device_bound(model, "optimizer_fused")
    update_s = _update_s(model.plain)
    if timed is None or not update_s:
        return None
    return float(np.clip(1 - (model.plain_s - timed.step_s) / update_s, 0.1, 1.0))


def _tensors(base: Base) -> int:
    return sum(operator.name == ACCUMULATE for operator in base.names.operators)


def _each_host_s(model: RecordedModel, tensors: int) -> float | None:
    """Host time of an operation on one parameter, where the host is the bottleneck."""
    base = model.plain
    ops = base.launched[base.kind[base.launched] == Kind.UPDATE]
    calls = len(set(base.operator[ops].tolist()))
    for timed in model.times("optimizer_for_each"):
        if timed.host_bound and tensors and calls:
            return max(0.0, timed.issue_s - model.plain_issue_s) / (tensors * calls)
    return None


def _cast_host_s(model: RecordedModel) -> float | None:
    casts = sum(
        any(name in model.bf16.names.ops[op] for name in _CASTS)
        for op in np.flatnonzero(model.bf16.on_device)
    )
    issues_s = [one.issue_s for name in (BF16, "amp_fp16") for one in model.times(name)]
    return max(0.0, min(issues_s) - model.plain_issue_s) / max(casts, 1) if issues_s else None


def _recording(model: RecordedModel, base: Base, variant: str) -> list[tuple[int, int, float]]:
    """How much longer the host's work is than the unrecorded issue."""
    begins, calls = recorded_events(base)
    host = ~base.on_device & (base.queue != NONE)
    recorded_s = float((base.duration_s + base.gap_s)[host].sum()) - end_wait_s(base)
    issue_s = min((one.issue_s for one in model.times(variant)), default=recorded_s)
    return [(int(begins.sum()), int(calls.sum()), recorded_s - issue_s)]


def end_wait_s(base: Base) -> float:
    """Host time in ops that wait for the device."""
    waits = np.array(["Synchronize" in name for name in base.names.ops]) & ~base.on_device
    return float((base.duration_s + base.gap_s)[waits].sum())


def table_of(known: Sequence[Facts]) -> FactorTable:
    """The table of some models' facts."""
    source = f"recordings and step times of {', '.join(one.model for one in known)} on an H100"

    def factor(values: Sequence[float | None], default: Factor) -> Factor:
        shown = [value for value in values if value is not None]
        if not shown:
            return default
        return prediction_interval(float(np.median(shown)), shown, source)

    layout = [row for one in known for row in one.layout]
    layout_costs = [1 / H100.layout_bytes_per_s, H100.layout_s]
    if layout:
        layout_costs = robust_costs([row[:2] for row in layout], [row[2] for row in layout])
    cast_bytes, casts_s = (sum(one.casts[place] for one in known) for place in (0, 1))
    classes = {one for facts_ in known for one in facts_.classes}
    products = {one: _roofline([f.products for f in known], one, source) for one in PRODUCTS}
    return FactorTable(
        device=H100.device,
        products=products,
        layout_bytes_per_s=1 / layout_costs[0],
        layout_s=layout_costs[1],
        classes={
            one: factor([f.classes.get(one) for f in known], H100.classes.get(one, ONE))
            for one in sorted(classes, key=lambda one: one.name)
        },
        tf32=_with_theory(
            [one.tf32.factor(products, layout_costs[1]) for one in known if one.tf32], source
        ),
        cast_bytes_per_s=cast_bytes / casts_s if casts_s else H100.cast_bytes_per_s,
        cast_s=H100.cast_s,
        cast_host_s=factor([one.cast_host_s for one in known], H100.cast_host_s),
        fixed_s=factor([one.fixed_s for one in known], H100.fixed_s),
        fused=factor([one.fused for one in known], H100.fused),
        each_s=H100.each_s,
        each_host_s=factor([one.each_host_s for one in known], H100.each_host_s),
        recording=_recording_cost([row for one in known for row in one.recording], source),
    )


def _with_theory(values: Sequence[float], source: str) -> Factor:
    """The mean of few measured values and of 1, which the rates in the data sheet give."""
    return prediction_interval(float(np.mean([*values, 1.0])), [*values, 1.0], source)


def prediction_interval(expected: float, values: Sequence[float], source: str) -> Factor:
    """Holds all values, and the next one with 80 % if they are normally distributed."""
    margin = T_QUANTILES[min(len(values), 5)] * float(np.std(values, ddof=len(values) > 1))
    margin *= float(np.sqrt(1 + 1 / len(values)))
    low, high = min([*values, expected - margin]), max([*values, expected + margin])
    return Factor(expected, max(low, 0.0), high, source)


def robust_costs(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Costs of at least 0 whose sums explain `seconds`: few odd rows, such as a network's first
    convolution, count little (least squares of relative errors, reweighted by them).
    """
    matrix = np.array(columns, dtype=np.float64)
    wanted = np.array(seconds)
    scales = matrix.mean(axis=0)
    matrix = matrix / scales
    weights = 1 / np.sqrt(wanted)
    costs = np.zeros(len(scales))
    for _ in range(REWEIGHTINGS):
        costs, _ = nnls(matrix * weights[:, None], wanted * weights)
        off = np.abs(matrix @ costs / wanted - 1)
        weights = 1 / np.sqrt(wanted * np.maximum(off, LEAST_ERROR))
    return [float(cost) for cost in np.maximum(costs, TINY) / scales]


T_QUANTILES = {1: 0.0, 2: 3.08, 3: 1.89, 4: 1.64, 5: 1.53}
"""Of Student's t at 0.9: two-sided 80 % for the next value after so many."""
REWEIGHTINGS, LEAST_ERROR, TINY = 20, 0.05, 1e-9
ONE = Factor(1.0, 1.0, 1.0, "unchanged")


def _roofline(models: Sequence[Rows], kind: KernelClass, source: str) -> Roofline:
    """Least squares on relative errors, weighted by time; the spread is that of models' totals."""
    of_kind = [[row for row in rows if row[0].kind is kind and row[1] > 0] for rows in models]
    aligned = [row for rows in of_kind for row in rows if row[0].alignment == ALIGNED]
    if not aligned:
        return H100.products[kind]
    flops_s, bytes_s, fixed_s = robust_costs(
        [(work.flops, 2 * work.elements, work.directions) for work, _ in aligned],
        [seconds for _, seconds in aligned],
    )
    fitted = Roofline(1 / flops_s, 1 / bytes_s, fixed_s, 1.0, ONE)
    odd = [row for rows in of_kind for row in rows if row[0].alignment < ALIGNED]
    unaligned = H100.products[kind].unaligned
    if odd:
        wanted_s = sum(value - 2 * work.elements * bytes_s - fixed_s for work, value in odd)
        plain_s = sum(work.flops / work.alignment for work, _ in odd) * flops_s
        unaligned = max(1.0, wanted_s / plain_s)
    fitted = replace(fitted, unaligned=unaligned)
    ratios = [
        sum(value for _, value in rows) / sum(fitted.seconds(work) for work, _ in rows)
        for rows in of_kind
        if sum(value for _, value in rows) >= SHORTEST_S
    ]
    spread = Factor(1.0, min([1.0, *ratios]), max([1.0, *ratios]), source)
    return replace(fitted, spread=spread)


def _recording_cost(rows: Sequence[tuple[int, int, float]], source: str) -> RecordingCost:
    columns = np.array([row[:2] for row in rows], dtype=np.float64)
    seconds = np.array([row[2] for row in rows])
    solve: Callable[[FloatArray, FloatArray], tuple[FloatArray, float]] = nnls
    costs, _ = solve(columns, np.maximum(seconds, 0.0))
    ratios = np.maximum(seconds, 0.0) / np.maximum(columns @ costs, 1e-9)
    low, high = min(1.0, float(ratios.min())), max(1.0, float(ratios.max()))
    operator, call = (
        Factor(float(cost), float(cost) * low, float(cost) * high, source) for cost in costs
    )
    return RecordingCost(operator, call)
