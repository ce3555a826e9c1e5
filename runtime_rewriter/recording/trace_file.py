"""Adds the log of collectives to a Kineto trace: group, number, sizes and message of each span.

The keys are those that PyTorch writes for NCCL (`Collective name`, `In msg nelems`, ...), so
readers of such traces understand Gloo's too. An object `autotune` next to them holds our own data.

A thread of Gloo serves one group and takes its collectives in the order of their issue. So within
a group the i-th span belongs to the i-th entry of the log. NCCL's kernels name their group, and lie
in the order of its stream. Sends and receives over Gloo have no thread: their spans are on the one
that begins them, which goes on meanwhile. They get lanes of their own. Gloo begins such a span only
behind its call, when the message may have arrived already, so it is extended to the issue.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.recordings.job_file import ClockPair
from autotune.recordings.recorded_steps import SeenCollective
from runtime_rewriter.recording.collectives import (
    BUCKET,
    POINT_TO_POINT,
    CollectiveLog,
    IssuedCollective,
)

Event = dict[str, Any]
Entries = Sequence[IssuedCollective]

_EARLY_US = 2000.0
"""Largest disagreement of two clocks of one host: a span may seem to begin before its issue."""
_KINDS = (
    *("allreduce", "allgather", "reducescatter", "alltoall", "broadcast"),
    *("gather", "scatter", "barrier", "reduce"),
    *POINT_TO_POINT,
)
"""A name that contains another one comes before it."""
PEERS = "peers"
"""Beginning of the lanes of sends and receives."""


@dataclass(frozen=True)
class TraceClock:
    """Converts the monotonic clock to microseconds of a trace.

    The clock pairs before and after the trace define the conversion.
    """

    before: ClockPair
    after: ClockPair
    base_ns: int

    def trace_us(self, perf_counter_ns: int) -> float:
        """Interpolate linearly between the pairs: the wall clock may be slewed."""
        span_ns = self.after.perf_counter_ns - self.before.perf_counter_ns
        wall_ns = self.after.wall_ns - self.before.wall_ns
        passed_ns: float = perf_counter_ns - self.before.perf_counter_ns
        if span_ns > 0:
            passed_ns = passed_ns * wall_ns / span_ns
        return (self.before.wall_ns - self.base_ns + passed_ns) / 1e3


@dataclass(frozen=True)
class Annotated:
    """The collectives that were added to a trace."""

    collectives: tuple[SeenCollective, ...]

    @property
    def untimed(self) -> int:
        """Collectives without a span."""
        return sum(one.start_s is None for one in self.collectives)

    @property
    def spans_us(self) -> list[tuple[float, float]]:
        """Start and end of the collectives with a span, on the trace's clock."""
        return [
            (one.start_s * 1e6, one.end_s * 1e6)
            for one in self.collectives
            if one.start_s is not None and one.end_s is not None
        ]


def annotate(
    trace: dict[str, Any],
    log: CollectiveLog,
    clock: TraceClock,
    rank: int,
    world_size: int,
    plan_id: str,
) -> Annotated:
    """Write the traced entries of `log` into the spans of `trace`.

    Entries without a span appear only in `trace["autotune"]`.
    """
    entries = [entry for entry in log.issued if entry.traced]
    spans = _matched(entries, trace.get("traceEvents", []), log, clock)
    buckets = _bucket_numbers(entries)
    descriptions = []
    lanes_us: list[float] = []
    for number, entry in enumerate(entries):
        description = _described(entry, log, plan_id, buckets.get(number))
        issued_us = clock.trace_us(entry.issued_ns)
        description["issued_us"] = round(issued_us, 3)
        if (span := spans.get(number)) is not None:
            if entry.pair:
                _move_to_peers(span, issued_us, lanes_us)
            description["queue_us"] = round(max(0.0, span["ts"] - issued_us), 3)
            span.setdefault("args", {}).update(_as_nccl(entry, log))
            span["args"]["autotune"] = dict(description)
            end_us = round(span["ts"] + span.get("dur", 0.0), 3)
            description |= {"start_us": span["ts"], "end_us": end_us}
        descriptions.append(description)
    trace["autotune"] = {
        "schema": 1,
        "rank": rank,
        "clocks": [asdict(clock.before), asdict(clock.after)],
        "collectives": descriptions,
    }
    info = trace.setdefault("distributedInfo", {})
    info |= {"rank": rank, "world_size": world_size}
    info.setdefault("backend", next((group.backend for group in log.groups.values()), ""))
    return Annotated(tuple(_collective(description) for description in descriptions))


