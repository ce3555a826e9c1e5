"""Kineto traces of every version give equal arrays; flaws are repaired and wrong files refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import EPOCH_US, Event, Job, span

from autotune.dfg.graph import Kind
from autotune.errors import InvalidInput
from autotune.jobs.sources import read_source
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import Category, Comm, RankTrace, Repair, repair_lines
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import TraceJob, read_job
from autotune.profiling.traces.job import assemble
from autotune.recordings.job_file import ORDINARY_STEPS


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


def mxnet_profile() -> dict[str, Any]:
    """A step of a dense layer as MXNet 1.9 writes it: times in us since 1970, threads as hashes."""
    names = ["cpu/0", "cpu/1", "gpu/0", "cpu pinned/"]
    events: list[Event] = [
        {"ph": "M", "args": {"name": name}, "pid": pid, "name": "process_name"}
        for pid, name in enumerate(names)
    ]
    operators = [
        (2, "CopyCPU2GPU", 100, 20),
        (2, "FullyConnectedin: [[16,10]]out: [[16,64]]", 130, 40),
        (2, "softmax", 170, 10),
        (2, "[_backward_FullyConnected,_backward_softmax]", 190, 70),
        (2, "sgd_mom_update", 270, 15),
        (0, "_backward_FullyConnected", 200, 30),
    ]
    for pid, name, at, us in operators:
        place = {"pid": pid, "tid": 14094860372735483713 + pid, "cat": "operator", "name": name}
        task = {**place, "pid": 2**63 + 5, "id": 1}
        events += [
            {"ph": "B", "ts": EPOCH_US + at, **place},
            {"ph": "E", "ts": EPOCH_US + at + us, **place},
        ]
        events += [
            {"ph": "b", "ts": EPOCH_US + at, **task},
            {"ph": "e", "ts": EPOCH_US + at + us, **task},
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def test_operators_of_mxnet_are_on_their_devices_and_in_their_passes() -> None:
    """Those of a GPU counted as threads of the host, and none as of the backward pass."""
    trace = read(mxnet_profile())
    assert {(lane.process, lane.device) for lane in trace.lanes} == {("0", True), ("0", False)}
    assert (trace.steps[0].source, trace.dropped) == ("whole trace", {})
    ops = TracedSteps(assemble([trace])).rank_ops(0, 0).ops
    of_gpu = [op for op in ops if trace.lanes[op.lane].device]
    kinds = [
        (op.name.split("in:")[0], op.kind, round((op.end_s - op.start_s) * 1e6)) for op in of_gpu
    ]
    assert kinds == [
        ("CopyCPU2GPU", Kind.COPY, 20),
        ("FullyConnected", Kind.FORWARD, 40),
        ("softmax", Kind.FORWARD, 10),
        ("[_backward_FullyConnected,_backward_softmax]", Kind.BACKWARD, 70),
        ("sgd_mom_update", Kind.OTHER, 15),
    ]


def test_a_file_without_known_categories_names_them() -> None:
    """TensorFlow's timeline has spans, which the message denied."""
    events = [add(cat="Op", name=name) for name in ("MatMul", "BiasAdd")]
    with pytest.raises(InvalidInput, match="has only others: Op, Tensor; TensorFlow is"):
        read_events([*events, add(ph="N", cat="Tensor")])


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


def unstated(folder: Path, ranks: int = 3) -> list[Path]:
    """Traces without distributedInfo, named by worker and time as torch's handler does."""
    Job(ranks=ranks).run().write(folder, with_ranks=False)
    return [
        (folder / f"rank{rank}.json.gz").rename(folder / f"worker{rank}_step_9.170{rank}.json.gz")
        for rank in range(ranks)
    ]


