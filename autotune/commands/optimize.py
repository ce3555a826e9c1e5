"""`autotune optimize`: search for the fastest strategy by replay, without a run (dPRO, sec. 5)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.commands.arguments import add_replay_outputs
from autotune.commands.render.iteration import (
    iteration_data,
    iteration_facts,
    iteration_table,
    write_timeline,
)
from autotune.commands.render.memory import (
    ShownMemory,
    memory_data,
    memory_facts,
    memory_listings,
    memory_table,
)
from autotune.commands.render.tables import table_text
from autotune.commands.strategies import named_cluster, named_model, zoo_name
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import IterationSummary, iteration_summary
from autotune.errors import InvalidInput
from autotune.export import write_whole
from autotune.lowering.lower import Lowering
from autotune.memory.budget import MemoryBudget
from autotune.memory.peak import highest_peak
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import ASSUMED_TIMES, Optimized, optimize
from autotune.profiling.formats.layer_profile import read_layer_profile
from autotune.profiling.formats.sources import holds_traces
from autotune.profiling.op_graph import OpGraph
from autotune.recordings.memory_file import RecordedMemory, why_no_memory
from autotune.reports.timeline_page import Fact, Listing, Page, write_timeline_report
from autotune.strategy_space.describe import message_rows, whole_text
from autotune.strategy_space.space import SearchSpace
from autotune.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from autotune.workload import Workload
from autotune.zoo.architectures import MODELS
from autotune.zoo.assumed_device import AssumedDevice
from autotune.zoo.assumed_models import assumed_ops

JOB_FILE = "job.json"
SHOWN_MESSAGES, SHOWN_NAMES, SHOWN_STARTS = 12, 3, 6


@dataclass(frozen=True)
class _Source:
    """What is optimized. `graph` is None where only the variables are known, and ops cannot be fused; `memory` where nobody recorded it.

    `times`: where its times come from, if nobody measured them. `notes`: what else was assumed. `why_no_memory`: in words.
    `cross_step_refused`: why the recorded script cannot synchronize across steps; empty where nothing is known against it.
    """

    workload: Workload
    graph: OpGraph | None = None
    times: str = ""
    memory: RecordedMemory | None = None
    why_no_memory: str = "it tells nothing of activations and optimizer state"
    cross_step_refused: str = ""
    notes: tuple[str, ...] = ()

    def assumed(self, found: Optimized) -> list[str]:
        """What was assumed, with what is known of it."""
        timed = [
            f"{note} ({self.times})" if self.times and note == ASSUMED_TIMES else note
            for note in found.assumed
        ]
        return [*timed, *self.notes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a folder of `autotune profile`, Kineto traces, a workload's JSON, a layer profile, "
        "or a model such as bert-base",
    )
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
        help="also fuse the ops of a layer profile: for a graph engine, not enacted",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a replica, such as 16GB or 512MiB: recomputes or accumulates to fit",
    )
    parser.add_argument("--budget-time", default="10s", help="maximum search time (default 10s)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="write the strategy's JSON"
    )
    add_replay_outputs(parser)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Search, replay the result, and show the gain over DDP's default buckets."""
    source, cluster = _source(options.source), named_cluster(options.cluster)
    within = _within(options, source, cluster)
    found = optimize(
        source.workload,
        cluster,
        _space(source, options),
        graph=source.graph if options.op_fusion else None,
        budget=replace(Budget(), seconds=parse_seconds(options.budget_time, "--budget-time")),
        seed=options.seed,
        memory=within.fit_workload if within is not None else None,
        allowed=within.allows if within is not None else lambda plan: True,
    )
    memory = _memory(source, cluster, found, within)
    # What is shown is what the runtime does today: fused ops are a decision for a graph engine.
    lowering = Lowering(
        memory.fit.workload if memory is not None and memory.fit is not None else source.workload,
        cluster,
    )
    summary = iteration_summary(replay(lowering.period(found.plan)))
    if options.output is not None:
        write_whole(options.output, found.strategy.to_json() + "\n", "the strategy")
    if options.timeline is not None:
        write_timeline(iteration_summary(replay(lowering.graph(found.plan))), options.timeline)
    if options.report is not None:
        write_timeline_report(
            options.report, _page(source, cluster, found, memory, summary), summary
        )
    return _data(source, cluster, found, memory, summary), _text(
        source, cluster, found, memory, summary, options
    )


def _within(options: argparse.Namespace, source: _Source, cluster: Cluster) -> MemoryBudget | None:
    """What `--memory` asks for. Raises `InvalidInput` where it cannot be told what a replica holds."""
    if options.memory is None:
        return None
    budget_bytes = parse_bytes(options.memory, "--memory")
    if budget_bytes < 1:
        raise InvalidInput(f"--memory must be at least 1 byte, but is {options.memory!r}")
    if source.memory is None:
        raise InvalidInput(
            f"--memory needs the lifetimes of a replica's tensors, which `autotune profile` records, but {options.source} has none: "
            f"{source.why_no_memory}"
        )
    return MemoryBudget(source.memory, cluster, budget_bytes)


