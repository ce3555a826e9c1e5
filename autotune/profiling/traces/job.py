"""All traces of one training job: read, ordered by rank, repaired and matched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.files import MAX_FILE_BYTES
from autotune.parsing import parse_json
from autotune.profiling.formats.chakra import chakra_reader
from autotune.profiling.formats.execution_trace import ExecutionTrace, read_execution_trace
from autotune.profiling.formats.horovod import BEGINNING, NEGOTIATE, HorovodTimeline, read_horovod
from autotune.profiling.formats.json_stream import Read
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import RankTrace, Repair, listed_numbers
from autotune.profiling.formats.sources import find_sources
from autotune.profiling.formats.tensorflow import read_step_graph
from autotune.profiling.traces.collectives import TracedCollective, rank_collectives
from autotune.profiling.traces.execution_links import ExecutionLink, enriched
from autotune.profiling.traces.hosts import Hosts, find_hosts
from autotune.profiling.traces.matching import Joint, match_collectives
from autotune.profiling.traces.ranks import ranked
from autotune.profiling.traces.step_numbers import with_common_numbers
from autotune.recordings.graph_file import NODES, StepGraph
from autotune.recordings.job_file import JOB_FILE
from autotune.recordings.memory_file import MEMORY_FILE

_SNIFFED_BYTES = 2**16
SHOWN_CATEGORIES = 8
NOT_NEEDED = frozenset(
    {"ac2g", "async", "async_cpu_to_gpu", "async_gpu", "overhead", "python_function", "Trace"}
    | {"without a category"}
)
"""Categories of Kineto that say nothing about the order or the time of work: arrows from calls to
kernels (correlation ids state them, too), the profiler's own time, frames of other functions than
modules, the whole recording, and instants."""


@dataclass(frozen=True, eq=False)
class TraceJob:
    """The traces of R ranks.

    - `ranks` (R,) in rank order; `collectives` (R,) of each rank.
    - `joints`: collectives matched across ranks; `steps`: numbers of the steps of every rank.
    - `shift_s` (R,): seconds from the earliest rank's origin to each rank's, on their own clocks.
    - `details`: the content of `job.json`, where the traces are a recording.
    - `graph`: what the nodes of TensorFlow's traces read; None for other traces.
    """

    ranks: tuple[RankTrace, ...]
    collectives: tuple[tuple[TracedCollective, ...], ...]
    joints: tuple[Joint, ...]
    steps: tuple[int, ...]
    shift_s: FloatArray
    hosts: Hosts
    world_size: int
    repairs: tuple[Repair, ...]
    source: str
    execution_traces: tuple[ExecutionTrace, ...] = ()
    links: tuple[ExecutionLink, ...] = ()
    details: dict[str, Any] | None = None
    graph: StepGraph | None = None

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        return tuple(
            place if trace.rank is None else trace.rank for place, trace in enumerate(self.ranks)
        )

    @property
    def dropped(self) -> Mapping[str, int]:
        """Category of events that are not read -> how many all ranks have, most first."""
        total: Counter[str] = Counter()
        for trace in self.ranks:
            total.update(trace.dropped)
        return dict(total.most_common())

    @property
    def unknown_lines(self) -> list[str]:
        """A line with the categories of `dropped` that are not `NOT_NEEDED`, if there are any."""
        listed = [
            f"{name} {count}" for name, count in self.dropped.items() if name not in NOT_NEEDED
        ]
        if not listed:
            return []
        more = f" and {len(listed) - SHOWN_CATEGORIES} more" * (len(listed) > SHOWN_CATEGORIES)
        shown = ", ".join(listed[:SHOWN_CATEGORIES])
        return [f"events of unknown categories, which are not read: {shown}{more}"]

    @cached_property
    def joint_of(self) -> list[dict[int, int]]:
        """(R,) index of a collective in the rank's list -> number of its joint."""
        tables: list[dict[int, int]] = [{} for _ in self.ranks]
        for number, joint in enumerate(self.joints):
            for place, index in joint.members:
                tables[place][index] = number
        return tables

    def alone(self, rank: int) -> TraceJob:
        """The job reduced to one rank. Raises `InvalidInput` for a rank without a trace."""
        if rank not in self.rank_numbers:
            numbers = listed_numbers(self.rank_numbers)
            raise InvalidInput(f"the rank must be one of {numbers}, but is {rank}")
        place = self.rank_numbers.index(rank)
        return replace(
            self,
            ranks=(self.ranks[place],),
            collectives=(self.collectives[place],),
            joints=(),
            steps=tuple(step.number for step in self.ranks[place].steps),
            shift_s=np.zeros(1),
            hosts=Hosts((self.hosts.names[place],), self.hosts.source),
        )


