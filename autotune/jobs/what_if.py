"""Answers what-ifs on the traces of a job: which rank, its base, predictions, curves."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput, MissingExtra, install_extra
from autotune.jobs.fused_times import SUFFIX as FUSED_SUFFIX
from autotune.jobs.fused_times import fused_times, write_fused_times
from autotune.jobs.half_times import SUFFIX, cast_times, half_times, write_half_times
from autotune.jobs.operator_times import measured_operators, working_operators, write_operator_times
from autotune.parsing import parse
from autotune.profiling.formats.rank_trace import listed_numbers, repair_lines
from autotune.profiling.graph.global_graph import build_dfg
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob
from autotune.recordings.job_file import RecordedJob
from autotune.recordings.memory_file import RecordedMemory
from autotune.tuning.statistics import compare_pairs
from autotune.whatif.answers.answered import Answered
from autotune.whatif.answers.answers import Answer, Asked, answers
from autotune.whatif.answers.curves import bandwidth_curves, worker_curves
from autotune.whatif.answers.limits import limits
from autotune.whatif.answers.slow_rank import SlowRank, alone_s, slow_rank
from autotune.whatif.answers.unrecorded import OrdinaryShare, unrecorded
from autotune.whatif.base import Base, bounds_s, steady
from autotune.whatif.kernels.kernel_layers import with_kernel_layers
from autotune.whatif.memory import ReplicaMemory, replica_memory
from autotune.whatif.question import Gradient, Question
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.recording.traced_memory import traced_memory

Progress = Callable[[str], None]
MOST_NOTES = 8
CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Fewer pairs have no interval of 95 % (signed ranks)."""


@dataclass(frozen=True)
class Wanted:
    """What a user asks of a job. `rank`: None chooses the slowest one.

    `workers`: numbers to predict for; () takes that of the cluster, if there is one. `curves`:
    whether to predict them as well. `memory`: of the recorded replica, None if it is unknown.
    `unrecorded_s`: how long a step takes that nobody records, None if the user does not state it.
    """

    asked: tuple[Asked, ...]
    cluster: Cluster | None = None
    workers: tuple[int, ...] = ()
    parameters: Path | None = None
    rank: int | None = None
    curves: bool = False
    memory: RecordedMemory | None = None
    unrecorded_s: float | None = None


def answered(job: TraceJob, wanted: Wanted, progress: Progress = lambda item: None) -> Answered:
    """Answer everything; `progress` is called before each rank, combination and curve.

    Raises `InvalidInput` for a job without a base, and for a rank without a trace.
    """
    if not wanted.asked:
        raise InvalidInput("no what-if is registered; name a file that registers one with --load")
    bases, notes = _bases(job, wanted.rank, progress)
    place = _chosen(job, bases, wanted.rank)
    recorded = bases[place]
    start = unrecorded(
        recorded,
        by_recorder=job.details is not None,
        step_s=wanted.unrecorded_s,
        ordinary=_ordinary_share(job),
    )
    base = start.base
    slow, problem = _slow_rank(job, bases, wanted.rank)
    question, lacks = _question(job, place, base, wanted)
    rows: list[Answer] = []
    progress(wanted.asked[0].text)
    all_rows = answers(base, wanted.asked, question, wanted.workers, start.others)
    for number, found in enumerate(all_rows, 1):
        rows += found
        if number < len(wanted.asked):
            progress(wanted.asked[number].text)
    over_workers, over_bandwidth = [], []
    if wanted.curves and wanted.cluster is not None:
        progress("curves")
        over_workers = worker_curves(base, rows, curve_workers(wanted))
        over_bandwidth = bandwidth_curves(base, rows)
    before = steady(base)
    repairs = [f"repaired: {line}" for line in repair_lines(job.repairs)]
    if len(repairs) > MOST_NOTES:
        repairs[MOST_NOTES:] = [f"and {len(repairs) - MOST_NOTES} more repairs"]
    return Answered(
        source=job.source,
        rank=job.rank_numbers[place],
        base=base,
        before=before,
        before_limits=limits(base, before),
        recorded_s=steady(recorded).step_s,
        least_s=bounds_s(base)[0],
        answers=tuple(rows),
        slow=slow,
        over_workers=tuple(over_workers),
        over_bandwidth=tuple(over_bandwidth),
        notes=(start.note, *repairs, *job.unknown_lines, *notes, *problem, *lacks),
    )


