"""`autotune replay` and `autotune optimize` as a user types them: what they print, write and refuse."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.canonical import canonical_json
from autotune.cli import main
from autotune.recordings.job_file import RankRecord, RecordedJob
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy

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
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#3",
            "pid": 1,
            "tid": 1,
            "ts": 0,
            "dur": 9000,
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": 1,
            "ts": 10,
            "dur": 3000 + late_us,
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "gloo:all_reduce",
            "pid": 1,
            "tid": 2,
            "ts": 3100 + late_us,
            "dur": 4900 - late_us,
            "args": group,
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add_",
            "pid": 1,
            "tid": 1,
            "ts": 8100,
            "dur": 800,
        },
    ]
    path = folder / f"rank{rank}.json"
    path.write_text(
        json.dumps(
            {
                "distributedInfo": {"rank": rank, "world_size": 2, "backend": "gloo"},
                "traceEvents": events,
            }
        )
    )
    return path


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(canonical_json(WORKLOAD))
    (tmp_path / "cluster.yaml").write_text(HOSTS)
    return path


def test_replay_of_two_ranks_says_what_the_iteration_is_made_of_and_writes_timeline_and_report(
    tmp_path, capsys
) -> None:
    traces = [str(kineto(rank, tmp_path)) for rank in (0, 1)]
    timeline, report = tmp_path / "timeline.json.gz", tmp_path / "report.html"
    assert (
        main(["replay", *traces, "--timeline", str(timeline), "--report", str(report), "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == [0, 1] and told["steps"] == [3]
    assert told["iteration_s"] == pytest.approx(told["measured_step_s"], rel=0.01)
    assert told["alignment"] is None or len(told["alignment"]["offset_s"]) == 2
    with gzip.open(timeline) as file:
        assert json.load(file)["traceEvents"]
    assert "Timeline" in report.read_text() and "<script" not in report.read_text()
    assert main(["replay", *traces]) == 0
    text = capsys.readouterr().out
    assert (
        "2 ranks, step 3, 1 collectives matched" in text
        and "exposed communication" in text
        and "hosts: unknown" in text
    )
    assert told["computation_s"] + told["exposed_communication_s"] + told[
        "idle_s"
    ] == pytest.approx(told["iteration_s"])
    assert main(["replay", *traces, "--hosts", "a,a", "--no-align", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["hosts"], again["hosts_from"], again["alignment"]) == (["a", "a"], "given", None)


def test_replay_of_a_recorded_folder_shows_the_peak_of_a_replica(tmp_path, capsys) -> None:
    from test_memory_commands import MODEL, replica

    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, kineto(rank, tmp_path).name, (), (0.2,))
        for rank in (0, 1)
    )
    RecordedJob(2, ranks, 1, 1, 1, MODEL.id, MODEL).write(tmp_path)
    replica().write(tmp_path)
    report = tmp_path / "report.html"
    assert main(["replay", str(tmp_path), "--report", str(report)]) == 0
    assert (
        "peak memory of a replica" in capsys.readouterr().out
        and "Peak memory of a replica" in report.read_text()
    )


def test_optimize_writes_a_strategy_that_plans_and_predicts_no_slower_than_ddp(
    workload, tmp_path, capsys
) -> None:
    output, report = tmp_path / "strategy.json", tmp_path / "report.html"
    words = [
        "optimize",
        str(workload),
        "--cluster",
        str(tmp_path / "cluster.yaml"),
        "-o",
        str(output),
        "--report",
        str(report),
    ]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    strategy = Strategy.from_json(output.read_text())
    assert strategy.id == told["strategy_id"]
    assert plan(strategy, WORKLOAD, 2).id == told["plan_id"]
    assert (
        told["predicted_step_s"] <= told["before_step_s"] and told["strategy"] == strategy.to_data()
    )
    assert "predicted, nothing was run" in report.read_text()
    assert main([*words, "--within-step"]) == 0
    assert "next forward pass" not in capsys.readouterr().out


def test_optimize_crosses_the_step_of_a_recorded_script_only_where_the_script_can(
    tmp_path, capsys
) -> None:
    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, f"rank{rank}.json.gz", (), (0.1,))
        for rank in range(2)
    )
    job = RecordedJob(2, ranks, 1, 1, 1, WORKLOAD.id, WORKLOAD)
    slow = tmp_path / "slow.yaml"
    slow.write_text(HOSTS.replace("1Gbit/s", "10Mbit/s"))
    words = [
        "optimize",
        str(tmp_path),
        "--cluster",
        str(slow),
        "--report",
        str(tmp_path / "report.html"),
    ]
    job.write(tmp_path)
    assert main(words) == 0
    assert "next forward pass" in capsys.readouterr().out
    replace(job, cross_step_refused="gradients are clipped").write(tmp_path)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert (
        "synchronization stays within the step: gradients are clipped\n" in text
        and "next forward pass" not in text
    )
    assert "gradients are clipped" in (tmp_path / "report.html").read_text()


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
    assert main([word.format(**names) for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["VGG16", "ncf_sparse"])
def test_a_model_of_the_zoo_is_optimized_with_times_that_are_said_to_be_assumed(
    name, capsys
) -> None:
    assert main(["optimize", name, "--cluster", "B1", "--budget-time", "1s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["forward_s"] < told["predicted_step_s"] <= told["before_step_s"]
    batch = 256 if name == "ncf_sparse" else 32
    source = f"on an NVIDIA V100 that reaches 60% of the 15.7 TFLOP/s and 900 GB/s of its data sheet, for a batch of {batch} examples"
    assert told["assumed"][0] == f"the workload's times (from FLOPs and bytes {source})"
