"""Inferred steps have one number per iteration, wherever each rank's recording begins."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from synthetic_traces import Event, Job, span

from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import Comm, RankTrace
from autotune.profiling.traces.collectives import TracedCollective
from autotune.profiling.traces.job import TraceJob, assemble
from autotune.profiling.traces.matching import match_collectives

STEPS = 7
MATCHED = "inferred steps are matched with those of rank"


def trace_of(events: list[Event], rank: int = 0, world_size: int = 1) -> RankTrace:
    info = {"rank": rank, "world_size": world_size}
    data = {"distributedInfo": info, "traceEvents": events}
    return read_kineto(BytesIO(json.dumps(data).encode()).read, f"rank{rank}.json")


def updates(events: list[Event]) -> list[Event]:
    """Replace each `ProfilerStep` by the mark of an optimizer right behind it."""
    changed = []
    for event in events:
        if event["name"].startswith("ProfilerStep#"):
            at_us = event["ts"] + event["dur"] + 2.0
            event = event | {"name": "Optimizer.step#Adam.step", "ts": at_us, "dur": 5.0}
        changed.append(event)
    return changed


def numbered(events: list[Event]) -> list[Event]:
    """Give each collective its sequence number, as torch does since 2.4."""
    number = 0
    changed = []
    for event in events:
        if event["name"] == "record_param_comms":
            number += 1
            event = event | {"args": event["args"] | {"Seq": number}}
        changed.append(event)
    return changed


def from_iteration(events: list[Event], first: int) -> list[Event]:
    """Drop what happened before an iteration."""
    (begin_us,) = [event["ts"] for event in events if event["name"] == f"ProfilerStep#{first}"]
    return [event for event in events if event["ts"] >= begin_us]


def job_of(
    first: tuple[int, ...], sequences: bool, offset_s: float = 0.0, stated: tuple[int, ...] = ()
) -> TraceJob:
    """Two ranks or more, of which each is recorded from iteration `first` on.

    `offset_s`: how far the clock of rank 1 is behind. `stated`: ranks that keep `ProfilerStep`.
    """
    ranks = len(first)
    offsets_s = (0.0, offset_s, *[0.0] * (ranks - 2))
    job = Job(ranks=ranks, steps=STEPS, offsets_s=offsets_s, spread_us=20.0).run()
    traces = []
    for rank, events in enumerate(job.events):
        recorded = from_iteration(numbered(events) if sequences else events, first[rank])
        marked = recorded if rank in stated else updates(recorded)
        traces.append(trace_of(marked, rank, ranks))
    return assemble(traces)


def assert_joints_are_of_one_iteration(job: TraceJob, offset_s: float = 0.0) -> None:
    """All members of a collective end together, in steps of one number."""
    assert len(job.joints) >= 4 * len(job.steps)
    clocks_s = job.shift_s + np.array([0.0, offset_s, *[0.0] * (len(job.ranks) - 2)])
    for joint in job.joints:
        members = [(place, job.collectives[place][index]) for place, index in joint.members]
        ends_s = [one.end_s + clocks_s[place] for place, one in members]
        assert np.ptp(ends_s) < 1e-6
        numbers = {job.ranks[place].steps[one.step].number for place, one in members}
        assert numbers == {joint.step}


def matched(job: TraceJob) -> list[str]:
    return [str(repair) for repair in job.repairs if MATCHED in repair.what]


@pytest.mark.parametrize("sequences", [True, False])
def test_a_step_has_one_number_on_ranks_that_are_recorded_from_other_iterations_on(
    sequences: bool,
) -> None:
    """Step k of rank 0 was joined with step k + 2 of rank 1, of which nothing was said."""
    job = job_of((0, 2), sequences)
    assert job.steps == (2, 3, 4, 5)
    assert_joints_are_of_one_iteration(job)
    (line,) = matched(job)
    assert ("wall clock" in line) != sequences and "by +2" in line
    earlier = job_of((2, 0), sequences)
    assert earlier.steps == (2, 3, 4, 5) and "by -2" in matched(earlier)[0]
    assert_joints_are_of_one_iteration(earlier)


def test_sequence_numbers_overrule_clocks_that_differ_by_steps() -> None:
    job = job_of((1, 2), sequences=True, offset_s=5e-3)
    assert job.steps == (1, 2, 3, 4)
    assert_joints_are_of_one_iteration(job, 5e-3)
    assert not matched(job_of((1, 1), sequences=True, offset_s=5e-3))


def test_inferred_steps_take_the_numbers_that_another_rank_states() -> None:
    job = job_of((0, 2, 1), sequences=True, stated=(0,))
    assert job.steps == (3, 4, 5, 6)
    assert_joints_are_of_one_iteration(job)


def test_a_clock_that_is_half_a_step_off_leaves_a_doubt() -> None:
    starts_s = [step.start_s for step in job_of((0, 0), sequences=False).ranks[0].steps]
    half_s = float(np.median(np.diff(starts_s))) / 2
    (line,) = matched(job_of((0, 0), sequences=False, offset_s=half_s))
    assert "fits nearly as well" in line
    (line,) = matched(job_of((0, 0), sequences=False, offset_s=half_s / 10))
    assert "fits nearly as well" not in line and "by +0" in line


def marks(name: str, count: int, every_us: float, at_us: float = 0.0) -> list[Event]:
    return [
        span(name, at_us + every_us * n, 2.0, cat="user_annotation") for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        # a GAN: the two optimizers have one name
        (
            [
                *marks("Optimizer.step#Adam.step", 12, 50.0),
                *marks("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 6, 100.0, 9),
            ],
            5,
        ),
        # an optimizer per parameter
        (
            [
                *marks("Optimizer.step#SGD.step", 40, 10.0),
                *marks("DistributedDataParallel.forward", 4, 100.0, 9),
            ],
            3,
        ),
        # the edge of the recording cuts off an update
        (
            [
                *marks("Optimizer.zero_grad#SGD.zero_grad", 4, 100.0),
                *marks("Optimizer.step#SGD.step", 5, 100.0, 9),
            ],
            4,
        ),
    ],
)
def test_steps_are_inferred_from_the_mark_that_repeats_least_often(
    events: list[Event], steps: int
) -> None:
    trace = trace_of([span("aten::add", 0.0, 1.0), *events])
    assert len(trace.steps) == steps


class CountingRanks(tuple[int, ...]):
    """Ranks of a group that count how often they are hashed."""

    hashed = 0

    def __hash__(self) -> int:
        CountingRanks.hashed += 1
        return super().__hash__()


def test_the_ranks_of_a_group_are_hashed_once_and_not_for_every_member() -> None:
    """A group of n ranks has n members, so their matching took n^2 time."""
    ranks, count = 8, 20
    group = CountingRanks(range(ranks))
    one = TracedCollective(0, 0.0, 1.0, 0.0, 0, Comm("all_reduce", 4.0, group_ranks=group))
    joints, _ = match_collectives(range(ranks), [[0]] * ranks, [[one] * count] * ranks, ranks)
    assert len(joints) == count and all(joint.complete for joint in joints)
    assert CountingRanks.hashed == 1
