"""Between-graph replication: a client on each rank, which runs the rank's own nodes.

Ranks meet in collectives only. A server's variable would be written by the clients of all ranks,
and nothing would make one step of them, so such plans need the one client of `distribute`.
"""

from __future__ import annotations

from dataclasses import replace

from tensorflow.core.framework.graph_pb2 import GraphDef

from autotune.errors import InvalidInput
from autotune.strategy_space.enactable import describe
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.graph_view import GraphView, control_inputs


def graph_of_rank(graph: DistributedGraph, rank: int) -> DistributedGraph:
    """Return the part of a distributed graph that a client on `rank` runs, with its own batch.

    For programs that run the rewriter's graphs themselves, and for `benchmarks.tensorflow_pairs`,
    which counts the graphs that split. Jobs do not use it: `autotune.distribute` has one client,
    and clients on each rank are those of MultiWorkerMirroredStrategy (`runtime_rewriter.mirrored`).

    Its session must be filtered to the rank's own task: a session that spans tasks aborts the
    collectives of the others. Raises `InvalidInput` for a plan by which ranks meet outside of
    collectives.
    """
    device = graph.devices[rank]
    view = GraphView(graph.graph_def)
    of_rank = {name for name, node in view.nodes.items() if node.device == device}
    for name in of_rank:
        inputs = [tensor.node for tensor in view.inputs[name]] + control_inputs(view.nodes[name])
        if not of_rank.issuperset(inputs):
            raise InvalidInput(
                "a client per rank can enact messages that are one collective, but "
                f"{_message_of(graph, name)} moves tensors from rank to rank; use all_reduce, or "
                "one client for all ranks"
            )
    part = GraphDef(versions=graph.graph_def.versions, library=graph.graph_def.library)
    part.node.extend(node for node in graph.graph_def.node if node.name in of_rank)
    return replace(
        graph,
        graph_def=part,
        devices=(device,),
        variables=tuple(
            replace(one, authoritative=True) for one in graph.variables if one.rank == rank
        ),
        kept=tuple(one for one in graph.kept if one.rank == rank),
        feeds=tuple(replace(one, placeholders=(one.placeholders[rank],)) for one in graph.feeds),
        targets=tuple(target for target in graph.targets if target in of_rank),
        fetches={
            name: tensor.replace("replica_0/", f"replica_{rank}/", 1)
            for name, tensor in graph.fetches.items()
        },
    )


def _message_of(graph: DistributedGraph, node: str) -> str:
    for number, message in enumerate(graph.plan.messages):
        if node.startswith(f"autotune/message_{number}/"):
            return f"message {number} ({describe(message)})"
    return f"{node!r}"
