"""The A100 trace of DDP with its collectives removed, and put back from a table of NCCL's times.

`traces/ddp_a100` is one of two ranks. Its recorded all-reduces contain waiting for the other rank,
whose trace is missing, and compete with kernels. The table was measured by others on two A100 of
another machine, alone. The truth is the recorded step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.cluster import Cluster, Host
from autotune.profiling.fits.table_fits import table_fits
from autotune.profiling.formats.collective_table import read_collective_table
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import steady
from autotune.whatif.changes.distributed import collectives, distributed
from autotune.whatif.primitives import remove
from autotune.whatif.question import Question, Reading
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import print_result, reference_data

TRACE = Path("traces", "ddp_a100", "rank0.json.gz")
TABLE = Path("collectives", "nccl_allreduce_a100_2gpu.txt")


@dataclass(frozen=True)
class Replaced:
    """Step times in seconds; `recorded_s`, `table_s`: of all collectives of a step together."""

    measured_s: float
    without_s: float
    low_s: float
    predicted_s: float
    high_s: float
    recorded_s: float
    table_s: float
    collectives: int

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


def replaced_collectives(folder: Path) -> Replaced:
    base = recorded_base(read_job([folder / TRACE]), 0)
    host = Host("a100", 2, 25e9 / 8, 2e-5, 3e11, 3e-6)
    rows = read_collective_table(folder / TABLE, ranks=2)
    cluster = Cluster("two A100", (host,)).with_fits(table_fits(rows))
    question = Question(cluster=cluster)
    messages = collectives(base)
    step_s, sent_s = {}, {}
    for reading in Reading:
        put_back = distributed(base, replace(question, reading=reading))
        step_s[reading] = steady(put_back).step_s
        sent_s[reading] = float(put_back.duration_s[messages].sum())
    return Replaced(
        measured_s=base.measured_s,
        without_s=steady(remove(base, messages)).step_s,
        low_s=step_s[Reading.OPTIMISTIC],
        predicted_s=step_s[Reading.EXPECTED],
        high_s=step_s[Reading.PESSIMISTIC],
        recorded_s=float(base.duration_s[messages].sum()),
        table_s=sent_s[Reading.EXPECTED],
        collectives=int(np.count_nonzero(messages)),
    )


def replaced_result() -> tuple[str, dict[str, object]] | None:
    """(text, keys for the benchmark's last line); None without the reference data."""
    folder = reference_data()
    if folder is None:
        return None
    row = replaced_collectives(folder)
    text = (
        f"ddp_a100: {1e3 * row.measured_s:.2f} ms recorded, {1e3 * row.without_s:.2f} without "
        f"its {row.collectives} collectives, {1e3 * row.predicted_s:.2f} "
        f"({1e3 * row.low_s:.2f} to {1e3 * row.high_s:.2f}) with those of the table: error "
        f"{row.error:.2%}; the collectives take {1e3 * row.recorded_s:.2f} ms recorded and "
        f"{1e3 * row.table_s:.2f} by the table, contention included"
    )
    return text, {"error_replaced_collectives": row.error}


if __name__ == "__main__":
    print_result(replaced_result())
