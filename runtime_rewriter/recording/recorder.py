"""From step to step of a recording: warm-up, the workload without communication, the memory, the recorded steps, the files.

Nothing that is trained changes: the collectives are only looked at, and while workload and memory are measured the messages are those of
the script's own setup, sent when the backward pass has ended. So sums have the same order, and parameters the same bits.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import os
import platform
import socket
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autotune.errors import InvalidInput, LaunchError
from autotune.recordings.job_file import JOB_FILE, RankRecord, RecordedJob, trace_name
from autotune.recordings.memory_file import MEMORY_FILE, RecordedMemory
from autotune.recordings.recorded_steps import SeenCollective, collective_rows, step_times
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Workload
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.recording.collectives import CollectiveLog
from runtime_rewriter.recording.kineto import KinetoTrace
from runtime_rewriter.recording.memory.steps import MEMORY_STEPS, MemoryCapture
from runtime_rewriter.recording.settings import SETTLING_STEPS, WORKLOAD_STEPS, RecordSettings
from runtime_rewriter.recording.trace_file import Clock, annotate, write_trace
from runtime_rewriter.software import software_versions

GATHER_TIMEOUT_S = 300.0
"""How long the ranks wait for the slowest to write its trace."""


SHOWN_STEPS = 10
_UNMEASURED_STEPS = 2
"""With the profiler of the workload: the first one, and the one at whose forward pass the last measured one ends."""


class Phase(Enum):
    """What the step that begins now is for."""

    WARMUP = auto()
    WORKLOAD = auto()
    MEMORY = auto()
    SETTLING = auto()
    RECORDING = auto()
    DONE = auto()


@dataclass
class _Peers:
    """The ranks of the job. Alone where there is no process group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def join() -> _Peers:
        """Collective: every rank of the world calls it."""
        if not (dist.is_available() and dist.is_initialized()):
            return _Peers(None, 0, 1)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GATHER_TIMEOUT_S))
        return _Peers(group, dist.get_rank(), dist.get_world_size())

    def gather(self, value: Any) -> list[Any]:
        """Collective: what every rank has. Raises `LaunchError` where one does not come."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise LaunchError(
                f"every rank must end the recording within {GATHER_TIMEOUT_S:g} s, but one did not: {error}"
            ) from error
        return found

    def leave(self) -> None:
        if (
            self.group is not None
            and dist.is_initialized()
            and self.group in dist.distributed_c10d._world.pg_map
        ):
            dist.destroy_process_group(self.group)
        self.group = None


@dataclass
class _Found:
    """What the phases leave behind. `buckets` are those of DDP's own reducer; `evaluating`: recorded steps that hold an evaluation."""

    plan: Plan | None = None
    buckets: tuple[tuple[str, ...], ...] = ()
    same: Plan | None = None  # the messages of the script's own setup, where they can be put off
    workload: Workload | None = None
    memory: RecordedMemory | None = None
    notes: list[str] = field(default_factory=list)
    evaluating: list[int] = field(default_factory=list)
    cross_step_refused: str = ""