def _memory(
    source: _Source, cluster: Cluster, found: Optimized, within: MemoryBudget | None
) -> ShownMemory | None:
    if source.memory is None:
        return None
    if within is None:
        return ShownMemory(
            highest_peak(
                source.memory, source.memory.profile, source.workload, found.plan, cluster
            ),
            source.memory,
        )
    return ShownMemory(within.peak(found.plan), source.memory, within.budget_bytes, within.fit)


def _source(name: str) -> _Source:
    path, model = Path(name), zoo_name(name)
    if model is not None:
        graph, row, device = assumed_ops(model), MODELS[model], AssumedDevice()
        return _Source(
            graph.workload(),
            graph,
            f"{device.text}, for a batch of {row.batch_per_gpu} {row.batch_unit}",
        )
    if path.name != JOB_FILE and not (path / JOB_FILE).exists() and holds_traces(path):
        return _traced(path)
    if path.suffix == ".json" and path.name != JOB_FILE:
        return _Source(_timed(named_model(name), name))
    if path.is_dir() or path.name == JOB_FILE:
        return _recorded(path if path.is_dir() else path.parent)
    if path.is_file():
        graph = read_layer_profile(path)
        return _Source(graph.workload(), graph)
    raise InvalidInput(
        f"there must be something to optimize: a folder of `autotune profile`, Kineto traces, a workload's JSON file, a layer profile "
        f"(.txt) or one of {', '.join(MODELS)}, but it is {name!r}"
    )


def _timed(workload: Workload, name: str) -> Workload:
    if workload.compute_s == 0:
        raise InvalidInput(
            f"a workload needs the times of its passes, behind which messages can hide, but in {name} they are 0; "
            f"record them with `autotune profile`, or name a model of the zoo, whose times are assumed: {', '.join(MODELS)}"
        )
    return workload


def _traced(path: Path) -> _Source:
    """The buckets of a data-parallel job that someone traced."""
    from autotune.profiling.graph.traced_workload import workload_of
    from autotune.profiling.traces.job import read_job

    found = workload_of(read_job(path), model=path.name.split(".")[0] or "traced")
    return _Source(
        found.workload, why_no_memory="traces tell nothing of lifetimes", notes=found.notes
    )


def _recorded(folder: Path) -> _Source:
    """The workload in the folder's job.json, the memory beside it, and what its script allows."""
    from autotune.recordings.job_file import RecordedJob

    job = RecordedJob.read(folder)
    if job.workload is None:
        reason = "; ".join(job.notes) or "the recording does not say why"
        raise InvalidInput(
            f"{folder}: the model's own times must be known, but could not be recorded: {reason}"
        )
    told = why_no_memory(job.notes)
    return _Source(
        job.workload,
        memory=RecordedMemory.read(folder),
        why_no_memory=told,
        cross_step_refused=job.cross_step_refused,
    )


def _space(source: _Source, options: argparse.Namespace) -> SearchSpace:
    space = SearchSpace.default(lossy=options.lossy)
    refused = "--within-step was given" if options.within_step else source.cross_step_refused
    return space.without_cross_step(refused) if refused else space


def _data(
    source: _Source,
    cluster: Cluster,
    found: Optimized,
    memory: ShownMemory | None,
    summary: IterationSummary,
) -> dict[str, Any]:
    return {
        "model": source.workload.model,
        "cluster": cluster.name,
        "workers": cluster.world_size,
        "before_step_s": found.before_step_s,
        "predicted_step_s": found.enacted_step_s,
        "predicted_with_op_fusion_s": found.predicted_step_s,
        "bound_s": found.bound_s,
        "starts_s": found.starts_s,
        "op_fusion": {
            "forward": sorted(found.op_fusion.forward),
            "backward": sorted(found.op_fusion.backward),
        },
        "assumed": source.assumed(found),
        "cross_step_refused": source.cross_step_refused,
        "log": to_data(found.log),
        "rounds": found.rounds,
        "replays": found.replays,
        "partial_replays": found.partial_replays,
        "cut_short": found.cut_short,
        "seconds": found.seconds,
        "strategy_id": found.strategy.id,
        "strategy": found.strategy.to_data(),
        "plan_id": found.plan.id,
        "memory": memory_data(memory),
        **iteration_data(summary),
    }


