"""Timelines of Horovod: reading, fused batches, steps, and `autotune replay`."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import error_output, json_output, output
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.profiling.formats.horovod import (
    FusedBatch,
    HorovodTimeline,
    TensorOperation,
    read_horovod,
)
from autotune.profiling.graph.horovod_steps import (
    CHANNEL,
    DERIVED,
    NEGOTIATION,
    chosen_step,
    horovod_steps,
    operations_outside,
    step_dfg,
)
from benchmarks.fuzz_campaign.samples import horovod_timeline, kineto

RECORDED = Path(__file__).parents[1] / "stored" / "horovod" / "timeline.json"
SAMPLE = horovod_timeline()["timeline.json"]


def read(content: bytes) -> HorovodTimeline:
    return read_horovod(io.BytesIO(content).read, "timeline.json")


def events() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(SAMPLE)
    return listed


def read_events(listed: list[dict[str, Any]]) -> HorovodTimeline:
    return read(json.dumps(listed).encode())


def test_a_tensor_has_its_negotiation_activities_and_bytes() -> None:
    timeline = read(SAMPLE)
    assert (timeline.ranks, timeline.repairs) == (2, ())
    assert timeline.origin_us == 1_700_000_000_000_000
    assert timeline.cycles_s.tolist() == pytest.approx([0.0, 1e-3])
    first = timeline.operations[0]
    assert (first.tensor, first.kind, first.dtype) == ("allreduce.1", "ALLREDUCE", "float32")
    assert (first.size_bytes, first.transfer) == (48.0, "GLOO_ALLREDUCE")
    assert first.negotiated_s == pytest.approx((1e-6, 1e-6))
    assert dict(first.ready_s) == pytest.approx({0: 1e-6, 1: 1e-6})
    assert first.copied_in_s == pytest.approx((30e-6, 45e-6))
    assert first.transferred_s == pytest.approx((50e-6, 65e-6))
    assert first.copied_out_s == pytest.approx((70e-6, 85e-6))
    assert first.end_s == pytest.approx(99e-6)


def test_transfers_without_an_event_between_them_are_one_batch() -> None:
    timeline = read(SAMPLE)
    assert [batch.operations for batch in timeline.batches] == [(0, 1), (2, 3)]
    assert timeline.batches[0].size_bytes == 96.0
    apart = events()
    begins = [at for at, event in enumerate(apart) if event.get("name") == "GLOO_ALLREDUCE"]
    # the first transfer ends before the second begins, as if each were sent alone
    apart.insert(begins[1], {"ph": "E", "ts": 51, "pid": 1})
    del apart[next(at for at in range(begins[1] + 1, len(apart)) if apart[at]["ph"] == "E")]
    assert [batch.operations for batch in read_events(apart).batches] == [(0,), (1,), (2, 3)]


STAGES = ("NCCL_REDUCESCATTER", "NCCL_REDUCE", "MPI_ALLREDUCE", "NCCL_ALLGATHER")


def hierarchical() -> list[dict[str, Any]]:
    """The sample with four transfers of 3 us, 1 us apart, instead of each one of 15 us."""
    listed = events()
    begins = [at for at, event in enumerate(listed) if event.get("name") == "GLOO_ALLREDUCE"]
    for at in reversed(begins[::2]):  # two begins and two ends follow each other
        staged = []
        for place, name in enumerate(STAGES):
            ts = listed[at]["ts"] + 4 * place
            staged += [{"ph": "B", "name": name, "ts": ts, "pid": pid} for pid in (1, 2)]
            staged += [{"ph": "E", "ts": ts + 3, "pid": pid} for pid in (1, 2)]
        listed[at : at + 4] = staged
    return listed


def test_the_transfers_of_a_hierarchical_all_reduce_are_one_without_hops() -> None:
    """Only the last one counted as transfer, with hops of a ring, and the others as copies."""
    timeline = read_events(hierarchical())
    assert [batch.operations for batch in timeline.batches] == [(0, 1), (2, 3)]
    first = timeline.operations[0]
    assert first.transferred_s == pytest.approx((50e-6, 65e-6))
    assert first.transfers == STAGES
    assert timeline.batches[0].transfer_s == first.transferred_s
    step = horovod_steps(timeline)[0]
    dfg = step_dfg(timeline, step)
    assert replay(dfg).makespan_s == pytest.approx(step.measured_s)
    times_s = dict(zip(dfg.names.ops, dfg.duration_s.tolist(), strict=True))
    (name,) = [name for name in times_s if name.startswith("NCCL_REDUCESCATTER + NCCL_REDUCE + ")]
    assert times_s[name] == pytest.approx(15e-6) and DERIVED not in name
    assert times_s["copy in allreduce.1 and 1 more"] < 50e-6


def test_a_timeline_before_horovod_0_21_is_refused_by_its_version(tmp_path, capsys) -> None:
    """It was refused as a trace of Kineto without Kineto's categories."""
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(events()[1:]))  # without the time at which it begins
    assert "of version 0.21 or later" in error_output(capsys, "replay", path)


