"""Which ranks share a machine, and so a clock: as told, else by what the traces let one infer.

| source | what tells it |
|---|---|
| given | the caller |
| job file | `job.json` of a recording |
| traces | `host_name`, which torch writes since 2.9 or so |
| file names | `<host>_<pid>.<time>.pt.trace.json` of torch's own handler, if the process id is that of the trace |
| devices | an assumption: consecutive ranks with rising device numbers, the same list of devices and different process ids |

What is assumed is checked against the clocks before they are tied to each other (`alignment.same_clock`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autotune.errors import InvalidInput
from autotune.profiling.traces.rank_trace import RankTrace, number_ranges

_HANDLER_NAME = re.compile(r"(?P<host>[^/]+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?$")


@dataclass(frozen=True)
class Hosts:
    """`names` (R,) by place, "" where unknown; `source`: as in the table above, "" where nothing is known."""

    names: tuple[str, ...]
    source: str

    @property
    def assumed(self) -> bool:
        return self.source == "devices"

    def text(self, ranks: Sequence[int]) -> str:
        """For people: every host with its ranks, and how that is known."""
        if not self.source:
            return "hosts: unknown; --hosts tells which ranks share a clock"
        places = groupby(
            sorted(range(len(ranks)), key=lambda place: self.names[place]),
            key=lambda place: self.names[place],
        )
        listed = [
            f"{name or 'unknown'} (rank {number_ranges(ranks[place] for place in own)})"
            for name, own in places
        ]
        shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
        return f"hosts: {shown}; {'assumed from the device numbers' if self.assumed else f'from {self.source}'}"


def find_hosts(
    traces: Sequence[RankTrace], details: dict[str, Any] | None, given: str = ""
) -> Hosts:
    """`given`: a name per rank with commas between them, or how many consecutive ranks share a host; "" for nothing.

    Raises `InvalidInput` where `given` does not fit the ranks.
    """
    if given:
        return Hosts(_given(given, len(traces)), "given")
    records = (details or {}).get("ranks")
    told = (
        {r.get("rank"): r.get("host") for r in records if isinstance(r, dict)}
        if isinstance(records, list)
        else {}
    )
    found = (
        Hosts(tuple(str(told.get(trace.rank) or "")[:200] for trace in traces), "job file"),
        Hosts(tuple(trace.host for trace in traces), "traces"),
        Hosts(tuple(_named(trace) for trace in traces), "file names"),
    )
    best = max(
        found, key=lambda one: sum(bool(name) for name in one.names)
    )  # of equal ones the first
    if not any(best.names):
        best = Hosts(_by_devices(traces), "devices")
    return best if any(best.names) else Hosts(best.names, "")


def _given(text: str, ranks: int) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and words[0].isdecimal():
        size = int(words[0])
        if size < 1 or ranks % size:
            raise InvalidInput(
                f"ranks per host must divide the {ranks} ranks that are here, but is {size}; name a host per rank instead"
            )
        return tuple(f"host {rank // size}" for rank in range(ranks))
    if len(words) != ranks or not all(words):
        raise InvalidInput(
            f"hosts must be a number of ranks per host, or {ranks} names with commas between them, but is {text!r}"
        )
    return tuple(words)


def _named(trace: RankTrace) -> str:
    match = _HANDLER_NAME.search(trace.source.replace(":", "/"))
    return match["host"][:200] if match and match["pid"] in _processes(trace) else ""


def _processes(trace: RankTrace) -> frozenset[str]:
    return frozenset(lane.process for lane in trace.lanes if not lane.device)


def _by_devices(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Launchers number a host's ranks one after the other and give each the next device. All "" where a rank does not fit that."""
    devices = [{lane.process for lane in trace.lanes if lane.device} for trace in traces]
    plain = all(len(own) == 1 and next(iter(own)).isdecimal() for own in devices)
    if (
        len(traces) < 2
        or not plain
        or not all(int(trace.info.get("devices", 0)) > 1 for trace in traces)
    ):
        return ("",) * len(traces)
    names, host = ["host 0"], 0
    for before, trace in zip(range(len(traces)), traces[1:], strict=False):
        rises = int(next(iter(devices[before + 1]))) > int(next(iter(devices[before])))
        alike = trace.info["device_list"] == traces[before].info["device_list"]
        if not (rises and alike and _processes(trace).isdisjoint(_processes(traces[before]))):
            host += 1
        names.append(f"host {host}")
    return tuple(names)
