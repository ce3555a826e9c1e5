"""`autotune strategies`: compare hand-made strategies for a model on a cluster, without a run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Column, Table

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.commands.render.tables import table_text
from autotune.costs.sync_cost import message_costs
from autotune.errors import InvalidInput
from autotune.jobs.sources import named_cluster, named_model
from autotune.parsing import json_schema
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.describe import variable_rows, whole_text
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.strategy import Strategy
from autotune.units import format_bytes, format_seconds
from autotune.workload import Workload
from autotune.zoo.architectures import MODELS
from autotune.zoo.clusters import CLUSTERS

WIDE = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a name such as bert-large, a workload's JSON, or a folder of `autotune profile`",
    )
    parser.add_argument(
        "cluster",
        nargs="?",
        help="a name such as B7 (B7-single-flow: 10 Gbit/s between two nodes), or a cluster file",
    )
    parser.add_argument(
        "--builder", help="show every variable of this one (default: compare all of them)"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a strategy")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if options.schema:
        schema = json_schema(Strategy)
        return schema, json.dumps(schema, indent=2)
    if options.model is None or options.cluster is None:
        raise InvalidInput(
            f"name a model and a cluster, or give --schema; models: {', '.join(MODELS)}; "
            f"clusters: {', '.join(CLUSTERS)}"
        )
    model, cluster = named_model(options.model), named_cluster(options.cluster)
    return _one(options.builder, model, cluster) if options.builder else _all(model, cluster)


def _all(model: Workload, cluster: Cluster) -> tuple[dict[str, Any], str]:
    table = Table("builder", "messages", "on the wire", "largest", "T_sync", "enacted by PyTorch")
    for column in table.columns[1:5]:
        column.justify = "right"
    rows = {}
    for name, build in BUILDERS.items():
        strategy = build(model, cluster)
        enacted = plan(strategy, model, cluster.world_size)
        sync_s = message_costs(enacted, cluster, model).paper_sync_s
        refused = refusal_reason(enacted)
        largest = max(message.wire_bytes for message in enacted.messages)
        cells = (
            str(len(enacted.messages)),
            format_bytes(enacted.wire_bytes),
            format_bytes(largest),
            format_seconds(sync_s),
        )
        table.add_row(name, *cells, "yes" if refused is None else f"no: {refused}")
        rows[name] = {
            "messages": len(enacted.messages),
            "wire_bytes": enacted.wire_bytes,
            "largest_bytes": largest,
            "sync_s": sync_s,
            "refused": refused,
            "strategy": strategy.to_data(),
        }
    size = f"{len(model.variables)} variables, {format_bytes(model.grad_bytes)} of gradients"
    hosts = f"{cluster.world_size} ranks on {len(cluster.hosts)} hosts"
    head = f"{model.model} ({size}) on {cluster.name}, {hosts}"
    tail = (
        "T_sync: AutoSync's estimate (Eq. 2 and 3), without overlap. `--builder NAME` shows every "
        "variable of one strategy."
    )
    data = {"model": model.model, "cluster": cluster.name, "builders": rows}
    return data, f"{head}\n{table_text(table)}{tail}"


def _one(name: str, model: Workload, cluster: Cluster) -> tuple[dict[str, Any], str]:
    if name not in BUILDERS:
        raise InvalidInput(f"--builder must be one of {', '.join(BUILDERS)}, but is {name!r}")
    strategy = BUILDERS[name](model, cluster)
    rows = variable_rows(model, PlannedStrategy.of(strategy, model, cluster.world_size))
    table = Table(
        Column("variable", overflow="fold"),
        "shape",
        "size",
        Column("synchronizer", overflow="fold"),
        "partition",
        "compressor",
        "server",
        "message",
    )
    for row in rows:
        variable = row.variable
        shape = "x".join(map(str, variable.shape)) + (" sparse" if variable.sparse else "")
        cells = (row.synchronizers, row.partition, row.compressors, row.servers, row.messages)
        table.add_row(variable.name, shape, format_bytes(variable.grad_bytes), *cells)
    data = {
        "model": model.model,
        "cluster": cluster.name,
        "builder": name,
        "variables": to_data(rows),
        "strategy": strategy.to_data(),
    }
    tail = "\n".join(line for line in (whole_text(strategy), strategy.id) if line)
    return (
        data,
        f"{name}, in the order in which gradients become ready\n{table_text(table, WIDE)}{tail}",
    )
