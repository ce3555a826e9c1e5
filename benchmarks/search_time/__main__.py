"""Measure the optimizer's search time, and replay its results: dPRO's models on 16 workers.

    python -m benchmarks.search_time [--data FOLDER] [--ablation-seconds 20] [--models resnet50]

Workloads: ResNet-50, VGG-16 and Inception-v3 by the layer profiles of PipeDream (measured by
others, V100), BERT-base by assumed times (`zoo.assumed_models`). Clusters: dPRO's (2 hosts x 8
devices, 100 Gbit/s) and 16 hosts x 1 device at 10 Gbit/s, with assumed links and latencies. dPRO
took 144 to 1764 s for such searches (0.04 to 0.49 h), its strawman 12 h to more than 24 h.

The search has the budget of `autotune optimize`: replays and their ops, on one core. The ablation
adds one speed-up after the other (`state.Speedups`) to a search whose budget is the number of
replays only, also with all of them. It stops a variant after `--ablation-seconds` and reports "more
than". The compiled replay is loaded before.

Budgets, logs and `anytime` count CPU time, so a busy machine changes them little. `anytime`: CPU
seconds -> the best step time known by then, divided by the final one. `by_replays`: number of
replays -> the same ratio, which does not depend on the machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster, Host
from autotune.errors import AutotuneError
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import Optimized, optimize
from autotune.optimizer.state import Speedups
from autotune.profiling.formats.layer_profile import read_layer_profile
from autotune.profiling.op_graph import OpGraph
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.zoo.assumed_models import assumed_ops
from benchmarks.repository import option_parser, reference_data

PROFILED = ("resnet50", "vgg16", "inception_v3")
BERT = "bert-base"
GBIT_PER_S = 1e9 / 8
NVLINK_BYTES_PER_S = 130e9
"""Between the devices of one host; assumed, as all latencies here."""
CLUSTERS = (
    Cluster(
        "2x8 at 100 Gbit/s",
        tuple(
            Host(f"h{i}", 8, 100 * GBIT_PER_S, 20e-6, NVLINK_BYTES_PER_S, 5e-6) for i in range(2)
        ),
    ),
    Cluster(
        "16x1 at 10 Gbit/s",
        tuple(Host(f"h{i}", 1, 10 * GBIT_PER_S, 50e-6, 10e9, 5e-6) for i in range(16)),
    ),
)
VARIANTS = {
    "strawman": Speedups(False, False, False),
    "+ coarsened view": Speedups(True, False, False),
    "+ partial replay": Speedups(True, True, False),
    "+ symmetry (full method)": Speedups(True, True, True),
}
ANYTIME_S = (0.25, 0.5, 1.0, 2.0, 4.0)
BY_REPLAYS = (40, 60, 80, 160)
UNBOUNDED_S, UNBOUNDED_OPS = 3600.0, 10**15


@dataclass(frozen=True)
class Case:
    graph: OpGraph
    cluster: Cluster

    @property
    def name(self) -> str:
        return f"{self.graph.model}, {self.cluster.name}"


def cases(data: Path | None, models: list[str]) -> Iterator[Case]:
    """`data`: None if only BERT is wanted."""
    for model in models:
        if model == BERT:
            graph = assumed_ops(BERT)
        else:
            assert data is not None, "a profiled model needs the reference data"
            graph = read_layer_profile(data / "layer_profiles" / f"{model}.txt")
        for cluster in CLUSTERS:
            yield Case(graph, cluster)


def best_builder(case: Case) -> tuple[str, float]:
    """Return the fastest hand-made strategy by replay, with no op fused."""
    workload = case.graph.workload()
    steps = LoweredSteps(workload, case.cluster)
    seeds = seed_strategies(workload, case.cluster, SearchSpace.default())
    times = {
        name: steps.step_s(plan(strategy, workload, case.cluster.world_size))
        for name, strategy in seeds
    }
    name = min(times, key=lambda builder: times[builder])
    return name, times[name]


def searched(
    case: Case, speedups: Speedups, seconds: float, budget: Budget
) -> tuple[Optimized, float]:
    """Return (result, seconds of wall clock); the result's own seconds are CPU time."""
    began_s = time.perf_counter()
    optimized = optimize(
        case.graph.workload(),
        case.cluster,
        graph=case.graph,
        speedups=speedups,
        budget=replace(budget, seconds=seconds),
        clock=time.process_time,
    )
    return optimized, time.perf_counter() - began_s


def row(optimized: Optimized, wall_s: float) -> dict[str, Any]:
    return {
        "search_s": round(wall_s, 3),
        "cpu_s": round(optimized.seconds, 3),
        "stopped": optimized.cut_short,
        "replays": optimized.replays,
        "partial_replays": optimized.partial_replays,
        "predicted_s": optimized.predicted_step_s,
        "without_op_fusion_s": optimized.enacted_step_s,
    }


