"""Write a timeline as a Chrome trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Each worker is a process with one thread for each queue. The critical path is a process of its own,
and arrows between its ops. The format is "Trace Event Format" (JSON object with `traceEvents`);
times are microseconds with three decimals.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np

from autotune.arrays import Int32Array
from autotune.dfg.critical_path import CriticalPath, critical_path
from autotune.dfg.graph import NONE, Kind
from autotune.dfg.replay import Timeline
from autotune.errors import InvalidInput
from autotune.files import whole_file

MAX_OPS = 1_000_000

Event = dict[str, Any]

_CRITICAL, _SHARED, _FIRST_WORKER = 0, 1, 2  # numbers of processes


@dataclass(frozen=True)
class Section:
    """From `begin_s` to `end_s` of a timeline, and the op that its critical path ends with."""

    begin_s: float
    end_s: float
    last: int

    def cut(self, timeline: Timeline) -> tuple[Timeline, Int32Array]:
        """The timeline with time 0 at the beginning, cut at both ends, and the ops inside."""
        length_s = self.end_s - self.begin_s
        inside = (timeline.start_s < self.end_s) & (timeline.end_s > self.begin_s)
        cut = replace(
            timeline,
            start_s=np.clip(timeline.start_s - self.begin_s, 0.0, length_s),
            end_s=np.clip(timeline.end_s - self.begin_s, 0.0, length_s),
        )
        return cut, np.flatnonzero(inside).astype(np.int32)


def write_chrome_trace(
    timeline: Timeline, path: Path, max_ops: int = MAX_OPS, section: Section | None = None
) -> int:
    """Write the trace, or a section of it, compressed for the suffix `.gz`; the number of its ops.

    A larger timeline is reduced to its critical path and longest ops, `max_ops` in all, and the
    trace states both counts. Events are streamed. Raises `InvalidInput` for less than one op.
    """
    if max_ops < 1:
        raise InvalidInput(f"a trace must be allowed at least 1 op, but max_ops is {max_ops}")
    critical = critical_path(timeline, None if section is None else section.last)
    timeline, inside = cut(timeline, section)
    shown = _shown(timeline, critical, inside, max_ops)
    with whole_file(path, "the timeline") as file, contextlib.ExitStack() as packing:
        stream = cast(BinaryIO, file)
        if path.suffix == ".gz":
            # without a name and a time, equal timelines give equal files
            packed = packing.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
            stream = cast(BinaryIO, packed)
        text = io.TextIOWrapper(stream, "utf-8")
        _write(text, timeline, critical, shown)
        text.detach()
    return len(shown)


def cut(timeline: Timeline, section: Section | None) -> tuple[Timeline, Int32Array]:
    """The section as in `Section.cut`; without one, the whole timeline and all ops."""
    if section is not None:
        return section.cut(timeline)
    return timeline, np.arange(timeline.dfg.ops, dtype=np.int32)


def _shown(
    timeline: Timeline, critical: CriticalPath, inside: Int32Array, max_ops: int
) -> Int32Array:
    if len(inside) <= max_ops:
        return inside
    rank_s = timeline.duration_s.copy()
    rank_s[critical.ops] = np.inf
    return np.sort(inside[np.argsort(-rank_s[inside], kind="stable")[:max_ops]])


def _write(text: TextIO, timeline: Timeline, critical: CriticalPath, shown: Int32Array) -> None:
    ops, makespan_s = timeline.dfg.ops, timeline.makespan_s
    data = {"ops": ops, "shown_ops": len(shown), "makespan_s": makespan_s}
    text.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(data))
    text.write(',"traceEvents":[')
    separator = "\n"
    for event in _events(timeline, critical, shown):
        text.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    text.write("\n]}\n")


def _events(timeline: Timeline, critical: CriticalPath, shown: Int32Array) -> Iterator[Event]:
    yield from _names(timeline, shown)
    for op in shown.tolist():
        yield from _op(timeline, op)
    present = np.zeros(timeline.dfg.ops, dtype=np.bool_)
    present[shown] = True
    path = critical.ops[present[critical.ops]].tolist()
    for op in path:
        yield _slice(timeline, op) | {"pid": _CRITICAL, "tid": 0}
    # Arrows join the middles of ops: at an edge they could belong to a neighbor.
    ends = [op for op in path if timeline.dfg.apart[op] and timeline.duration_s[op] > 0]
    for number, (one, two) in enumerate(pairwise(ends)):
        arrow = {"name": "critical path", "cat": "critical path", "id": number}
        yield arrow | {"ph": "s"} | _middle(timeline, one)
        yield arrow | {"ph": "f", "bp": "e"} | _middle(timeline, two)


def _names(timeline: Timeline, shown: Int32Array) -> Iterator[Event]:
    dfg = timeline.dfg

    def named(kind: str, pid: int, tid: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    yield named("process_name", _CRITICAL, 0, "critical path")
    for worker in np.unique(dfg.worker[shown]).tolist():
        yield named("process_name", _process(worker), 0, process_name(timeline, worker))
    pairs = np.column_stack([dfg.worker[shown], dfg.queue[shown]])
    for worker, queue in np.unique(pairs, axis=0).tolist():
        if queue != NONE:
            yield named("thread_name", _process(worker), queue, dfg.names.queues[queue])


def process_name(timeline: Timeline, worker: int) -> str:
    """The name of a worker's process, and of that of ops without one."""
    if worker != NONE:
        return f"worker {worker}"
    return "shared" if (timeline.dfg.worker != NONE).any() else "training"


def _process(worker: int) -> int:
    return _SHARED if worker == NONE else _FIRST_WORKER + worker


def _op(timeline: Timeline, op: int) -> Iterator[Event]:
    """A slice on the queue's thread.

    Virtual ops and those of a shared queue may overlap: asynchronous events if they take time,
    otherwise left out.
    """
    event = _slice(timeline, op)
    if timeline.dfg.apart[op]:
        yield event
    elif timeline.duration_s[op] > 0:
        begin = {name: value for name, value in event.items() if name != "dur"}
        yield begin | {"ph": "b", "id": op}
        identity = {name: begin[name] for name in ("name", "cat", "pid", "tid")}
        yield identity | {"id": op, "ph": "e", "ts": _us(timeline.end_s[op])}


def _slice(timeline: Timeline, op: int) -> Event:
    dfg = timeline.dfg
    layer, channel = int(dfg.layer[op]), int(dfg.channel[op])
    details: Event = {"op": op}
    if layer != NONE:
        details["layer"] = dfg.names.layers[layer]
    if dfg.size_bytes[op]:
        details["bytes"] = float(dfg.size_bytes[op])
    if channel != NONE:
        details["channel"] = dfg.names.queues[channel]
    return {
        "ph": "X",
        "name": dfg.names.ops[op],
        "cat": Kind(dfg.kind[op]).name.lower(),
        "pid": _process(int(dfg.worker[op])),
        "tid": max(int(dfg.queue[op]), 0),
        "ts": _us(timeline.start_s[op]),
        "dur": _us(timeline.end_s[op] - timeline.start_s[op]),
        "args": details,
    }


def _middle(timeline: Timeline, op: int) -> Event:
    dfg = timeline.dfg
    ts = _us((timeline.start_s[op] + timeline.end_s[op]) / 2)
    return {"pid": _process(int(dfg.worker[op])), "tid": int(dfg.queue[op]), "ts": ts}


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
