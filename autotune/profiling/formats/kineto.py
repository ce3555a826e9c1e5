"""Reads Chrome traces of torch.profiler (Kineto) of CUDA, ROCm and CPU jobs into `RankTrace`.

Since 2021 the category names, the types of thread ids, the keys of correlation ids and the place of
the time's origin have changed. This module undoes all of it, so no other module knows the formats.
MXNet's profiler writes such a file, too (src/profiler/profiler.h of apache/mxnet 1.x): an operator
is a span of category `operator` in a process that is named `cpu/0` or `gpu/0`.
Unusable events are left out and counted. Above a share of `MOST_BAD` the file is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InvalidInput
from autotune.limits import MAX_RANKS
from autotune.profiling.formats.collective_args import backend_collective, comm_of
from autotune.profiling.formats.flaws import flaws
from autotune.profiling.formats.json_stream import Field, JsonItems, Read
from autotune.profiling.formats.limits import (
    MAX_GROUP_RANKS,
    MAX_SPAN_US,
    MAX_TIME_US,
    limited,
    limited_rank,
)
from autotune.profiling.formats.op_inputs import OpInputs, op_inputs
from autotune.profiling.formats.rank_trace import (
    CATEGORY_NAMES,
    MISSING,
    Category,
    Comm,
    Flow,
    MemoryEvents,
    RankTrace,
    Repair,
    SyncWait,
    TraceLane,
)
from autotune.profiling.formats.stated_numbers import stated_number, stated_whole
from autotune.profiling.formats.steps import find_steps

MOST_BAD = 0.05
MAX_EVENTS = 50_000_000
MAX_NAME_CHARS = 400
MAX_DROPPED = 50
"""Most categories of dropped events that are counted apart."""
DEVICE_BYTES = "device_bytes"
"""Key of `RankTrace.info`: bytes of the smallest visible device's memory."""
US, NS = 1e-6, 1e-9

_MARKS = re.compile(
    r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|(?:nccl|gloo|ucc|mpi|autotune)[:.]|## "
)
"""Names of annotations that profilers until 2021 categorized as operators."""
_OLD_PROCESSES = {"CPU functions": Category.HOST_OP, "CUDA functions": Category.KERNEL}
"""The legacy autograd profiler gives no categories, only these processes."""
_MXNET_DEVICE = re.compile(r"(cpu|gpu)/(\d+)$")
_MXNET_COPY = re.compile(r"Copy[CG]PU2[CG]PU")
MEMORY = "[memory]"
"""Name of the instants that state a block of an allocator."""
_FLOWS = ("fwdbwd", "forward_backward")
_ON_DEVICE = (
    Category.KERNEL,
    Category.MEMCPY,
    Category.MEMSET,
    Category.DEVICE_MARK,
    Category.DEVICE_SYNC,
)
_FLOATS = ("start", "duration", "bytes")
_INTS = [
    "category",
    "lane",
    "name",
    "correlation",
    "external",
    "function",
    "sequence",
    "comm",
    "sync",
    "inputs",
]
K = TypeVar("K")


def read_kineto(read: Read, where: str) -> RankTrace:
    """Read one trace. Raises `InvalidInput` for a file that is not a trace or mostly unusable."""
    return _KinetoReader(JsonItems(read, "traceEvents", where), where).trace()


