"""Traces of other, older and broken profilers equal the plain form, or are refused clearly."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Event, Job

from autotune.cli import main

Change = Callable[[list[Event]], list[Event]]


def begins_and_ends(events: list[Event]) -> list[Event]:
    """Write each host span as a B and an E, in the order in which they nest."""
    marks: list[tuple[float, bool, float, int, Event]] = []
    for number, event in enumerate(events):
        start_us, length_us = event["ts"], event["dur"]
        if "stream" in event["args"]:
            marks.append((start_us, True, 0.0, number, event))
            continue
        end_us = start_us + length_us
        end = {"pid": event["pid"], "tid": event["tid"], "ph": "E", "ts": end_us}
        begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
        # at equal times ends come first, then the longer begins
        marks.append((start_us, True, -length_us, number, begin))
        marks.append((end_us, False, 0.0, number, end))
    return [event for *_, event in sorted(marks, key=lambda mark: mark[:3])]


def text_numbers(events: list[Event]) -> list[Event]:
    return [
        event | {"ts": f"{event['ts']:.3f}", "dur": str(event["dur"]), "tid": str(event["tid"])}
        for event in events
    ]


def before_zero(events: list[Event]) -> list[Event]:
    return [event | {"ts": event["ts"] - 1_700_000_000_000_500.0} for event in events]


def renamed(old: str, new: str) -> Change:
    return lambda events: [event | {"name": re.sub(old, new, event["name"])} for event in events]


def kernels_only(events: list[Event]) -> list[Event]:
    """Leave only the names of the kernels to describe a collective."""
    return [event for event in events if event["name"] != "record_param_comms"]


def kernels_named(name: str) -> Change:
    return lambda events: renamed(NCCL, name)(kernels_only(events))


def annotated(events: list[Event]) -> list[Event]:
    """Add nested annotations of the user: two at the same time and one without length."""
    out = []
    for event in events:
        out.append(event)
        if event["name"].startswith("aten::linear"):
            mark = event | {"cat": "user_annotation", "args": {}}
            out += [mark | {"name": "block"}, mark | {"name": "block/inner"}]
            out.append(mark | {"name": "empty", "dur": 0.0})
    return out


def repeated_ids(events: list[Event]) -> list[Event]:
    """Add a driver call with the id of each launch, as if both interfaces were traced."""
    out = []
    for event in events:
        out.append(event)
        if event["name"] == "cudaLaunchKernel":
            inner = {"ts": event["ts"] + 1.0, "dur": event["dur"] - 2.0}
            out.append(event | {"cat": "cuda_driver", "name": "cuLaunchKernel"} | inner)
    return out


def no_steps(events: list[Event]) -> list[Event]:
    return [event for event in events if not event["name"].startswith("ProfilerStep")]


NCCL = "ncclDevKernel_AllReduce_.*"
GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
TEMPLATE = "void ncclDevKernel_AllReduce_Sum_f32_TREE_LL<true>(ncclDevKernelArgsStorage<4096ul>)"
SYMMETRIC = "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs)"
READ: dict[str, Change] = {
    "B and E": begins_and_ends,
    "numbers as text": text_numbers,
    "times below zero": before_zero,
    "nested annotations": annotated,
    "ids twice": repeated_ids,
    "NCCL 2.4": kernels_named("ncclAllReduceRingLLKernel_sum_f32(ncclColl)"),
    "NCCL 2.10": kernels_named("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"),
    "NCCL 2.27 symmetric": kernels_named(SYMMETRIC),
    "template": kernels_named(TEMPLATE),
    "RCCL": renamed(NCCL, "rccl_main_kernel(rcclKernelArgs)"),
    "RCCL generic": renamed(NCCL, GENERIC),
    "MSCCL": renamed(NCCL, "mscclKernel_Sum_float_LL_true(ncclDevComm*)"),
}


def written(folder: Path, job: Job) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank{rank}.json" for rank in range(len(job.events))]
    for rank, (path, events) in enumerate(zip(paths, job.events, strict=True)):
        info = {"rank": rank, "world_size": len(job.events)}
        path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return [str(path) for path in paths]


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["replay", "--json", "--no-align", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("form", sorted(READ))
def test_an_odd_form_reads_like_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    job = Job(ranks=2, steps=2, layers=3).run()
    plain = replayed(capsys, *written(tmp_path / "plain", job))
    job.events = [READ[form](events) for events in job.events]
    odd = replayed(capsys, *written(tmp_path / "odd", job))
    assert odd["matched_collectives"] == plain["matched_collectives"] == 6
    assert odd["measured_step_s"] == pytest.approx(plain["measured_step_s"], abs=2e-6)
    assert abs(odd["replay_error"]) < 1e-3
    assert odd["communication_s"] == pytest.approx(plain["communication_s"], abs=2e-6)


def test_without_steps_the_whole_trace_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(ranks=2, steps=3).run()
    job.events = [no_steps(events) for events in job.events]
    report = replayed(capsys, *written(tmp_path, job))
    assert (report["steps"], report["matched_collectives"]) == ([0], 12)
    assert abs(report["replay_error"]) < 1e-3
    assert any("whole trace" in repair for repair in report["repairs"])


STACKS = b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}'
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "text cut off": (lambda text: gzip.compress(text[: len(text) // 2]), "is the file complete"),
    "no durations": (lambda text: re.sub(rb'"dur": [0-9.e-]+, ', b"", text), "dur must be"),
    "protobuf": (lambda text: b"\x08\x01\x12\x05hello" * 50, "must hold a JSON object"),
    "empty": (lambda text: b"", "must hold a JSON object"),
    "stacks": (lambda text: STACKS, "must hold events"),
}


@pytest.mark.parametrize("form", sorted(BROKEN))
def test_an_unreadable_trace_is_refused_in_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    change, reason = BROKEN[form]
    path = Path(written(tmp_path, Job(ranks=1, steps=1).run())[0])
    path.write_bytes(change(path.read_bytes()))
    assert main(["replay", str(path)]) != 0
    message = capsys.readouterr().err
    assert reason in message and str(path) in message and "Traceback" not in message
