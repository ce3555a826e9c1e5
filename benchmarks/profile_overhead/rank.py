"""One rank of `profile_overhead`: trains an example with and without a recording, in turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.profile_overhead.models import MODELS
from runtime_rewriter.recording.collectives import CollectiveLog
from runtime_rewriter.recording.kineto import KinetoTrace
from runtime_rewriter.recording.settings import PROFILE_STEPS, RecordSettings
from runtime_rewriter.recording.trace_file import TraceClock, annotate, write_trace
from runtime_rewriter.recording.turns import estimated_cost, ordinary_steps

BLOCK_S = 1.0
FEWEST_STEPS, MOST_STEPS = 4, 50
"""Steps of a block; one with the recording has as many, rounded up to whole turns."""
SETTLING = 1
"""Untimed steps at the start of a block."""
EVENT_ROUNDS, EVENT_CALLS = 21, 4000


class Recording:
    """A recorder's effect on the steps: the part of `StepRecorder` between settling and writing."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.log = CollectiveLog()
        self.watching = self.log.watching()
        self.trace = KinetoTrace(replace(RecordSettings(folder=""), **options), torch.device("cpu"))

    def __enter__(self) -> Recording:
        self.watching.__enter__()
        self.trace.prepare()
        self.trace.start()
        self.log.traced = True
        return self

    def __exit__(self, *_: object) -> None:
        self.log.traced = False
        self.trace.stop()
        self.watching.__exit__(None, None, None)

    def begin_step(self, number: int, recorded: bool) -> None:
        if recorded:
            self.trace.resume()
            self.log.resume()
            self.log.step = number
            self.trace.begin_step()
        else:
            self.trace.pause()
            self.log.pause()

    def end_step(self, recorded: bool) -> None:
        if recorded:
            self.trace.end_step()

    def write(self, folder: Path) -> int:
        """Write as a recorder does, and return the spans of the trace."""
        trace = self.trace.read()
        assert self.trace.before is not None and self.trace.after is not None
        clock = TraceClock(self.trace.before, self.trace.after, int(trace["baseTimeNanoseconds"]))
        annotate(trace, self.log, clock, dist.get_rank(), dist.get_world_size(), "")
        write_trace(trace, folder / f"rank{dist.get_rank()}.json.gz")
        return sum(event["ph"] == "X" for event in trace["traceEvents"])


def measure(
    rank: int, port: int, name: str, blocks: int, options: dict[str, Any], directory: str
) -> None:
    """Run one rank; rank 0 writes the findings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module, optimizer = MODELS[name]()
    run = optimizer(DistributedDataParallel(module))
    _plain_block(run, FEWEST_STEPS)
    step_s, cpu_s = _plain_block(run, FEWEST_STEPS)
    steps = min(max(round(BLOCK_S / statistics.fmean(step_s)), FEWEST_STEPS), MOST_STEPS)
    fastest_s = min(*step_s, *(both_s / dist.get_world_size() for both_s in cpu_s))
    between = _chosen_between(run, fastest_s, options)
    turns = [*[False] * between, True] * -(-steps // (between + 1))
    _recording_block(run, turns, options)  # the first trace loads slowly
    plain, recorded, ordinary = [], [], []
    for number in range(blocks):
        if number % 2 == 0:
            plain.append(_plain_block(run, steps))
        took = np.array(_recording_block(run, turns, options))
        if number % 2:
            plain.append(_plain_block(run, steps))
        recorded.append(took[:, turns].tolist())
        ordinary.append(took[:, np.logical_not(turns)].tolist())
    outside_s, spans = _outside(run, options, Path(directory))
    findings = {
        "between": between,
        "plain_s": plain,
        "recorded_s": recorded,
        "ordinary_s": ordinary,
        "outside_s": outside_s,
        "spans": spans,
        "event_s": _event_s(options),
    }
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps(findings), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _chosen_between(run: Callable[[], None], step_s: float, options: dict[str, Any]) -> int:
    """Return the ordinary steps between two recorded ones, as the recorder chooses them.

    `step_s`: without the time that other processes have the cores.
    """
    with Recording(options) as rehearsal:
        run()
    cost = torch.tensor(estimated_cost(rehearsal.trace.count_events(), step_s))
    dist.all_reduce(cost, op=dist.ReduceOp.MAX)
    return ordinary_steps(cost.item(), PROFILE_STEPS)


def _plain_block(run: Callable[[], None], steps: int) -> list[list[float]]:
    """Return the wall time of each step on the slower rank, and its CPU time on both together."""
    for _ in range(SETTLING):
        run()
    return _slower_and_sum([_timed(run) for _ in range(steps)])


def _recording_block(
    run: Callable[[], None], turns: list[bool], options: dict[str, Any]
) -> list[list[float]]:
    """The same under a recording; `turns`: whether each step is recorded."""
    took = []
    with Recording(options) as recording:
        for number, recorded in enumerate([*[True] * SETTLING, *turns]):

            def step(number: int = number, recorded: bool = recorded) -> None:
                recording.begin_step(number, recorded)
                run()
                recording.end_step(recorded)

            took.append(_timed(step))
    return _slower_and_sum(took[SETTLING:])


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started_s, time.process_time() - cpu_s


def _slower_and_sum(took: list[tuple[float, float]]) -> list[list[float]]:
    both = torch.tensor(took, dtype=torch.float64).T.contiguous()
    dist.all_reduce(both[0], op=dist.ReduceOp.MAX)
    dist.all_reduce(both[1])
    step_s: list[list[float]] = both.tolist()
    return step_s


def _outside(
    run: Callable[[], None], options: dict[str, Any], folder: Path
) -> tuple[dict[str, float], float]:
    """Return the seconds of a default recording outside of its steps, and the spans of a step."""
    at_s = [time.perf_counter()]
    with Recording(options) as recording:
        at_s.append(time.perf_counter())
        for number in range(PROFILE_STEPS):
            recording.begin_step(number, recorded=True)
            run()
            recording.end_step(recorded=True)
        at_s.append(time.perf_counter())
    at_s.append(time.perf_counter())
    spans = recording.write(folder)
    at_s.append(time.perf_counter())
    return {
        "start": at_s[1] - at_s[0],
        "stop": at_s[3] - at_s[2],
        "files": at_s[4] - at_s[3],
    }, spans / PROFILE_STEPS


def _event_s(options: dict[str, Any]) -> float:
    """Return the CPU time of a trivial operator when recorded, less that when not."""
    number = torch.zeros(1)

    def calls_s() -> float:
        started_s = time.thread_time()
        for _ in range(EVENT_CALLS):
            number.neg_()
        return (time.thread_time() - started_s) / EVENT_CALLS

    added = []
    for _ in range(EVENT_ROUNDS):
        plain_s = calls_s()
        with Recording(options):
            added.append(calls_s() - plain_s)
    return statistics.median(added)
