"""Published step times of DDP on many placements, predicted from two of them.

The tables of AdaptDL (OSDI 2021, artifact) hold step times on up to 4 hosts of 4 T4 GPUs each, by
placement (a digit per host: its GPUs) and batch per GPU. Two placements calibrate a model's
prediction; all others are predicted by the replay of DDP's buckets:

- one GPU: the computation of each batch;
- `CALIBRATED`: two numbers, the bandwidth of the hosts' links and the latency, by least squares.

The share of the passes and the order of the gradients are those of the model's op graph in the zoo
(assumed); inner links have the cluster file's usual rate. Gradients of the CIFAR-10 model are those
of ResNet-18.

A table's own noise: the relative difference of a row from the median of the rows whose placements
have the same digits in another order, which are the same cluster. No prediction can be closer.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import minimize

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, Host
from autotune.lowering.lower import Lowering
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.workload import Variable, Workload
from autotune.zoo.assumed_models import assumed_ops
from benchmarks.repository import print_result, reference_data

ALONE, CALIBRATED = "1", "1234"
"""One GPU, and the placement that has hosts of every size."""
INNER_BYTES_PER_S, INNER_LATENCY_S = 1e10, 5e-6
FIRST_BYTES_PER_S, FIRST_LATENCY_S = 6e8, 1e-4
TABLES = ("bert", "cifar10", "imagenet")


@dataclass(frozen=True)
class Row:
    placement: str
    batch: int
    step_s: float


@dataclass(frozen=True)
class Predicted:
    """A row and its predicted step time."""

    row: Row
    step_s: float

    @property
    def error(self) -> float:
        return abs(self.step_s / self.row.step_s - 1)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [
            Row(one["placement"], int(one["local_bsz"]), float(one["step_time"]))
            for one in csv.DictReader(file)
        ]


@cache
def workload_of(table: str) -> Workload:
    """The gradients of a table's model and their times, in the shares of an assumed device."""
    if table == "imagenet":
        return assumed_ops("resnet50").workload()
    if table == "bert":
        return assumed_ops("bert-base").workload()
    return replace(
        Workload("resnet18", _resnet18(), device="cuda", source="assumed"),
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.1,
    )


def _resnet18() -> tuple[Variable, ...]:
    """ResNet-18 for CIFAR-10, in backward order; its 11.17 million parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        for block in range(2):
            first = inputs if block == 0 else outputs
            shapes += [(outputs, first, 3, 3), (outputs,), (outputs,)]
            shapes += [(outputs, outputs, 3, 3), (outputs,), (outputs,)]
            if first != outputs:
                shapes += [(outputs, first, 1, 1), (outputs,), (outputs,)]
        inputs = outputs
    shapes += [(10, 512), (10,)]
    return tuple(Variable(f"p{at}", shape) for at, shape in reversed(list(enumerate(shapes))))


def on_hosts(placement: str, bytes_per_s: float, latency_s: float) -> Cluster:
    inner = INNER_BYTES_PER_S, INNER_LATENCY_S
    hosts = (
        Host(f"h{at}", int(devices), bytes_per_s, latency_s, *inner)
        for at, devices in enumerate(placement)
    )
    return Cluster(placement, tuple(hosts))


def scaled(workload: Workload, compute_s: float) -> Workload:
    """The workload with passes that take this long together."""
    factor = compute_s / workload.compute_s
    variables = tuple(
        replace(
            one,
            ready_s=None if one.ready_s is None else one.ready_s * factor,
            needed_s=None if one.needed_s is None else one.needed_s * factor,
        )
        for one in workload.variables
    )
    return replace(
        workload,
        variables=variables,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        update_s=workload.update_s * factor,
    )


class Calibrated:
    """A model's computation by batch, and the links that explain the second placement."""

    def __init__(self, table: str, rows: Sequence[Row], second: str = CALIBRATED) -> None:
        self.workload = workload_of(table)
        self.compute_s = {row.batch: row.step_s for row in rows if row.placement == ALONE}
        given = [row for row in rows if row.placement == second and row.batch in self.compute_s]
        start: FloatArray = np.log(np.array([FIRST_BYTES_PER_S, FIRST_LATENCY_S]))

        def misfit(logs: FloatArray) -> float:
            links = float(np.exp(logs[0])), float(np.exp(logs[1]))
            return sum((self.step_s(row, *links) / row.step_s - 1) ** 2 for row in given)

        minimum = minimize(misfit, start, method="Nelder-Mead", options={"maxfev": 80})
        self.bytes_per_s, self.latency_s = np.exp(minimum.x).tolist()

    def step_s(self, row: Row, bytes_per_s: float, latency_s: float) -> float:
        workload = scaled(self.workload, self.compute_s[row.batch])
        cluster = on_hosts(row.placement, bytes_per_s, latency_s)
        strategy = ddp_default(workload)
        return Lowering(workload, cluster).step_s(plan(strategy, workload, cluster.world_size))

    def predicted(self, row: Row) -> Predicted:
        return Predicted(row, self.step_s(row, self.bytes_per_s, self.latency_s))


def noise(rows: Sequence[Row]) -> float:
    """Mean relative difference from the median of equal clusters, over rows that have a double."""
    equal: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        equal.setdefault(("".join(sorted(row.placement)), row.batch), []).append(row.step_s)
    several = [times for times in equal.values() if len(times) > 2]
    return fmean(abs(time / median(times) - 1) for times in several for time in times)


def scaling_result(second: str = CALIBRATED) -> tuple[str, Mapping[str, object]] | None:
    """(table, keys for the benchmark's last line); None without the reference data."""
    folder = reference_data()
    if folder is None:
        return None
    lines = [
        "| table | rows | mean error | largest | without communication | noise | link | latency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    noises: list[float] = []
    for table in TABLES:
        rows = read_rows(folder / "scaling" / table / "placements.csv")
        model = Calibrated(table, rows, second)
        rest = [
            model.predicted(row)
            for row in rows
            if row.placement not in (ALONE, second) and row.batch in model.compute_s
        ]
        of_table = [one.error for one in rest]
        free = fmean(abs(model.compute_s[one.row.batch] / one.row.step_s - 1) for one in rest)
        errors += of_table
        noises.append(noise(rows))
        lines.append(
            f"| {table} | {len(rest)} | {fmean(of_table):.1%} | {max(of_table):.1%} | {free:.1%} "
            f"| {noises[-1]:.1%} | {model.bytes_per_s * 8e-9:.2f} Gbit/s "
            f"| {model.latency_s * 1e6:.0f} us |"
        )
    keys = {
        "error_mean_scaling": fmean(errors),
        "error_max_scaling": max(errors),
        "rows_scaling": len(errors),
        "noise_scaling": fmean(noises),
    }
    return "\n".join(lines), keys


if __name__ == "__main__":
    print_result(scaling_result())
