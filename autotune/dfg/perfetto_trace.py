"""Write a timeline as a Perfetto trace (protobuf): a quarter of the bytes of a Chrome trace.

The messages are those of the package `perfetto` (extra `perfetto`). Each worker is a process with a
track for each queue. The critical path has a track of its own, with its delays. Other delays, and
ops of shared queues, are left out: they overlap, and a track cannot show that.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from autotune.dfg.chrome_trace import Section, cut, process_name
from autotune.dfg.critical_path import critical_path
from autotune.dfg.graph import Kind
from autotune.dfg.replay import Timeline
from autotune.errors import MissingExtra, install_extra
from autotune.files import whole_file

PACKETS_AT_ONCE = 10_000
_SEQUENCE = 1
_CRITICAL, _FIRST_PROCESS, _FIRST_QUEUE = 1, 2, 2**32
_CLEARED, _NEEDED = 1, 2
"""SEQ_INCREMENTAL_STATE_CLEARED and SEQ_NEEDS_INCREMENTAL_STATE of `TracePacket`."""


def write_perfetto_trace(timeline: Timeline, path: Path, section: Section | None = None) -> int:
    """Write the trace, or a section of it, compressed for the suffix `.gz`; the number of its ops.

    Raises `InvalidInput` if the package `perfetto` is missing or the file cannot be written.
    """
    protos = _protos()
    critical = critical_path(timeline, None if section is None else section.last)
    timeline, inside = cut(timeline, section)
    shown = inside[timeline.dfg.apart[inside]]
    present = np.zeros(timeline.dfg.ops, dtype=np.bool_)
    present[inside] = True
    packets = _Packets(protos, timeline)
    with whole_file(path, "the timeline") as file, contextlib.ExitStack() as packing:
        stream = cast(BinaryIO, file)
        if path.suffix == ".gz":
            packed = packing.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
            stream = cast(BinaryIO, packed)
        every = packets.every(shown, critical.ops[present[critical.ops]])
        while some := list(islice(every, PACKETS_AT_ONCE)):  # messages may be concatenated
            stream.write(protos.Trace(packet=some).SerializeToString())
    return len(shown)


def _protos() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise MissingExtra(
            "a Perfetto trace needs the package perfetto, which is not installed; write Chrome "
            f"traces, or {install_extra('perfetto')}"
        ) from error
    return perfetto_trace_pb2


class _Packets:
    """Makes packets. Names of ops and kinds are written once and referred to by number."""

    def __init__(self, protos: Any, timeline: Timeline) -> None:
        self.protos, self.timeline = protos, timeline
        self.names: dict[str, int] = {}
        self.kinds: dict[int, int] = {}
        self.begun = False

    def every(self, shown: np.ndarray, path: np.ndarray) -> Iterator[Any]:
        dfg, timeline = self.timeline.dfg, self.timeline
        yield self._track(_CRITICAL, name="critical path")
        for worker in np.unique(dfg.worker[shown]).tolist():
            yield self._process(worker)
        pairs = np.column_stack([dfg.worker[shown], dfg.queue[shown]])
        for worker, queue in np.unique(pairs, axis=0).tolist():
            parent = _FIRST_PROCESS + worker + 1
            yield self._track(
                _FIRST_QUEUE + queue, parent_uuid=parent, name=dfg.names.queues[queue]
            )
        # In the order of each track: where one op ends as another begins, its end comes first.
        order = np.lexsort((timeline.end_s[shown], timeline.start_s[shown], dfg.queue[shown]))
        for op in shown[order].tolist():
            yield from self._slice(op, _FIRST_QUEUE + int(dfg.queue[op]))
        for op in path.tolist():
            yield from self._slice(op, _CRITICAL)

    def _track(self, uuid: int, **values: Any) -> Any:
        descriptor = self.protos.TrackDescriptor(uuid=uuid, **values)
        return self.protos.TracePacket(track_descriptor=descriptor)

    def _process(self, worker: int) -> Any:
        process = self.protos.ProcessDescriptor(
            pid=worker + 2, process_name=process_name(self.timeline, worker)
        )
        return self._track(_FIRST_PROCESS + worker + 1, process=process)

    def _slice(self, op: int, track: int) -> Iterator[Any]:
        event = self.protos.TrackEvent
        begin = self._packet(self.timeline.start_s[op])
        name, kind = self.timeline.dfg.names.ops[op], int(self.timeline.dfg.kind[op])
        if name not in self.names:
            self.names[name] = len(self.names) + 1
            begin.interned_data.event_names.add(iid=self.names[name], name=name)
        if kind not in self.kinds:
            self.kinds[kind] = len(self.kinds) + 1
            begin.interned_data.event_categories.add(
                iid=self.kinds[kind], name=Kind(kind).name.lower()
            )
        begin.track_event.type = event.TYPE_SLICE_BEGIN
        begin.track_event.track_uuid = track
        begin.track_event.name_iid = self.names[name]
        begin.track_event.category_iids.append(self.kinds[kind])
        yield begin
        end = self._packet(self.timeline.end_s[op])
        end.track_event.type = event.TYPE_SLICE_END
        end.track_event.track_uuid = track
        yield end

    def _packet(self, time_s: float) -> Any:
        flags = _NEEDED if self.begun else _CLEARED | _NEEDED
        self.begun = True
        return self.protos.TracePacket(
            timestamp=round(float(time_s) * 1e9),
            trusted_packet_sequence_id=_SEQUENCE,
            sequence_flags=flags,
        )