def test_ranks_come_from_the_traces_or_the_user_and_never_from_file_names(tmp_path: Path) -> None:
    stated = read_job(Job(ranks=3).run().write(tmp_path))
    assert stated.rank_numbers == (0, 1, 2) and not repaired(stated, "rank")
    for path in tmp_path.iterdir():
        path.unlink()
    paths = unstated(tmp_path)
    with pytest.raises(InvalidInput, match=r"must state their ranks .*worker0_step.* --ranks"):
        read_job(tmp_path)
    matched = read_job(tmp_path, ranks="worker{rank}_*.json.gz")
    ordered = read_job([paths[2], paths[0], paths[1]], ranks="2, 0, 1")
    assert matched.rank_numbers == ordered.rank_numbers == (0, 1, 2)
    for job in (matched, ordered):
        names = [Path(trace.source).name for trace in job.ranks]
        assert names == [path.name for path in paths]
    alone = read_job(paths[2])
    assert alone.rank_numbers == (0,) and repaired(alone, "taken as rank 0")


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ("0,1", "3 numbers below"),
        ("0,1,x", "3 numbers below"),
        (f"0,1,{'9' * 5000}", "3 numbers below"),
        ("rank{rank}.json.gz", "must fit the pattern"),
        ("worker{rank}_step_*", None),
        ("worker*_step_{rank}.*", "both of rank 9"),
    ],
)
def test_ranks_that_do_not_fit_the_files_are_refused(
    tmp_path: Path, ranks: str, reason: str | None
) -> None:
    unstated(tmp_path)
    if reason is None:
        assert read_job(tmp_path, ranks=ranks).rank_numbers == (0, 1, 2)
        return
    with pytest.raises(InvalidInput, match=reason):
        read_job(tmp_path, ranks=ranks)


def test_separate_runs_of_one_worker_are_no_ranks(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, offset_s in ((first, 0.0), (second, -60.0)):
        folder.mkdir()
        Job(ranks=2, offsets_s=(offset_s,) * 2).run().write(folder)
    (second / "rank0.json.gz").rename(second / "again.json.gz")
    with pytest.raises(InvalidInput, match=r"both of rank 0: separate runs of one worker"):
        read_job([first / "rank0.json.gz", second / "again.json.gz"])
    with pytest.raises(InvalidInput, match=r"must overlap in time .* begins 60 s after"):
        read_job([first / "rank0.json.gz", second / "rank1.json.gz"])


def test_traces_of_one_host_must_overlap_but_clocks_of_others_may_differ() -> None:
    jobs = [Job(ranks=2, offsets_s=(0.0, -offset_s)).run() for offset_s in (3.0, 60.0)]

    def traces(job: Job, host: str) -> list[RankTrace]:
        return [
            read(
                {
                    "distributedInfo": {"rank": rank, "world_size": 2},
                    "host_name": host,
                    "traceEvents": events,
                }
            )
            for rank, events in enumerate(job.events)
        ]

    assert assemble(traces(jobs[0], "")).rank_numbers == (0, 1)
    for job, host in ((jobs[0], "a"), (jobs[1], "")):
        with pytest.raises(InvalidInput, match="must overlap in time"):
            assemble(traces(job, host))


WRONG_INFO: list[dict[str, Any]] = [
    {"rank": 0, "world_size": 10**9},
    {"rank": 10**9, "world_size": 2},
    {"rank": 2, "world_size": 2},
    {"rank": 0, "world_size": 0},
    {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 10**12]}]},
]


@pytest.mark.parametrize("info", WRONG_INFO)
def test_ranks_and_worlds_that_no_job_has_are_refused(info: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"t\.json.* distributedInfo"):
        read({"distributedInfo": info, "traceEvents": [add()]})


WRONG_COLLECTIVES: list[tuple[dict[str, Any], str]] = [
    ({"In msg nelems": 10**30}, "elements in a message"),
    ({"In msg nelems": "1e30"}, "elements in a message"),
    ({"Group size": 10**9, "Global rank start": 0, "Global rank stride": 1}, "ranks in a group"),
    ({"Group size": 9, "Global rank start": 0, "Global rank stride": 10**9}, "a rank must be"),
    ({"Group size": 1, "Process Group Ranks": f"[{'9' * 5000}]"}, "a rank must be"),
]


@pytest.mark.parametrize(("args", "reason"), WRONG_COLLECTIVES)
def test_collectives_that_no_job_has_are_refused_with_their_event(
    args: dict[str, Any], reason: str
) -> None:
    event = add(name="record_param_comms", args={"Collective name": "allreduce", **args})
    with pytest.raises(InvalidInput, match=rf"t\.json, event 1: .*{reason}"):
        read_events([add(), event])