class StepRecorder:
    """Told of every boundary between two steps, alike on all ranks: the decisions depend on the number of steps alone.

    Building one is collective. `synchronizer` None: there is no model whose gradients we know of, so no workload.
    `close` may come at any time and always restores what was changed.
    """

    def __init__(self, settings: RecordSettings, synchronizer: GradientSynchronizer | None) -> None:
        self.settings, self._synchronizer = settings, synchronizer
        self._peers = _Peers.join()
        self._log = CollectiveLog()
        self._restore = ExitStack()
        self._trace: KinetoTrace | None = None
        self._profiler: WorkloadProfiler | None = None
        self._memory: MemoryCapture | None = None
        self._found = _Found()
        self.phase = Phase.WARMUP
        self.steps = 0
        """Steps that the script has made since the recorder was built."""
        self._left = settings.warmup
        self._device = (
            synchronizer.device.device
            if synchronizer is not None
            else torch.device("cuda" if _on_cuda() else "cpu")
        )

    @property
    def steps_before(self) -> int:
        """Steps before the first recorded one."""
        measured = WORKLOAD_STEPS + _UNMEASURED_STEPS + MEMORY_STEPS + 1 if self._measures else 0
        return self.settings.warmup + measured + SETTLING_STEPS

    @property
    def _measures(self) -> bool:
        return self.settings.workload and self._synchronizer is not None

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE

    def boundary(self, clean: bool) -> bool:
        """A step has ended and the next one begins: all three below. `clean`: the step held no evaluation."""
        if self.phase is Phase.RECORDING and self._trace is not None and not clean:
            self._found.evaluating.append(len(self._trace.step_s))
        self.end_step()
        done = self.advance()
        self.begin_step()
        return done

    def begin_step(self) -> None:
        """What follows belongs to a step, until `end_step`."""
        if self.phase is Phase.RECORDING and self._trace is not None:
            self._log.step = len(self._trace.step_s)
            self._trace.begin_step()

    def end_step(self) -> None:
        if self.phase is Phase.RECORDING and self._trace is not None:
            self._trace.end_step()

    def advance(self) -> bool:
        """After every step. Collective at some of them; True when everything is written, then and ever after."""
        if self.done:
            return True
        self.steps += 1
        self._left -= 1
        if self._left <= 0:
            self._next_phase()
        return self.done

    def _next_phase(self) -> None:
        if self.phase is Phase.WARMUP:
            if not (self._measures and self._begin_workload()):
                self._settle()
        elif self.phase is Phase.WORKLOAD:
            if (
                self._profiler is not None and self._profiler.done
            ):  # under accumulation a step of the script may synchronize nothing
                self._end_workload()
                self._begin_memory()
        elif self.phase is Phase.MEMORY:
            if self._memory is not None and self._memory.done:
                self._end_memory()
                self._settle()
        elif self.phase is Phase.SETTLING:
            self._record()
        else:
            self.finish()

    # -- the workload --------------------------------------------------------------------------------

    def _begin_workload(self) -> bool:
        """Collective. False where the messages of this script cannot be put off."""
        synchronizer = self._synchronizer
        assert synchronizer is not None
        self._found.plan = synchronizer.plan
        buckets = None if synchronizer.plan is not None else synchronizer.own_buckets
        self._found.buckets = buckets or ()
        self._found.same = same = synchronizer.plan or (
            None if buckets is None else _plan_of(buckets, synchronizer)
        )
        if same is None and not self.settings.stop:
            self._found.notes.append(
                "the workload was not measured: this DDP sends more than buckets, and training goes on"
            )
            return False
        try:
            self._profiler = WorkloadProfiler(synchronizer, WORKLOAD_STEPS, plan=same)
        except InvalidInput as refusal:  # every rank raised it
            self._found.notes.append(f"the workload was not measured: {refusal}")
            return False
        self.phase, self._left = Phase.WORKLOAD, WORKLOAD_STEPS + _UNMEASURED_STEPS
        return True

    def _end_workload(self) -> None:
        assert self._profiler is not None and self._synchronizer is not None
        self._found.workload = self._profiler.finish()
        self._profiler = None

    # -- the memory ----------------------------------------------------------------------------------

    def _begin_memory(self) -> None:
        """Collective, under the same plan as the workload."""
        assert self._synchronizer is not None
        self._memory = MemoryCapture(self._synchronizer, self._found.same)
        self._restore.callback(self._memory.close)
        self.phase, self._left = (
            Phase.MEMORY,
            MEMORY_STEPS + 1,
        )  # by `autotune.profile` the last one ends in the next forward pass

    def _end_memory(self) -> None:
        assert self._memory is not None and self._synchronizer is not None
        self._found.memory = self._memory.finish()
        if self._memory.note:
            self._found.notes.append(self._memory.note)
        self._memory = None
        if self._found.plan is not None:
            self._synchronizer.load(self._found.plan)

    # -- the trace -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.phase, self._left = Phase.SETTLING, SETTLING_STEPS
        self._restore.enter_context(self._log.watching())
        if self._synchronizer is not None:
            lanes = self._synchronizer.lanes
            lanes.around = self._log.around
            self._restore.callback(setattr, lanes, "around", None)
        self._trace = KinetoTrace(self.settings, self._device)
        self._trace.prepare()
        self._restore.callback(self._stop_trace)

    def _record(self) -> None:
        assert self._trace is not None
        self.phase, self._left = Phase.RECORDING, self.settings.steps
        self._trace.start()
        self._log.traced = True

    def _stop_trace(self) -> None:
        if self._log.traced and self._trace is not None:
            self._log.traced = False
            self._trace.stop()

    # -- the end -------------------------------------------------------------------------------------

    def finish(self, last_step_ended: bool = False) -> None:
        """Collective: stop recording and write what was recorded. Raises `LaunchError` on every rank where one cannot write.

        `last_step_ended`: so has the step that `boundary` began last, though no other one begins.
        """
        trace = self._trace
        self.steps += last_step_ended
        if trace is None or self.phase is not Phase.RECORDING:
            raise LaunchError(self.too_few())
        if last_step_ended:
            trace.end_step()
        self.phase = Phase.DONE
        self._restore.close()
        if not trace.step_s:
            raise LaunchError(self.too_few())
        written = self._peers.gather(self._write_trace(trace))
        problems = [
            f"rank {rank}: {problem}" for rank, (_, _, problem) in enumerate(written) if problem
        ]
        if problems:
            raise LaunchError(
                f"every rank must write its trace to {self.settings.folder}, but {'; '.join(problems)}"
            )
        self._bring_together()
        self._agree_on_script()
        self._write_job([record for record, _, _ in written], [seen for _, seen, _ in written])
        self._hand_out()
        self._peers.gather(None)  # nobody goes on before all is there
        self._peers.leave()

    def too_few(self) -> str:
        """The message for a script that ends before anything was recorded."""
        return (
            f"the script made {self.steps} steps, but the recording begins after {self.steps_before} and takes {self.settings.steps}; "
            "let it train longer, or ask for less with --warmup and --steps"
        )

    def close(self) -> None:
        """Local: give up, and restore everything. Nothing more is written."""
        if self.phase is not Phase.DONE:
            self.phase = Phase.DONE
            self._restore.close()

    def _write_trace(
        self, trace: KinetoTrace
    ) -> tuple[RankRecord | None, tuple[SeenCollective, ...], str]:
        """The record of this rank and the collectives that it saw, or what went wrong."""
        rank = self._peers.rank
        assert trace.before is not None and trace.after is not None
        try:
            content = trace.read()
            clock = Clock(trace.before, trace.after, int(content.get("baseTimeNanoseconds", 0)))
            plan_id = "" if self._found.plan is None else self._found.plan.id
            self._log.issued = [
                entry for entry in self._log.issued if entry.step < len(trace.step_s)
            ]
            put = annotate(content, self._log, clock, rank, self._peers.size, plan_id)
            folder = Path(self.settings.folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_trace(content, folder / trace_name(rank))
        except (OSError, ValueError, RuntimeError) as error:
            return None, (), f"{type(error).__name__}: {error}"
        name = (
            torch.cuda.get_device_name(self._device)
            if self._device.type == "cuda"
            else platform.processor() or platform.machine()
        )
        device = str(self._device)
        record = RankRecord(
            *(
                rank,
                socket.gethostname(),
                device,
                name,
                os.getpid(),
                trace_name(rank),
                (trace.before, trace.after),
            ),
            *(
                tuple(trace.step_s),
                len(put.seen),
                put.untimed,
                step_times(content["traceEvents"], put.spans_us),
            ),
        )
        return record, put.seen, ""

    def _agree_on_script(self) -> None:
        """What one rank saw is so for the job. Collective."""
        found, synchronizer = self._found, self._synchronizer
        refused = "" if synchronizer is None else synchronizer.cross_step.refusal_reason() or ""
        told = self._peers.gather((refused, found.evaluating))
        found.cross_step_refused = next((reason for reason, _ in told if reason), "")
        found.evaluating = sorted(set().union(*(steps for _, steps in told)))

    def _bring_together(self) -> None:
        """Traces that rank 0 does not see lie on other hosts; they are sent to it. Collective."""
        folder, mine = Path(self.settings.folder), self._peers.rank
        written = self._peers.gather(_checksum(folder / trace_name(mine)))
        lacking: list[int] = []
        if mine == 0:  # a trace of an earlier recording is none of this one
            lacking = [
                rank
                for rank, of_rank in enumerate(written)
                if _checksum(folder / trace_name(rank)) != of_rank
            ]
        for rank in self._peers.gather(lacking)[0]:
            sent = self._peers.gather(
                (folder / trace_name(rank)).read_bytes() if mine == rank else b""
            )
            if mine == 0:
                (folder / trace_name(rank)).write_bytes(sent[rank])

    def _hand_out(self) -> None:
        """What rank 0 wrote beside the traces, to the hosts that do not see it. Collective."""
        folder, mine = Path(self.settings.folder), self._peers.rank
        for name in (MEMORY_FILE, JOB_FILE):  # whoever waits for the job's file finds all
            path = folder / name
            told = self._peers.gather(_content(path) if mine == 0 else None)[0]
            if told is None:
                path.unlink(missing_ok=True)
            elif _content(path) != told:
                partial = path.with_name(
                    f"{name}.{mine}.partial"
                )  # the ranks of a host write the same
                partial.write_bytes(told)
                partial.replace(path)

    def _write_job(self, records: list[RankRecord], seen: list[tuple[SeenCollective, ...]]) -> None:
        if self._peers.rank != 0:
            return
        found, synchronizer = self._found, self._synchronizer
        steps = min(len(record.step_s) for record in records)
        job = RecordedJob(
            world_size=self._peers.size,
            ranks=tuple(replace(record, step_s=record.step_s[:steps]) for record in records),
            steps=steps,
            asked_steps=self.settings.steps,
            warmup_steps=self.settings.warmup,
            model_id="" if synchronizer is None else synchronizer.model_id,
            workload=found.workload,
            plan=found.plan,
            plan_id="" if found.plan is None else found.plan.id,
            buckets=found.buckets,
            backend="" if self._peers.group is None else str(dist.get_backend()),
            collectives=collective_rows(seen, steps),
            software=software_versions(),
            command=self.settings.command,
            options=self.settings.options,
            notes=(
                *found.notes,
                *_notes(self._log, records, steps),
                *_evaluations(found.evaluating),
            ),
            cross_step_refused=found.cross_step_refused,
        )
        folder = Path(self.settings.folder)
        (folder / MEMORY_FILE).unlink(missing_ok=True)  # of an earlier recording
        if found.memory is not None:
            found.memory.write(folder)
        job.write(folder)


def _notes(log: CollectiveLog, records: list[RankRecord], steps: int) -> list[str]:
    notes = []
    updated = min(record.times.updated_steps for record in records)
    if 0 < updated < steps:
        notes.append(
            f"an optimizer stepped in {updated} of {steps} recorded steps; the others only compute gradients (accumulation, or a backward "
            "pass in evaluation), and send them too unless under no_sync()"
        )
    if any(group.backend == "gloo" for group in log.groups.values()):
        notes.append(
            "Gloo tells of whole collectives only: the SENDs and RECVs of their chunks are not recorded"
        )
    untimed = sum(record.untimed for record in records)
    if untimed:
        notes.append(
            f"{untimed} of {sum(record.collectives for record in records)} collectives have no span in the traces"
        )
    return notes


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _checksum(path: Path) -> int | None:
    content = _content(path)
    return None if content is None else zlib.crc32(content)


def _evaluations(steps: list[int]) -> list[str]:
    listed = ", ".join(map(str, steps[:SHOWN_STEPS])) + (" ..." if len(steps) > SHOWN_STEPS else "")
    return (
        [f"evaluation ran within recorded steps {listed}, and counts as their time"]
        if steps
        else []
    )


def _plan_of(
    buckets: tuple[tuple[str, ...], ...], synchronizer: GradientSynchronizer
) -> Plan | None:
    """DDP's own buckets as messages of ours: the same elements in the same order, so the same sums to the last bit."""
    workload = assumed_workload(synchronizer.module)
    variables = {variable.name: variable for variable in workload.variables}
    if sorted(name for bucket in buckets for name in bucket) != sorted(variables):
        return None
    messages = tuple(
        Message(
            tuple(TensorSlice(name, variables[name].elements) for name in bucket),
            *(Synchronizer.ALL_REDUCE, Compressor.NONE, variables[bucket[0]].dtype),
        )
        for bucket in buckets
    )
    return Plan(workload.id, synchronizer.ranks.size, messages)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
