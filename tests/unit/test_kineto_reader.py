"""Kineto traces of every version give equal arrays; flaws are repaired and wrong files refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import Event, Job, span

from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import Category, RankTrace, Repair, repair_lines
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import TraceJob, read_job


def read(data: Any) -> RankTrace:
    return read_kineto(io.BytesIO(json.dumps(data).encode()).read, "t.json")


def read_events(events: list[Any]) -> RankTrace:
    return read({"traceEvents": events})


def add(**changed: Any) -> Event:
    return span("aten::add", 10.0, 2.0) | changed


def repaired(result: RankTrace | TraceJob, what: str) -> bool:
    return any(what in repair.what for repair in result.repairs)


def test_old_and_new_formats_give_the_same_arrays() -> None:
    new, old = (Job(ranks=1, old=old).run().events[0] for old in (False, True))
    for event in old:
        event["tid"] = str(event["tid"])
        if "correlation" in event["args"]:
            event["args"]["external id"] = 3
    first, second = read_events(new), read(old)
    for name in ("start_s", "duration_s", "category", "name", "lane", "correlation"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.lanes == second.lanes
    assert first.steps == second.steps and [step.number for step in first.steps] == [0, 1, 2]


def test_a_streams_number_is_read_from_the_arguments_or_the_thread() -> None:
    kinds = ({"tid": "stream 7"}, {"tid": 7}, {"tid": "stream 9", "args": {"stream": 7}})
    trace = read_events([add(cat="kernel", pid=0, **kind) for kind in kinds])
    assert [(lane.thread, lane.device) for lane in trace.lanes] == [("7", True)]


def test_times_count_from_the_first_event_and_the_base_is_kept() -> None:
    events = [add(ts=2_000_000.25), add(ts=1_000_000.5, dur="3.5")]
    trace = read({"baseTimeNanoseconds": 17 * 10**17, "traceEvents": events})
    assert trace.origin_ns == 17 * 10**17 + 1_000_000_500
    np.testing.assert_allclose(trace.start_s, [0, 0.99999975])
    np.testing.assert_allclose(trace.duration_s, [3.5e-6, 2e-6])


def test_unusable_events_are_left_out_and_reported() -> None:
    good = [add(ts=float(n)) for n in range(200)]
    bad = [add(dur="long"), add(ts=None), add(dur=-1), "text", add(dur=float("nan"))]
    trace = read_events(good + bad)
    assert trace.events == 200
    (repair,) = [repair for repair in trace.repairs if "event 200" in repair.what]
    assert repair.count == len(bad) and "dur must be" in repair.what


def test_too_many_unusable_events_refuse_the_file_and_name_the_first() -> None:
    with pytest.raises(InvalidInput, match=r"event 1 \(name 'broken'.*dur must be"):
        read_events([add(), add(name="broken", dur=None)])
    with pytest.raises(InvalidInput, match="must hold events"):
        read_events([{"ph": "M", "name": "process_name"}])


WRONG_LISTS = {"correlation": [2], "stream": [1], "bytes": {}}
WRONG_ARGUMENTS = [None, 3, WRONG_LISTS, {"External id": 1e300}]


@pytest.mark.parametrize("args", [*WRONG_ARGUMENTS, {"Input Dims": {"a": 1}, "Rank": "a"}])
def test_arguments_of_wrong_types_are_harmless(args: Any) -> None:
    kinds = product(("kernel", "cpu_op", "cuda_sync"), ("a", 7, None))
    events = [add(args=args, cat=cat, name=name, pid=[1], tid={}) for cat, name in kinds]
    assert read_events(events).events == 9


def test_ranks_come_from_the_traces_then_the_names_then_the_order(tmp_path: Path) -> None:
    job = Job(ranks=3).run()
    stated = read_job(job.write(tmp_path))
    named = read_job(job.write(tmp_path, with_ranks=False))
    paths = [
        (tmp_path / f"rank{rank}.json.gz").rename(tmp_path / f"{name}.json.gz")
        for rank, name in enumerate("cab")
    ]
    ordered = read_job(paths)
    assert {each.rank_numbers for each in (stated, named, ordered)} == {(0, 1, 2)}
    assert not repaired(stated, "ranks taken") and repaired(named, "file names")
    assert repaired(ordered, "order of the files")
    assert [Path(trace.source).name[0] for trace in ordered.ranks] == ["c", "a", "b"]


def test_folders_globs_and_archives_give_the_same_job(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    Job().run().write(folder)
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "traces")
    places: list[Any] = [folder, str(folder / "rank*.json.gz"), archive, sorted(folder.iterdir())]
    jobs = [read_job(place) for place in places]
    assert {job.rank_numbers for job in jobs} == {(0, 1)}
    assert len({TracedSteps(job).measured_s() for job in jobs}) == 1


def test_broken_files_and_those_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    path = Job(ranks=1).run().write(tmp_path) / "rank0.json.gz"
    whole = path.read_bytes()
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * 200_000_000, 6)
    for contents, reason in ((whole[: len(whole) // 2], "complete gzip"), (bomb, "times its size")):
        path.write_bytes(contents)
        with pytest.raises(InvalidInput, match=reason):
            read_job(path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar.gz").write_bytes(gzip.compress(b"no archive" * 1000))
    reasons = {
        "none.json": "a trace must exist",
        "empty": "a folder of traces",
        "text.tar.gz": "tar",
    }
    for name, reason in reasons.items():
        with pytest.raises(InvalidInput, match=reason):
            read_job(tmp_path / name)


def test_reading_a_large_trace_takes_less_than_half_its_text_in_memory() -> None:
    count, row = 60_000, json.dumps(add(args={"Call stack": "x" * 900}))
    rows = [(row + ",").encode() * 1000] * (count // 1000)
    chunks = iter([b'{"traceEvents": [', *rows, b"{}]}", b""])
    tracemalloc.start()
    try:
        trace = read_kineto(lambda _: next(chunks), "large.json")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.events == count
    assert peak_bytes < count * len(row) / 2  # the text is 60 MB, json.load several times that


def test_steps_are_inferred_from_a_repeating_mark_and_reported() -> None:
    mark = {"cat": "user_annotation", "name": "Optimizer.step#SGD.step", "dur": 10.0}
    trace = read_events([add(ts=1.0), *(add(ts=100.0 * n, **mark) for n in range(1, 5))])
    times_us = [(round(step.start_s * 1e6), round(step.end_s * 1e6)) for step in trace.steps]
    assert times_us == [(109, 209), (209, 309), (309, 409)]
    assert repaired(trace, "3 steps inferred")
    alone = read_events([add(ts=1.0), add(ts=50.0)])
    assert [step.source for step in alone.steps] == ["whole trace"]


def test_repairs_that_differ_in_the_rank_only_are_reported_as_one() -> None:
    repairs = [Repair("steps inferred", rank=rank) for rank in (0, 1, 2, 5)]
    repairs += [Repair("a rank is missing"), Repair("left out", 3, 4)]
    lines = ["ranks 0-2, 5: steps inferred", "a rank is missing", "rank 4: left out (3 times)"]
    assert repair_lines(repairs) == lines


def test_python_frames_are_dropped_but_modules_kept() -> None:
    names = ("train.py(3): main", "nn.Module: Linear_0")
    trace = read_events([add(), *(add(cat="python_function", name=name) for name in names)])
    assert sorted(trace.category.tolist()) == [Category.HOST_OP, Category.MODULE]
