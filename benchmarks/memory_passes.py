"""Are peak memory and step time with recomputation and gradient accumulation the predicted ones? `python -m benchmarks.memory_passes`

One process, no synchronization: a sequence of linear layers without dropout is profiled once. Every way to train it with less memory is
predicted from that profile, and then really trained (`torch.utils.checkpoint`, a batch in parts): peak by the counter in front of torch's
CPU allocator, time as the median of interleaved blocks of steps. Times of parts are predicted twice: with the assumption that a pass takes
time in proportion to its samples, and from a profile that was recorded with the smaller batch. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.dfg.memory import peak_memory
from autotune.dfg.memory_passes import Run, accumulated, recomputed
from autotune.dfg.memory_profile import MemoryProfile
from benchmarks.c10_memory import AllocatorCounter, built
from runtime_rewriter.pytorch.memory_recorder import MemoryRecorder

WIDTH, LAYERS, BATCH = 256, 12, 2048
RUNS = {"one run": ((0, 2 * LAYERS - 1),), "thirds": ((0, 7), (8, 15), (16, 23)), "first half": ((0, 11),)}
PARTS = (2, 4)


class Stack(nn.Module):
    """`again`: (first, last) parts of the sequence that are checkpointed together."""

    def __init__(self, again: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__()
        self.again = dict(again)
        self.body = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        at = 0
        while at < len(self.body):
            last = self.again.get(at, at)
            run = self.body[at : last + 1]
            x = checkpoint(run, x, use_reentrant=False) if at in self.again else run(x)
            at = last + 1
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Way:
    """One way to train, predicted (`step_s` by assumptions) and built."""

    peak_bytes: int
    step_s: float
    small_step_s: float | None
    build: Callable[[], Callable[[], None]]


def training(module: nn.Module, batch: int = BATCH, parts: int = 1) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(parts):
            module(torch.randn(batch // parts, WIDTH)).square().mean().backward()
        optimizer.step()

    return step


def recorded(batch: int = BATCH) -> MemoryProfile:
    module = Stack()
    return MemoryRecorder(module, timed_steps=7).record(training(module, batch))


def ways() -> dict[str, Way]:
    profile = recorded()

    def way(after: MemoryProfile, build: Callable[[], Callable[[], None]], small: MemoryProfile | None = None) -> Way:
        return Way(peak_memory(after).peak_bytes, float(after.end_s[-1]), None if small is None else float(small.end_s[-1]), build)

    found = {"as it is": way(profile, lambda: training(Stack()))}
    for name, again in RUNS.items():
        after = recomputed(profile, [Run(*run) for run in again])
        found[f"recompute {name}"] = way(after, lambda again=again: training(Stack(again)))  # type: ignore[misc]
    for parts in PARTS:
        small = accumulated(profile, parts, recorded(BATCH // parts))
        found[f"{parts} parts"] = way(accumulated(profile, parts), lambda parts=parts: training(Stack(), parts=parts), small)  # type: ignore[misc]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way (default 7)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block (default 4)")
    options = parser.parse_args()
    counter = AllocatorCounter(built())
    torch.set_num_threads(1)
    found = ways()
    peaks = {name: measured_peak(way, counter) for name, way in found.items()}
    taken = measured_times(found, options.rounds, options.steps)
    summary = {}
    for name, way in found.items():
        median_s = statistics.median(taken[name])
        low, _, high = statistics.quantiles(taken[name], n=4)
        times = {
            "predicted_s": way.step_s,
            "predicted_from_small_s": way.small_step_s,
            "measured_s": median_s,
            "low_s": low,
            "high_s": high,
        }
        summary[name] = {"predicted_bytes": way.peak_bytes, "measured_bytes": peaks[name], **times}
        small = "" if way.small_step_s is None else f" (from a small batch {way.small_step_s * 1e3:.1f})"
        shown = f"{way.step_s * 1e3:7.1f}{small} predicted, {median_s * 1e3:7.1f} ms measured ({low * 1e3:.1f} to {high * 1e3:.1f})"
        print(f"{name:24} {way.peak_bytes / 1e6:7.2f} predicted, {peaks[name] / 1e6:7.2f} MB measured; {shown}")
    errors = [abs(one["predicted_bytes"] / one["measured_bytes"] - 1) for one in summary.values()]
    slower = [abs((one["predicted_from_small_s"] or one["predicted_s"]) / one["measured_s"] - 1) for one in summary.values()]
    figures = {"memory_error_max": max(errors), "time_error_max": max(slower), "time_error_mean": statistics.mean(slower)}
    print(json.dumps({**figures, "ways": summary, "device": "cpu", "cores": os.cpu_count(), "machine": platform.machine()}))
    return 0


def measured_peak(way: Way, counter: AllocatorCounter) -> int:
    gc.collect()
    before = counter.current_bytes
    step = way.build()
    for _ in range(2):
        step()
    counter.reset()
    for _ in range(2):
        step()
    return counter.peak_bytes - before


def measured_times(found: dict[str, Way], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of every block, by way; blocks of all ways take turns."""
    built_steps = {name: way.build() for name, way in found.items()}
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, step in built_steps.items():
            step()
            began_s = time.perf_counter()
            for _ in range(steps):
                step()
            taken[name].append((time.perf_counter() - began_s) / steps)
    return taken


if __name__ == "__main__":
    sys.exit(main())