def _move_to_peers(span: Event, issued_us: float, lanes_us: list[float]) -> None:
    """Let the span of a send or receive begin at its issue, on a lane of its own."""
    end_us = span["ts"] + span.get("dur", 0.0)
    span["ts"] = min(span["ts"], round(issued_us, 3))
    span["dur"] = round(end_us - span["ts"], 3)
    span["tid"] = f"{PEERS} {free_lane(lanes_us, span['ts'], end_us)}"


def free_lane(lanes_us: list[float], start_us: float, end_us: float) -> int:
    """Take the first lane that is free at `start_us`, or a new one, until `end_us`.

    `lanes_us`: the end of the last span of each lane.
    """
    lane = next((at for at, until_us in enumerate(lanes_us) if until_us <= start_us), len(lanes_us))
    lanes_us[lane : lane + 1] = [end_us]
    return lane


def _collective(description: dict[str, Any]) -> SeenCollective:
    times_us = [description.get(key) for key in ("start_us", "end_us", "queue_us")]
    start_s, end_s, queue_s = (None if us is None else us / 1e6 for us in times_us)
    return SeenCollective(
        transaction=description["transaction"],
        label=_label(description),
        op=description["op"].strip("_"),
        size_bytes=description["bytes"],
        ranks=len(description["ranks"]),
        start_s=start_s,
        end_s=end_s,
        queue_s=queue_s,
    )


def _label(description: dict[str, Any]) -> str:
    if "message" in description:
        return f"message {description['message']} {description['part']}"
    if "bucket" in description:
        return f"bucket {description['bucket']}"
    site = description.get("site", "")
    return f"{description['origin']} {site.rpartition('/')[2]}".strip()


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write one event per line, lightly packed: the script waits. Raises `OSError`."""
    partial = path.with_name(path.name + ".partial")
    fields = {key: value for key, value in trace.items() if key != "traceEvents"}
    with gzip.open(partial, "wt", compresslevel=2, encoding="utf-8") as file:
        file.write(json.dumps(fields)[:-1] + ', "traceEvents": [')
        for number, event in enumerate(trace["traceEvents"]):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")
    partial.replace(path)


def _described(
    entry: IssuedCollective, log: CollectiveLog, plan_id: str, bucket: int | None
) -> dict[str, Any]:
    description: dict[str, Any] = {
        "transaction": entry.transaction,
        "op": entry.op,
        "origin": entry.origin,
        "step": entry.step,
        "group": entry.group,
        "ranks": list(log.groups[entry.group].ranks),
        "sequence": entry.sequence,
        "bytes": max(entry.in_elements, entry.out_elements) * entry.element_bytes,
        "in_elements": entry.in_elements,
        "out_elements": entry.out_elements,
        "dtype": entry.dtype,
    }
    if entry.site:
        description["site"] = entry.site
    if bucket is not None:
        description["bucket"] = bucket
    if entry.message is not None:
        description |= {"plan": plan_id, **asdict(entry.message)}
    return description


def _bucket_numbers(entries: Entries) -> dict[int, int]:
    """Entry -> number of its bucket in its step: a reducer sends its buckets in their order."""
    numbers: dict[int, int] = {}
    sent: Counter[int] = Counter()
    for number, entry in enumerate(entries):
        if entry.origin == BUCKET:
            numbers[number] = sent[entry.step]
            sent[entry.step] += 1
    return numbers


NCCL_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "uint8": "Byte",
    "int8": "Char",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_ROOTS = {"send": "Dst Rank", "recv_": "Src Rank"}


def _as_nccl(entry: IssuedCollective, log: CollectiveLog) -> dict[str, Any]:
    """The arguments that PyTorch gives to NCCL's kernels (torch: ParamCommsUtils.hpp)."""
    group = log.groups[entry.group]
    arguments: dict[str, Any] = {
        "Collective name": "recv" if entry.op.startswith("recv") else entry.op.rstrip("_"),
        "dtype": NCCL_DTYPES.get(entry.dtype, entry.dtype),
        "In msg nelems": entry.in_elements,
        "Out msg nelems": entry.out_elements,
        "Group size": len(group.ranks),
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": json.dumps(list(group.ranks)),
        "Seq": entry.sequence,
    }
    if entry.root is not None:
        arguments[_ROOTS.get(entry.op, "Root Rank")] = group.ranks[entry.root]
    return arguments


