"""A traced data-parallel step as a workload: its buckets, their ready times, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Event, span

from autotune.cli import main
from autotune.errors import InvalidInput
from autotune.profiling.graph.traced_workload import workload_of
from autotune.profiling.traces.job import read_job

REFERENCE = (
    Path(os.environ.get("AUTOTUNE_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "traces"
)


def sent(name: str, elements: int, start_us: float, length_us: float) -> Event:
    args: dict[str, Any] = {"Collective name": name, "dtype": "Float", "In msg nelems": elements}
    args |= {"Group size": 2, "Process Group Name": "0"}
    return span(f"gloo:{name}", start_us, length_us, tid=2, **args)


def trace(folder: Path, *events: Event) -> Path:
    """Write the events as the trace of one step of rank 0."""
    path = folder / "rank0.json"
    whole = [span("ProfilerStep#1", 0, 13000, cat="user_annotation"), *events]
    info = {"rank": 0, "world_size": 2, "backend": "gloo"}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": whole}))
    return path


STEP = (
    span("c10d::broadcast_", 50, 20),
    sent("broadcast", 250, 100, 800),
    span("aten::mm", 1000, 3000),
    span("autograd::engine::evaluate_function: MmBackward0", 4000, 2000),
    span("c10d::allreduce_", 5980, 15),
    sent("all_reduce", 1000, 6010, 3000),
    span("autograd::engine::evaluate_function: MmBackward0", 6000, 2000),
    span("c10d::allreduce_", 7980, 15),
    sent("all_reduce", 500, 9010, 2500),
    span("Optimizer.step#SGD.step", 11600, 1000, cat="user_annotation"),
    span("aten::add_", 11600, 1000),
)


def test_every_bucket_is_a_variable_that_is_ready_when_its_gradients_are(tmp_path: Path) -> None:
    workload = workload_of(read_job(trace(tmp_path, *STEP))).workload
    assert [variable.shape for variable in workload.variables] == [(1000,), (500,)]
    assert workload.variables[0].ready_s == pytest.approx(0.002, abs=1e-4)
    waited = "it waited for the first one, which is no computation"
    assert workload.variables[1].ready_s == pytest.approx(0.004, abs=1e-4), waited
    assert workload.backward_s == pytest.approx(0.004, abs=1e-4)
    assert (workload.buffer_bytes, workload.buffers) == ((1000,), 1)
    assert (workload.device, workload.source) == ("cpu", "measured")


def in_group(event: Event, ranks: str) -> Event:
    """The collective as torch writes it, with its group's ranks."""
    stated = {"Process Group Ranks": ranks, "Group size": ranks.count(",") + 1}
    return {**event, "args": {**event["args"], **stated, "Process Group Name": ranks}}


def grouped(folder: Path, ranks: tuple[str, str], world: int) -> Path:
    """`STEP` whose two sums are of these ranks."""
    first, second = (in_group(STEP[at], ranks[n]) for n, at in enumerate((5, 8)))
    path = trace(folder, *STEP[:5], first, *STEP[6:8], second, *STEP[9:])
    data = json.loads(path.read_text())
    data["distributedInfo"]["world_size"] = world
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("[0, 1, 2, 3]", "[0, 2]"), "of the ranks 0-3 and 0, 2 of 4 ranks"),
        (("[0, 2]", "[0, 2]"), "of the ranks 0, 2 of 4 ranks"),
    ],
)
def test_sums_of_a_part_of_the_ranks_are_no_gradients_of_data_parallelism(
    tmp_path: Path, ranks: tuple[str, str], message: str
) -> None:
    """Those of tensor or hybrid parallelism; each sum counted as a bucket of gradients before."""
    with pytest.raises(InvalidInput, match=message):
        workload_of(read_job(grouped(tmp_path, ranks, 4)))


def test_several_groups_of_all_ranks_are_data_parallelism(tmp_path: Path) -> None:
    """DDP has a second group of the same ranks, and groups of one rank send nothing."""
    path = grouped(tmp_path, ("[0, 1, 2, 3]", "[0, 1, 2, 3]"), 4)
    assert len(workload_of(read_job(path)).workload.variables) == 2
    (other := tmp_path / "other").mkdir()
    path = grouped(other, ("[0, 1, 2, 3]", "[0]"), 4)
    assert len(workload_of(read_job(path)).workload.variables) == 2


def test_a_trace_without_gradients_is_refused_in_words(tmp_path: Path) -> None:
    backward = span("autograd::engine::evaluate_function: MmBackward0", 4000, 2000)
    none = r"of the 0 collectives of rank 0's step 1 .* none is an all-reduce"
    with pytest.raises(InvalidInput, match=none):
        workload_of(read_job(trace(tmp_path, span("aten::mm", 0, 3000), backward)))
    with pytest.raises(InvalidInput, match="needs a step with a backward pass"):
        workload_of(read_job(trace(tmp_path, *STEP[:3])))


def test_optimize_takes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: two\nhosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"
    )
    cluster = str(tmp_path / "cluster.yaml")
    assert main(["optimize", str(trace(tmp_path, *STEP)), "--cluster", cluster, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "rank0"
    assert any("buckets as they were sent" in note for note in report["assumed"])


@pytest.mark.skipif(not REFERENCE.exists(), reason="AUTOTUNE_REFERENCE_DATA has no traces")
def test_the_buckets_of_a_traced_job_on_two_gpus_are_all_there() -> None:
    workload = workload_of(read_job(REFERENCE / "ddp_a100" / "rank0.json.gz")).workload
    elements = [variable.elements for variable in workload.variables]
    assert elements == [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]
    assert workload.device == "cuda" and workload.buffer_bytes == (212_480, 424)
    assert workload.compute_s == pytest.approx(0.2213, rel=0.01)