def test_a_recorded_timeline_shows_the_batches_of_its_threshold() -> None:
    timeline = read(RECORDED.read_bytes())
    assert timeline.ranks == 2
    assert [str(repair) for repair in timeline.repairs] == ["the timeline is cut off at its end"]
    steps = horovod_steps(timeline)
    sizes = [[timeline.batches[number].size_bytes for number in step.batches] for step in steps]
    assert len(steps) == 4  # the broadcast of parameters is no step
    assert sizes[1:] == [[5672.0, 65536.0, 33280.0]] * 3  # at most 40 000 bytes are fused


GRADIENTS = {"fc.bias": 40.0, "fc.weight": 4e4, "conv.weight": 6e4}
METRICS = {"loss": 4.0, "accuracy": 4.0}


def timeline_of(calls: list[str], sizes: Mapping[str, float]) -> HorovodTimeline:
    """One batch per call, a millisecond apart."""
    operations = tuple(
        TensorOperation(name, "ALLREDUCE", 1e-3 * at, 1e-3 * at + 5e-4, sizes[name])
        for at, name in enumerate(calls)
    )
    batches = tuple(
        FusedBatch((at,), ("GLOO_ALLREDUCE",), one.size_bytes, one.start_s, (0.0, 0.0), one.end_s)
        for at, one in enumerate(operations)
    )
    return HorovodTimeline("timeline.json", 0, operations, batches, np.zeros(0), 2)


def members_of(timeline: HorovodTimeline) -> list[list[str]]:
    """The tensors of every step."""
    return [
        [timeline.operations[number].tensor for number in step.batches]
        for step in horovod_steps(timeline)
    ]


@pytest.mark.parametrize(("parts", "states_bytes"), [(1, True), (4, True), (1, False)])
def test_metrics_of_every_part_of_a_batch_are_not_taken_for_steps(parts, states_bytes) -> None:
    sizes = {**GRADIENTS, **METRICS}
    step = [*METRICS] * parts + [*GRADIENTS]
    timeline = timeline_of(step * 5, sizes if states_bytes else dict.fromkeys(sizes, 0.0))
    assert members_of(timeline) == [step] * 5
    assert operations_outside(timeline, horovod_steps(timeline)) == ()


def test_validation_is_not_taken_for_steps_however_often_it_is_averaged() -> None:
    sizes = {**GRADIENTS, "val_loss": 4.0}
    calls = [*[*GRADIENTS] * 5, *["val_loss"] * 40, *[*GRADIENTS] * 5]
    timeline = timeline_of(calls, sizes)
    steps = horovod_steps(timeline)
    # val_loss joins the step before it, and the rest of it the step after it
    assert members_of(timeline) == [[*GRADIENTS]] * 8
    outside = [timeline.operations[at].tensor for at in operations_outside(timeline, steps)]
    assert Counter(outside) == {"val_loss": 40, **dict.fromkeys(GRADIENTS, 2)}


def test_validation_under_the_names_of_the_training_metrics_lengthens_no_step() -> None:
    step = [*METRICS, *GRADIENTS]
    timeline = timeline_of([*step * 4, *[*METRICS] * 50, *step * 4], {**GRADIENTS, **METRICS})
    assert members_of(timeline) == [step] * 7


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations([*GRADIENTS, "a", "b", "c"]),
    parts=st.integers(0, 4),
    steps=st.integers(2, 6),
)
def test_equal_steps_are_found_again_in_whatever_order_their_tensors_come(
    order: list[str], parts: int, steps: int
) -> None:
    sizes = {**GRADIENTS, **METRICS, **dict.fromkeys("abc", 500.0)}
    step = [*[*METRICS] * parts, *order]
    assert members_of(timeline_of(step * steps, sizes)) == [step] * steps


