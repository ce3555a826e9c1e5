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


def spans(ranks: list[list[Event]], change: Callable[[Event], None]) -> None:
    for events in ranks:
        for event in events:
            change(event)


def begins_and_ends(events: list[Event]) -> list[Event]:
    """Every host span as a B and an E, in the order in which they nest; kernels stay whole."""
    out: list[Event] = []
    for event in events:
        if "stream" in event["args"]:
            out.append(event)
            continue
        end = {key: event[key] for key in ("pid", "tid")} | {
            "ph": "E",
            "ts": event["ts"] + event["dur"],
        }
        out += [{key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}, end]
    # at equal times ends come first, then the longer begins: `events` are in any order
    lengths = {
        (event["pid"], event["tid"], event["ts"], event["name"]): event["dur"] for event in events
    }
    return sorted(
        out,
        key=lambda e: (
            e["ts"],
            e["ph"] != "E",
            -lengths.get((e["pid"], e["tid"], e["ts"], e.get("name", "")), 0.0),
        ),
    )


def text_numbers(events: list[Event]) -> list[Event]:
    return [
        event | {"ts": f"{event['ts']:.3f}", "dur": str(event["dur"]), "tid": str(event["tid"])}
        for event in events
    ]


def before_zero(events: list[Event]) -> list[Event]:
    return [event | {"ts": event["ts"] - 1_700_000_000_000_500.0} for event in events]


def renamed(old: str, new: str) -> Change:
    return lambda events: [event | {"name": re.sub(old, new, event["name"])} for event in events]


def without_said(events: list[Event]) -> list[Event]:
    """No event says anything about a collective but the names of the kernels."""
    return [event for event in events if event["name"] != "record_param_comms"]


def kernels_named(name: str) -> Change:
    return lambda events: renamed("ncclDevKernel_AllReduce_.*", name)(without_said(events))


def annotated(events: list[Event]) -> list[Event]:
    """Nested annotations of the user, also two at the same time and one without length."""
    out = []
    for event in events:
        out.append(event)
        if event["name"].startswith("aten::linear"):
            mark = event | {"cat": "user_annotation", "args": {}}
            out += [
                mark | {"name": "block"},
                mark | {"name": "block/inner"},
                mark | {"name": "empty", "dur": 0.0},
            ]
    return out


def repeated_ids(events: list[Event]) -> list[Event]:
    """Runtime and driver call of a launch with the same id, if both interfaces are traced."""
    out = []
    for event in events:
        out.append(event)
        if event["name"] == "cudaLaunchKernel":
            out.append(
                event
                | {
                    "cat": "cuda_driver",
                    "name": "cuLaunchKernel",
                    "ts": event["ts"] + 1.0,
                    "dur": event["dur"] - 2.0,
                }
            )
    return out


def no_steps(events: list[Event]) -> list[Event]:
    return [event for event in events if not event["name"].startswith("ProfilerStep")]


READ: dict[str, Change] = {
    "B and E": begins_and_ends,
    "numbers as text": text_numbers,
    "times below zero": before_zero,
    "nested annotations": annotated,
    "ids twice": repeated_ids,
    "NCCL 2.4": kernels_named("ncclAllReduceRingLLKernel_sum_f32(ncclColl)"),
    "NCCL 2.10": kernels_named("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"),
    "NCCL 2.27 symmetric": kernels_named(
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs)"
    ),
    "template": kernels_named(
        "void ncclDevKernel_AllReduce_Sum_f32_TREE_LL<true>(ncclDevKernelArgsStorage<4096ul>)"
    ),
    "RCCL": renamed("ncclDevKernel_AllReduce_.*", "rccl_main_kernel(rcclKernelArgs)"),
    "RCCL generic": renamed(
        "ncclDevKernel_AllReduce_.*", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    ),
    "MSCCL": renamed("ncclDevKernel_AllReduce_.*", "mscclKernel_Sum_float_LL_true(ncclDevComm*)"),
}


def written(folder: Path, job: Job, name: str = "rank{}.json") -> list[str]:
    paths = []
    for rank, events in enumerate(job.events):
        path = folder / name.format(rank)
        path.write_text(json.dumps({"traceEvents": events}))
        paths.append(str(path))
    return paths


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["replay", "--json", "--no-align", *words]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize("form", sorted(READ))
def test_an_odd_form_reads_like_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    job = Job(ranks=2, steps=2, layers=3).run()
    (tmp_path / "plain").mkdir()
    (tmp_path / "odd").mkdir()
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
    told = replayed(capsys, *written(tmp_path, job))
    assert (
        told["steps"] == [0]
        and told["matched_collectives"] == 12
        and abs(told["replay_error"]) < 1e-3
    )
    assert any("whole trace" in repair for repair in told["repairs"])


def cut(text: bytes) -> bytes:
    return gzip.compress(text[: len(text) // 2])


def no_durations(text: bytes) -> bytes:
    return re.sub(rb'"dur": [0-9.e-]+, ', b"", text)


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "text cut off within a gz": (cut, "is the file complete"),
    "no durations": (no_durations, "dur must be"),
    "protobuf": (lambda text: b"\x08\x01\x12\x05hello" * 50, "must hold a JSON object"),
    "empty": (lambda text: b"", "must hold a JSON object"),
    "stacks": (
        lambda text: b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}',
        "must hold events",
    ),
}


@pytest.mark.parametrize("form", sorted(BROKEN))
def test_what_cannot_be_read_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    change, said = BROKEN[form]
    path = Path(written(tmp_path, Job(ranks=1, steps=1).run())[0])
    path.write_bytes(change(path.read_bytes()))
    assert main(["replay", str(path)]) != 0
    shown = capsys.readouterr().err
    assert said in shown and str(path) in shown and "Traceback" not in shown
