"""Which nodes update a variable, found by the flow of data from its gradient.

Keras 3 updates variables with plain assignments, so the type of a node tells nothing. Instead:

- A *slot* of a variable is another variable that is written in dependence of the gradient of
  exactly this variable. Dependence through a scalar does not count: a global norm or a loss scale
  depends on every gradient, and couples no two variables element by element.
- The *update* of a variable is the set of nodes that only serve to write it or its slots.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from runtime_rewriter.tensorflow.training_graph import TrainingGraph

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_GIVEN = frozenset({"VarHandleOp", "Placeholder"})
_PASSES = frozenset({"Identity"})


@dataclass(frozen=True)
class Update:
    """The nodes that write `variable` and its `slots`, and those that only serve them."""

    variable: str
    slots: tuple[str, ...]
    writers: tuple[str, ...]
    nodes: frozenset[str]


class Updates:
    """The updates of a training graph."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training = training
        self.users: dict[str, set[str]] = {
            variable.name: self._users(variable.name) for variable in training.variables
        }

    @cached_property
    def writers(self) -> dict[str, tuple[str, ...]]:
        """The nodes that write each variable, in the order of construction."""
        nodes = self.training.view.nodes
        return {
            name: tuple(
                node
                for node in sorted(users, key=self.training.view.places.__getitem__)
                if nodes[node].op not in READS
            )
            for name, users in self.users.items()
        }

    @cached_property
    def _used_by(self) -> dict[str, set[str]]:
        """The variables that each node uses by their handles."""
        used: dict[str, set[str]] = defaultdict(set)
        for name, users in self.users.items():
            for node in users:
                used[node].add(name)
        return used

    @cached_property
    def slots(self) -> dict[str, tuple[str, ...]]:
        """The slots of each variable with a gradient."""
        trained = self.training.gradient_of
        slots_of: dict[str, list[str]] = defaultdict(list)
        for name, writers in self.writers.items():
            if name in trained or not writers:
                continue
            sources = frozenset[str]().union(*(self._sources[writer] for writer in writers))
            if len(sources) == 1:
                slots_of[next(iter(sources))].append(name)
        return {name: tuple(slots_of[name]) for name in trained}

    def update_of(self, variable: str) -> Update | str:
        """Return the update of a variable, or the reason why it has none of its own."""
        slots = self.slots[variable]
        held = {variable, *slots}
        writers = tuple(dict.fromkeys(node for name in held for node in self.writers[name]))
        if not self.writers[variable]:
            return "nothing writes it"
        for writer in writers:
            others = self._used_by[writer] - held
            if others:
                return f"{writer!r} also uses {sorted(others)[0]!r}"
            if self.training.view.consumers.get(writer):
                return f"the program reads a result of {writer!r}"
        nodes = self._serving(set(writers))
        outside = [writer for writer in writers if writer not in nodes]
        if outside:
            return f"{outside[0]!r} runs before the gradients are known"
        for slot in slots:
            readers = sorted(self.users[slot] - nodes)
            if readers:
                return f"{readers[0]!r} reads its slot {slot!r}"
        return Update(variable, slots, writers, frozenset(nodes))

    def _serving(self, writers: set[str]) -> set[str]:
        """Return `writers` and the nodes whose data only they use."""
        view = self.training.view
        ends = {fetch.node for fetch in self.training.fetches.values()}
        before = self._before_gradients
        nodes = view.upstream(writers, control=False, stop=before) - before - ends
        nodes = {
            name for name in nodes if view.nodes[name].op not in ("VarHandleOp", "Placeholder")
        }
        waiting = list(nodes)
        while waiting:
            name = waiting.pop()
            if name not in nodes or name in writers:
                continue
            if any(reader not in nodes for reader in view.consumers.get(name, ())):
                nodes.discard(name)
                waiting.extend(tensor.node for tensor in view.inputs[name])
        return nodes

    @cached_property
    def _before_gradients(self) -> set[str]:
        marks = [one.values.node for one in self.training.gradients]
        marks += [one.indices.node for one in self.training.gradients if one.indices]
        return self.training.view.upstream(marks)

    @cached_property
    def _sources(self) -> dict[str, frozenset[str]]:
        """The gradients on which a node depends, element by element."""
        at = {one.values: one.variable for one in self.training.gradients}
        known: dict[str, frozenset[str]] = {}
        view, shapes = self.training.view, self.training.types.shapes
        for name in view.topological:
            own: set[str] = set()
            for tensor in view.inputs[name]:
                if tensor in at:
                    own.add(at[tensor])
                elif shapes[tensor] != ():
                    own |= known[tensor.node]
            known[name] = frozenset(own)
        return known

    def _users(self, variable: str) -> set[str]:
        """Return the nodes that take the handle of a variable, possibly passed on."""
        view = self.training.view
        users: set[str] = set()
        waiting = [variable]
        while waiting:
            for name in view.consumers.get(waiting.pop(), ()):
                if view.nodes[name].op in _PASSES:
                    waiting.append(name)
                users.add(name)
        return users
