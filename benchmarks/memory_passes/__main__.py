"""Compare predicted and measured memory passes: `python -m benchmarks.memory_passes`.

One process without synchronization profiles three models once each: a stack of linear layers, the
GPT of the examples (dropout, recomputed blocks) and their ResNet (convolutions; BatchNorm forbids
recomputation). Every way to train them with less memory is predicted from that profile and then run
(`torch.utils.checkpoint`, a batch in parts). The peak comes from the counter in front of torch's
CPU allocator, the time is the median of interleaved blocks of steps: CPU time with one thread, or
wall time (`--wall`). Times of parts are predicted twice: in proportion to the samples, and with the
fixed share that half a batch shows (`fixed_share`), as the command does. The last line is one JSON
object.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from autotune.memory.accumulation import accumulated
from autotune.memory.peak import peak_memory
from autotune.memory.recomputation import Run, recomputed
from autotune.recordings.memory_profile import MemoryProfile
from benchmarks.memory_accuracy.c10_memory import AllocatorCounter, built
from benchmarks.memory_accuracy.models import JOBS
from benchmarks.memory_passes.checkpointed import Stack, computed_again, training
from benchmarks.repository import machine, option_parser
from runtime_rewriter.recording.memory.fixed_share import ModuleCall, fixed_share
from runtime_rewriter.recording.memory.recorder import MemoryRecorder

WIDTH, LAYERS, BATCH = 256, 12, 2048
PARTS = (2, 4)
Step = Callable[[], None]


@dataclass(frozen=True)
class Subject:
    """A model.

    `build(runs, parts)` trains it; `runs`: name -> first and last region of each run.
    """

    build: Callable[[list[list[str]], int], Step]
    module: nn.Module
    step: Step
    inputs: tuple[torch.Tensor, ...]
    runs: dict[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class MemoryWay:
    """A way to train, and its prediction (`proportional_s` without the fixed share)."""

    peak_bytes: int
    step_s: float
    proportional_s: float
    build: Callable[[], Step]


def stack() -> Subject:
    def build(runs: list[list[str]], parts: int) -> Step:
        return training(computed_again(Stack(WIDTH, LAYERS, nn.GELU), runs), WIDTH, BATCH, parts)

    module = Stack(WIDTH, LAYERS, nn.GELU)
    runs = {
        "one run": ((0, 2 * LAYERS - 1),),
        "thirds": ((0, 7), (8, 15), (16, 23)),
        "first half": ((0, 11),),
    }
    return Subject(
        build, module, training(module, WIDTH, BATCH), (torch.randn(BATCH, WIDTH),), runs
    )


def example(name: str, runs: dict[str, tuple[tuple[int, int], ...]]) -> Subject:
    def build(again: list[list[str]], parts: int) -> Step:
        job = JOBS[name](parts=parts)
        computed_again(job.module, again)
        return partial(job.step, job.module)

    job = JOBS[name]()
    return Subject(build, job.module, partial(job.step, job.module), job.inputs, runs)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "stack": stack,
    "gpt_text": lambda: example(
        "gpt_text", {"all blocks": ((0, 0), (1, 1), (2, 2), (3, 3)), "two blocks": ((0, 0), (2, 2))}
    ),
    "resnet_digits": lambda: example("resnet_digits", {}),
}


def ways(subject: Subject) -> Iterator[tuple[str, MemoryWay]]:
    profile = MemoryRecorder(subject.module, timed_steps=7).record(subject.step)
    fixed = fixed_share(subject.module, ModuleCall(subject.inputs, {}), len(subject.inputs[0]))
    print(
        f"does not shrink with the batch: {fixed.forward:.3f} of the forward pass, "
        f"{fixed.backward:.3f} of the backward pass",
        flush=True,
    )

    def way(
        after: MemoryProfile, build: Callable[[], Step], proportional: MemoryProfile | None = None
    ) -> MemoryWay:
        return MemoryWay(
            peak_memory(after).peak_bytes,
            float(after.end_s[-1]),
            float((proportional or after).end_s[-1]),
            build,
        )

    yield "as it is", way(profile, partial(subject.build, [], 1))
    for name, again in subject.runs.items():
        names = [
            [profile.regions[number].name for number in range(first, last + 1)]
            for first, last in again
        ]
        yield (
            f"recompute {name}",
            way(
                recomputed(profile, [Run(*run) for run in again]), partial(subject.build, names, 1)
            ),
        )
    for parts in PARTS:
        after = accumulated(profile, parts, fixed=fixed)
        yield (
            f"{parts} parts",
            way(after, partial(subject.build, [], parts), accumulated(profile, parts)),
        )


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way (default 7)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block (default 4)")
    parser.add_argument("--wall", action="store_true", help="wall time: only on a quiet machine")
    options = parser.parse_args()
    counter = AllocatorCounter(built())
    torch.set_num_threads(1)
    clock = time.perf_counter if options.wall else time.process_time
    summary: dict[str, dict[str, float | int]] = {}
    for model in options.models:
        subject = SUBJECTS[model]()
        by_name = dict(ways(subject))
        peaks = {name: measured_peak(way, counter) for name, way in by_name.items()}
        taken = measured_times(by_name, options.rounds, options.steps, clock)
        summary |= {
            f"{model} {name}": compared(f"{model} {name}", way, peaks[name], taken, name)
            for name, way in by_name.items()
        }
    print(json.dumps({**figures(summary), "ways": summary, "device": "cpu", **machine()}))
    return 0


def compared(
    title: str, way: MemoryWay, peak_bytes: int, taken: dict[str, list[float]], name: str
) -> dict[str, float | int]:
    """Return figures. A price is a ratio to the unchanged step of the same block, at any speed."""
    ratios = [mine / before for mine, before in zip(taken[name], taken["as it is"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    median_s = statistics.median(taken[name])
    sizes = f"{way.peak_bytes / 1e6:7.2f} predicted, {peak_bytes / 1e6:7.2f} MB measured"
    times = (
        f"{way.step_s * 1e3:7.1f} predicted "
        f"(in proportion {way.proportional_s * 1e3:.1f}), {median_s * 1e3:7.1f} ms measured"
    )
    print(
        f"{title:32} {sizes}; {times}, {ratio:.3f} of as it is ({low:.3f} to {high:.3f})",
        flush=True,
    )
    return {
        "predicted_bytes": way.peak_bytes,
        "measured_bytes": peak_bytes,
        "predicted_s": way.step_s,
        "proportional_s": way.proportional_s,
        "measured_s": median_s,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
    }


def figures(summary: dict[str, dict[str, float | int]]) -> dict[str, float]:
    """Return the errors of the peaks, and of the steps' times relative to the unchanged step."""
    memory = [abs(one["predicted_bytes"] / one["measured_bytes"] - 1) for one in summary.values()]
    prices: dict[str, list[float]] = {"predicted_s": [], "proportional_s": []}
    for title, one in summary.items():
        before = summary[f"{title.split()[0]} as it is"]
        if one is not before:
            for key, errors in prices.items():
                errors.append(abs(one[key] / before[key] / one["ratio"] - 1))
    return {
        "memory_error_max": max(memory),
        "memory_error_mean": statistics.mean(memory),
        "time_error_max": max(prices["predicted_s"]),
        "time_error_mean": statistics.mean(prices["predicted_s"]),
        "proportional_time_error_max": max(prices["proportional_s"]),
        "proportional_time_error_mean": statistics.mean(prices["proportional_s"]),
    }


def measured_peak(way: MemoryWay, counter: AllocatorCounter) -> int:
    gc.collect()
    before = counter.current_bytes
    step = way.build()
    for _ in range(2):
        step()
    counter.reset()
    for _ in range(2):
        step()
    return counter.peak_bytes - before


def measured_times(
    by_name: dict[str, MemoryWay], rounds: int, steps: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return way -> seconds per step of every block; blocks of all ways alternate."""
    built_steps = {name: way.build() for name, way in by_name.items()}
    taken: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, step in built_steps.items():
            step()
            began_s = clock()
            for _ in range(steps):
                step()
            taken[name].append((clock() - began_s) / steps)
    return taken


if __name__ == "__main__":
    sys.exit(main())
