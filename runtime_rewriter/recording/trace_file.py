"""A Kineto trace with what the log of collectives knows: each collective's span gets its group, number, sizes and message.

The keys are those that PyTorch writes for NCCL (`Collective name`, `In msg nelems`, `Process Group Ranks`, ...), so that readers of
such traces understand Gloo's too; beside them stands one object `autotune` of our own.

Which span belongs to which entry of the log: a thread of Gloo serves one group and takes its collectives in the order in which they
were issued, so within a group the i-th span is the i-th entry. NCCL's kernels carry their group, and stand in the order of its stream.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.recordings.job_file import ClockPair
from autotune.recordings.recorded_steps import SeenCollective
from runtime_rewriter.recording.collectives import BUCKET, CollectiveLog, Issued

Event = dict[str, Any]

_EARLY_US = 2000.0
"""By how much two clocks of one host may disagree: a span may seem to begin so long before it was issued."""
_POINT_TO_POINT = ("send", "recv")
_KINDS = (
    "allreduce",
    "allgather",
    "reducescatter",
    "alltoall",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "reduce",
    *_POINT_TO_POINT,
)
"""Names that hold others come before these."""


@dataclass(frozen=True)
class Clock:
    """From the monotonic clock to microseconds of a trace, by the pairs taken at its begin and end."""

    before: ClockPair
    after: ClockPair
    base_ns: int

    def trace_us(self, perf_counter_ns: int) -> float:
        """Linear between the pairs: the wall clock may be slewed."""
        span_ns = self.after.perf_counter_ns - self.before.perf_counter_ns
        wall_ns = self.after.wall_ns - self.before.wall_ns
        passed_ns = perf_counter_ns - self.before.perf_counter_ns
        return (
            self.before.wall_ns
            - self.base_ns
            + (passed_ns * wall_ns / span_ns if span_ns > 0 else passed_ns)
        ) / 1e3


@dataclass(frozen=True)
class Annotated:
    """What was put into a trace. `untimed`: collectives without a span."""

    seen: tuple[SeenCollective, ...]

    @property
    def untimed(self) -> int:
        return sum(one.start_s is None for one in self.seen)

    @property
    def spans_us(self) -> list[tuple[float, float]]:
        """Start and end of those that have a span, on the trace's clock."""
        return [
            (one.start_s * 1e6, one.end_s * 1e6)
            for one in self.seen
            if one.start_s is not None and one.end_s is not None
        ]


def annotate(
    trace: dict[str, Any],
    log: CollectiveLog,
    clock: Clock,
    rank: int,
    world_size: int,
    plan_id: str,
) -> Annotated:
    """Write the traced entries of `log` into the spans of `trace`; entries that have none stand in `trace["autotune"]` only."""
    events: list[Event] = trace.get("traceEvents", [])
    entries = [entry for entry in log.issued if entry.traced]
    spans = _matched(entries, events, log, clock)
    buckets = _bucket_numbers(entries)
    told = []
    for number, entry in enumerate(entries):
        span = spans.get(number)
        described = _described(entry, log, plan_id, buckets.get(number))
        issued_us = clock.trace_us(entry.issued_ns)
        described["issued_us"] = round(issued_us, 3)
        if span is not None:
            described["queue_us"] = round(max(0.0, span["ts"] - issued_us), 3)
            span.setdefault("args", {}).update(_as_nccl(entry, log))
            span["args"]["autotune"] = dict(described)
            described |= {
                "start_us": span["ts"],
                "end_us": round(span["ts"] + span.get("dur", 0.0), 3),
            }
        told.append(described)
    trace["autotune"] = {
        "schema": 1,
        "rank": rank,
        "clocks": [asdict(clock.before), asdict(clock.after)],
        "collectives": told,
    }
    info = trace.setdefault("distributedInfo", {})
    info["rank"], info["world_size"] = rank, world_size
    info.setdefault("backend", next((group.backend for group in log.groups.values()), ""))
    return Annotated(tuple(_seen(entry) for entry in told))