def test_the_replay_of_a_step_takes_its_measured_time_on_two_devices() -> None:
    for content in (SAMPLE, RECORDED.read_bytes()):
        timeline = read(content)
        for step in horovod_steps(timeline):
            dfg = step_dfg(timeline, step)
            assert replay(dfg).makespan_s == pytest.approx(step.measured_s)
            assert set(dfg.names.queues) == {NEGOTIATION, CHANNEL}
            derived = [name for name in dfg.names.ops if DERIVED in name]
            assert len(derived) == 2 * (timeline.ranks - 1) * len(step.batches)


def test_a_timeline_may_end_anywhere() -> None:
    content = RECORDED.read_bytes()
    whole = read(content)
    kept = 0
    for end in range(1, len(content), 487):
        try:
            timeline = read(content[:end])
        except InvalidInput as refusal:
            assert "complete operation" in str(refusal)
        else:
            assert timeline.operations == whole.operations[: len(timeline.operations)]
            kept += 1
    assert kept > 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"ph": "B", "name": "ALLREDUCE", "ts": -1, "pid": 1}, "ts must be 0 to"),
        ({"ph": "B", "name": "ALLREDUCE", "ts": 1, "pid": 77}, "no process_name names"),
        ({"ph": "X", "name": "one", "ts": 1, "pid": 1}, "named by a rank"),
        ({"ph": "E", "ts": 1, "pid": 1}, "it ends and never began"),
        ({"ph": "Q", "ts": 1, "pid": 1}, "ph must be"),
    ],
)
def test_a_few_bad_events_are_left_out_and_many_are_refused(
    damage: dict[str, Any], message: str
) -> None:
    listed = events()
    listed[3:3] = [damage]
    assert message in str(read_events(listed).repairs[0])
    with pytest.raises(InvalidInput, match="at most 5 % of a timeline's events"):
        read_events([*listed[:3], *[damage] * 9, *listed[3:]])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("shape", f"[{2**40}, {2**40}]", "elements in a tensor"),
        ("rank", "999999999", "a rank must be"),
    ],
)
def test_numbers_beyond_their_limits_are_refused(place: str, value: str, message: str) -> None:
    listed = events()
    for event in listed:
        if place == "shape" and "shape" in event.get("args", {}):
            event["args"]["shape"] = value
        if place == "rank" and event["ph"] == "X":
            event["name"] = value
    with pytest.raises(InvalidInput, match=message):
        read_events(listed)


def test_a_step_that_does_not_exist_is_refused() -> None:
    steps = horovod_steps(read(SAMPLE))
    with pytest.raises(InvalidInput, match="one of 0, 1"):
        chosen_step(steps, 2)
    assert chosen_step(steps, None).number == 0


def test_replay_shows_batches_and_writes_timeline_and_report(tmp_path, capsys) -> None:
    timeline, report = tmp_path / "t.json.gz", tmp_path / "r.html"
    words = ("replay", RECORDED, "--timeline", timeline, "--report", report)
    text = output(capsys, *words)
    assert "6 tensors in 3 batches" in text
    assert "replayed +0.00 %" in text
    # the broadcast of parameters
    assert "6 of 30 operations belong to no step, with 0 B of 408 KiB (6 state no bytes)" in text
    assert timeline.exists()
    assert "Fused batches" in report.read_text()
    data = json_output(capsys, "replay", RECORDED, "--step", "2")
    assert [len(batch["tensors"]) for batch in data["batches"]] == [3, 1, 2]
    assert (data["step"], data["world_size"], data["hops"]) == (2, 2, "derived")
    assert data["outside_steps"] == {"operations": 6, "bytes": 0.0, "without_bytes": 6}


def test_a_timeline_among_other_files_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "a.json").write_bytes(SAMPLE)
    (tmp_path / "b.json").write_text('{"traceEvents": []}')
    assert "is replayed alone, but" in error_output(capsys, "replay", tmp_path)
    (tmp_path / "a.json").rename(tmp_path / "c.json")
    (tmp_path / "b.json").write_bytes(kineto()["rank0.json"])
    assert "name it alone" in error_output(capsys, "replay", tmp_path)
