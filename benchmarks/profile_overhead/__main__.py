"""Measure what recording costs: `python -m benchmarks.profile_overhead`.

    python -m benchmarks.profile_overhead --models gpt ncf --blocks 40

Two ranks train the models of the example scripts over Gloo under torch's DDP. Blocks of steps with
and without the recording (Kineto, the marks and the log of collectives, as in `autotune profile`)
alternate in the same processes, in turn first and second, so other load meets both. A block lasts
about a second, and the median of its steps counts. In a block with the recording, recorded and
ordinary steps take turns as the recorder chooses (`runtime_rewriter.recording.turns`).

| figure | of a model |
|---|---|
| between | ordinary steps between two recorded ones, as chosen |
| recorded | a recorded step / a step without a recording - 1 |
| ordinary | the same for the ordinary steps in between |
| stretch | the same for both together, as often as in a recording of the default length |
| wall | of each: steps of the slower rank |
| cpu | of each: CPU time of both ranks' processes, all threads |
| median | over the pairs of blocks: pseudo-median of the logarithms (Hodges and Lehmann 1963) |
| quiet | ratio of the lower deciles of all steps, since other load only adds to a step |
| event_s | CPU time that torch's profiler adds to an operator on a single number, warm |
| floor | event_s times the events of a step / the step's CPU time: the profiler's least cost |
| outside_s | start, stop, and reading, matching and writing the trace; training waits |

Intervals (95 %) are by bootstrap over the pairs. The last line is one JSON object;
`overhead_median` and `cpu_overhead_median` are the largest of the models' medians of the stretch,
`recorded_median` and `cpu_recorded_median` those of a recorded step.

The ranks keep their pages (`STEADY_HEAP`). Otherwise glibc returns tensors' pages and fetches them
again in some blocks and not in others, recorded or not: 0 to 2,300 page faults a step of the
ResNet, which took 110 or 130 ms. `--ordinary-heap` keeps that behaviour.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
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
from benchmarks.repository import option_parser
from runtime_rewriter.recording.collectives import CollectiveLog
from runtime_rewriter.recording.kineto import KinetoTrace
from runtime_rewriter.recording.settings import PROFILE_STEPS, RecordSettings
from runtime_rewriter.recording.trace_file import TraceClock, annotate, write_trace
from runtime_rewriter.recording.turns import estimated_cost, ordinary_steps

BLOCK_S = 1.0
FEWEST_STEPS, MOST_STEPS = 4, 50
"""Steps of a block; one with the recording has as many, rounded up to whole turns."""
CLOCKS = ("wall", "cpu")
SETTLING = 1
"""Untimed steps at the start of a block."""
RESAMPLES = 1000
STEADY_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Settings of glibc (mallopt): no tensor has its own mapping, and nothing is returned."""
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
    step_s = _plain_block(run, FEWEST_STEPS)[0]
    steps = min(max(round(BLOCK_S / statistics.fmean(step_s)), FEWEST_STEPS), MOST_STEPS)
    between = _chosen_between(run, min(step_s), options)
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
    """Return the ordinary steps between two recorded ones, as the recorder chooses them."""
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


def overhead(name: str, blocks: int, options: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=measure, args=(rank, port, name, blocks, options, directory))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank of {name} failed")
        findings = json.loads(Path(directory, "found.json").read_text(encoding="utf-8"))
    return figures(findings)


