"""Adds the logged calls of Horovod to a rank's Kineto trace, as spans from enqueuing to completion.

Horovod's own threads write nothing into the trace. The keys are those of the other collectives
(`trace_file`), and a transaction is the name and number of the call in its step, which are equal on
all ranks. Calls that are under way at once lie on several lanes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from autotune.recordings.horovod_calls import HorovodCall
from autotune.recordings.recorded_steps import SeenCollective
from runtime_rewriter.recording.trace_file import NCCL_DTYPES, TraceClock, free_lane

GROUP = "horovod"
"""Name of Horovod's global process set in a trace, and beginning of its lanes and spans."""


def add_spans(
    trace: dict[str, Any],
    calls: Sequence[HorovodCall],
    clock: TraceClock,
    rank: int,
    world_size: int,
) -> tuple[SeenCollective, ...]:
    """Add a span for each complete call of a recorded step, and return what was seen."""
    occurrences: Counter[tuple[int, str]] = Counter()
    lanes_us: list[float] = []  # end of the last span of each lane
    seen = []
    for call in calls:
        if call.step < 0 or call.complete_s is None:
            continue
        number = occurrences[call.step, call.name]
        occurrences[call.step, call.name] += 1
        transaction = f"{GROUP}:{call.step}:{call.name}:{number}"
        start_us, end_us = (
            clock.trace_us(round(at_s * 1e9)) for at_s in (call.called_s, call.complete_s)
        )
        lane = free_lane(lanes_us, start_us, end_us)
        trace["traceEvents"].append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"{GROUP}:{call.op}",
                "pid": rank,
                "tid": f"{GROUP} {lane}",
                "ts": round(start_us, 3),
                "dur": round(end_us - start_us, 3),
                "args": _arguments(call, transaction, world_size),
            }
        )
        seen.append(
            SeenCollective(
                transaction=transaction,
                label=f"horovod {call.name}".strip(),
                op=call.op,
                size_bytes=call.size_bytes * _gathered_parts(call, world_size),
                ranks=world_size,
                start_s=start_us / 1e6,
                end_s=end_us / 1e6,
                queue_s=0.0,
            )
        )
    return tuple(seen)


def _arguments(call: HorovodCall, transaction: str, world_size: int) -> dict[str, Any]:
    element_bytes = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
    elements = call.size_bytes // element_bytes.get(call.dtype, 4)
    return {
        "Collective name": call.op,
        "dtype": NCCL_DTYPES.get(call.dtype, call.dtype),
        "In msg nelems": elements,
        "Out msg nelems": elements * _gathered_parts(call, world_size),
        "Group size": world_size,
        "Process Group Name": GROUP,
        "Process Group Ranks": json.dumps(list(range(world_size))),
        "autotune": {"transaction": transaction, "tensors": call.tensors, "name": call.name},
    }


def _gathered_parts(call: HorovodCall, world_size: int) -> int:
    """The result's size as a multiple of this rank's tensor.

    Ranks may gather different numbers of rows; each then counts its own for all.
    """
    return world_size if call.op == "all_gather" else 1
