"""Chrome traces of torch.profiler (Kineto), old and new, of CUDA, ROCm and CPU jobs, into `RankTrace`.

Since 2021 the category names, the types of thread ids, the keys of correlation ids and the place of the time's origin have changed;
all of it is undone here, so that nothing else knows formats. An event that cannot be used is left out and counted; where they are more
than `MOST_BAD` of all, the file is refused with the first of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.errors import InvalidInput
from autotune.profiling.traces.comm_args import backend_collective, comm_of
from autotune.profiling.traces.json_stream import Field, JsonItems
from autotune.profiling.traces.rank_trace import (
    CATEGORY_NAMES,
    MISSING,
    Category,
    Comm,
    Flow,
    Lane,
    RankTrace,
    Repair,
    SyncWait,
)
from autotune.profiling.traces.sources import Read
from autotune.profiling.traces.steps import find_steps

MOST_BAD = 0.05
MAX_EVENTS = 50_000_000
MAX_NAME_CHARS = 400
US, NS = 1e-6, 1e-9

_MARKS = re.compile(
    r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|(?:nccl|gloo|ucc|mpi|autotune)[:.]|## "
)
"""Names that are annotations although profilers until 2021 called them operators."""
_OLD_PROCESSES = {"CPU functions": Category.HOST_OP, "CUDA functions": Category.KERNEL}
"""The legacy autograd profiler gives no categories, only these processes."""
_FLOWS = ("fwdbwd", "forward_backward")


def read_kineto(read: Read, where: str) -> RankTrace:
    """The trace behind `read`. Raises `InvalidInput` where it is no trace or too much of it is wrong."""
    return _Reader(JsonItems(read, "traceEvents", where), where).trace()


class _Reader:
    def __init__(self, items: JsonItems, where: str) -> None:
        self.items, self.where = items, where
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[str, str, bool], int] = {}
        self.comms: dict[Comm, int] = {}
        self.syncs: dict[SyncWait, int] = {}
        self.floats = {name: array("d") for name in ("start", "duration", "bytes")}
        self.ints = {
            name: array("q")
            for name in (
                "category",
                "lane",
                "name",
                "correlation",
                "external",
                "function",
                "sequence",
                "comm",
                "sync",
            )
        }
        self.open: dict[
            tuple[str, str], list[dict[str, Any]]
        ] = {}  # by process and thread: spans that began and have not ended
        self.flow_ends: dict[str, dict[int, tuple[int, float]]] = {"s": {}, "f": {}}
        self.fields: dict[str, Any] = {}
        self.bad = 0
        self.first_bad = ""
        self.dropped: Counter[str] = Counter()
        self.base_us: float | None = None
        self.rank_args: Counter[int] = Counter()

    def trace(self) -> RankTrace:
        for item in self.items:
            if isinstance(item, Field):
                self.fields[item.key] = item.value
                continue
            if self.items.items > MAX_EVENTS:
                raise InvalidInput(
                    f"{self.where} may hold at most {MAX_EVENTS} events, but has more"
                )
            if problem := self._event(item) if isinstance(item, dict) else "it is no object":
                self._unusable(item, problem)
        for began in [event for stack in self.open.values() for event in stack]:
            self._unusable(began, "it begins and never ends")
        kept = len(self.floats["start"])
        if self.bad and self.bad > MOST_BAD * (kept + self.bad):
            share = f"at most {100 * MOST_BAD:.0f} % of a trace's events may be unusable"
            found = f"of {kept + self.bad} in {self.where} {self.bad} are; first {self.first_bad}"
            raise InvalidInput(f"{share}, but {found}; export the trace again")
        if not kept:
            raise InvalidInput(
                f"{self.where} must hold events with ph, ts and dur in traceEvents, but none of {self.items.items} is one"
            )
        return self._build()

    def _unusable(self, item: Any, problem: str) -> None:
        self.bad += 1
        self.first_bad = (
            self.first_bad or f"event {self.items.items - 1} ({_shown(item)}): {problem}"
        )

    def _event(self, event: dict[str, Any]) -> str:
        """Store it; what is wrong with it, "" if nothing."""
        phase = event.get("ph")
        if phase == "X":
            return self._complete(event)
        if phase in ("B", "E"):
            return self._begin_or_end(event, str(phase))
        if phase in ("s", "f") and (event.get("cat") in _FLOWS or event.get("name") in _FLOWS):
            self._flow(event, str(phase))
        return ""

    def _complete(self, event: dict[str, Any]) -> str:
        name = event.get("name")
        name = name[:MAX_NAME_CHARS] if isinstance(name, str) else str(name)[:MAX_NAME_CHARS]
        category = _category(event, name)
        if category is None:
            self.dropped[str(event.get("cat"))[:40]] += 1
            return ""
        start, duration = _number(event.get("ts")), _number(event.get("dur"))
        if start is None:
            return f"ts must be a finite number, but is {event.get('ts')!r:.40}"
        if duration is None or duration < 0:
            return f"dur must be a number of at least 0, but is {event.get('dur')!r:.40}"
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if self.base_us is None:
            self.base_us = float(math.floor(start))
        self.floats["start"].append(start - self.base_us)
        self.floats["duration"].append(duration)
        self.floats["bytes"].append(max(0.0, _number(args.get("bytes")) or 0.0))
        row = self.ints
        row["category"].append(category)
        row["lane"].append(self._lane(event, args, category))
        row["name"].append(self.names.setdefault(name, len(self.names)))
        row["correlation"].append(_whole(args.get("correlation")))
        row["external"].append(_whole(args.get("External id", args.get("external id"))))
        row["function"].append(_whole(args.get("Record function id")))
        row["sequence"].append(_whole(args.get("Sequence number")))
        comm = comm_of(name, category, args)
        row["comm"].append(
            MISSING if comm is None else self.comms.setdefault(comm, len(self.comms))
        )
        row["sync"].append(self._sync(args) if category == Category.DEVICE_SYNC else MISSING)
        if category == Category.HOST_OP and (rank := _whole(args.get("Rank"))) >= 0:
            self.rank_args[rank] += 1
        return ""

    def _begin_or_end(self, event: dict[str, Any], phase: str) -> str:
        """A span in two events, as other writers of the format make it: an end belongs to the last begin of its thread."""
        stack = self.open.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
        if phase == "B":
            stack.append(event)
            return ""
        if not stack:
            return "it ends and never began"
        began = stack.pop()
        start, end = _number(began.get("ts")), _number(event.get("ts"))
        return self._complete(
            {**began, "dur": end - start if start is not None and end is not None else None}
        )

    def _lane(self, event: dict[str, Any], args: dict[str, Any], category: Category) -> int:
        device = category in (
            Category.KERNEL,
            Category.MEMCPY,
            Category.MEMSET,
            Category.DEVICE_MARK,
            Category.DEVICE_SYNC,
        )
        process = str(args.get("device", event.get("pid")) if device else event.get("pid"))[:40]
        thread = str(
            args["stream"] if device and "stream" in args else event.get("tid")
        ).removeprefix("stream ")[:40]
        return self.lanes.setdefault((process, thread, device), len(self.lanes))

    def _sync(self, args: dict[str, Any]) -> int:
        sync = SyncWait(
            str(args.get("cuda_sync_kind", ""))[:40],
            str(args.get("stream", ""))[:40],
            str(args.get("wait_on_stream", ""))[:40],
            _whole(args.get("wait_on_cuda_event_record_corr_id")),
        )
        return self.syncs.setdefault(sync, len(self.syncs))

    def _flow(self, event: dict[str, Any], phase: str) -> None:
        number, at = _whole(event.get("id")), _number(event.get("ts"))
        if number >= 0 and at is not None and self.base_us is not None:
            lane = self.lanes.setdefault(
                (str(event.get("pid"))[:40], str(event.get("tid"))[:40], False), len(self.lanes)
            )
            self.flow_ends[phase].setdefault(number, (lane, at - self.base_us))

    def _build(self) -> RankTrace:
        assert self.base_us is not None
        start, duration = (
            np.frombuffer(self.floats[name], dtype=np.float64) * US
            for name in ("start", "duration")
        )
        order = np.lexsort((-duration, start))
        first = float(start[order[0]])
        ints = {
            name: np.frombuffer(values, dtype=np.int64)[order] for name, values in self.ints.items()
        }
        pairs = [
            (self.flow_ends["s"][number], end)
            for number, end in self.flow_ends["f"].items()
            if number in self.flow_ends["s"]
        ]
        base_ns = _whole(self.fields.get("baseTimeNanoseconds"))
        rank, world, groups = self._distributed()
        trace = RankTrace(
            source=self.where,
            rank=rank,
            world_size=world,
            host=str(self.fields.get("host_name") or "")[:200],
            origin_ns=max(base_ns, 0) + int(self.base_us) * 1000 + round(first / NS),
            start_s=start[order] - first,
            duration_s=duration[order],
            category=ints["category"].astype(np.int8),
            lane=ints["lane"].astype(np.int32),
            name=ints["name"].astype(np.int32),
            correlation=ints["correlation"],
            external=ints["external"],
            function=ints["function"],
            sequence=ints["sequence"],
            size_bytes=np.frombuffer(self.floats["bytes"], dtype=np.float64)[order],
            comm=ints["comm"].astype(np.int32),
            sync=ints["sync"].astype(np.int32),
            names=tuple(self.names),
            lanes=tuple(Lane(*key) for key in self.lanes),
            comms=tuple(self.comms),
            syncs=tuple(self.syncs),
            flows=tuple(Flow(a[0], a[1] * US - first, b[0], b[1] * US - first) for a, b in pairs),
            groups=groups,
            repairs=tuple(self._repairs()),
            info={
                key: str(value)[:200]
                for key, value in self.fields.items()
                if isinstance(value, str | int | float)
            }
            | self._devices(),
        )
        return find_steps(trace)

    def _devices(self) -> dict[str, str]:
        """How many devices the process could see, and a digest of what they are: alike for all processes of a host."""
        listed = self.fields.get("deviceProperties")
        if not isinstance(listed, list) or not listed:
            return {}
        digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
        return {"devices": str(len(listed)), "device_list": digest}

    def _repairs(self) -> list[Repair]:
        found = []
        if self.bad:
            found.append(Repair(f"events left out; first {self.first_bad}", self.bad))
        if self.items.not_numbers:
            found.append(
                Repair("bare nan or inf, which is not JSON, read as null", self.items.not_numbers)
            )
        if self.items.replaced:
            found.append(Repair("bytes that are not UTF-8 replaced", self.items.replaced))
        return found

    def _distributed(self) -> tuple[int | None, int | None, dict[str, tuple[int, ...]]]:
        """(rank, world size, groups) from distributedInfo and, where that is missing, from what collectives say."""
        info = self.fields.get("distributedInfo")
        if isinstance(info, str):
            info = _parsed(info)
        info = info if isinstance(info, dict) else {}
        rank, world = _whole(info.get("rank")), _whole(info.get("world_size"))
        groups = {
            comm.group: comm.group_ranks for comm in self.comms if comm.group and comm.group_ranks
        }
        config = info.get("pg_config")
        for group in config if isinstance(config, list) else []:
            ranks = group.get("ranks") if isinstance(group, dict) else None
            if isinstance(ranks, list) and all(isinstance(r, int) for r in ranks):
                groups.setdefault(str(group.get("pg_name"))[:80], tuple(ranks))
        if rank < 0 and len(self.rank_args) == 1:
            rank = next(iter(self.rank_args))
        if world < 0 and groups:
            world = max(max(ranks, default=0) for ranks in groups.values()) + 1
        return (rank if rank >= 0 else None), (world if world > 0 else None), groups


def _category(event: Mapping[str, Any], name: str) -> Category | None:
    """None for events that are of no use here, such as Python frames and the profiler's own spans."""
    given = event.get("cat")
    if not isinstance(given, str):
        return _OLD_PROCESSES.get(str(event.get("pid")))
    category = CATEGORY_NAMES.get(given.lower())
    if category is Category.HOST_OP and (
        _MARKS.match(name) if given == "Operator" else backend_collective(name)
    ):
        return Category.HOST_MARK
    if category is None and given == "python_function" and name.startswith("nn.Module: "):
        return Category.MODULE
    return category


def _number(value: Any) -> float | None:
    """A finite number, also one that was written as a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int:
    number = _number(value)
    return (
        int(value if isinstance(value, int) else number)
        if number is not None and abs(number) < 2**62
        else MISSING
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(item: Any) -> str:
    if isinstance(item, dict):
        return f"name {str(item.get('name'))[:60]!r}, ph {str(item.get('ph'))[:5]!r}, cat {str(item.get('cat'))[:30]!r}"
    return str(item)[:60]