def figures(findings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a model; arrays have shape (blocks, wall and CPU, steps)."""
    plain_s, recorded_s, ordinary_s = (
        np.array(findings[f"{kind}_s"]) for kind in ("plain", "recorded", "ordinary")
    )
    between = findings["between"]
    stretch = [(PROFILE_STEPS, recorded_s)]
    if between:
        stretch.append((between * (PROFILE_STEPS - 1), ordinary_s))
    kinds = {"recorded": [(1, recorded_s)], "stretch": stretch}
    if between:
        kinds["ordinary"] = [(1, ordinary_s)]
    compared_kinds = {
        kind: {
            clock: compared(plain_s[:, at], [(weight, one[:, at]) for weight, one in parts])
            for at, clock in enumerate(CLOCKS)
        }
        for kind, parts in kinds.items()
    }
    cpu_s = float(np.median(plain_s[:, 1])) / 2
    return {
        "between": between,
        **compared_kinds,
        "step_s": float(np.median(plain_s[:, 0])),
        "recorded_step_s": float(np.median(recorded_s[:, 0])),
        "cpu_step_s": cpu_s,
        "events_per_step": findings["spans"],
        "event_s": findings["event_s"],
        "floor": findings["event_s"] * findings["spans"] / cpu_s,
        "outside_s": findings["outside_s"],
        "blocks": len(plain_s),
        "steps_per_block": plain_s.shape[2],
    }


def compared(plain_s: np.ndarray, parts: list[tuple[int, np.ndarray]]) -> dict[str, Any]:
    """Return the weighted mean of the steps of `parts` / plain steps - 1.

    Times have shape (pairs, steps). Of each pair the medians count.
    """
    weights = sum(weight for weight, _ in parts)
    block_s = sum(weight * np.median(one, axis=1) for weight, one in parts) / weights
    ratios = np.log(block_s / np.median(plain_s, axis=1))
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    interval = np.quantile([pseudo_median(one) for one in drawn], [0.025, 0.975])
    quiet_s = sum(weight * np.quantile(one, 0.1) for weight, one in parts) / weights
    return {
        "median": float(np.expm1(pseudo_median(ratios))),
        "interval": np.expm1(interval).tolist(),
        "quartiles": np.expm1(np.quantile(ratios, [0.25, 0.75])).tolist(),
        "quiet": float(quiet_s / np.quantile(plain_s, 0.1) - 1),
    }


def pseudo_median(values: np.ndarray) -> float:
    """Return the median of the means of all pairs of values, each with itself among them."""
    first, second = np.triu_indices(len(values))
    return float(np.median((values[first] + values[second]) / 2))


def _shown(result: dict[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['median']:+.1%} ({low:+.1%} to {high:+.1%}, quiet {result['quiet']:+.1%})"


def _largest(models: dict[str, dict[str, Any]], kind: str, clock: str) -> float:
    return float(max(one[kind][clock]["median"] for one in models.values()))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument(
        "--blocks", type=int, default=40, help="pairs of blocks per model (default 40)"
    )
    for name in ("record_shapes", "profile_memory", "with_stack"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    parser.add_argument("--ordinary-heap", action="store_true", help="let glibc give pages back")
    options = parser.parse_args()
    if not options.ordinary_heap:
        os.environ.update(STEADY_HEAP)  # the ranks inherit it
    chosen = {
        name: getattr(options, name) for name in ("record_shapes", "profile_memory", "with_stack")
    }
    loads, models = [os.getloadavg()[0]], {}
    for name in options.models:
        models[name] = one = overhead(name, options.blocks, chosen)
        loads.append(os.getloadavg()[0])
        floor = f"{one['event_s'] * 1e6:.2f} us each: floor {one['floor']:+.1%}"
        print(
            f"{name}: {one['step_s'] * 1e3:.1f} ms, recorded {one['recorded_step_s'] * 1e3:.1f} ms;"
            f" {one['events_per_step']:.0f} events a step, {floor};"
            f" {one['between']} ordinary steps between two recorded ones",
            flush=True,
        )
        for kind in ("recorded", "ordinary", "stretch"):
            if kind in one:
                wall, cpu = (_shown(one[kind][clock]) for clock in CLOCKS)
                print(f"  {kind}: {wall}, of CPU {cpu}", flush=True)
    print(
        json.dumps(
            {
                "overhead_median": _largest(models, "stretch", "wall"),
                "cpu_overhead_median": _largest(models, "stretch", "cpu"),
                "recorded_median": _largest(models, "recorded", "wall"),
                "cpu_recorded_median": _largest(models, "recorded", "cpu"),
                "models": models,
                "options": chosen,
                "steady_heap": not options.ordinary_heap,
                "load": [statistics.fmean(loads), max(loads)],
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