def _ordinary_share(job: TraceJob) -> OrdinaryShare | None:
    """Ordinary / recorded steps, each recorded one with its neighbours; None without enough."""
    if job.details is None:
        return None
    pairs = parse(RecordedJob, job.details, job.source).ordinary_pairs
    if len(pairs) < FEWEST_PAIRS:
        return None
    logarithms = np.log([ordinary_s / recorded_s for recorded_s, ordinary_s in pairs])
    compared = compare_pairs(logarithms, CONFIDENCE)
    return OrdinaryShare(compared.ratio, compared.low, compared.high)


def ranks_read(job: TraceJob, rank: int | None) -> int:
    """The number of ranks to read for a prediction of the asked one, or of the slowest."""
    return 1 if rank is not None else len(job.ranks)


def items(job: TraceJob, wanted: Wanted) -> int:
    """How often `answered` calls `progress`."""
    curves = wanted.curves and wanted.cluster is not None
    return ranks_read(job, wanted.rank) + len(wanted.asked) + curves


def curve_workers(wanted: Wanted) -> tuple[int, ...]:
    """The numbers of workers of a curve: those asked for, or powers of two around the cluster's."""
    if len(wanted.workers) > 1:
        return wanted.workers
    assert wanted.cluster is not None
    most = max(wanted.workers[0] if wanted.workers else wanted.cluster.world_size, 2)
    return tuple(sorted({2**power for power in range(1, most.bit_length() + 1)} | {most}))


def _bases(
    job: TraceJob, rank: int | None, progress: Progress
) -> tuple[dict[int, Base], list[str]]:
    """Place -> base of the asked rank, or of every rank that has one; notes on the others."""
    numbers = job.rank_numbers
    if rank is not None:
        _place_of(job, rank)
    bases: dict[int, Base] = {}
    notes, problem = [], None
    for place, number in enumerate(numbers):
        if rank is not None and number != rank:
            continue
        progress(f"rank {number}")
        try:
            bases[place] = with_kernel_layers(recorded_base(job, place))
        except InvalidInput as error:
            problem = error
            notes.append(f"rank {number} is left out: {error}")
    if not bases:
        assert problem is not None
        raise problem
    return bases, notes


def _place_of(job: TraceJob, rank: int) -> int:
    """The place of an asked rank in the job; raises `InvalidInput` for one without a trace."""
    numbers = job.rank_numbers
    if rank not in numbers:
        raise InvalidInput(f"--rank must be one of {listed_numbers(numbers)}, but is {rank}")
    return numbers.index(rank)


def _chosen(job: TraceJob, bases: dict[int, Base], rank: int | None) -> int:
    """The asked rank's place, or that of the slowest one: the others wait for it."""
    if rank is not None or len(bases) == 1:
        return next(iter(bases))
    return max(bases, key=lambda place: alone_s(bases[place]))


def _slow_rank(
    job: TraceJob, bases: dict[int, Base], rank: int | None
) -> tuple[SlowRank | None, tuple[str, ...]]:
    """The slowest of several ranks, or a note on why it is unknown."""
    if len(bases) < 2 or rank is not None:
        return None, ()
    if not any(joint.mutual for joint in job.joints):
        return None, ("the slow rank is unknown: no collective was matched across the ranks",)
    try:
        from autotune.profiling.alignment.align import align

        steps = TracedSteps(job, align(job))
        together = build_dfg(steps.parts("median"), job.joints)
    except InvalidInput as error:
        return None, (f"the slow rank is unknown: {error}",)
    ranks = [job.rank_numbers[place] for place in bases]
    return slow_rank(list(bases.values()), ranks, together), ()


