"""Which variables of a plan live on servers, and where the replicas read them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import SparseHandling, Synchronizer
from runtime_rewriter.tensorflow.graph_view import GraphView, data_inputs
from runtime_rewriter.tensorflow.splitting import divided_nodes
from runtime_rewriter.tensorflow.training_graph import TrainingGraph
from runtime_rewriter.tensorflow.updates import READS, Update, Updates


@dataclass(frozen=True)
class Part:
    """Rows `start:stop` along the axis of a served variable, on the server's rank."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Served:
    """A variable whose value, slots and update are on servers.

    `axis`: along which it is cut; None for one whole part. `divided`: the nodes of its update that
    run once per part. `local_copy`: replicas read a copy that each step refreshes; else they read
    at the server. Rows are taken at the server. A variable that is cut, or that a loop or branch
    reads, always has copies.
    """

    update: Update
    axis: int | None
    parts: tuple[Part, ...]
    divided: frozenset[str]
    local_copy: bool

    @property
    def variable(self) -> str:
        return self.update.variable

    @property
    def is_whole(self) -> bool:
        return self.axis is None

    @cached_property
    def held(self) -> frozenset[str]:
        return frozenset({self.update.variable, *self.update.slots})

    @cached_property
    def writers(self) -> frozenset[str]:
        return frozenset(self.update.writers)


def served_variables(
    training: TrainingGraph, plan: Plan, updates: Updates
) -> tuple[dict[str, Served], list[str]]:
    """Return the served variables, and a note for each whose update cannot run on its servers.

    The servers of the latter only sum the gradient, and every replica updates its own copy.
    """
    slices: dict[str, list[tuple[TensorSlice, Message]]] = defaultdict(list)
    for message in plan.messages:
        for part in message.slices:
            slices[part.variable].append((part, message))
    served: dict[str, Served] = {}
    notes: list[str] = []
    for name, of_variable in slices.items():
        kinds = {message.synchronizer for _, message in of_variable}
        if kinds != {Synchronizer.PARAMETER_SERVER}:
            continue
        outcome = _served(training, plan, updates, name, of_variable)
        if isinstance(outcome, Served):
            served[name] = outcome
        else:
            notes.append(
                f"the servers of {name!r} sum its gradient and every replica updates it: {outcome}"
            )
    return served, notes


def _served(
    training: TrainingGraph,
    plan: Plan,
    updates: Updates,
    name: str,
    slices: list[tuple[TensorSlice, Message]],
) -> Served | str:
    update = updates.update_of(name)
    if isinstance(update, str):
        return update
    in_order = sorted(slices, key=lambda pair: pair[0].start)
    parts = tuple(Part(_owner(message), part.start, part.stop) for part, message in in_order)
    axis = in_order[0][0].axis
    divided = update.nodes if axis is None else divided_nodes(updates, update)
    if isinstance(divided, str):
        return divided
    readers = updates.users[name] - update.nodes
    rows = in_order[0][1].sparse is SparseHandling.GATHER_SCATTER
    if rows and _only_gathered(training.view, readers):
        return Served(update, axis, parts, divided, local_copy=False)
    readable = axis is None and all(training.view.nodes[one].op in READS for one in readers)
    return Served(update, axis, parts, divided, plan.local_copies or not readable)


def _owner(message: Message) -> int:
    assert message.owner is not None
    return message.owner


def _only_gathered(view: GraphView, readers: set[str]) -> bool:
    """Whether replicas take rows of the variable and nothing else."""
    for reader in readers:
        op = view.nodes[reader].op
        if op not in READS:
            return False
        takers = view.consumers.get(reader, ())
        if op == "ReadVariableOp" and not all(is_gather(view, one, reader) for one in takers):
            return False
    return True


def is_gather(view: GraphView, name: str, read: str) -> bool:
    """Whether a node takes rows of the variable that `read` reads."""
    node = view.nodes[name]
    return node.op == "GatherV2" and data_inputs(node)[0].node == read
