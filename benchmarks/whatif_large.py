"""What does a large trace cost? `python -m benchmarks.whatif_large`.

The recording of BERT-base in `datasets/gpu_traces/h100` is repeated until it has the asked size. A
child process reads it, builds the base of what-ifs, replays it twice, and finds the gradients; a
second one replays all steps as `autotune replay` does. `--giant`: the same events as two steps.
Processor time and peak memory are the child's, so other work on the machine changes little.

Keys: `base_cpu_s` (aim 60), `base_peak_mb`, `replay_cpu_s`, `replay_peak_mb`, `trace_mb`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.profiling.traces.job import read_job
from autotune.whatif.base import steady
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import ROOT, machine, option_parser

TRACE = ROOT / "datasets" / "gpu_traces" / "h100" / "bert_base.fp32" / "rank0.json.gz"
STEP = "ProfilerStep#"
NUMBERED = ("correlation", "External id", "Sequence number", "Record function id", "Ev Idx")
LIMIT_S, END_S = 1800, 30
"""Longest time of a child's work, and of its end."""


def repeated(trace: dict[str, Any], size_bytes: int, giant: bool) -> Iterator[str]:
    """The text of the trace, with its events again and again until it has `size_bytes`."""
    events = [one for one in trace["traceEvents"] if one.get("ph") != "M"]
    marks = [one for one in events if str(one.get("name")).startswith(STEP)]
    begin_us = min(one["ts"] for one in marks)
    length_us = max(one["ts"] + one["dur"] for one in marks) - begin_us
    text_bytes = len(json.dumps(events))
    copies = max(size_bytes // text_bytes, 2)
    most = 1 + max(int(one.get("id", 0)) for one in events if isinstance(one.get("id", 0), int))
    for key in NUMBERED:
        numbers = [
            one["args"][key] for one in events if isinstance(one.get("args", {}).get(key), int)
        ]
        most = max(most, 1 + max(numbers, default=0))
    steps = len({one["name"] for one in marks})
    yield json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})[:-1]
    yield ', "traceEvents": ['
    for copy in range(copies):
        shifted = [_shifted(one, copy, length_us, most, steps, giant) for one in events]
        yield ", ".join(json.dumps(one) for one in shifted if one is not None)
        yield ", "
    if giant:
        half_us = length_us * copies / 2
        mark = next(one for one in marks if one["cat"] == "user_annotation")
        for number in range(2):
            ts = begin_us + number * half_us
            yield json.dumps({**mark, "name": f"{STEP}{number}", "ts": ts, "dur": half_us})
            yield ", "
    yield json.dumps({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "end"}}) + "]}"


def _shifted(
    event: dict[str, Any], copy: int, length_us: float, most: int, steps: int, giant: bool
) -> dict[str, Any] | None:
    """The event of a copy; None for marks of steps in a giant one."""
    name = str(event.get("name"))
    if name.startswith(STEP):
        if giant:
            return None
        name = f"{STEP}{int(name.removeprefix(STEP)) + copy * steps}"
    changed = {**event, "name": name, "ts": event["ts"] + copy * length_us}
    if isinstance(event.get("id"), int):
        changed["id"] = event["id"] + copy * most
    if "args" in event:
        changed["args"] = {
            key: value + copy * most if key in NUMBERED and isinstance(value, int) else value
            for key, value in event["args"].items()
        }
    return changed


def build_base(path: Path) -> None:
    job = read_job([path])
    base = recorded_base(job, 0)
    steady(base)
    steady(base.without_unknown_waits())
    gradients_of(job, 0, base)


def replay_all(path: Path) -> None:
    from autotune.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        status = main(["replay", str(path), "--json"])
    if status != 0:
        raise SystemExit(f"autotune replay of the trace ended with status {status}")


def cost(work: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """(processor seconds, peak megabytes) of the work in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_measured, args=(work, path, send))
    child.start()
    send.close()  # so that the pipe ends with the child
    if not receive.poll(LIMIT_S):
        child.kill()
        raise SystemExit(f"{work.__name__} must end within {LIMIT_S / 60:g} min, but did not")
    try:
        used: tuple[float, float] = receive.recv()
    except EOFError:
        child.join()
        raise SystemExit(
            f"{work.__name__} ended with status {child.exitcode} and no figures; see its output "
            "above"
        ) from None
    child.join(END_S)
    return used


def _measured(work: Callable[[Path], None], path: Path, send: Any) -> None:
    work(path)
    used = resource.getrusage(resource.RUSAGE_SELF)
    send.send((used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--giant", action="store_true", help="all events in two steps")
    options = parser.parse_args()
    with gzip.open(TRACE) as file:
        trace = json.load(file)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rank0.json")
        with path.open("w") as text:
            text.writelines(repeated(trace, options.megabytes * 10**6, options.giant))
        base_s, base_mb = cost(build_base, path)
        line: dict[str, Any] = {"base_cpu_s": round(base_s, 1), "base_peak_mb": round(base_mb)}
        replay_s, replay_mb = cost(replay_all, path)
        line |= {"replay_cpu_s": round(replay_s, 1), "replay_peak_mb": round(replay_mb)}
        line |= {"trace_mb": round(path.stat().st_size / 1e6), "giant": options.giant}
    print(json.dumps(line | machine()))


if __name__ == "__main__":
    main()
