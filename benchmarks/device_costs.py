"""Costs of DDP's reducer on a GPU, from recordings: `python -m benchmarks.device_costs`.

Every recording of one rank in `datasets/gpu_traces` was made under DDP, so it shows each copy of a
gradient into its bucket, the issue of each bucket, and the copy back. `autotune.lowering.
device_costs` holds the result. Host times are as recorded, so they include the profiler's.

- `host`: median seconds of the host's event. `device`: seconds of its kernel, fitted as a constant
  and a cost per byte; the error is the median relative one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from autotune.profiling.fits.link_fit import fit_alpha_beta
from autotune.profiling.formats.rank_trace import DEVICE_WORK, Category, RankTrace
from autotune.profiling.traces.job import read_job
from autotune.recordings.job_file import RecordedJob
from autotune.whatif.messages.ddp_buckets import PACK_MARK, UNPACK_MARK
from benchmarks.repository import ROOT, machine, option_parser

ISSUE = "c10d::allreduce_"


@dataclass
class Copies:
    """`host_s` of every event; `size_bytes` and `device_s` of those with a kernel."""

    host_s: list[float] = field(default_factory=list)
    size_bytes: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)

    def line(self) -> dict[str, float]:
        row = {"host_us": 1e6 * median(self.host_s), "events": len(self.host_s)}
        if self.device_s:
            alpha_s, s_per_byte, error = fit_alpha_beta(self.size_bytes, self.device_s)
            row |= {
                "device_us": 1e6 * alpha_s,
                "device_bytes_per_s": 1 / s_per_byte,
                "device_error": error,
            }
        return row


def events_of(trace: RankTrace, name: str) -> list[int]:
    if name not in trace.names:
        return []
    number = trace.names.index(name)
    events: list[int] = np.flatnonzero(trace.name == number).tolist()
    return events


def kernels_within(trace: RankTrace, event: int) -> Iterator[int]:
    """Device work that the calls inside a host event launch."""
    inside = (trace.category == Category.RUNTIME) & (trace.lane == trace.lane[event])
    inside &= trace.start_s >= trace.start_s[event]
    inside &= trace.start_s <= trace.start_s[event] + trace.duration_s[event]
    ids = trace.correlation[inside]
    device = np.isin(trace.category, DEVICE_WORK) & np.isin(trace.correlation, ids[ids >= 0])
    yield from np.flatnonzero(device).tolist()


def add_copies(copies: Copies, trace: RankTrace, mark: str, sizes_bytes: list[int]) -> None:
    events = events_of(trace, mark)
    copies.host_s += trace.duration_s[events].tolist()
    if not sizes_bytes or len(events) % len(sizes_bytes):
        return
    for place, event in enumerate(events):
        kernels = list(kernels_within(trace, event))
        if len(kernels) == 1:
            copies.size_bytes.append(float(sizes_bytes[place % len(sizes_bytes)]))
            copies.device_s.append(float(trace.duration_s[kernels[0]]))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="by default all of one rank")
    options = parser.parse_args()
    folders = options.folders or sorted(
        path.parent for path in (ROOT / "datasets" / "gpu_traces").glob("*/*.fp32/job.json")
    )
    pack, unpack, issue_s = Copies(), Copies(), []
    for folder in folders:
        trace = read_job([folder]).ranks[0]
        workload = RecordedJob.read(folder).workload
        sizes = [] if workload is None else [one.grad_bytes for one in workload.variables]
        add_copies(pack, trace, PACK_MARK, sizes)
        add_copies(unpack, trace, UNPACK_MARK, sizes)
        issue_s += trace.duration_s[events_of(trace, ISSUE)].tolist()
    line = {
        "pack": pack.line(),
        "unpack": unpack.line(),
        "issue_us": 1e6 * median(issue_s),
        "recordings": len(folders),
        **machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