def anytime(optimized: Optimized) -> dict[str, float | None]:
    """Return the best step after each of `ANYTIME_S` over the final one; None before any."""
    spent = [(entry.seconds, entry.step_s) for entry in optimized.log]
    return _curve(spent, ANYTIME_S, optimized.predicted_step_s)


def by_replays(optimized: Optimized) -> dict[str, float | None]:
    """Return the best step after each of `BY_REPLAYS` over the final one; None before any."""
    spent = [(float(entry.replays), entry.step_s) for entry in optimized.log]
    return _curve(spent, BY_REPLAYS, optimized.predicted_step_s)


def _curve(
    spent: Sequence[tuple[float, float]], limits: Sequence[float], final_s: float
) -> dict[str, float | None]:
    curve: dict[str, float | None] = {}
    for limit in limits:
        best_s = min((step_s for cost, step_s in spent if cost <= limit), default=None)
        curve[f"{limit:g}"] = None if best_s is None else round(best_s / final_s, 5)
    return curve


def measure(case: Case, budget: Budget, ablation_s: float) -> dict[str, Any]:
    full, wall_s = searched(case, Speedups(), UNBOUNDED_S, budget)
    name, builder_s = best_builder(case)
    print(
        f"\n{case.name}: computation {case.graph.workload().compute_s * 1e3:.1f} ms, "
        f"source {case.graph.source}"
    )
    for label, step_s in (
        ("DDP's buckets", full.before_step_s),
        (f"best builder ({name})", builder_s),
    ):
        print(f"  {label:42} {step_s * 1e3:8.1f} ms")
    print(f"  {'optimized, without op fusion':42} {full.enacted_step_s * 1e3:8.1f} ms")
    print(
        f"  {'optimized':42} {full.predicted_step_s * 1e3:8.1f} ms   in {wall_s:.2f} s, "
        f"{full.seconds:.2f} s of CPU, {full.replays} replays"
    )
    curve = anytime(full)
    reached = ", ".join(f"{at} s: {'-' if of is None else of}" for at, of in curve.items())
    print(f"  best so far over the final one, by CPU time: {reached}")
    print(f"  {'full overlap, max(T_comp, T_comm)':42} {full.bound_s * 1e3:8.1f} ms")
    findings: dict[str, Any] = {
        "ddp_s": full.before_step_s,
        "best_builder": name,
        "best_builder_s": builder_s,
        "bound_s": full.bound_s,
        "cross_step": full.strategy.cross_step,
        **row(full, wall_s),
        "anytime": curve,
        "by_replays": by_replays(full),
        "ablation": {},
    }
    unbounded = replace(budget, ops=UNBOUNDED_OPS)
    for label, speedups in VARIANTS.items() if ablation_s > 0 else ():
        optimized, variant_s = searched(case, speedups, ablation_s, unbounded)
        findings["ablation"][label] = row(optimized, variant_s)
        more = "more than " if optimized.cut_short else ""
        print(
            f"    {label:26} {more}{optimized.seconds:.2f} s of CPU ({optimized.replays} replays), "
            f"{optimized.predicted_step_s * 1e3:.1f} ms"
        )
    return findings


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=reference_data(),
        help=f"the reference data, which all models but {BERT} need",
    )
    parser.add_argument("--models", nargs="+", choices=(*PROFILED, BERT), default=[*PROFILED, BERT])
    parser.add_argument("--replays", type=int, default=Budget().replays)
    parser.add_argument(
        "--ablation-seconds", type=float, default=20.0, help="limit of each variant; 0: no ablation"
    )
    options = parser.parse_args()
    if options.data is None and set(options.models) != {BERT}:
        raise SystemExit(
            f"without the reference data: set AUTOTUNE_REFERENCE_DATA, or choose --models {BERT}"
        )
    try:
        all_cases = list(cases(options.data, options.models))
        budget = Budget(options.replays)
        searched(
            all_cases[0], Speedups(), UNBOUNDED_S, Budget(1, UNBOUNDED_OPS)
        )  # loads the compiled replay
        results = {case.name: measure(case, budget, options.ablation_seconds) for case in all_cases}
    except AutotuneError as error:
        print(f"search_time: {error}", file=sys.stderr)
        return 1
    worst = max(results, key=lambda name: results[name]["search_s"])
    after_1_s = [result_row["anytime"]["1"] for result_row in results.values()]
    figures = {
        "worst_s": results[worst]["search_s"],
        "worst": worst,
        "worst_cpu_s": max(result_row["cpu_s"] for result_row in results.values()),
        "worst_after_1_s": None if None in after_1_s else max(after_1_s),
    }
    print(json.dumps({**figures, "cases": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