class _KinetoReader:
    def __init__(self, items: JsonItems, where: str) -> None:
        self.items, self.where = items, where
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[str, str, bool], int] = {}
        self.comms: dict[Comm, int] = {}
        self.syncs: dict[SyncWait, int] = {}
        self.inputs: dict[OpInputs, int] = {}
        self.floats = {name: array("d") for name in _FLOATS}
        self.ints = {name: array("q") for name in _INTS}
        # by process and thread: spans that began and have not ended
        self.open: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.flow_ends: dict[str, dict[int, tuple[int, float]]] = {"s": {}, "f": {}}
        self.memory_us, self.memory = array("d"), array("q")
        self.fields: dict[str, Any] = {}
        self.mxnet: dict[str, tuple[str, int]] = {}  # process -> kind and number of its device
        self.bad = 0
        self.first_bad = ""
        self.base_us: float | None = None
        self.dropped: Counter[str] = Counter()
        self.known_groups: set[tuple[int, ...]] = set()
        self.group_ranks = 0

    def trace(self) -> RankTrace:
        for item in self.items:
            if isinstance(item, Field):
                self.fields[item.key] = item.value
                continue
            if self.items.items > MAX_EVENTS:
                raise InvalidInput(
                    f"{self.where} may hold at most {MAX_EVENTS} events, but has more"
                )
            try:
                problem = self._event(item) if isinstance(item, dict) else "it is no object"
            except InvalidInput as error:
                place = f"{self.where}, event {self.items.items - 1}"
                raise InvalidInput(f"{place}: {error}; is the file damaged?") from error
            if problem:
                self._unusable(item, problem)
        for began in [event for stack in self.open.values() for event in stack]:
            self._unusable(began, "it begins and never ends")
        kept = self._kept()
        usable = int(kept.sum())
        if self.bad and self.bad > MOST_BAD * (usable + self.bad):
            raise InvalidInput(
                f"at most {100 * MOST_BAD:.0f} % of a trace's events may be unusable, but of "
                f"{usable + self.bad} in {self.where} {self.bad} are; first {self.first_bad}; "
                "export the trace again"
            )
        if not usable and self.dropped:
            raise InvalidInput(
                f"{self.where} must hold events of Kineto's or MXNet's categories, such as cpu_op "
                f"and kernel, but has only others: {', '.join(list(self.dropped)[:8])}; TensorFlow "
                "is recorded with autotune profile"
            )
        if not usable:
            raise InvalidInput(
                f"{self.where} must hold events with ph, ts and dur in traceEvents, but none of "
                f"{self.items.items} is one"
            )
        return self._build(kept)

    def _kept(self) -> NDArray[np.bool_]:
        """Which events lie within `MAX_SPAN_US` of the median one; the others are unusable."""
        start_us = np.frombuffer(self.floats["start"])
        if not len(start_us):
            return np.ones(0, dtype=np.bool_)
        kept: NDArray[np.bool_] = np.abs(start_us - np.median(start_us)) <= MAX_SPAN_US
        if far := int((~kept).sum()):
            days = round(MAX_SPAN_US / 86_400e6)
            self.first_bad = self.first_bad or f"an event more than {days} days from the others"
            self.bad += far
        return kept

    def _unusable(self, item: Any, problem: str) -> None:
        self.bad += 1
        if not self.first_bad:
            self.first_bad = f"event {self.items.items - 1} ({_shown(item)}): {problem}"

    def _event(self, event: dict[str, Any]) -> str:
        """Store the event; return what is wrong with it, "" if nothing is."""
        phase = event.get("ph")
        if phase == "X":
            return self._complete(event)
        if phase in ("B", "E"):
            return self._begin_or_end(event, str(phase))
        if phase in ("s", "f") and (event.get("cat") in _FLOWS or event.get("name") in _FLOWS):
            self._flow(event, str(phase))
        elif phase == "i" and event.get("name") == MEMORY and self._memory(event):
            pass
        elif phase == "M":  # names of processes and threads
            self._name(event)
        elif not (self.mxnet and phase in ("b", "e") and event.get("cat") == "operator"):
            self._drop(event)  # MXNet shows each operator again as an asynchronous task
        return ""

    def _name(self, event: dict[str, Any]) -> None:
        """Note which device a process of MXNet stands for."""
        args = event.get("args")
        name = args.get("name") if isinstance(args, dict) else None
        device = _MXNET_DEVICE.match(str(name))
        if event.get("name") == "process_name" and device:
            self.mxnet[str(event.get("pid"))] = device.group(1), int(device.group(2)[:9])

    def _memory(self, event: dict[str, Any]) -> bool:
        """Store a block that was allocated or freed; False if the event does not state it all."""
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        at = stated_number(event.get("ts"))
        address, size, total = (
            stated_whole(args.get(key)) for key in ("Addr", "Bytes", "Total Allocated")
        )
        known = {"Addr", "Bytes", "Total Allocated", "Device Type"} <= args.keys()
        if at is None or abs(at) > MAX_TIME_US or not known or total < 0:
            return False
        host = stated_whole(args["Device Type"]) == 0
        self.memory_us.append(at)
        device = MISSING if host else stated_whole(args.get("Device Id"))
        for value in (address, size, total, device):
            self.memory.append(value)
        return True

    def _drop(self, event: dict[str, Any]) -> None:
        """Count an event that nothing here reads, by its category."""
        category = str(event.get("cat") or "without a category")[:40]
        known = category in self.dropped or len(self.dropped) < MAX_DROPPED
        self.dropped[category if known else "others"] += 1

    def _complete(self, event: dict[str, Any]) -> str:
        name = str(event.get("name"))[:MAX_NAME_CHARS]
        category = _category(event, name)
        if category is None:
            self._drop(event)
            return ""
        start, duration = stated_number(event.get("ts")), stated_number(event.get("dur"))
        if start is None or abs(start) > MAX_TIME_US:
            return f"ts must be at most {MAX_TIME_US:.0f} us from 0, but is {event.get('ts')!r:.40}"
        if duration is None or not 0 <= duration <= MAX_SPAN_US:
            shown = f"{event.get('dur')!r:.40}"
            return f"dur must be a number of 0 to {MAX_SPAN_US:.0f} us, but is {shown}"
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        kind, number = self.mxnet.get(str(event.get("pid")), ("", 0))
        if kind == "gpu" and category is Category.HOST_OP:
            category = Category.MEMCPY if _MXNET_COPY.match(name) else Category.KERNEL
            args = {"device": number, **args}
        if self.base_us is None:
            self.base_us = float(math.floor(start))
        self.floats["start"].append(start - self.base_us)
        self.floats["duration"].append(duration)
        self.floats["bytes"].append(max(0.0, stated_number(args.get("bytes")) or 0.0))
        comm = self._comm(name, category, args)
        row = self.ints
        row["category"].append(category)
        row["lane"].append(self._lane(event, args, category))
        row["name"].append(_numbered(self.names, name))
        row["correlation"].append(stated_whole(args.get("correlation")))
        row["external"].append(stated_whole(args.get("External id", args.get("external id"))))
        row["function"].append(stated_whole(args.get("Record function id")))
        row["sequence"].append(stated_whole(args.get("Sequence number")))
        row["comm"].append(MISSING if comm is None else _numbered(self.comms, comm))
        row["sync"].append(self._sync(args) if category == Category.DEVICE_SYNC else MISSING)
        inputs = op_inputs(args) if category == Category.HOST_OP else None
        row["inputs"].append(MISSING if inputs is None else _numbered(self.inputs, inputs))
        return ""

    def _comm(self, name: str, category: Category, args: dict[str, Any]) -> Comm | None:
        comm = comm_of(name, category, args)
        if comm is not None and comm.group_ranks and comm.group_ranks not in self.known_groups:
            self.known_groups.add(comm.group_ranks)
            self.group_ranks += len(comm.group_ranks)
            limited(self.group_ranks, MAX_GROUP_RANKS, "ranks in all groups of a trace")
        return comm

    def _begin_or_end(self, event: dict[str, Any], phase: str) -> str:
        """Read a span in two events: an end belongs to the last begin of its thread."""
        stack = self.open.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
        if phase == "B":
            stack.append(event)
            return ""
        if not stack:
            return "it ends and never began"
        began = stack.pop()
        start, end = stated_number(began.get("ts")), stated_number(event.get("ts"))
        duration = None if start is None or end is None else end - start
        return self._complete({**began, "dur": duration})

    def _lane(self, event: dict[str, Any], args: dict[str, Any], category: Category) -> int:
        process, thread = event.get("pid"), event.get("tid")
        device = category in _ON_DEVICE
        if device:
            process, thread = args.get("device", process), args.get("stream", thread)
        thread = str(thread).removeprefix("stream ")
        return _numbered(self.lanes, (str(process)[:40], thread[:40], device))

    def _sync(self, args: dict[str, Any]) -> int:
        kind, stream, wait_on_stream, device = (
            str(args.get(key, ""))[:40]
            for key in ("cuda_sync_kind", "stream", "wait_on_stream", "device")
        )
        correlation = stated_whole(args.get("wait_on_cuda_event_record_corr_id"))
        sync = SyncWait(kind, stream, wait_on_stream, correlation, device)
        return _numbered(self.syncs, sync)

    def _flow(self, event: dict[str, Any], phase: str) -> None:
        number, at = stated_whole(event.get("id")), stated_number(event.get("ts"))
        if number >= 0 and at is not None and self.base_us is not None:
            process, thread = str(event.get("pid"))[:40], str(event.get("tid"))[:40]
            lane = _numbered(self.lanes, (process, thread, False))
            self.flow_ends[phase].setdefault(number, (lane, at - self.base_us))

    def _build(self, kept: NDArray[np.bool_]) -> RankTrace:
        """The trace of the events that are `kept`."""
        assert self.base_us is not None
        floats = {name: np.frombuffer(column)[kept] for name, column in self.floats.items()}
        start_s, duration_s = floats["start"] * US, floats["duration"] * US
        order = np.lexsort((-duration_s, start_s))
        first_s = float(start_s[order[0]])
        ints = {
            name: np.frombuffer(column, dtype=np.int64)[kept][order]
            for name, column in self.ints.items()
        }
        flows = []
        for number, (to_lane, to_us) in self.flow_ends["f"].items():
            if number in self.flow_ends["s"]:
                from_lane, from_us = self.flow_ends["s"][number]
                flows.append(Flow(from_lane, from_us * US - first_s, to_lane, to_us * US - first_s))
        base_ns = stated_whole(self.fields.get("baseTimeNanoseconds"))
        rank, world, groups = self._distributed()
        info = {
            key: str(value)[:200]
            for key, value in self.fields.items()
            if isinstance(value, str | int | float)
        }
        trace = RankTrace(
            source=self.where,
            rank=rank,
            world_size=world,
            host=str(self.fields.get("host_name") or "")[:200],
            origin_ns=max(base_ns, 0) + int(self.base_us) * 1000 + round(first_s / NS),
            start_s=start_s[order] - first_s,
            duration_s=duration_s[order],
            category=ints["category"].astype(np.int8),
            lane=ints["lane"].astype(np.int32),
            name=ints["name"].astype(np.int32),
            correlation=ints["correlation"],
            external=ints["external"],
            function=ints["function"],
            sequence=ints["sequence"],
            size_bytes=floats["bytes"][order],
            comm=ints["comm"].astype(np.int32),
            sync=ints["sync"].astype(np.int32),
            inputs=ints["inputs"].astype(np.int32),
            names=tuple(self.names),
            lanes=tuple(TraceLane(*key) for key in self.lanes),
            comms=tuple(self.comms),
            syncs=tuple(self.syncs),
            op_inputs=tuple(self.inputs),
            flows=tuple(flows),
            groups=groups,
            repairs=tuple(self._repairs()),
            dropped=dict(self.dropped.most_common()),
            memory=self._memory_events(first_s),
            info=info | self._devices(),
        )
        return find_steps(replace(trace, repairs=(*trace.repairs, *flaws(trace))))

    def _memory_events(self, first_s: float) -> MemoryEvents:
        """The blocks in order of time, which counts from the first event."""
        assert self.base_us is not None
        at_s = (np.frombuffer(self.memory_us) - self.base_us) * US - first_s
        rows = np.frombuffer(self.memory, dtype=np.int64).reshape(-1, 4)
        order = np.argsort(at_s, kind="stable")
        return MemoryEvents(at_s[order], *rows[order].T)

    def _devices(self) -> dict[str, str]:
        """The number of visible devices, the first one's name, the digest of all, and the smallest
        memory in bytes. All processes of a host share them.
        """
        listed = self.fields.get("deviceProperties")
        if not isinstance(listed, list) or not listed:
            return {}
        digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
        info = {"devices": str(len(listed)), "device_list": digest}
        devices = [one for one in listed if isinstance(one, dict)]
        memories = [stated_whole(one.get("totalGlobalMem")) for one in devices]
        if known := [size for size in memories if size > 0]:
            info[DEVICE_BYTES] = str(min(known))
        name = listed[0].get("name") if isinstance(listed[0], dict) else None
        if isinstance(name, str):
            info["device_name"] = name[:MAX_NAME_CHARS]
        return info

    def _repairs(self) -> list[Repair]:
        flaws = (
            (f"events left out; first {self.first_bad}", self.bad),
            ("bare nan or inf, which is not JSON, read as null", self.items.not_numbers),
            ("bytes that are not UTF-8 replaced", self.items.replaced),
        )
        return [Repair(what, count) for what, count in flaws if count]

    def _distributed(self) -> tuple[int | None, int | None, dict[str, tuple[int, ...]]]:
        """(rank, world size, groups) from distributedInfo; groups also from the collectives.

        Only distributedInfo states the rank: `Rank` among a collective's arguments counts within
        its group.
        """
        info = self.fields.get("distributedInfo")
        if isinstance(info, str):
            info = _parsed(info)
        info = info if isinstance(info, dict) else {}
        rank, world = stated_whole(info.get("rank")), stated_whole(info.get("world_size"))
        groups = {
            comm.group: comm.group_ranks for comm in self.comms if comm.group and comm.group_ranks
        }
        try:
            config = info.get("pg_config")
            for group in config if isinstance(config, list) else []:
                ranks = group.get("ranks") if isinstance(group, dict) else None
                if isinstance(ranks, list) and all(isinstance(r, int) for r in ranks):
                    name = str(group.get("pg_name"))[:80]
                    groups.setdefault(name, tuple(limited_rank(r) for r in ranks))
            limited(world, MAX_RANKS, "ranks in a job")
            if rank >= 0:
                limited_rank(rank)
        except InvalidInput as error:
            raise InvalidInput(f"{self.where}, distributedInfo: {error}") from error
        if world == 0 or rank >= world > 0:
            raise InvalidInput(
                f"{self.where}: distributedInfo must have a rank below its world_size, but has "
                f"rank {rank} and world_size {world}"
            )
        if world < 0 and groups:
            world = max(max(ranks, default=0) for ranks in groups.values()) + 1
        return (rank if rank >= 0 else None), (world if world > 0 else None), groups


def _category(event: Mapping[str, Any], name: str) -> Category | None:
    """None for useless events, such as Python frames and the profiler's own spans."""
    given = event.get("cat")
    if not isinstance(given, str):
        return _OLD_PROCESSES.get(str(event.get("pid")))
    category = CATEGORY_NAMES.get(given.lower())
    if category is Category.HOST_OP:
        is_mark = _MARKS.match(name) if given == "Operator" else backend_collective(name)
        return Category.HOST_MARK if is_mark else category
    if category is None and given == "python_function" and name.startswith("nn.Module: "):
        return Category.MODULE
    return category


def _numbered(numbers: dict[K, int], key: K) -> int:
    """The number of `key`, which is the next one where the key is new."""
    return numbers.setdefault(key, len(numbers))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)[:60]
    name, phase, category = str(item.get("name")), str(item.get("ph")), str(item.get("cat"))
    return f"name {name[:60]!r}, ph {phase[:5]!r}, cat {category[:30]!r}"
