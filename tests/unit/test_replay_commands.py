"""The output, files and refusals of `autotune replay` and `autotune optimize`."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import error_output, json_output, output
from synthetic_job import WORKLOAD

from autotune.canonical import canonical_json
from autotune.cluster_file import read_cluster
from autotune.features.extract import Extractor, job_extractor
from autotune.recordings.job_file import RankRecord, RecordedJob
from autotune.records import Accelerators
from autotune.strategy_space.mirrored import MIRRORED_LIMITS, mirrored_refusal
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Variable

HOSTS = "name: two\nhosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"


def kineto(rank: int, folder: Path) -> Path:
    """A step of two ops and an all-reduce; rank 1 reaches it 2 ms later."""
    late_us = 2000 * rank
    group = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 1000,
        "Group size": 2,
        "Process Group Name": "0",
    }
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, **more}
        for cat, name, tid, ts, dur, more in (
            ("user_annotation", "ProfilerStep#3", 1, 0, 9000, {}),
            ("cpu_op", "aten::mm", 1, 10, 3000 + late_us, {}),
            ("cpu_op", "gloo:all_reduce", 2, 3100 + late_us, 4900 - late_us, {"args": group}),
            ("cpu_op", "aten::add_", 1, 8100, 800, {}),
        )
    ]
    path = folder / f"rank{rank}.json"
    info = {"rank": rank, "world_size": 2, "backend": "gloo"}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return path


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(canonical_json(WORKLOAD))
    (tmp_path / "cluster.yaml").write_text(HOSTS)
    return path


def test_replay_of_two_ranks_breaks_the_iteration_down_and_writes_timeline_and_report(
    tmp_path, capsys
) -> None:
    words = ("replay", *(kineto(rank, tmp_path) for rank in (0, 1)))
    timeline, report = tmp_path / "timeline.json.gz", tmp_path / "report.html"
    data = json_output(capsys, *words, "--timeline", timeline, "--report", report)
    assert data["ranks"] == [0, 1] and data["steps"] == [3]
    assert data["iteration_s"] == pytest.approx(data["measured_step_s"], rel=0.01)
    assert data["alignment"] is None or len(data["alignment"]["offset_s"]) == 2
    parts_s = data["computation_s"] + data["exposed_communication_s"] + data["idle_s"]
    assert parts_s == pytest.approx(data["iteration_s"])
    with gzip.open(timeline) as file:
        assert json.load(file)["traceEvents"]
    assert "Timeline" in report.read_text() and "<script" not in report.read_text()
    text = output(capsys, *words)
    for part in ("2 ranks, step 3, 1 collectives matched", "exposed communication"):
        assert part in text
    assert "hosts: unknown" in text
    again = json_output(capsys, *words, "--hosts", "a,a", "--no-align")
    assert (again["hosts"], again["hosts_from"], again["alignment"]) == (["a", "a"], "given", None)


def test_without_cvxpy_replay_names_the_extra_or_takes_the_clock_of_the_one_host(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)  # as in the base installation
    words = ("replay", *(kineto(rank, tmp_path) for rank in (0, 1)))
    message = error_output(capsys, *words)
    assert "pip install '.[align]'" in message and "--no-align" in message
    text = output(capsys, *words, "--hosts", "a,a")
    assert "clocks: not aligned; the ranks share the clock of their host" in text


def test_replay_of_a_recorded_folder_shows_the_peak_of_a_replica(tmp_path, capsys) -> None:
    from test_memory_commands import MODEL, replica

    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, kineto(rank, tmp_path).name, (), (0.2,))
        for rank in (0, 1)
    )
    RecordedJob(2, ranks, 1, 1, 1, MODEL.id, MODEL).write(tmp_path)
    replica().write(tmp_path)
    report = tmp_path / "report.html"
    text = output(capsys, "replay", tmp_path, "--report", report)
    assert "peak memory of a replica" in text
    assert "Peak memory of a replica" in report.read_text()


def test_optimize_writes_a_strategy_that_plans_and_predicts_no_slower_than_ddp(
    workload, tmp_path, capsys
) -> None:
    output_path, report = tmp_path / "strategy.json", tmp_path / "report.html"
    cluster = tmp_path / "cluster.yaml"
    words = ("optimize", workload, "--cluster", cluster, "-o", output_path, "--report", report)
    data = json_output(capsys, *words)
    strategy = Strategy.from_json(output_path.read_text())
    assert strategy.id == data["strategy_id"] and data["strategy"] == strategy.to_data()
    assert plan(strategy, WORKLOAD, 2).id == data["plan_id"]
    assert data["predicted_step_s"] <= data["before_step_s"]
    assert "predicted, nothing was run" in report.read_text()
    assert "next forward pass" not in output(capsys, *words, "--within-step")


def test_optimize_keeps_to_what_the_recorded_script_can(tmp_path, capsys) -> None:
    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, f"rank{rank}.json.gz", (), (0.1,))
        for rank in range(2)
    )
    job = RecordedJob(2, ranks, 1, 1, 1, WORKLOAD.id, WORKLOAD)
    slow = tmp_path / "slow.yaml"
    slow.write_text(HOSTS.replace("1Gbit/s", "10Mbit/s"))
    words = ("optimize", tmp_path, "--cluster", slow, "--report", tmp_path / "report.html")
    job.write(tmp_path)
    text = output(capsys, *words)
    assert "next forward pass" in text
    replace(job, cross_step_refused="gradients are clipped", direct_refused="no sends").write(
        tmp_path
    )
    text = output(capsys, *words)
    assert "synchronization stays within the step: gradients are clipped\n" in text
    assert "no direct exchanges: no sends\n" in text
    assert "next forward pass" not in text
    report = (tmp_path / "report.html").read_text()
    assert "gradients are clipped" in report and "no sends" in report


def test_optimize_predicts_a_recorded_graph_of_tensorflow_as_a_job_does(tmp_path, capsys) -> None:
    record = (RankRecord(0, "host", "cpu", "x", 1, "rank0.json.gz", (), (0.1,)),) * 2
    ranks = tuple(replace(one, rank=rank) for rank, one in enumerate(record))
    software = {"tensorflow": "2.21"}
    RecordedJob(2, ranks, 1, 1, 1, WORKLOAD.id, WORKLOAD, software=software).write(tmp_path)
    (tmp_path / "cluster.yaml").write_text(HOSTS)
    cluster = tmp_path / "cluster.yaml"
    data = json_output(capsys, "optimize", tmp_path, "--cluster", cluster, "--within-step")
    planned = plan(Strategy.from_data(data["strategy"]), WORKLOAD, 2)
    in_a_job = job_extractor(WORKLOAD, read_cluster(cluster), Accelerators.REAL, software)
    assert data["predicted_step_s"] == pytest.approx(in_a_job.steps.step_s(planned))
    assert data["predicted_step_s"] < Extractor(WORKLOAD, read_cluster(cluster)).steps.step_s(
        planned
    )


def test_optimize_plans_for_recorded_mirrored_workers_what_they_can_enact(tmp_path, capsys) -> None:
    record = RankRecord(0, "host", "cpu", "x", 1, "rank0.json.gz", (), (0.1,))
    table = Variable("table", (5000, 64), sparse=True, ready_s=0.1, touched_rows=20.0)
    workload = replace(WORKLOAD, variables=(*WORKLOAD.variables, table))
    job = RecordedJob(1, (record,), 1, 1, 1, workload.id, workload, mirrored=True)
    slow = tmp_path / "slow.yaml"
    slow.write_text(HOSTS.replace("1Gbit/s", "10Mbit/s"))
    job.write(tmp_path)
    written, report = tmp_path / "strategy.json", tmp_path / "report.html"
    words = ("optimize", tmp_path, "--cluster", slow, "--lossy", "--within-step", "-o", written)
    text = output(capsys, *words, "--report", report, "--budget-time", "2s")
    assert MIRRORED_LIMITS in text and MIRRORED_LIMITS in report.read_text()
    planned = plan(Strategy.from_json(written.read_text()), workload, 2)
    assert mirrored_refusal(planned, {"table"}) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "absent.json"], "absent.json"),
        (
            ["replay", "{trace}", "--step", "last"],
            "--step must be the number of a step, or median, but is 'last'",
        ),
        (
            ["replay", "{trace}", "--hosts", "a,b"],
            "hosts must be a number of ranks per host, or 1 names with commas",
        ),
        (["replay", "{trace}", "--step", "9"], "the step must be one of 3, but is 9"),
        (["optimize", "absent", "--cluster", "B7"], "there must be something to optimize"),
        (
            ["optimize", "{workload}", "--cluster", "absent.yaml"],
            "the cluster must be a cluster file or one of",
        ),
        (
            ["optimize", "{workload}", "--cluster", "B7", "--op-fusion"],
            "--op-fusion needs the ops of a model, which a layer profile (.txt) and the models of",
        ),
        (
            ["optimize", "{untimed}", "--cluster", "B7"],
            "record them with `autotune profile`, or name a model of the zoo",
        ),
    ],
)
def test_bad_input_is_refused_with_the_rule_and_the_value(
    workload, tmp_path, capsys, words, message
) -> None:
    untimed = tmp_path / "untimed.json"
    untimed.write_text(
        canonical_json(replace(WORKLOAD, forward_s=0.0, backward_s=0.0, update_s=0.0))
    )
    names = {"trace": kineto(0, tmp_path), "workload": workload, "untimed": untimed}
    assert message in error_output(capsys, *(word.format(**names) for word in words))


@pytest.mark.parametrize(("name", "batch"), [("VGG16", 32), ("ncf_sparse", 256)])
def test_the_times_of_a_zoo_model_are_shown_as_assumed(name, batch, capsys) -> None:
    data = json_output(capsys, "optimize", name, "--cluster", "B1", "--budget-time", "1s")
    assert 0 < data["forward_s"] < data["predicted_step_s"] <= data["before_step_s"]
    source = (
        "on an NVIDIA V100 that reaches 60% of the 15.7 TFLOP/s and 900 GB/s of its data sheet, "
        f"for a batch of {batch} examples"
    )
    assert data["assumed"][0] == f"the workload's times (from FLOPs and bytes {source})"
