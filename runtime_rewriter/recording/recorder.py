"""The phases of a recording: warm-up, workload, memory, recorded steps, files.

Training does not change. The recorder only watches the collectives. While it measures workload and
memory, the messages of the script's own setup are sent after the backward pass. So sums keep their
order, and parameters their bits.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

import torch

from autotune.errors import InvalidInput, LaunchError
from autotune.recordings.job_file import RankRecord, RecordedJob, trace_name
from autotune.recordings.memory_file import MEMORY_FILE, RecordedMemory
from autotune.recordings.recorded_steps import SeenCollective, collective_rows, step_times
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Workload
from runtime_rewriter.horovod.recording import HorovodLog
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.recording.collectives import CollectiveLog
from runtime_rewriter.recording.horovod_spans import add_spans
from runtime_rewriter.recording.kineto import KinetoTrace
from runtime_rewriter.recording.memory.capture import MEMORY_STEPS, MemoryCapture
from runtime_rewriter.recording.peers import Peers, remove_other_files
from runtime_rewriter.recording.settings import SETTLING_STEPS, WORKLOAD_STEPS, RecordSettings
from runtime_rewriter.recording.trace_file import Annotated, TraceClock, annotate, write_trace
from runtime_rewriter.recording.turns import Turns, estimated_cost, ordinary_steps
from runtime_rewriter.software import software_versions

SHOWN_STEPS = 10
_UNMEASURED_STEPS = 2
"""Extra steps for the workload: the first one, and the one whose forward pass ends the last."""


class RecordingPhase(Enum):
    """The purpose of the step that begins now."""

    WARMUP = auto()
    WORKLOAD = auto()
    MEMORY = auto()
    SETTLING = auto()
    RECORDING = auto()
    DONE = auto()


@dataclass
class _Results:
    """The results of the phases.

    - `buckets`: those of DDP's own reducer; `deferrable`: the messages of the script's own setup,
      where they can be deferred.
    - `evaluating`: recorded steps that contain an evaluation.
    """

    plan: Plan | None = None
    buckets: tuple[tuple[str, ...], ...] = ()
    deferrable: Plan | None = None
    workload: Workload | None = None
    memory: RecordedMemory | None = None
    notes: list[str] = field(default_factory=list)
    evaluating: list[int] = field(default_factory=list)
    cross_step_refused: str = ""
    direct_refused: str = ""


class StepRecorder:
    """Receives every boundary between two steps, equally on all ranks.

    Decisions depend on the number of steps, and on figures that the ranks exchange. Building a
    recorder is collective. Without a `synchronizer` no model is known whose gradients could be
    measured, so there is no workload. `close` may come at any time and always restores everything.
    """

    def __init__(self, settings: RecordSettings, synchronizer: GradientSynchronizer | None) -> None:
        self.settings, self._synchronizer = settings, synchronizer
        self._peers = Peers.join(nullcontext if synchronizer is None else synchronizer.world)
        self._log = CollectiveLog()
        self._horovod = HorovodLog()
        self._restore = ExitStack()
        self._trace: KinetoTrace | None = None
        self._rehearsal: KinetoTrace | None = None
        self._turns = Turns()
        self._profiler: WorkloadProfiler | None = None
        self._memory: MemoryCapture | None = None
        self._results = _Results()
        self.phase = RecordingPhase.WARMUP
        self.steps = 0
        """Steps of the script since the recorder was built."""
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
        return self.phase is RecordingPhase.DONE

    @property
    def _is_ordinary(self) -> bool:
        """Whether a step before the recording is one as without a recorder."""
        settling = self.phase is RecordingPhase.SETTLING and not self._rehearses
        return self.phase is RecordingPhase.WARMUP or settling

    @property
    def _rehearses(self) -> bool:
        return self._rehearsal is not None and self._rehearsal.before is not None

    def boundary(self, clean: bool) -> bool:
        """End a step and begin the next one. `clean`: the step contained no evaluation."""
        if self._turns.recorded and self._trace is not None and not clean:
            self._results.evaluating.append(len(self._trace.step_s))
        self.end_step()
        done = self.advance()
        self.begin_step()
        return done

    def begin_step(self) -> None:
        """Begin a step, which lasts until `end_step`."""
        turns, trace = self._turns, self._trace
        turns.begin(recording=self.phase is RecordingPhase.RECORDING)
        if turns.ordinary and trace is not None:
            trace.pause()
            self._log.pause()
            self._horovod.step = -1
        elif turns.recorded and trace is not None:
            trace.resume()
            self._log.resume()
            self._log.step = self._horovod.step = len(trace.step_s)
            trace.begin_step()

    def end_step(self) -> None:
        if self._turns.recorded and self._trace is not None:
            self._trace.end_step()
        self._turns.end(undisturbed=self._is_ordinary)

    def advance(self) -> bool:
        """Call after every step. Collective at some of them.

        Returns whether everything is written, then and at all later calls.
        """
        if self.done:
            return True
        self.steps += 1
        self._left -= 1
        if self.phase is RecordingPhase.SETTLING and self._left == 1 and self._rehearsal:
            self._rehearsal.start()
        if self._left <= 0:
            self._next_phase()
        return self.done

    def _next_phase(self) -> None:
        if self.phase is RecordingPhase.WARMUP:
            if not (self._measures and self._begin_workload()):
                self._begin_settling()
        elif self.phase is RecordingPhase.WORKLOAD:
            # under accumulation a step of the script may synchronize nothing
            if self._profiler is not None and self._profiler.done:
                self._end_workload()
                self._begin_memory()
        elif self.phase is RecordingPhase.MEMORY:
            if self._memory is not None and self._memory.done:
                self._end_memory()
                self._begin_settling()
        elif self.phase is RecordingPhase.SETTLING:
            self._record()
        else:
            self.finish()

    def _enter(self, phase: RecordingPhase, steps: int) -> None:
        self.phase, self._left = phase, steps

    # -- the workload ----------------------------------------------------------------------------

    def _begin_workload(self) -> bool:
        """Collective. Returns whether the messages of this script can be deferred."""
        synchronizer = self._synchronizer
        assert synchronizer is not None
        self._results.plan = synchronizer.plan
        buckets = None if synchronizer.plan is not None else synchronizer.backend.own_buckets()
        self._results.buckets = buckets or ()
        self._results.deferrable = deferrable = synchronizer.plan or (
            None if buckets is None else _plan_of(buckets, synchronizer)
        )
        if deferrable is None and not self.settings.stop:
            reason = "this DDP sends more than buckets, and training goes on"
            self._results.notes.append(f"the workload was not measured: {reason}")
            return False
        try:
            self._profiler = WorkloadProfiler(synchronizer, WORKLOAD_STEPS, plan=deferrable)
        except InvalidInput as refusal:  # every rank raised it
            self._results.notes.append(f"the workload was not measured: {refusal}")
            return False
        self._enter(RecordingPhase.WORKLOAD, WORKLOAD_STEPS + _UNMEASURED_STEPS)
        return True

    def _end_workload(self) -> None:
        assert self._profiler is not None and self._synchronizer is not None
        self._results.workload = self._profiler.finish()
        self._profiler = None

    # -- the memory ------------------------------------------------------------------------------

    def _begin_memory(self) -> None:
        """Collective, under the same plan as the workload."""
        assert self._synchronizer is not None
        self._memory = MemoryCapture(
            self._synchronizer, self._results.deferrable, script_ends=self.settings.stop
        )
        self._restore.callback(self._memory.close)
        # under `autotune.profile` the last step ends in the next forward pass
        self._enter(RecordingPhase.MEMORY, MEMORY_STEPS + 1)

    def _end_memory(self) -> None:
        assert self._memory is not None and self._synchronizer is not None
        self._results.memory = self._memory.finish()
        if self._memory.note:
            self._results.notes.append(self._memory.note)
        self._memory = None
        if self._results.plan is not None:
            self._synchronizer.load(self._results.plan)

    # -- the trace -------------------------------------------------------------------------------

    def _begin_settling(self) -> None:
        self._enter(RecordingPhase.SETTLING, SETTLING_STEPS)
        if self._synchronizer is not None:
            self._synchronizer.cross_step.flush()  # no message is under way as the count begins
        self._restore.enter_context(self._log.watching())
        self._restore.enter_context(self._horovod.watching())
        if self._synchronizer is not None:
            lanes = self._synchronizer.lanes
            lanes.around = self._log.around
            self._restore.callback(setattr, lanes, "around", None)
        self._trace = KinetoTrace(self.settings, self._device)
        refused = self._refusal_to_pause()
        if self.settings.between and refused:
            self._results.notes.append(f"no ordinary steps between the recorded ones: {refused}")
        if self.settings.between is None and not refused:
            self._rehearsal = KinetoTrace(self.settings, self._device)
        (self._rehearsal or self._trace).prepare()
        self._restore.callback(self._stop_trace)

    def _record(self) -> None:
        """Collective where the number of ordinary steps is to be chosen."""
        assert self._trace is not None
        between = 0 if self._refusal_to_pause() else self.settings.between or 0
        if self._rehearsal is not None:
            self._rehearsal.stop()
            events, self._rehearsal = self._rehearsal.count_events(), None
            costs = self._peers.gather(estimated_cost(events, self._turns.fastest_s))
            between = ordinary_steps(max(costs), self.settings.steps)
            self._trace.prepare()
        self._turns.between = between
        steps = self.settings.steps
        self._enter(RecordingPhase.RECORDING, steps + between * (steps - 1))
        self._trace.start()
        self._log.traced = True

    def _refusal_to_pause(self) -> str:
        """Why all steps must be recorded without ordinary ones in between, "" for no reason."""
        plan = None if self._synchronizer is None else self._synchronizer.plan
        if self._device.type != "cpu":
            return "the profiler of a device goes on in ordinary steps"
        if plan is not None and plan.cross_step:
            return "a recorded step contains messages of the step before"
        return ""

    def _stop_trace(self) -> None:
        if self._rehearsal is not None and self._rehearses:
            self._rehearsal.stop()
        self._rehearsal = None
        if self._log.traced and self._trace is not None:
            self._log.traced = False
            self._trace.stop()
            self._log.resume()

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, last_step_ended: bool = False) -> None:
        """Collective: stop recording and write the files.

        `last_step_ended`: the step that `boundary` began last has ended, though no other one
        begins. Raises `LaunchError` on every rank if one rank cannot write.
        """
        trace = self._trace
        self.steps += last_step_ended
        if trace is None or self.phase is not RecordingPhase.RECORDING:
            raise LaunchError(self.too_few())
        if last_step_ended:
            self.end_step()
        self.phase = RecordingPhase.DONE
        self._restore.close()
        if not trace.step_s:
            raise LaunchError(self.too_few())
        written = self._peers.gather(self._write_trace(trace))
        records, collectives, problems = zip(*written, strict=True)
        failed = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if failed:
            raise LaunchError(
                f"every rank must write its trace to {self.settings.folder}, but "
                f"{'; '.join(failed)}"
            )
        folder = Path(self.settings.folder)
        self._peers.collect_traces(folder)
        self._agree_on_script()
        if self._peers.rank == 0:
            self._write_job(folder, records, collectives)
        self._peers.hand_out_files(folder)
        self._peers.gather(None)  # no rank goes on before all files are there
        self._peers.leave()

    def too_few(self) -> str:
        """The message for a script that ends before anything was recorded."""
        return (
            f"the script made {self.steps} steps, but the recording begins after "
            f"{self.steps_before} and takes {self.settings.steps}; let it train longer, or ask for "
            "less with --warmup and --steps"
        )

    def close(self) -> None:
        """Local: give up, and restore everything. Nothing more is written."""
        if self.phase is not RecordingPhase.DONE:
            self.phase = RecordingPhase.DONE
            self._restore.close()

    def _write_trace(
        self, trace: KinetoTrace
    ) -> tuple[RankRecord | None, tuple[SeenCollective, ...], str]:
        """This rank's record and collectives, or the problem."""
        rank, device = self._peers.rank, self._device
        assert trace.before is not None and trace.after is not None
        try:
            content = trace.read()
            base_ns = int(content.get("baseTimeNanoseconds", 0))
            clock = TraceClock(trace.before, trace.after, base_ns)
            plan = self._results.plan
            plan_id = "" if plan is None else plan.id
            steps = len(trace.step_s)
            self._log.issued = [entry for entry in self._log.issued if entry.step < steps]
            annotated = annotate(content, self._log, clock, rank, self._peers.size, plan_id)
            calls = [call for call in self._horovod.calls if call.step < steps]
            spans = add_spans(content, calls, clock, rank, self._peers.size)
            annotated = Annotated((*annotated.collectives, *spans))
            folder = Path(self.settings.folder)
            folder.mkdir(parents=True, exist_ok=True)
            remove_other_files(folder, self._peers.size)
            write_trace(content, folder / trace_name(rank))
        except (OSError, ValueError, RuntimeError) as error:
            return None, (), f"{type(error).__name__}: {error}"
        device_name = platform.processor() or platform.machine()
        if device.type == "cuda":
            device_name = torch.cuda.get_device_name(device)
        record = RankRecord(
            rank=rank,
            host=socket.gethostname(),
            device=str(device),
            device_name=device_name,
            process_id=os.getpid(),
            trace=trace_name(rank),
            clocks=(trace.before, trace.after),
            step_s=tuple(trace.step_s),
            collectives=len(annotated.collectives),
            untimed=annotated.untimed,
            times=step_times(content["traceEvents"], annotated.spans_us),
            ordinary_s=tuple(self._turns.ordinary_s),
        )
        return record, annotated.collectives, ""

    def _agree_on_script(self) -> None:
        """Collective: the observations of any rank hold for the job."""
        results, synchronizer = self._results, self._synchronizer
        refused = "" if synchronizer is None else synchronizer.cross_step.conditions.limits()[0]
        gathered = self._peers.gather((refused, results.evaluating))
        results.direct_refused = "" if synchronizer is None else synchronizer.direct_refused
        results.cross_step_refused = next((reason for reason, _ in gathered if reason), "")
        results.evaluating = sorted(set().union(*(steps for _, steps in gathered)))

    def _write_job(
        self,
        folder: Path,
        records: Sequence[RankRecord],
        collectives: Sequence[tuple[SeenCollective, ...]],
    ) -> None:
        results, synchronizer, peers = self._results, self._synchronizer, self._peers
        steps = min(len(record.step_s) for record in records)
        notes = _notes(self._log, records, steps)
        job = RecordedJob(
            world_size=peers.size,
            ranks=tuple(replace(record, step_s=record.step_s[:steps]) for record in records),
            steps=steps,
            asked_steps=self.settings.steps,
            warmup_steps=self.settings.warmup,
            model_id="" if synchronizer is None else synchronizer.model_id,
            workload=results.workload,
            plan=results.plan,
            plan_id="" if results.plan is None else results.plan.id,
            buckets=results.buckets,
            backend=peers.backend,
            collectives=collective_rows(collectives, steps),
            software=software_versions(),
            command=self.settings.command,
            options=self.settings.options,
            notes=(*results.notes, *notes, *_evaluation_notes(results.evaluating)),
            cross_step_refused=results.cross_step_refused,
            direct_refused=results.direct_refused,
            between=self._turns.between,
        )
        (folder / MEMORY_FILE).unlink(missing_ok=True)  # of an earlier recording
        if results.memory is not None:
            results.memory.write(folder)
        job.write(folder)