def _matched(
    entries: Entries, events: Iterable[Event], log: CollectiveLog, clock: TraceClock
) -> dict[int, Event]:
    """Number of an entry -> its span."""
    by_thread, by_group = _spans(events, log)
    numbers_of: dict[str, list[int]] = defaultdict(list)
    matched: dict[int, Event] = {}
    for number, entry in enumerate(entries):
        if not entry.pair:
            numbers_of[entry.group].append(number)
        elif (span := _take_direct(entry, by_thread)) is not None:
            matched[number] = span
    groups = _groups_of_threads(by_thread, numbers_of, entries, log)
    for thread, group in groups.items():
        by_group[group] += by_thread[thread]
    for group, numbers in numbers_of.items():
        spans = sorted(by_group[group], key=lambda span: float(span["ts"]))
        matched |= _in_order(numbers, spans, entries, clock)
    return matched


def _spans(
    events: Iterable[Event], log: CollectiveLog
) -> tuple[dict[Any, list[Event]], dict[str, list[Event]]]:
    """Spans of backends on the host by thread, and kernels of NCCL by group."""
    backends = {group.backend for group in log.groups.values()} - {"", "nccl"}
    prefixes = tuple(f"{backend}:" for backend in backends)
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    by_group: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefixes):
            by_thread[event["tid"]].append(event)
        elif event.get("cat") == "kernel" and "Process Group Name" in event.get("args", {}):
            by_group[str(event["args"]["Process Group Name"])].append(event)
    for spans in by_thread.values():
        spans.sort(key=lambda span: float(span["ts"]))
    return by_thread, by_group


def _take_direct(entry: IssuedCollective, by_thread: dict[Any, list[Event]]) -> Event | None:
    """Remove and return the span of a point-to-point work, which the issuing thread begins."""
    kind = entry.op.split("_")[0]
    spans = by_thread.get(entry.thread, [])
    for at, span in enumerate(spans):
        if span["name"].partition(":")[2].startswith(kind):
            return spans.pop(at)
    return None


def _groups_of_threads(
    by_thread: dict[Any, list[Event]],
    numbers_of: dict[str, list[int]],
    entries: Entries,
    log: CollectiveLog,
) -> dict[Any, str]:
    """Thread -> group, as learned.

    A thread that ended nothing before gets the group that lacks as many spans of those kinds.
    """
    known = log.group_of_thread
    groups: dict[Any, str] = {thread: known[thread] for thread in by_thread if thread in known}
    issuing = {entry.thread for entry in entries}
    for thread, spans in sorted(by_thread.items(), key=lambda item: -len(item[1])):
        if thread in groups or thread in issuing:
            continue
        lacking = {group: len(numbers) for group, numbers in numbers_of.items()}
        for other, group in groups.items():
            if group in lacking:
                lacking[group] -= len(by_thread[other])
        kinds = {_kind(span["name"].partition(":")[2]) for span in spans}
        possible = [
            group
            for group, numbers in numbers_of.items()
            if lacking[group] >= len(spans)
            and kinds <= {_kind(entries[number].op) for number in numbers}
        ]
        if possible:
            groups[thread] = min(possible, key=lambda group: lacking[group])
    return groups


def _in_order(
    numbers: Sequence[int], spans: Sequence[Event], entries: Entries, clock: TraceClock
) -> dict[int, Event]:
    """Give each entry the first remaining span of its kind that begins after its issue."""
    matched: dict[int, Event] = {}
    begin = 0
    for number in numbers:
        entry = entries[number]
        earliest_us = clock.trace_us(entry.issued_ns) - _EARLY_US
        for at in range(begin, len(spans)):
            if _fits(spans[at], entry, earliest_us):
                matched[number] = spans[at]
                begin = at + 1
                break
    return matched


def _fits(span: Event, entry: IssuedCollective, earliest_us: float) -> bool:
    name = span.get("args", {}).get("Collective name") or span["name"].partition(":")[2]
    return float(span["ts"]) >= earliest_us and _kind(name) == _kind(entry.op)


def _kind(name: str) -> str:
    """One kind for `all_reduce`, `allreduce_` and `sparse_all_reduce`."""
    plain = name.lower().replace("_", "")
    return next((kind for kind in _KINDS if kind in plain), plain)
