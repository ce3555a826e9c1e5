"""All traces of one training job: read, put in order, repaired, matched, and as a data-flow graph."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.dfg.graph import Dfg
from autotune.errors import InvalidInput
from autotune.profiling.traces.collectives import Collective, rank_collectives
from autotune.profiling.traces.device_order import launched_before_trace
from autotune.profiling.traces.execution_links import Link, enriched
from autotune.profiling.traces.execution_trace import ExecutionTrace, read_execution_trace
from autotune.profiling.traces.global_graph import Part, build_dfg
from autotune.profiling.traces.hosts import Hosts, find_hosts
from autotune.profiling.traces.kineto import read_kineto
from autotune.profiling.traces.matching import Joint, collectives_by_place, match_collectives
from autotune.profiling.traces.rank_ops import RankOps, hidden_before, step_ops
from autotune.profiling.traces.rank_trace import RankTrace, Repair, Step
from autotune.profiling.traces.recordings import same_recording, without_copies
from autotune.profiling.traces.sources import Read, find_sources, rank_in_name
from autotune.recordings.memory_file import MEMORY_FILE

if TYPE_CHECKING:
    from autotune.profiling.alignment.result import Alignment

StepChoice = int | Literal["median"]

JOB_FILE = "job.json"
_SNIFFED = 2**16


@dataclass(frozen=True, eq=False)
class TraceJob:
    """`ranks` (R,) by rank; `steps`: numbers of the steps that every rank has; `joints`: collectives matched across ranks.

    `shift_s` (R,): seconds from the earliest rank's origin to each rank's, as their own clocks say.
    """

    ranks: tuple[RankTrace, ...]
    collectives: tuple[tuple[Collective, ...], ...]
    joints: tuple[Joint, ...]
    steps: tuple[int, ...]
    shift_s: np.ndarray
    hosts: Hosts
    world_size: int
    repairs: tuple[Repair, ...]
    source: str
    execution_traces: tuple[ExecutionTrace, ...] = ()
    links: tuple[Link, ...] = ()
    details: dict[str, Any] | None = None

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        return tuple(
            trace.rank if trace.rank is not None else place
            for place, trace in enumerate(self.ranks)
        )

    @cached_property
    def joint_of(self) -> list[dict[int, int]]:
        """Of every rank's place: index of a collective -> number of its joint."""
        return collectives_by_place(self.joints, len(self.ranks))

    def step_of(self, place: int, number: int) -> Step:
        """That step of the rank at `place`."""
        for step in self.ranks[place].steps:
            if step.number == number:
                return step
        raise InvalidInput(f"the step must be one of {_listed(self.steps)}, but is {number}")

    def rank_ops(self, place: int, number: int) -> RankOps:
        """The ops of one rank in one step, kept until another step is asked for: those of many steps would not fit."""
        cache: dict[tuple[int, int], RankOps] = self.__dict__.setdefault("_ops", {})
        if (place, number) not in cache:
            for other in [key for key in cache if key[1] != number]:
                del cache[other]
            step = self.step_of(place, number)
            cache[place, number] = step_ops(
                self.ranks[place], step.start_s, step.end_s, list(self.collectives[place])
            )
        return cache[place, number]

    def chosen_step(self, step: StepChoice, aligned: Alignment | None = None) -> int:
        """`step` itself, or the one whose measured time is the (lower) median."""
        if step != "median":
            if step not in self.steps:
                raise InvalidInput(f"the step must be one of {_listed(self.steps)}, but is {step}")
            return step
        times = [self.measured_step_s(number, aligned) for number in self.steps]
        return self.steps[int(np.argsort(times, kind="stable")[(len(times) - 1) // 2])]

    def measured_step_s(
        self, step: StepChoice = "median", aligned: Alignment | None = None
    ) -> float:
        """What the step took over all ranks: from its first op to its last end; from the last end of the step before where that is later.

        The latter is so where devices lag behind their hosts: work of a step is launched while the one before still runs. This is
        what the replay of `global_dfg` is to give.
        """
        number = self.chosen_step(step, aligned) if step == "median" else step
        shifts_s = self.shifts_s(number, aligned)
        begins, ends = self._spans_s(number, shifts_s)
        return float(ends.max() - max(begins.min(), self._floor_s(number, shifts_s)))

    def _spans_s(self, number: int, shifts_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(R,) first start and last end of the step's ops on every rank."""
        spans: dict[int, tuple[np.ndarray, np.ndarray]] = self.__dict__.setdefault("_spans", {})
        if number not in spans:
            own = self._all_ops(number)
            spans[number] = (
                np.array([ops.begin_s for ops in own]),
                np.array([ops.end_s for ops in own]),
            )
        return spans[number][0] + shifts_s, spans[number][1] + shifts_s

    def _floor_s(self, number: int, shifts_s: np.ndarray) -> float:
        """When the last op of the step before ended; minus infinity where that step is not in the traces."""
        place = self.steps.index(number)
        if place and self.steps[place - 1] == number - 1:
            return float(self._spans_s(number - 1, shifts_s)[1].max())
        if place:
            return -np.inf
        left = [
            trace.end_s[launched_before_trace(trace)].max(initial=-np.inf) for trace in self.ranks
        ]
        return float((np.array(left) + shifts_s).max())

    def _all_ops(self, number: int) -> list[RankOps]:
        return [self.rank_ops(place, number) for place in range(len(self.ranks))]

    def shifts_s(self, number: int, aligned: Alignment | None) -> np.ndarray:
        """(R,) what to add to a rank's times to get onto the common clock: that of the first rank where `aligned` is given.

        Clocks that drift have the offset of the middle of the step throughout it.
        """
        if aligned is None:
            return self.shift_s
        steps = [self.step_of(place, number) for place in range(len(self.ranks))]
        middle_s = np.array([(step.start_s + step.end_s) / 2 for step in steps])
        return self.shift_s + aligned.correction_s(self.shift_s + middle_s)

    def global_dfg(self, step: StepChoice = "median", aligned: Alignment | None = None) -> Dfg:
        """One step of all ranks. Without an alignment the ranks' clocks are taken as they are.

        Raises `InvalidInput` for a step that not every rank has.
        """
        return build_dfg(self.parts(step, aligned), self.joints)

    def parts(self, step: StepChoice = "median", aligned: Alignment | None = None) -> list[Part]:
        """(R,) every rank's ops of the step, with what lies hidden behind the step before cut off; and how certain they are (`RankOps`)."""
        number = self.chosen_step(step, aligned)
        shifts = self.shifts_s(number, aligned)
        floor_s = self._floor_s(number, shifts)
        return [
            Part(rank, trace, hidden_before(ops, floor_s - shift), float(shift), table)
            for rank, trace, ops, shift, table in zip(
                self.rank_numbers,
                self.ranks,
                self._all_ops(number),
                shifts,
                self.joint_of,
                strict=True,
            )
        ]

    def rank_dfg(self, rank: int, step: StepChoice = "median") -> Dfg:
        """One step of one rank; its collectives take as long as they did there, waiting included."""
        if rank not in self.rank_numbers:
            raise InvalidInput(
                f"the rank must be one of {_listed(self.rank_numbers)}, but is {rank}"
            )
        return self.alone(rank).global_dfg(step)

    def alone(self, rank: int) -> TraceJob:
        """The job of that rank only."""
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


def read_job(paths: str | Path | Sequence[str | Path], hosts: str = "") -> TraceJob:
    """Read every trace of `paths` (files, folders, globs, tar archives) as one job; `hosts` as in `find_hosts`.

    Raises `InvalidInput` where a file is no trace, or where the files cannot be the ranks of one job.
    """
    traces: list[RankTrace] = []
    execution: list[ExecutionTrace] = []
    details: dict[str, Any] | None = None
    for source in find_sources(paths):
        with source.open() as read:
            if source.file_name == JOB_FILE:
                details = same_recording(details, _job_file(read, source.name), source.name)
                continue
            if source.file_name == MEMORY_FILE:
                continue
            begin, read = _sniffed(read)
            if b'"nodes"' in begin and b'"traceEvents"' not in begin:
                execution.append(read_execution_trace(read, source.name))
            else:
                traces.append(read_kineto(read, source.name))
    if not traces:
        others = "only execution traces were given" if execution else f"there is only a {JOB_FILE}"
        raise InvalidInput(f"a job needs at least one Kineto trace, but {others}")
    listed = [paths] if isinstance(paths, str | Path) else paths
    return assemble(traces, execution, details, ", ".join(str(path) for path in listed), hosts)


def assemble(
    traces: Sequence[RankTrace],
    execution: Sequence[ExecutionTrace] = (),
    details: dict[str, Any] | None = None,
    source: str = "",
    hosts: str = "",
) -> TraceJob:
    """A job of traces that were read already. Raises `InvalidInput`."""
    traces, repairs = _ranked(list(traces))
    found_hosts = find_hosts(traces, details, hosts)
    world_size = max(
        [trace.world_size or 0 for trace in traces] + [(trace.rank or 0) + 1 for trace in traces]
    )
    if len(traces) < world_size:
        told = f"{len(traces)} of {world_size} ranks are here; what the others did shows as waiting inside the collectives"
        repairs.append(Repair(told))
    steps = _common_steps(traces)
    collectives = tuple(tuple(rank_collectives(trace)) for trace in traces)
    linked, links, et_repairs = enriched(traces, collectives, execution)
    ranks = [trace.rank or 0 for trace in traces]
    joints, unmatched = match_collectives(
        ranks, [[s.number for s in trace.steps] for trace in traces], linked, world_size
    )
    if len(traces) > 1 and not joints and any(linked):
        repairs.append(Repair("no collective could be matched across ranks"))
    first_ns = min(trace.origin_ns for trace in traces)
    shift_s = np.array([(trace.origin_ns - first_ns) * 1e-9 for trace in traces])
    own = [replace(repair, rank=trace.rank) for trace in traces for repair in trace.repairs]
    return TraceJob(
        tuple(traces),
        linked,
        tuple(joints),
        steps,
        shift_s,
        found_hosts,
        world_size,
        (*repairs, *own, *et_repairs, *(unmatched if len(traces) == world_size else [])),
        source,
        tuple(execution),
        links,
        details,
    )


def _sniffed(read: Read) -> tuple[bytes, Read]:
    """The first bytes, and a `read` that gives them again."""
    begin = b""
    while len(begin) < _SNIFFED and (more := read(_SNIFFED - len(begin))):
        begin += more
    left = begin

    def again(count: int) -> bytes:
        nonlocal left
        if left:
            part, left = left[:count], left[count:]
            return part
        return read(count)

    return begin, again


def _job_file(read: Read, where: str) -> dict[str, Any]:
    text = b"".join(iter(lambda: read(2**20), b""))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} must be JSON, but is not: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{where} must hold a JSON object, but holds {str(data)[:40]}")
    return data


def _ranked(traces: list[RankTrace]) -> tuple[list[RankTrace], list[Repair]]:
    """Traces with a rank each, by rank: what they say, else what their file names say, else the order in which they were given."""
    traces, repairs = without_copies(traces)
    said = [trace.rank for trace in traces]
    named = [rank_in_name(trace.source) for trace in traces]
    if all(rank is not None for rank in said) and len(set(said)) == len(said):
        ranks = [rank for rank in said if rank is not None]
    elif all(rank is not None for rank in named) and len(set(named)) == len(named):
        ranks = [rank for rank in named if rank is not None]
        wrong = sum(
            rank is not None and rank != name for rank, name in zip(said, named, strict=True)
        )
        why = f"{wrong} of them said otherwise" if wrong else "the traces do not tell them"
        repairs.append(Repair(f"ranks taken from the file names, since {why}", len(traces)))
    else:
        ranks = list(range(len(traces)))
        why = (
            "two traces say that they are the same one"
            if all(rank is not None for rank in said)
            else "neither traces nor names tell them"
        )
        repairs.append(Repair(f"ranks taken from the order of the files, since {why}", len(traces)))
    order = sorted(range(len(traces)), key=lambda place: ranks[place])
    return [replace(traces[place], rank=ranks[place]) for place in order], repairs


def _common_steps(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    common = set.intersection(*({step.number for step in trace.steps} for trace in traces))
    if not common:
        told = "; ".join(
            f"rank {trace.rank} has {_listed([s.number for s in trace.steps])}"
            for trace in traces[:4]
        )
        raise InvalidInput(f"the ranks of a job must have a step in common, but {told}")
    return tuple(sorted(common))


def _listed(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return ", ".join(map(str, listed[:10])) + (" ..." if len(listed) > 10 else "")