def _seen(told: dict[str, Any]) -> SeenCollective:
    start_us, end_us = told.get("start_us"), told.get("end_us")
    timed = (
        (None, None, None)
        if start_us is None or end_us is None
        else (start_us / 1e6, end_us / 1e6, told["queue_us"] / 1e6)
    )
    return SeenCollective(
        told["transaction"],
        _label(told),
        told["op"].strip("_"),
        told["bytes"],
        len(told["ranks"]),
        *timed,
    )


def _label(told: dict[str, Any]) -> str:
    if "message" in told:
        return f"message {told['message']} {told['part']}"
    if "bucket" in told:
        return f"bucket {told['bucket']}"
    site = told.get("site", "")
    return f"{told['origin']} {site.rpartition('/')[2]}".strip()


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """One event a line, packed lightly: a trace has many equal words, and the script waits. Raises `OSError`."""
    partial = path.with_name(path.name + ".partial")
    beside = {key: value for key, value in trace.items() if key != "traceEvents"}
    with gzip.open(partial, "wt", compresslevel=2, encoding="utf-8") as file:
        file.write(json.dumps(beside)[:-1] + ', "traceEvents": [')
        for number, event in enumerate(trace["traceEvents"]):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")
    partial.replace(path)


def _described(
    entry: Issued, log: CollectiveLog, plan_id: str, bucket: int | None
) -> dict[str, Any]:
    group = log.groups[entry.group]
    described: dict[str, Any] = {
        "transaction": entry.transaction,
        "op": entry.op,
        "origin": entry.origin,
        "step": entry.step,
        "group": entry.group,
        "ranks": list(group.ranks),
        "sequence": entry.sequence,
        "bytes": max(entry.in_elements, entry.out_elements) * entry.element_bytes,
        "in_elements": entry.in_elements,
        "out_elements": entry.out_elements,
        "dtype": entry.dtype,
    }
    if entry.site:
        described["site"] = entry.site
    if bucket is not None:
        described["bucket"] = bucket
    if entry.message is not None:
        described |= {"plan": plan_id, **asdict(entry.message)}
    return described


def _bucket_numbers(entries: Sequence[Issued]) -> dict[int, int]:
    """Entry -> number of its bucket within its step: a reducer sends its buckets in their order."""
    numbers: dict[int, int] = {}
    seen: dict[int, int] = defaultdict(int)
    for number, entry in enumerate(entries):
        if entry.origin == BUCKET:
            numbers[number] = seen[entry.step]
            seen[entry.step] += 1
    return numbers


