"""The output, files and refusals of `autotune what-if`."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import command_line
import pytest
from periodic_training import training, training_text
from synthetic_traces import span

from autotune.cli import argument_parser, main, split_words
from autotune.commands.arguments import given_settings
from autotune.commands.render.what_if import memory_text
from autotune.dfg.perfetto_trace import write_perfetto_trace
from autotune.jobs.settings import read_settings
from autotune.jobs.what_if import Wanted, answered
from autotune.profiling.traces.job import read_job
from autotune.reports.whatif_page import write_whatif_report
from autotune.whatif.answers.answers import Asked
from autotune.whatif.answers.limits import surrounded_step
from autotune.whatif.answers.user_file import load_what_ifs
from autotune.whatif.memory import MemoryOutcome
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WHAT_IFS

OWN = '''
from autotune.errors import InvalidInput
from autotune.whatif.primitives import scale
from autotune.whatif.registry import what_if


@what_if("quick", title="quick <kernels>", source="invented", enact="model.quick()")
def quick(base, question):
    """Kernels take half the time."""
    return scale(base, base.on_device, 0.5)


@what_if("never", title="never", source="invented", enact="-")
def never(base, question):
    """Refused."""
    raise InvalidInput("there is nothing to change")
'''


@pytest.fixture(autouse=True)
def separate() -> Iterator[None]:
    import_module("autotune.whatif.changes.all")  # registers once, outside
    with WHAT_IFS.separate():
        yield


def output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with WHAT_IFS.separate():
        return command_line.output(capsys, *words)


def json_output(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    with WHAT_IFS.separate():
        return command_line.json_output(capsys, *words)


def error_output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with WHAT_IFS.separate():
        return command_line.error_output(capsys, *words)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "rank0.json"
    path.write_bytes(training_text(5, 100))
    return path


def test_predictions_are_rows_with_limits_and_the_line_that_enacts_them(trace, capsys) -> None:
    words = ("what-if", trace, "--load", trace.with_name("own.py"), "--only", "quick,never")
    text = output(capsys, *words)
    for part in (
        "rank 0: a step takes 300 us, replayed 300 us",
        "host/device/both/comm/idle",
        "quick",
        "2.00x",
        "quick  model.quick()",
        "never: there is nothing to change",
    ):
        assert part in text


def test_every_what_if_of_autotune_gives_a_row_or_a_reason(trace, capsys) -> None:
    data = json_output(capsys, "what-if", trace, "--load", trace.with_name("own.py"))
    assert {row["what_if"] for row in data["what_ifs"]} == {*WHAT_IFS, "quick", "never"}
    for row in data["what_ifs"]:
        assert ("speedup" in row) != bool(row.get("reason")), row
        assert row["assumptions"] and all(row["enact"])


def test_the_commands_that_enact_what_ifs_are_complete(tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").touch()
    hosts = "hosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"
    (tmp_path / "cluster.yaml").write_text(f"name: two\n{hosts}")
    monkeypatch.chdir(tmp_path)
    lines = [one.enact for one in WHAT_IFS.values() if one.enact.startswith("autotune")]
    assert len(lines) == 3
    for line in lines:
        own_words, command = split_words(shlex.split(line, comments=True)[1:])
        options = argument_parser().parse_args(own_words)
        settings = read_settings(command, given_settings(options), None, options.address)
        assert settings.spec.workers == 2


def test_timelines_and_report_are_written(trace, tmp_path, capsys) -> None:
    own, out, report = tmp_path / "own.py", tmp_path / "out", tmp_path / "report.html"
    words = ("--load", own, "--only", "quick", "--out", out, "--report", report)
    data = json_output(capsys, "what-if", trace, *words)
    assert data["files"] == [str(out / "before.json.gz"), str(out / "quick.json.gz"), str(report)]
    page = report.read_text()
    assert "quick &lt;kernels&gt;" in page and "<script" not in page and "http:" not in page
    lengths_us = []
    for name in ("before", "quick"):
        with gzip.open(out / f"{name}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        kernels = [event for event in events if event.get("name") == "gemm_1"]
        lengths_us.append({round(event["dur"]) for event in kernels})
        assert all(0 <= event["ts"] <= 301 for event in events if event["ph"] == "X")
    assert lengths_us == [{100}, {50}]


def test_the_report_tells_the_replayed_step_from_that_without_recording(trace) -> None:
    load_what_ifs(trace.with_name("own.py"))
    found = answered(read_job([trace]), Wanted((Asked("quick", "quick"),)))
    report = trace.with_name("report.html")
    write_whatif_report(report, replace(found, recorded_s=2 * found.recorded_s))
    text = "which the replay gives as 600 us. Speed-ups start from a step of 300 us."
    assert text in report.read_text()


def test_several_what_ifs_are_checked_each_by_itself(trace, capsys, monkeypatch) -> None:
    script = trace.with_name("train.py")
    script.touch()
    words = ["what-if", trace, "--load", trace.with_name("own.py"), "--check", "quick,never"]
    assert main([*map(str, words), "--json", "--", str(script)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [row["what_if"] for row in data["what_ifs"]] == ["quick", "never"]
    assert list(data["not_checked"]) == ["quick", "never"] and not data["checked"]
    assert "needs a change of the script itself" in data["not_checked"]["quick"]


def test_a_check_runs_on_one_machine(trace, capsys) -> None:
    script = trace.with_name("train.py")
    script.touch()
    words = ["what-if", trace, "--load", trace.with_name("own.py"), "--check", "quick", "--json"]
    launch = ["--", "torchrun", "--nnodes", "2", "--nproc-per-node", "1", script]
    assert main([*map(str, (*words, *launch))]) == 1
    refused = json.loads(capsys.readouterr().out)["not_checked"]
    assert "the command has 2 nodes; leave out --nnodes" in refused["quick"]


def test_perfetto_timelines_hold_every_op(trace, tmp_path, capsys) -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    base = recorded_base(training(5, 100), 0)
    timeline, section = surrounded_step(base)
    path = tmp_path / "one.pftrace"
    shown = write_perfetto_trace(timeline, path, section)
    read = protos.Trace()
    read.ParseFromString(path.read_bytes())
    names: dict[int, str] = {}
    open_slices: dict[int, list[tuple[str, int]]] = {}
    spans: list[tuple[int, str, int]] = []
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in read.packet}
    for packet in read.packet:
        names |= {one.iid: one.name for one in packet.interned_data.event_names}
        event = packet.track_event
        if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            open_slices.setdefault(event.track_uuid, []).append(
                (names[event.name_iid], packet.timestamp)
            )
        elif event.type == protos.TrackEvent.TYPE_SLICE_END:
            name, begin = open_slices[event.track_uuid].pop()
            spans.append((event.track_uuid, name, packet.timestamp - begin))
    stream = next(uuid for uuid, name in tracks.items() if "stream" in name)
    on_stream = [(name, length) for uuid, name, length in spans if uuid == stream]
    assert sorted(on_stream) == [("gemm_0", 100_000), ("gemm_1", 100_000), ("gemm_2", 100_000)]
    assert "critical path" in tracks.values()
    assert shown == len([1 for uuid, _, _ in spans if tracks[uuid] != "critical path"])
    own = tmp_path / "own.py"
    words = ("--load", own, "--only", "quick", "--out", tmp_path, "--timeline-format", "perfetto")
    data = json_output(capsys, "what-if", trace, *words)
    assert data["files"] == [str(tmp_path / f"{name}.pftrace") for name in ("before", "quick")]


def test_memory_is_shown_with_the_largest_batch_that_is_known() -> None:
    peaks = "peak 2 GiB -> 1 GiB"
    unknown = MemoryOutcome(2**31, 2**30, None, None, None, None)
    assert memory_text(unknown) == peaks
    times = replace(unknown, batch_times_before=1.5, batch_times_after=3.0)
    assert memory_text(times) == f"{peaks}; largest batch 1.50 -> 3.00 times the recorded one"
    samples = replace(times, largest_batch_before=24, largest_batch_after=48)
    assert memory_text(samples) == f"{peaks}; largest batch 24 -> 48"


def two_ranks(folder: Path, slow_us: float) -> list[Path]:
    """Steps of an op, an all-reduce that both ranks must reach, and an op; rank 1 is slower."""
    group: dict[str, Any] = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 1000,
        "Group size": 2,
        "Process Group Name": "0",
    }
    paths = []
    for rank in (0, 1):
        events, now = [], 0.0
        for step in range(4):
            own_us = 3000 + slow_us * rank
            events += [
                span(f"ProfilerStep#{step}", now, 5000 + slow_us - 10, cat="user_annotation"),
                span("aten::mm", now + 10, own_us - 10),
                span("gloo:all_reduce", now + own_us, 4000 + slow_us - own_us, **group),
                span("aten::add_", now + 4000 + slow_us, 900),
            ]
            now += 5000 + slow_us
        path = folder / f"rank{rank}.json"
        info = {"rank": rank, "world_size": 2, "backend": "gloo"}
        path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
        paths.append(path)
    return paths


def test_the_slow_rank_is_named_with_what_it_costs(tmp_path, capsys) -> None:
    paths = two_ranks(tmp_path, slow_us=2000)
    (tmp_path / "own.py").write_text(OWN)
    words = ("--load", tmp_path / "own.py", "--only", "quick")
    data = json_output(capsys, "what-if", *paths, *words)
    slow = data["slow_rank"]
    assert data["rank"] == slow["rank"] == 1
    assert slow["together_s"] == pytest.approx(7e-3, rel=0.02)
    assert slow["cost_s"] == pytest.approx(2e-3, rel=0.05)
    assert "slowest: rank 1" in output(capsys, "what-if", *paths, *words)


def test_one_rank_can_be_asked_for(tmp_path, capsys) -> None:
    paths = two_ranks(tmp_path, slow_us=2000)
    (tmp_path / "own.py").write_text(OWN)
    words = ("--load", tmp_path / "own.py", "--only", "quick")
    data = json_output(capsys, "what-if", *paths, "--rank", 0, *words)
    assert data["rank"] == 0 and data["slow_rank"] is None
    message = error_output(capsys, "what-if", *paths, "--rank", 2, *words)
    assert "--rank must be one of 0, 1, but is 2" in message
    measure = ("--measure", tmp_path / "times.csv", "--rank", 2)
    message = error_output(capsys, "what-if", *paths, *measure, *words)
    assert "--rank must be one of 0, 1, but is 2" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "amq"), "there is no what-if 'amq'"),
        (("--workers", "2,x"), "--workers needs whole numbers"),
        (("--workers", "0"), "--workers needs numbers of at least 1"),
        (("--cluster", "nowhere"), "the cluster must be a cluster file"),
        (("--load", "nowhere.py"), "--load needs a Python file"),
        (("--measure", "times.csv"), "operators can be timed with the shapes of their inputs"),
        (("--measure", "a,b.csv"), "--measure needs a path without ','"),
        (("--check", "quick"), "--check needs the script behind --"),
        (("--", "train.py"), "--check is missing"),
    ],
)
def test_a_wrong_option_is_refused(trace, capsys, words, message) -> None:
    own = trace.with_name("own.py")
    assert message in error_output(capsys, "what-if", trace, "--load", own, *words)


def test_progress_is_called_for_each_part(trace) -> None:
    job = read_job([trace])
    seen: list[str] = []
    load_what_ifs(trace.with_name("own.py"))
    wanted = Wanted((Asked("quick", "quick"), Asked("never", "never")))
    answered(job, wanted, seen.append)
    assert seen == ["rank 0", "quick", "never"]


def test_events_of_unknown_categories_are_named_with_their_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.json"
    text = json.loads(training_text(5, 100))
    kinds = ("martian", "martian", "overhead")
    text["traceEvents"] += [span("zap", 10.0, 3.0, cat=kind) for kind in kinds]
    path.write_text(json.dumps(text))
    data = json_output(capsys, "what-if", path, "--only", "faster_gpu")
    assert "events of unknown categories, which are not read: martian 2" in data["notes"]