def _text(
    source: _Source,
    cluster: Cluster,
    found: Optimized,
    memory: ShownMemory | None,
    summary: IterationSummary,
    options: argparse.Namespace,
) -> str:
    model = source.workload
    lines = [
        f"{model.model} ({len(model.variables)} variables, {format_bytes(model.grad_bytes)} of gradients) on {cluster.name}, "
        f"{cluster.world_size} workers on {len(cluster.hosts)} hosts",
        _gained(found),
    ]
    if assumed := source.assumed(found):
        lines.append(f"assumed, not measured: {', '.join(assumed)}")
    if source.cross_step_refused:
        lines.append(f"synchronization stays within the step: {source.cross_step_refused}")
    if whole := whole_text(found.strategy):
        lines.append(whole)
    text = (
        "\n".join(lines) + "\n" + _messages(found) + iteration_table(summary) + memory_table(memory)
    )
    tail = [
        f"{found.rounds} rounds, {found.replays} replays and {found.partial_replays} of single messages in {format_seconds(found.seconds)}"
    ]
    if found.cut_short:
        tail.append("the time ended the search: more of it (--budget-time) may find more")
    for what, path in (
        ("strategy", options.output),
        ("timeline", options.timeline),
        ("report", options.report),
    ):
        if path is not None:
            tail.append(f"{what}: {path}")
    return text + "\n".join(tail)


def _gained(found: Optimized) -> str:
    ratio = found.before_step_s / found.enacted_step_s
    text = (
        f"predicted {format_seconds(found.enacted_step_s)} per step; DDP's default buckets {format_seconds(found.before_step_s)} "
        f"({ratio:.2f}x), with all communication hidden {format_seconds(found.bound_s)}"
    )
    joined = len(found.op_fusion.forward) + len(found.op_fusion.backward)
    if joined:
        text += f"; {format_seconds(found.predicted_step_s)} with {joined} ops fused into the one before, for a graph engine"
    return text


def _messages(found: Optimized) -> str:
    table = Table(
        "#",
        "synchronizer",
        "compressor",
        "gradient",
        "on the wire",
        "variables",
        title="messages in issue order",
        title_justify="left",
    )
    for column in (0, 3, 4):
        table.columns[column].justify = "right"
    rows = list(message_rows(found.plan))
    for row in rows[:SHOWN_MESSAGES]:
        names = list(row.names)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        cells = (
            str(row.number),
            row.synchronizer,
            row.compressor,
            format_bytes(row.grad_bytes),
            format_bytes(row.wire_bytes),
        )
        table.add_row(*cells, escape(", ".join(names[:SHOWN_NAMES]) + more))
    rest = f"and {len(rows) - SHOWN_MESSAGES} more messages\n" if len(rows) > SHOWN_MESSAGES else ""
    return table_text(table) + rest


def _page(
    source: _Source,
    cluster: Cluster,
    found: Optimized,
    memory: ShownMemory | None,
    summary: IterationSummary,
) -> Page:
    ratio = found.before_step_s / found.enacted_step_s
    facts = (
        Fact("DDP's default buckets", format_seconds(found.before_step_s), "predicted"),
        Fact(
            "All communication hidden",
            format_seconds(found.bound_s),
            "no lossless strategy is faster",
        ),
        *iteration_facts(summary),
        *memory_facts(memory),
    )
    starts = sorted(found.starts_s.items(), key=lambda item: item[1])
    listings = (
        Listing(
            "Where the search began",
            ("strategy", "predicted step"),
            tuple((name, format_seconds(seconds)) for name, seconds in starts),
            frozenset({1}),
            "Hand-made strategies, replayed on this cluster.",
        ),
        Listing(
            "What the search kept",
            ("by", "predicted step", "replays", "after"),
            tuple(
                (
                    kept.by,
                    format_seconds(kept.step_s),
                    str(kept.replays),
                    format_seconds(kept.seconds),
                )
                for kept in found.log
            ),
            frozenset({1, 2, 3}),
        ),
        Listing(
            "Messages in issue order",
            ("#", "synchronizer", "compressor", "gradient", "on the wire", "variables"),
            tuple(
                (
                    str(row.number),
                    row.synchronizer,
                    row.compressor,
                    format_bytes(row.grad_bytes),
                    format_bytes(row.wire_bytes),
                    ", ".join(row.names),
                )
                for row in message_rows(found.plan)
            ),
            frozenset({0, 3, 4}),
        ),
        *memory_listings(memory),
    )
    assumed = source.assumed(found)
    notes = [f"Assumed, not measured: {', '.join(assumed)}."] if assumed else []
    if source.cross_step_refused:
        notes.append(f"Synchronization stays within the step: {source.cross_step_refused}.")
    kicker = f"autotune optimize · {source.workload.model} · {cluster.world_size} workers on cluster {cluster.name} · predicted, nothing was run"
    return Page(
        kicker,
        f"{ratio:.2f}x of DDP's default buckets",
        _gained(found),
        facts,
        listings,
        tuple(notes),
        ratio > 1,
    )