def read_job(
    paths: str | Path | Sequence[str | Path], hosts: str = "", ranks: str = ""
) -> TraceJob:
    """Read every trace in `paths` as one job: files, folders, globs, tar archives.

    `hosts` is passed to `find_hosts`, `ranks` to `ranked`. Raises `InvalidInput` for a file that is
    not a trace, and for files that cannot be the ranks of one job.
    """
    traces: list[RankTrace] = []
    execution: list[ExecutionTrace] = []
    details: dict[str, Any] | None = None
    graph: StepGraph | None = None
    for source in find_sources(paths):
        with source.open() as read:
            if source.file_name == JOB_FILE:
                content = _job_file(read, source.name)
                if details is not None and details != content:
                    raise InvalidInput(
                        f"the folders must be of one recording, but {source.name} is of another "
                        "one than those before it; name one recording"
                    )
                details = content
                continue
            if source.file_name == MEMORY_FILE:
                continue
            beginning, read = _sniffed(read)
            if _is_timeline(beginning, source.name):
                raise InvalidInput(
                    f"a timeline of Horovod is replayed alone, but {source.name} is one among "
                    "other files; name it alone"
                )
            of_chakra = chakra_reader(beginning)
            if of_chakra is not None:
                execution.append(of_chakra(read, source.name))
            elif f'"{NODES}"'.encode() in beginning:
                if graph is not None:
                    raise InvalidInput(
                        f"a job has one recorded graph, but {source.name} is a second one; name "
                        "one recording"
                    )
                graph = read_step_graph(read, source.name)
            elif b'"nodes"' in beginning and b'"traceEvents"' not in beginning:
                execution.append(read_execution_trace(read, source.name))
            else:
                traces.append(read_kineto(read, source.name))
    if not traces:
        others = "only execution traces were given" if execution else f"there is only a {JOB_FILE}"
        raise InvalidInput(f"a job needs at least one Kineto trace, but {others}")
    listed = [paths] if isinstance(paths, str | Path) else paths
    source_names = ", ".join(str(path) for path in listed)
    return replace(assemble(traces, execution, details, source_names, hosts, ranks), graph=graph)


def read_timeline(paths: str | Path | Sequence[str | Path]) -> HorovodTimeline | None:
    """Read the timeline of Horovod that `paths` name; None if the first file is none.

    Raises `InvalidInput` for a timeline that cannot be read, and for files next to it.
    """
    timeline: HorovodTimeline | None = None
    for source in find_sources(paths):
        if timeline is not None:
            raise InvalidInput(
                f"a timeline of Horovod is replayed alone, but {source.name} is named, too; rank 0 "
                "writes the only timeline of a job"
            )
        with source.open() as read:
            beginning, read = _sniffed(read)
            if not _is_timeline(beginning, source.name):
                return None
            timeline = read_horovod(read, source.name)
    return timeline