def test_the_numbers_of_a_collective_are_also_read_as_text() -> None:
    """As text they counted as unstated: no size, no group and no sequence number."""
    numbers: dict[str, Any] = {"In msg nelems": 1024, "Seq": 5, "Root Rank": 2}
    numbers |= {"Group size": 4, "Global rank start": 0, "Global rank stride": 2}
    texts: dict[str, Any] = {key: str(number) for key, number in numbers.items()}
    described = {"Collective name": "broadcast", "dtype": "Float"}
    for stated in (numbers, texts):
        trace = read_events([add(name="record_param_comms", args={**described, **stated})])
        expected = Comm("broadcast", 4096.0, "Float", group_ranks=(0, 2, 4, 6), sequence=5, root=2)
        assert trace.comms == (expected,)


def test_tensors_of_annotations_are_limited_by_their_product() -> None:
    for dims in ([10**9] * 1000, [2**23, 2**24]):
        args = {"Input Dims": [dims], "Input type": ["float"]}
        event = add(cat="user_annotation", name="gloo:all_reduce", args=args)
        with pytest.raises(InvalidInput, match="elements in a tensor"):
            read_events([event])


def test_groups_of_many_events_are_limited_together() -> None:
    args = {"Collective name": "allreduce", "Group size": 100_000, "Global rank stride": 1}
    one = add(name="record_param_comms")
    starts = range(0, 30_000, 100)
    events = [one | {"args": {**args, "Global rank start": start}} for start in starts]
    assert read_events(events[:5] * 20).events == 100
    with pytest.raises(InvalidInput, match="ranks in all groups"):
        read_events(events)


@pytest.mark.parametrize("wrong", [{"ts": 1e308}, {"ts": -1e308}, {"dur": 1e300}, {"dur": -1.0}])
def test_impossible_times_are_unusable(wrong: dict[str, float]) -> None:
    good = [add(ts=float(n)) for n in range(30)]
    trace = read_events([*good, add(**wrong)])
    assert trace.events == 30 and repaired(trace, "events left out")
    with pytest.raises(InvalidInput, match="may be unusable"):
        read_events([add(), add(**wrong)])


def test_events_of_another_year_are_unusable() -> None:
    good = [add(ts=1.7e15 + n) for n in range(30)]
    for events in ([add(ts=0.0), *good], [*good, add(ts=9e15)]):
        trace = read_events(events)
        assert trace.events == 30 and repaired(trace, "more than 30 days")
        assert trace.end_s.max() < 1e-3
    with pytest.raises(InvalidInput, match="may be unusable"):
        read_events([add(ts=0.0), *good[:5]])


def test_a_trace_names_its_fields_and_its_steps_once() -> None:
    text = b'{"distributedInfo": {"rank": 0}, "distributedInfo": {"rank": 1}, "traceEvents": []}'
    with pytest.raises(InvalidInput, match="'distributedInfo' again"):
        read_kineto(io.BytesIO(text).read, "t.json")
    steps = [add(cat="user_annotation", name="ProfilerStep#3", ts=10.0 * n) for n in range(2)]
    with pytest.raises(InvalidInput, match="ProfilerStep#3 2 times"):
        read_events(steps)


def test_empty_profiler_steps_are_no_steps() -> None:
    step = {"cat": "user_annotation", "dur": 50.0}
    call = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize"}
    events = [add(ts=100.0 * n, name=f"ProfilerStep#{n}", **step) for n in range(4)]
    events += [add(ts=110.0), add(ts=210.0), add(ts=310.0, **call)]  # the profiler's own call
    trace = read_events(events)
    assert [item.number for item in trace.steps] == [1, 2] and repaired(trace, "empty profiler")
    assert sum(one.count for one in trace.repairs) == 2
    none = read_events([add(ts=900.0), *events[:4]])
    assert repaired(none, "no ProfilerStep annotations with work")


