"""`autotune optimize`: search for the fastest strategy by replay, without a run (dPRO, sec. 5)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.commands.arguments import add_ranks, add_replay_outputs
from autotune.commands.render.iteration import write_timeline
from autotune.commands.render.memory import ShownMemory
from autotune.commands.render.optimized import OptimizedResult
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import iteration_summary
from autotune.errors import InvalidInput
from autotune.files import refuse_unwritable, write_whole
from autotune.jobs.sources import Source, named_cluster, read_source
from autotune.lowering.lower import Lowering
from autotune.memory.budget import MemoryBudget
from autotune.memory.peak import highest_peak
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import Optimized, optimize
from autotune.reports.timeline_page import write_timeline_report
from autotune.strategy_space.mirrored import mirrored_space
from autotune.strategy_space.space import SearchSpace
from autotune.units import parse_bytes, parse_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a folder of `autotune profile`, traces of torch.profiler (Kineto), a workload's "
        "JSON, a layer profile, or a model such as bert-base",
    )
    add_ranks(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        help="a cluster file (best one of `autotune probe`), or a name such as B7",
    )
    parser.add_argument(
        "--lossy",
        action="store_true",
        help="also lossy compression: fp16, bf16, int8, top-k, PowerSGD",
    )
    parser.add_argument(
        "--within-step", action="store_true", help="no synchronization into the next forward pass"
    )
    parser.add_argument(
        "--op-fusion",
        action="store_true",
        help="also fuse the ops of a layer profile or a named model: for a graph engine, not "
        "enacted",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a replica, such as 16GB or 512MiB: the result states which recomputation "
        "or accumulation, made in your script, would fit",
    )
    parser.add_argument("--budget-time", default="10s", help="maximum search time (default 10s)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="write the strategy's JSON (`autotune run` takes exports of tuning jobs only)",
    )
    add_replay_outputs(parser)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Search, replay the result, and show the gain over DDP's default buckets."""
    for path in (options.output, options.timeline, options.report):
        refuse_unwritable(path)
    source, cluster = read_source(options.source, options.ranks), named_cluster(options.cluster)
    within = _memory_budget(options, source, cluster)
    if options.op_fusion and source.graph is None:
        raise InvalidInput(
            "--op-fusion needs the ops of a model, which a layer profile (.txt) and the models of "
            f"the zoo have, but {options.source} has only its variables; leave the option out"
        )
    best = optimize(
        source.workload,
        cluster,
        _space(source, options),
        graph=source.graph if options.op_fusion else None,
        budget=replace(Budget(), seconds=parse_seconds(options.budget_time, "--budget-time")),
        seed=options.seed,
        memory=within.fit_workload if within is not None else None,
        allowed=within.allows if within is not None else lambda plan: True,
        costs=source.costs,
    )
    memory = _memory(source, cluster, best, within)
    fit = memory.fit if memory is not None else None
    # Only TensorFlow fuses ops as a strategy states, and the source may be of another framework.
    workload = source.workload if fit is None else fit.workload
    lowering = Lowering(workload, cluster, source.costs)
    summary = iteration_summary(replay(lowering.period(best.plan)))
    result = OptimizedResult(source, cluster, best, memory, summary)
    if options.output is not None:
        write_whole(options.output, best.strategy.to_json() + "\n", "the strategy")
    if options.timeline is not None:
        write_timeline(iteration_summary(replay(lowering.graph(best.plan))), options.timeline)
    if options.report is not None:
        write_timeline_report(options.report, result.page(), summary)
    outputs = {"strategy": options.output, "timeline": options.timeline, "report": options.report}
    written = "".join(f"{name}: {path}\n" for name, path in outputs.items() if path is not None)
    return result.data(), (result.text() + written).rstrip("\n")


def _memory_budget(
    options: argparse.Namespace, source: Source, cluster: Cluster
) -> MemoryBudget | None:
    """The budget of `--memory`. Raises `InvalidInput` if the source has no lifetimes."""
    if options.memory is None:
        return None
    budget_bytes = parse_bytes(options.memory, "--memory")
    if budget_bytes < 1:
        raise InvalidInput(f"--memory must be at least 1 byte, but is {options.memory!r}")
    if source.memory is None:
        raise InvalidInput(
            "--memory needs the lifetimes of a replica's tensors, which `autotune profile` "
            f"records, but {options.source} has none: {source.no_memory}"
        )
    return MemoryBudget(source.memory, cluster, budget_bytes, source.costs)


def _memory(
    source: Source, cluster: Cluster, best: Optimized, within: MemoryBudget | None
) -> ShownMemory | None:
    memory = source.memory
    if memory is None:
        return None
    if within is None:
        peak = highest_peak(memory, memory.profile, source.workload, best.plan, cluster)
        return ShownMemory(peak, memory)
    return ShownMemory(within.peak(best.plan), memory, within.budget_bytes, within.fit)


def _space(source: Source, options: argparse.Namespace) -> SearchSpace:
    space = SearchSpace.default(lossy=options.lossy)
    refused = "--within-step was given" if options.within_step else source.cross_step_refused
    if source.mirrored:
        space = mirrored_space(space)
    if source.direct_refused:
        space = space.without_direct()
    return space.without_cross_step(refused) if refused else space