def _question(
    job: TraceJob, place: int, base: Base, wanted: Wanted
) -> tuple[Question, tuple[str, ...]]:
    """The question to all what-ifs, and notes on what it lacks."""
    workers = wanted.workers[0] if wanted.workers else None
    if workers is None and wanted.cluster is not None:
        workers = wanted.cluster.world_size
    gradients = gradients_of(job, place, base, wanted.parameters)
    memory, notes = _memory(job, place, base, wanted, gradients)
    question = Question(cluster=wanted.cluster, workers=workers, gradients=gradients, memory=memory)
    return question, notes


def _memory(
    job: TraceJob, place: int, base: Base, wanted: Wanted, gradients: Sequence[Gradient] | None
) -> tuple[ReplicaMemory | None, tuple[str, ...]]:
    """The memory of our recording, or of the blocks in the trace; a note if these do not do."""
    if wanted.memory is not None:
        return replica_memory(job, place, wanted.memory.profile, wanted.memory.batch), ()
    try:
        traced = traced_memory(job.ranks[place], base, gradients)
    except InvalidInput as error:
        return None, (f"the memory is unknown: {error}",)
    return (None if traced is None else replica_memory(job, place, traced)), ()


def measure_operators(
    job: TraceJob, rank: int | None, path: Path, budget_s: float, progress: Progress
) -> tuple[str, str]:
    """Time the operators of the rank that is predicted (`rank`, or the slowest) on this machine.

    Returns the what-ifs that use the times, and a line for people: `kernel_times=path`, and for a
    CPU's trace `amp_cpu` and `fused_adam_cpu` with times of their own, which take another
    `budget_s` and a tenth of it. Raises `InvalidInput` if no operator can be timed, for a rank
    without a trace, and for the trace of a GPU on a machine without one.
    """
    if find_spec("torch") is None:
        raise MissingExtra(
            f"--measure times operators with torch, which is missing; {install_extra('torch')}"
        )
    bases, _ = _bases(job, rank, progress)
    place = _chosen(job, bases, rank)
    base = bases[place]
    known = working_operators(base)
    measured = []
    progress(f"timing {len(known)} operators")
    for one in measured_operators(base, budget_s=budget_s):
        measured.append(one)
    rows = write_operator_times(path, measured)
    timed_s = sum(one.step_s for one in measured if one.seconds is not None)
    line = (
        f"{rows} operators were timed on this machine ({path}); they take "
        f"{100 * timed_s / sum(known.values()):.0f} % of the operators' time in the trace"
    )
    asked = f"kernel_times={path}"
    if not base.on_device.any() and (halves := list(half_times(base, budget_s))):
        half_path = path.with_suffix(SUFFIX)
        write_half_times(half_path, halves, list(cast_times(base, budget_s)))
        asked += f",amp_cpu={half_path}"
        ratio = sum(one.step_s * one.half_s / one.single_s for one in halves)
        ratio /= sum(one.step_s for one in halves)
        line += f"; {len(halves)} operators take {ratio:.2f} of their time in bfloat16"
    if not base.on_device.any() and (fused := fused_times(base, budget_s)):
        fused_path = path.with_suffix(FUSED_SUFFIX)
        write_fused_times(fused_path, fused)
        asked += f",fused_adam_cpu={fused_path}"
        line += "".join(
            f"; the step of {one.optimizer} takes {one.fused_s / one.unfused_s:.2f} of its time "
            "fused"
            for one in fused
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        line += f"; {load:.0f} processes shared its {cores} cores, so these times are too long"
    return asked, line


def checked_workers(numbers: Sequence[int]) -> tuple[int, ...]:
    """Ascending numbers of workers. Raises `InvalidInput` for one below 1."""
    if any(number < 1 for number in numbers):
        raise InvalidInput(f"--workers needs numbers of at least 1, but has {min(numbers)}")
    return tuple(int(number) for number in np.unique(numbers))