def _notes(log: CollectiveLog, records: Sequence[RankRecord], steps: int) -> list[str]:
    notes = []
    updated = min(record.times.updated_steps for record in records)
    if 0 < updated < steps:
        notes.append(
            f"an optimizer stepped in {updated} of {steps} recorded steps; the others only compute "
            "gradients (accumulation, or a backward pass in evaluation), and send them too unless "
            "under no_sync()"
        )
    if any(group.backend == "gloo" for group in log.groups.values()):
        notes.append(
            "Gloo shows whole collectives only: the SENDs and RECVs of their chunks are not "
            "recorded"
        )
    untimed = sum(record.untimed for record in records)
    if untimed:
        total = sum(record.collectives for record in records)
        notes.append(f"{untimed} of {total} collectives have no span in the traces")
    return notes


def _evaluation_notes(steps: list[int]) -> list[str]:
    if not steps:
        return []
    listed = ", ".join(map(str, steps[:SHOWN_STEPS])) + (" ..." if len(steps) > SHOWN_STEPS else "")
    return [f"evaluation ran within recorded steps {listed}, and counts as their time"]


def _plan_of(
    buckets: tuple[tuple[str, ...], ...], synchronizer: GradientSynchronizer
) -> Plan | None:
    """The plan that sends DDP's own buckets: the same elements in the same order.

    So sums are equal to the last bit. None where the buckets do not cover the variables.
    """
    workload = synchronizer.workload
    variables = {variable.name: variable for variable in workload.variables}
    if sorted(name for bucket in buckets for name in bucket) != sorted(variables):
        return None
    messages = tuple(
        Message(
            slices=tuple(TensorSlice(name, variables[name].elements) for name in bucket),
            synchronizer=Synchronizer.ALL_REDUCE,
            compressor=Compressor.NONE,
            dtype=variables[bucket[0]].dtype,
        )
        for bucket in buckets
    )
    return Plan(workload.id, synchronizer.ranks.size, messages)


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