def assemble(
    traces: Sequence[RankTrace],
    execution: Sequence[ExecutionTrace] = (),
    details: dict[str, Any] | None = None,
    source: str = "",
    hosts: str = "",
    given_ranks: str = "",
) -> TraceJob:
    """Assemble a job from traces that were already read. Raises `InvalidInput`."""
    traces, repairs = ranked(traces, given_ranks)
    found_hosts = find_hosts(traces, details, hosts)
    ranks = [trace.rank or 0 for trace in traces]
    world_size = max(
        max(trace.world_size or 0, rank + 1) for trace, rank in zip(traces, ranks, strict=True)
    )
    if len(traces) < world_size:
        repairs.append(
            Repair(
                f"{len(traces)} of {world_size} ranks have a trace; the work of the others shows "
                "as waiting inside the collectives"
            )
        )
    collectives, links, link_repairs = enriched(
        traces, [rank_collectives(trace) for trace in traces], execution
    )
    traces, step_repairs = with_common_numbers(traces, collectives)
    steps = _common_steps(traces)
    step_numbers = [[step.number for step in trace.steps] for trace in traces]
    joints, unmatched = match_collectives(ranks, step_numbers, collectives, world_size)
    if len(traces) > 1 and not joints and any(collectives):
        repairs.append(Repair("no collective could be matched across ranks"))
    repairs += [replace(repair, rank=trace.rank) for trace in traces for repair in trace.repairs]
    repairs += [*step_repairs, *link_repairs]
    if len(traces) == world_size:
        repairs += unmatched
    first_ns = min(trace.origin_ns for trace in traces)
    return TraceJob(
        ranks=tuple(traces),
        collectives=collectives,
        joints=tuple(joints),
        steps=steps,
        shift_s=np.array([(trace.origin_ns - first_ns) * 1e-9 for trace in traces]),
        hosts=found_hosts,
        world_size=world_size,
        repairs=tuple(repairs),
        source=source,
        execution_traces=tuple(execution),
        links=links,
        details=details,
    )


def _sniffed(read: Read) -> tuple[bytes, Read]:
    """Return the first bytes, and a `read` that repeats them."""
    beginning = b""
    try:
        while len(beginning) < _SNIFFED_BYTES and (more := read(_SNIFFED_BYTES - len(beginning))):
            beginning += more
    except InvalidInput:
        if not beginning:
            raise  # else the reader of this format meets the error again, and names its place
    left = beginning

    def read_again(count: int) -> bytes:
        nonlocal left
        if not left:
            return read(count)
        part, left = left[:count], left[count:]
        return part

    return beginning, read_again


def _is_timeline(beginning: bytes, where: str) -> bool:
    """Whether a file is a timeline of Horovod. Raises `InvalidInput` for one of an old version."""
    if not beginning.lstrip().startswith(b"["):
        return False
    if BEGINNING in beginning:
        return True
    if f'"{NEGOTIATE}'.encode() in beginning:
        raise InvalidInput(
            "a timeline of Horovod must be of version 0.21 or later, which states when it begins, "
            f"but {where} does not; record it with a later version"
        )
    return False


def _job_file(read: Read, where: str) -> dict[str, Any]:
    text = bytearray()
    while data := read(2**20):
        text += data
        if len(text) > MAX_FILE_BYTES:
            raise InvalidInput(f"{where} may hold at most {MAX_FILE_BYTES} bytes, but has more")
    try:
        content = parse_json(text.decode(), where)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} must be UTF-8 text, but byte {error.start} is not") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{where} must hold a JSON object, but holds {str(content)[:40]}")
    return content


def _common_steps(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    numbers = [{step.number for step in trace.steps} for trace in traces]
    common = set.intersection(*numbers)
    if not common:
        listed = [
            f"rank {trace.rank} has {listed_numbers(sorted(steps))}"
            for trace, steps in zip(traces[:4], numbers, strict=False)
        ]
        raise InvalidInput(
            f"the ranks of a job must have a step in common, but {'; '.join(listed)}"
        )
    return tuple(sorted(common))
