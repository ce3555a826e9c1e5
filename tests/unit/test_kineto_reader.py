"""Kineto traces of every version give equal arrays; flaws are repaired, wrong files refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import Job

from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import Category, Repair, repair_lines
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import read_job


def read(data: Any) -> Any:
    return read_kineto(io.BytesIO(json.dumps(data).encode()).read, "t.json")


def span(**changed: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "args": {}}
    return {**event, "ts": 10.0, "dur": 2.0, **changed}


def test_old_and_new_formats_give_the_same_arrays() -> None:
    new, old = (Job(ranks=1, old=old).run().events[0] for old in (False, True))
    for event in old:
        event["tid"] = str(event["tid"])
        if "correlation" in event["args"]:
            event["args"]["external id"] = 3
    first, second = read({"traceEvents": new}), read(old)
    for name in ("start_s", "duration_s", "category", "name", "lane", "correlation"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.lanes == second.lanes
    assert first.steps == second.steps and [step.number for step in first.steps] == [0, 1, 2]


def test_a_stream_is_the_same_whether_its_number_stands_in_the_arguments_or_in_the_thread() -> None:
    kinds = ({"tid": "stream 7"}, {"tid": 7}, {"tid": "stream 9", "args": {"stream": 7}})
    trace = read({"traceEvents": [span(cat="kernel", pid=0, **kind) for kind in kinds]})
    assert [(lane.thread, lane.device) for lane in trace.lanes] == [("7", True)]


def test_times_count_from_the_first_event_and_the_base_is_kept() -> None:
    trace = read(
        {
            "baseTimeNanoseconds": 17 * 10**17,
            "traceEvents": [span(ts=2_000_000.25), span(ts=1_000_000.5, dur="3.5")],
        }
    )
    assert trace.origin_ns == 17 * 10**17 + 1_000_000_500
    np.testing.assert_allclose(trace.start_s, [0, 0.99999975])
    np.testing.assert_allclose(trace.duration_s, [3.5e-6, 2e-6])


def test_events_that_cannot_be_used_are_left_out_and_told() -> None:
    good = [span(ts=float(n)) for n in range(200)]
    bad = [span(dur="long"), span(ts=None), span(dur=-1), "text", span(dur=float("nan"))]
    trace = read({"traceEvents": good + bad})
    assert trace.events == 200
    assert any(
        repair.count == len(bad) and "event 200" in repair.what and "dur must be" in repair.what
        for repair in trace.repairs
    )


def test_too_many_of_them_refuse_the_file_with_the_first() -> None:
    with pytest.raises(InvalidInput, match=r"event 1 \(name 'broken'.*dur must be"):
        read({"traceEvents": [span(), span(name="broken", dur=None)]})
    with pytest.raises(InvalidInput, match="must hold events"):
        read({"traceEvents": [{"ph": "M", "name": "process_name"}]})


@pytest.mark.parametrize(
    "args",
    [
        None,
        3,
        {"correlation": [2], "stream": [1], "bytes": {}},
        {"External id": 1e300},
        {"Input Dims": {"a": 1}, "Rank": "a"},
    ],
)
def test_arguments_of_wrong_types_are_harmless(args: Any) -> None:
    trace = read(
        {
            "traceEvents": [
                span(args=args, cat=cat, name=name, pid=[1], tid={})
                for cat in ("kernel", "cpu_op", "cuda_sync")
                for name in ("a", 7, None)
            ]
        }
    )
    assert trace.events == 9


def test_ranks_come_from_the_traces_then_from_the_names_then_from_the_order(tmp_path: Path) -> None:
    job = Job(ranks=3).run()
    told = read_job(job.write(tmp_path))
    assert told.rank_numbers == (0, 1, 2) and not [
        r for r in told.repairs if "ranks taken" in r.what
    ]
    named = read_job(job.write(tmp_path, told=False))
    assert named.rank_numbers == (0, 1, 2) and any(
        "file names" in repair.what for repair in named.repairs
    )
    paths = [
        (tmp_path / f"rank{rank}.json.gz").rename(tmp_path / f"{name}.json.gz")
        for rank, name in enumerate("cab")
    ]
    ordered = read_job(paths)
    assert ordered.rank_numbers == (0, 1, 2) and any(
        "order of the files" in repair.what for repair in ordered.repairs
    )
    assert [Path(trace.source).name[0] for trace in ordered.ranks] == ["c", "a", "b"]


def test_folders_globs_and_archives_give_the_same_job(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    Job().run().write(folder)
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "traces")
    jobs = [
        read_job(folder),
        read_job(str(folder / "rank*.json.gz")),
        read_job(archive),
        read_job(sorted(folder.iterdir())),
    ]
    assert {job.rank_numbers for job in jobs} == {(0, 1)}
    assert len({TracedSteps(job).measured_s() for job in jobs}) == 1


def test_files_that_are_broken_or_made_to_fill_the_memory_are_refused(tmp_path: Path) -> None:
    path = Job(ranks=1).run().write(tmp_path) / "rank0.json.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match="complete gzip"):
        read_job(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 200_000_000, 6))
    with pytest.raises(InvalidInput, match="times its size"):
        read_job(path)
    with pytest.raises(InvalidInput, match="a trace must exist"):
        read_job(tmp_path / "none.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="a folder of traces"):
        read_job(tmp_path / "empty")
    text = tmp_path / "text.tar.gz"
    text.write_bytes(gzip.compress(b"no archive" * 1000))
    with pytest.raises(InvalidInput, match="tar"):
        read_job(text)


def test_memory_stays_below_twice_the_arrays_while_a_large_trace_is_read() -> None:
    count, row = 60_000, json.dumps(span(args={"Call stack": "x" * 900}))
    left = iter(
        [b'{"traceEvents": [', *[(row + ",").encode() * 1000] * (count // 1000), b"{}]}", b""]
    )
    tracemalloc.start()
    try:
        trace = read_kineto(lambda _: next(left), "large.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.events == count
    text_bytes = count * len(row)
    assert peak < text_bytes / 2  # the text alone is 60 MB, one json.load of it several times that


def test_steps_are_inferred_from_what_repeats_and_told() -> None:
    marks = [
        span(cat="user_annotation", name="Optimizer.step#SGD.step", ts=100.0 * n, dur=10.0)
        for n in range(1, 5)
    ]
    trace = read({"traceEvents": [span(ts=1.0), *marks]})
    assert [(round(step.start_s * 1e6), round(step.end_s * 1e6)) for step in trace.steps] == [
        (109, 209),
        (209, 309),
        (309, 409),
    ]
    assert any("3 steps inferred" in repair.what for repair in trace.repairs)
    alone = read({"traceEvents": [span(ts=1.0), span(ts=50.0)]})
    assert [step.found for step in alone.steps] == ["whole trace"]


def test_repairs_that_differ_in_the_rank_only_are_told_as_one() -> None:
    repairs = [Repair("steps inferred", rank=rank) for rank in (0, 1, 2, 5)] + [
        Repair("a rank is missing"),
        Repair("left out", 3, 4),
    ]
    assert repair_lines(repairs) == [
        "ranks 0-2, 5: steps inferred",
        "a rank is missing",
        "rank 4: left out (3 times)",
    ]


def test_python_frames_are_dropped_but_modules_kept() -> None:
    trace = read(
        {
            "traceEvents": [
                span(),
                span(cat="python_function", name="train.py(3): main"),
                span(cat="python_function", name="nn.Module: Linear_0"),
            ]
        }
    )
    assert sorted(trace.category.tolist()) == [Category.HOST_OP, Category.MODULE]