_NCCL_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
}
_NCCL_DTYPES |= {
    "uint8": "Byte",
    "int8": "Char",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


_ROOTS = {"send": "Dst Rank", "recv_": "Src Rank"}


def _as_nccl(entry: Issued, log: CollectiveLog) -> dict[str, Any]:
    """The arguments that PyTorch gives to NCCL's kernels (torch: ParamCommsUtils.hpp)."""
    group = log.groups[entry.group]
    return {
        "Collective name": "recv" if entry.op.startswith("recv") else entry.op.rstrip("_"),
        "dtype": _NCCL_DTYPES.get(entry.dtype, entry.dtype),
        "In msg nelems": entry.in_elements,
        "Out msg nelems": entry.out_elements,
        "Group size": len(group.ranks),
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": json.dumps(list(group.ranks)),
        "Seq": entry.sequence,
        **({} if entry.root is None else {_ROOTS.get(entry.op, "Root Rank"): entry.root}),
    }


def _matched(
    entries: Sequence[Issued], events: Iterable[Event], log: CollectiveLog, clock: Clock
) -> dict[int, Event]:
    """Number of an entry -> its span."""
    by_thread: dict[Any, list[Event]] = defaultdict(
        list
    )  # spans of Gloo and other backends on the host
    by_group: dict[str, list[Event]] = defaultdict(list)  # kernels of NCCL
    backends = tuple(
        f"{group.backend}:"
        for group in log.groups.values()
        if group.backend and group.backend != "nccl"
    )
    for event in events:
        if event.get("ph") != "X":
            continue
        if (
            backends
            and event.get("cat") == "user_annotation"
            and event["name"].startswith(backends)
        ):
            by_thread[event["tid"]].append(event)
        elif event.get("cat") == "kernel" and "Process Group Name" in event.get("args", {}):
            by_group[str(event["args"]["Process Group Name"])].append(event)
    wanted: dict[str, list[int]] = defaultdict(list)
    matched: dict[int, Event] = {}
    for number, entry in enumerate(entries):
        if entry.op.startswith(_POINT_TO_POINT):
            _take_direct(number, entry, by_thread, matched)
        else:
            wanted[entry.group].append(number)
    groups = _groups_of_threads(by_thread, wanted, entries, log)
    for thread, spans in by_thread.items():
        if thread in groups:
            by_group[groups[thread]] += spans
    for group, numbers in wanted.items():
        matched |= _in_order(
            numbers, sorted(by_group[group], key=lambda span: float(span["ts"])), entries, clock
        )
    return matched


def _take_direct(
    number: int, entry: Issued, by_thread: dict[Any, list[Event]], matched: dict[int, Event]
) -> None:
    """Point-to-point works are begun by the thread that issues them."""
    kind = entry.op.split("_")[0]
    spans = by_thread.get(entry.thread, [])
    for at, span in enumerate(spans):
        if span["name"].endswith(kind):
            matched[number] = spans.pop(at)
            return


def _groups_of_threads(
    by_thread: dict[Any, list[Event]],
    wanted: dict[str, list[int]],
    entries: Sequence[Issued],
    log: CollectiveLog,
) -> dict[Any, str]:
    """Thread -> group: as learned; for a thread that ended nothing before, the group that lacks as many spans of those kinds as it has."""
    groups: dict[Any, str] = {
        thread: log.group_of_thread[thread] for thread in by_thread if thread in log.group_of_thread
    }
    issuing = {entry.thread for entry in entries}
    for thread, spans in sorted(by_thread.items(), key=lambda item: -len(item[1])):
        if thread in groups or thread in issuing:
            continue
        lacking = {
            group: len(numbers)
            - sum(
                len(by_thread[other]) for other, its_group in groups.items() if its_group == group
            )
            for group, numbers in wanted.items()
        }
        kinds = {_kind(span["name"].partition(":")[2]) for span in spans}
        possible = [
            group
            for group, numbers in wanted.items()
            if lacking[group] >= len(spans)
            and kinds <= {_kind(entries[number].op) for number in numbers}
        ]
        if possible:
            groups[thread] = min(possible, key=lambda group: lacking[group] - len(spans))
    return groups


def _in_order(
    numbers: Sequence[int], spans: Sequence[Event], entries: Sequence[Issued], clock: Clock
) -> dict[int, Event]:
    """The first span that is left, of the entry's kind and not begun before it was issued."""
    matched: dict[int, Event] = {}
    at = 0
    for number in numbers:
        entry = entries[number]
        earliest_us = clock.trace_us(entry.issued_ns) - _EARLY_US
        found = at
        while found < len(spans) and not _fits(spans[found], entry, earliest_us):
            found += 1
        if found < len(spans):
            matched[number] = spans[found]
            at = found + 1
    return matched


def _fits(span: Event, entry: Issued, earliest_us: float) -> bool:
    name = span.get("args", {}).get("Collective name") or span["name"].partition(":")[2]
    return float(span["ts"]) >= earliest_us and _kind(name) == _kind(entry.op)


def _kind(name: str) -> str:
    """`all_reduce`, `allreduce_` and `sparse_all_reduce` are one kind, `_allgather_base` is an all-gather."""
    plain = name.lower().replace("_", "")
    for kind in (
        "allreduce",
        "allgather",
        "reducescatter",
        "alltoall",
        "broadcast",
        "gather",
        "scatter",
        "barrier",
        "reduce",
        "send",
        "recv",
    ):
        if kind in plain:
            return kind
    return plain
