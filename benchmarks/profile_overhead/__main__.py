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
| beside | a recorded step / the ordinary steps in between - 1, which are nearest in time |
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
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.profile_overhead.models import MODELS
from benchmarks.profile_overhead.rank import measure
from benchmarks.repository import option_parser
from runtime_rewriter.recording.settings import PROFILE_STEPS

CLOCKS = ("wall", "cpu")
RESAMPLES = 1000
STEADY_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Settings of glibc (mallopt): no tensor has its own mapping, and nothing is returned."""


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
    kinds = {"recorded": (plain_s, [(1, recorded_s)]), "stretch": (plain_s, stretch)}
    if between:
        kinds["ordinary"] = plain_s, [(1, ordinary_s)]
        kinds["beside"] = ordinary_s, [(1, recorded_s)]
    compared_kinds = {
        kind: {
            clock: compared(than_s[:, at], [(weight, one[:, at]) for weight, one in parts])
            for at, clock in enumerate(CLOCKS)
        }
        for kind, (than_s, parts) in kinds.items()
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
        for kind in ("recorded", "ordinary", "beside", "stretch"):
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
