"""The base of what-ifs refuses a damaged trace with its event, or reports how it was repaired."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from periodic_training import training_text
from synthetic_traces import Event, Job
from test_trace_graph import call, kernel, mark

from autotune.errors import InvalidInput
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.whatif.base import Base, steady
from autotune.whatif.recording.recorded import recorded_base

Change = Callable[[list[Event]], list[Event]]


def training_events(host_us: float, kernel_us: float, *, steps: int = 4) -> list[Event]:
    events: list[Event] = json.loads(training_text(host_us, kernel_us, steps=steps))["traceEvents"]
    return events


def read(folder: Path, events: list[Any], *, cut: float = 1.0) -> tuple[TraceJob, Base]:
    """`cut`: the share of the packed file that is there."""
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = folder / "rank0.json.gz"
    path.write_bytes(packed[: int(cut * len(packed))])
    job = read_job(path)
    return job, recorded_base(job, 0)


def changed(name: str, **fields: Any) -> Change:
    """Change the fields, or arguments, of all events whose names begin with `name`."""

    def change(events: list[Event]) -> list[Event]:
        out = []
        for event in events:
            if event["name"].startswith(name):
                own = {key: value for key, value in fields.items() if key in event}
                args = {key: value for key, value in fields.items() if key not in event}
                event = event | own | {"args": event["args"] | args}
            out.append(event)
        return out

    return change


def without(category: str) -> Change:
    return lambda events: [event for event in events if event["cat"] != category]


REFUSED: dict[str, tuple[Change, str]] = {
    "empty": (lambda events: [], "must hold events with ph, ts and dur .* none of 0 is one"),
    "no kernels": (without("kernel"), "has 12 launches .*'cudaLaunchKernel'.* and no kernel"),
    "negative durations": (
        changed("gemm", dur=-5.0),
        "12 are; first event 2 .*name 'gemm_0'.*dur must be a number of 0 to .* but is -5.0",
    ),
    "endless durations": (
        changed("gemm", dur=1e300),
        "name 'gemm_0'.*dur must be .* but is 1e.300",
    ),
    "a time beyond any bound": (
        changed("aten", ts=1e30),
        "name 'aten::linear_0'.*ts must be at most .* but is 1e.30",
    ),
    "a time far from the others": (changed("aten", ts=9e15), "more than 30 days from the others"),
    "no steps": (without("user_annotation"), "needs two complete, consecutive"),
}


@pytest.mark.parametrize("flaw", sorted(REFUSED))
def test_a_flaw_of_many_events_is_refused_with_its_first_event(tmp_path: Path, flaw: str) -> None:
    change, message = REFUSED[flaw]
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, change(training_events(50, 10)))


@pytest.mark.parametrize("cut", [0.2, 0.7, 0.999])
def test_a_packed_file_that_is_cut_off_is_refused_with_its_last_item(
    tmp_path: Path, cut: float
) -> None:
    with pytest.raises(InvalidInput, match=r"must be a complete gzip file.* after item \d+"):
        read(tmp_path, training_events(50, 10, steps=40), cut=cut)


def test_a_few_unusable_events_are_left_out_and_reported(tmp_path: Path) -> None:
    events = training_events(50, 10, steps=10)
    whole = steady(read(tmp_path, events)[1]).step_s
    bad = {**events[0], "name": "broken", "dur": -1.0}
    job, base = read(tmp_path, [*events, bad])
    assert any("name 'broken'" in str(repair) and "-1.0" in str(repair) for repair in job.repairs)
    assert steady(base).step_s == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("number", [2**63, 10**40, -(10**40), 1.5e300])
def test_ids_beyond_any_bound_are_no_ids(tmp_path: Path, number: float) -> None:
    """Kernels without a known launch follow each other on their stream."""
    change = changed("gemm", correlation=number)
    base = read(tmp_path, change(training_events(50, 100)))[1]
    assert steady(base).step_s == pytest.approx(base.measured_s, rel=1e-6)


def test_kernels_of_one_id_belong_to_the_last_call_before_them(tmp_path: Path) -> None:
    events = training_events(50, 10)
    expected = read(tmp_path, events)[1]
    job, base = read(tmp_path, changed("", correlation=7)(events))
    assert any("correlation id 7" in str(one) and "cudaLaunch" in str(one) for one in job.repairs)
    assert steady(base).step_s == pytest.approx(expected.measured_s, rel=1e-3)


def test_collectives_of_repeated_ids_are_issued_by_the_last_call_before_them(tmp_path) -> None:
    """As if each rank's recorder had begun to count its calls anew in the last step."""
    job = Job(steps=3).run()
    expected = read_job(job.write(tmp_path)).collectives
    for events in job.events:
        launches = [event for event in events if event["name"] == "cudaLaunchKernel"]
        later_us = max(event["ts"] + event["dur"] for event in events) - 1
        for event in launches[: len(launches) // 3]:
            events.append({**event, "ts": later_us, "dur": 0.5})
    repeated = read_job(job.write(tmp_path)).collectives
    assert [[(one.issued_s, one.step, one.comm) for one in of_rank] for of_rank in repeated] == [
        [(one.issued_s, one.step, one.comm) for one in of_rank] for of_rank in expected
    ]


def test_work_that_begins_before_its_launch_makes_no_cycle(tmp_path: Path) -> None:
    """By its clock a kernel ran before another one, whose end the host awaited to launch it."""
    events = []
    for step in range(4):
        at, number = 3000.0 * step, 10 * step + 1
        events += [
            mark(f"ProfilerStep#{step}", at, 2900),
            call("cudaLaunchKernel", at + 10, 5, number),
            kernel("early", at + 50, 40, number + 2),
            kernel("awaited", at + 100, 100, number),
            call("cudaStreamSynchronize", at + 80, 140, number + 1),
            call("cudaLaunchKernel", at + 300, 5, number + 2),
        ]
    job, base = read(tmp_path, events)
    assert any("'early' by 250 us" in str(repair) for repair in job.repairs)
    assert steady(base).step_s == pytest.approx(base.measured_s, rel=0.05)