def test_a_step_ends_where_an_ordinary_one_begins() -> None:
    """It includes what the script does until then, and no step that was not recorded."""
    marks = [("ProfilerStep#0", 0.0, 50.0), (ORDINARY_STEPS, 60.0, 200.0)]
    marks += [("ProfilerStep#1", 270.0, 50.0), ("ProfilerStep#2", 330.0, 50.0)]
    events = [
        add(cat="user_annotation", name=name, ts=at, dur=dur, tid=7) for name, at, dur in marks
    ]
    trace = read_events([*events, *(add(ts=at + 1.0) for _, at, _ in marks)])
    spans_s = [(step.start_s, step.end_s) for step in trace.steps]
    np.testing.assert_allclose(spans_s, [(0, 6e-5), (2.7e-4, 3.3e-4), (3.3e-4, 3.8e-4)])


def test_dropped_events_are_counted_by_category() -> None:
    kinds = [{"cat": "overhead"}, {"cat": "python_function"}, {"cat": "ac2g", "ph": "s"}]
    kinds += [{"cat": "overhead"}, {"ph": "i", "cat": None}, {"ph": "M", "cat": "none"}]
    trace = read_events([add(), *(add(**kind) for kind in kinds)])
    one_each = dict.fromkeys(("python_function", "ac2g", "without a category"), 1)
    assert trace.dropped == {"overhead": 2, **one_each}
    many = read_events([add(), *(add(cat=f"c{n}") for n in range(200))])
    assert len(many.dropped) == 51 and many.dropped["others"] == 150


@pytest.mark.parametrize("name", ["pipe.json", "zero.json", "loop.json"])
def test_a_path_that_is_no_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "pipe.json":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if name == "zero.json" else path)
    with pytest.raises(InvalidInput, match=r"must be a regular file|cannot read|must exist"):
        read_job(path)
    (tmp_path / "traces.tar").symlink_to("/dev/zero")
    with pytest.raises(InvalidInput, match="must be a regular file"):
        read_job(tmp_path / "traces.tar")


def test_a_folder_without_search_permission_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    Job(ranks=1).run().write(folder)
    with without_privileges(tmp_path):
        folder.chmod(0o400)
        try:
            for path in (folder, folder / "rank0.json.gz"):
                with pytest.raises(InvalidInput, match="Permission denied"):
                    read_job(path)
                with pytest.raises(InvalidInput, match="Permission denied"):
                    read_source(str(path))
        finally:
            folder.chmod(0o700)


@contextmanager
def without_privileges(folder: Path) -> Iterator[None]:
    """Run as the owner of the folder's files, an ordinary user."""
    if os.geteuid() != 0:
        yield
        return
    nobody = 65534
    for path in (folder, *folder.rglob("*")):
        os.chown(path, nobody, nobody)
    for parent in folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)


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


def test_hidden_files_and_folders_of_a_folder_are_not_read(tmp_path: Path) -> None:
    Job().run().write(tmp_path)
    hidden = tmp_path / ".earlier-recording-1"
    hidden.mkdir()
    Job(offsets_s=(-60.0, -60.0)).run().write(hidden)
    (tmp_path / "._rank0.json").write_bytes(b"of another system")
    assert [Path(trace.source).parent for trace in read_job(tmp_path).ranks] == [tmp_path] * 2
    assert read_job(hidden).rank_numbers == (0, 1)


def test_headers_of_an_archive_cannot_fill_the_memory_or_the_stack(tmp_path: Path) -> None:
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 2**33
    (tmp_path / "long.tar").write_bytes(long_name.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(InvalidInput, match="may hold at most 1048576 bytes of names"):
        read_job(tmp_path / "long.tar")
    long_name.size = 1
    one = long_name.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(tarfile.BLOCKSIZE, b"\0")
    (tmp_path / "deep.tar").write_bytes(one * 2000)
    with pytest.raises(InvalidInput, match="must be a tar archive"):
        read_job(tmp_path / "deep.tar")


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
    count, row = 30_000, json.dumps(add(args={"Call stack": "x" * 900}))
    rows = [(row + ",").encode() * 500] * (count // 500)
    chunks = iter([b'{"traceEvents": [', *rows, b"{}]}", b""])
    tracemalloc.start()
    try:
        trace = read_kineto(lambda _: next(chunks), "large.json")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.events == count
    assert peak_bytes < count * len(row) / 2  # the text is 30 MB, json.load several times that


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
