"""Compare what-ifs' base with its trace: `python -m benchmarks.whatif_baseline`.

For every recording with two complete steps, the base is replayed from its dependencies alone. The
truth is the distance between two executions of the same kernel in consecutive steps, which needs no
graph. Recordings are those of `datasets/gpu_traces` and the reference traces. The table also shows
the median distance of all kernels that both steps have: steps differ, and a distance belongs to one
place in them.

Key `refused`: ranks without a base, with the reasons. The exit status is 1 unless all of them have
fewer than two complete, consecutive steps.

`unexplained`: share of a step for which streams waited without a known cause; the prediction is
bounded by what happens if these waits vanish.

    python -m benchmarks.whatif_baseline
    python -m benchmarks.whatif_baseline traces/*.json.gz    # other traces
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import DEVICE_WORK, Category, RankTrace, TracedStep
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.whatif.base import bounds_s
from autotune.whatif.recording.recorded import consecutive_steps, recorded_base
from benchmarks.repository import ROOT, machine, option_parser, reference_data

MS = 1e3


@dataclass(frozen=True)
class Row:
    """One rank of a recording; times in seconds."""

    name: str
    measured_s: float
    replayed_s: float
    least_s: float
    kernels_s: float
    unexplained_share: float
    read_s: float
    replay_s: float

    @property
    def error(self) -> float:
        return abs(self.replayed_s / self.measured_s - 1)


def recordings() -> list[Path]:
    """The committed recordings and, where they are present, the reference traces."""
    folders = sorted((ROOT / "datasets" / "gpu_traces").glob("*/*/job.json"))
    traces = [folder.parent for folder in folders]
    reference = reference_data()
    if reference is None:
        print("without the reference traces: set AUTOTUNE_REFERENCE_DATA", file=sys.stderr)
        return traces
    paths = sorted((reference / "traces").rglob("*"))
    return [*traces, *(path for path in paths if path.name.endswith((".json.gz", "kineto.tar.gz")))]


@dataclass(frozen=True)
class Refused:
    """A rank without a base. `too_short`: it has no two complete, consecutive steps to compare."""

    name: str
    reason: str
    too_short: bool

    @staticmethod
    def of(name: str, trace: RankTrace, error: InvalidInput) -> Refused:
        """Note a refusal, and print it."""
        print(f"{name}: {error}", file=sys.stderr)
        too_short = all(b.number != a.number + 1 for a, b in pairwise(trace.steps))
        return Refused(name, str(error), too_short)


def status_of(refused: Sequence[Refused]) -> int:
    """Return the exit status: 1 if a rank was refused that has two steps."""
    return int(not all(one.too_short for one in refused))


def rows_of(path: Path) -> Iterator[Row | Refused]:
    began_s = time.perf_counter()
    job = read_job([path])
    read_s = time.perf_counter() - began_s
    for place, rank in enumerate(job.rank_numbers):
        name = f"{path.parent.name}/{path.name}" + (f" rank {rank}" if len(job.ranks) > 1 else "")
        try:
            yield _row(job, place, name, read_s)
        except InvalidInput as error:
            yield Refused.of(name, job.ranks[place], error)


def _row(job: TraceJob, place: int, name: str, read_s: float) -> Row:
    began_s = time.perf_counter()
    base = recorded_base(job, place)
    least_s, replayed_s = bounds_s(base)
    trace = job.ranks[place]
    kernels_s = [kernel_distance_s(trace, *pair) for pair in consecutive_steps(trace)]
    return Row(
        name,
        base.measured_s,
        replayed_s,
        least_s,
        median(kernels_s),
        base.unknown_s / base.measured_s,
        read_s,
        time.perf_counter() - began_s,
    )


def kernel_distance_s(trace: RankTrace, before: TracedStep, step: TracedStep) -> float:
    """The median distance of the kernels of two steps that have equal names and places.

    The nth kernel of a name and stream in one step is the nth one in the other. A kernel counts to
    the step of the call with its correlation id.
    """
    calls = np.flatnonzero(trace.category == Category.RUNTIME)
    called_s = dict(
        zip(trace.correlation[calls].tolist(), trace.start_s[calls].tolist(), strict=True)
    )
    kernels = np.flatnonzero(np.isin(trace.category, DEVICE_WORK)).tolist()
    starts: list[dict[tuple[int, int, int], float]] = []
    for one in (before, step):
        counts: Counter[tuple[int, int]] = Counter()
        numbered: dict[tuple[int, int, int], float] = {}
        for event in kernels:
            if not one.start_s <= called_s.get(int(trace.correlation[event]), -1.0) < one.end_s:
                continue
            key = int(trace.lane[event]), int(trace.name[event])
            numbered[*key, counts[key]] = float(trace.start_s[event])
            counts[key] += 1
        starts.append(numbered)
    shared = [starts[1][key] - at_s for key, at_s in starts[0].items() if key in starts[1]]
    return median(shared) if shared else float("nan")


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| recording | measured (ms) | replayed | without unexplained | all kernels | error "
        "| unexplained |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = (row.measured_s, row.replayed_s, row.least_s, row.kernels_s)
        shown = " | ".join(f"{MS * value:.2f}" for value in times)
        lines.append(f"| {row.name} | {shown} | {row.error:.2%} | {row.unexplained_share:.1%} |")
    return "\n".join(lines)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="by default all recordings")
    options = parser.parse_args()
    judged = [one for path in options.traces or recordings() for one in rows_of(path)]
    rows = [one for one in judged if isinstance(one, Row)]
    refused = [one for one in judged if isinstance(one, Refused)]
    print(table(rows))
    if not rows:
        sys.exit("no recording has two complete steps")
    errors = [row.error for row in rows]
    line = {
        "error_max": max(errors),
        "error_mean": fmean(errors),
        "unexplained_share_max": max(row.unexplained_share for row in rows),
        "recordings": len(rows),
        "refused": {one.name: one.reason for one in refused},
        "seconds_median": median(row.replay_s for row in rows),
        **machine(),
    }
    print(json.dumps(line))
    return status_of(refused)


if __name__ == "__main__":
    sys.exit(main())
