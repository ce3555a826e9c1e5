"""Finds which ranks share a machine, and so a clock: as given, else inferred from the traces.

| source | evidence |
|---|---|
| given | the caller |
| job file | `job.json` of a recording |
| traces | `host_name`, which torch writes since 2.9 or so |
| file names | `<host>_<pid>.<time>.pt.trace.json` of torch's handler, if the trace has that pid |
| devices | an assumption, see `_by_devices` |

Assumed hosts are checked against the clocks before these are tied together
(`alignment.same_clock`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import RankTrace, number_ranges

_HANDLER_NAME = re.compile(r"(?P<host>[^/]+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?$")
_SHOWN = 8


@dataclass(frozen=True)
class Hosts:
    """`names` (R,) by place, "" where unknown. `source`: as in the table, "" for no evidence."""

    names: tuple[str, ...]
    source: str

    @property
    def assumed(self) -> bool:
        return self.source == "devices"

    def text(self, ranks: Sequence[int]) -> str:
        """Every host with its ranks, and the evidence, for people."""
        if not self.source:
            return "hosts: unknown; --hosts tells which ranks share a clock"
        by_name = sorted(zip(self.names, ranks, strict=True))
        listed = [
            f"{name or 'unknown'} (rank {number_ranges(rank for _, rank in pairs)})"
            for name, pairs in groupby(by_name, key=lambda pair: pair[0])
        ]
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        evidence = "assumed from the device numbers" if self.assumed else f"from {self.source}"
        return f"hosts: {', '.join(listed[:_SHOWN])}{more}; {evidence}"


def find_hosts(
    traces: Sequence[RankTrace], details: dict[str, Any] | None, given: str = ""
) -> Hosts:
    """`given`: a name per trace separated by commas, or the number of consecutive ranks per host.

    Raises `InvalidInput` where `given` does not fit the ranks.
    """
    if given:
        return Hosts(_given(given, traces), "given")
    listed = (details or {}).get("ranks")
    records = listed if isinstance(listed, list) else []
    host_of = {
        one["rank"]: one.get("host")
        for one in records
        if isinstance(one, dict) and isinstance(one.get("rank"), int)
    }
    candidates = (
        Hosts(tuple(str(host_of.get(trace.rank) or "")[:200] for trace in traces), "job file"),
        Hosts(tuple(trace.host for trace in traces), "traces"),
        Hosts(tuple(_in_file_name(trace) for trace in traces), "file names"),
    )
    # the first of those that name the most ranks
    best = max(candidates, key=lambda hosts: sum(bool(name) for name in hosts.names))
    if not any(best.names):
        best = Hosts(_by_devices(traces), "devices")
    return best if any(best.names) else Hosts(best.names, "")


def _given(text: str, traces: Sequence[RankTrace]) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and words[0].isdecimal():
        size = int(words[0])
        numbers = [
            place if trace.rank is None else trace.rank for place, trace in enumerate(traces)
        ]
        ranks = _world_size(traces, numbers)
        if size < 1 or (ranks or 0) % size:
            of_job = "the job's ranks" if ranks is None else f"the {ranks} ranks of the job"
            raise InvalidInput(
                f"ranks per host must divide {of_job}, but is {size}; name a host per rank instead"
            )
        return tuple(f"host {rank // size}" for rank in numbers)
    if len(words) != len(traces) or not all(words):
        raise InvalidInput(
            f"hosts must be a number of ranks per host, or {len(traces)} names with commas between "
            f"them, but is {text!r}"
        )
    return tuple(words)


def _world_size(traces: Sequence[RankTrace], numbers: Sequence[int]) -> int | None:
    """As the traces state it, else the number of traces if none seems to lack; else None."""
    stated = max(trace.world_size or 0 for trace in traces)
    whole = max(numbers) + 1 == len(numbers)
    return stated or (len(numbers) if whole else None)


def _in_file_name(trace: RankTrace) -> str:
    match = _HANDLER_NAME.search(trace.source.replace(":", "/"))
    return match["host"][:200] if match and match["pid"] in _processes(trace) else ""


def _processes(trace: RankTrace, device: bool = False) -> frozenset[str]:
    return frozenset(lane.process for lane in trace.lanes if lane.device == device)


def _by_devices(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Assume hosts: launchers number a host's ranks consecutively, and each gets the next device.

    The ranks of a host see the same list of devices and have different process ids.

    All names are "" where a rank does not fit that pattern.
    """
    devices = [list(_processes(trace, device=True)) for trace in traces]
    plain = all(len(numbers) == 1 and numbers[0].isdecimal() for numbers in devices)
    if len(traces) < 2 or not plain:
        return ("",) * len(traces)
    if not all(int(trace.info.get("devices", 0)) > 1 for trace in traces):
        return ("",) * len(traces)
    host = 0
    names = ["host 0"]
    for (before, after), (first, second) in zip(pairwise(traces), pairwise(devices), strict=True):
        rises = int(second[0]) > int(first[0])
        same_list = after.info["device_list"] == before.info["device_list"]
        if not (rises and same_list and _processes(after).isdisjoint(_processes(before))):
            host += 1
        names.append(f"host {host}")
    return tuple(names)
