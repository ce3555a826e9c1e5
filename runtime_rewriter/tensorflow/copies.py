"""Copies the nodes of a training graph to the replicas and servers.

A *site* is where copies go: a replica, or a part of a served variable on its server. A node goes
to the replica that needs it. The update of a served variable goes to the servers' sites only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef

from runtime_rewriter.tensorflow.graph_view import TensorName, control_inputs
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.randomness import reseed
from runtime_rewriter.tensorflow.serving import Served, is_gather
from runtime_rewriter.tensorflow.synchronization import Averaged
from runtime_rewriter.tensorflow.training_graph import TrainingGraph
from runtime_rewriter.tensorflow.updates import Updates


@dataclass(frozen=True)
class Site:
    """Where copies of nodes go: `name` prefixes theirs. `part`: of the served variable."""

    name: str
    rank: int
    variable: str | None = None
    part: int | None = None


@dataclass(frozen=True)
class Handle:
    """A variable's VarHandleOp at a site, and the part of the variable that it holds.

    `is_copy`: of a served variable, whose servers hold the value.
    """

    variable: str
    site: Site
    node: str
    is_copy: bool
    axis: int | None = None
    start: int = 0
    stop: int = 0


def replica(rank: int) -> Site:
    return Site(f"replica_{rank}", rank)


class Copies:
    """Copies nodes, each with all that it depends on."""

    def __init__(
        self,
        training: TrainingGraph,
        updates: Updates,
        writer: GraphWriter,
        devices: tuple[str, ...],
        served: dict[str, Served],
        container: str,
    ) -> None:
        self.training, self.updates, self.writer = training, updates, writer
        self.devices, self.served, self.container = devices, served, container
        self.averaged: Mapping[str, Averaged] = {}
        self.refreshed: dict[tuple[str, int], str] = {}
        """The node that refreshes a rank's copy of a served variable."""
        self.handles: list[Handle] = []
        self._done: set[tuple[str, Site]] = set()
        self._needs: list[tuple[str, Site]] = []
        self._cuts: dict[tuple[str, Site], str] = {}
        self._update_of = {node: one for one in served.values() for node in one.update.nodes}
        self._held_by = {name: one for one in served.values() for name in one.held}
        self._read_at_server = self._remote_reads()
        self._gradient_at = {
            tensor: gradient
            for gradient in training.gradients
            for tensor in (gradient.values, gradient.indices)
            if tensor is not None
        }

    def copy(self, names: Iterable[str], site: Site) -> None:
        """Copy nodes and all that they depend on, each to its site."""
        waiting = [(name, self._site_of(name, site)) for name in names]
        while waiting:
            name, at = waiting.pop()
            if (name, at) not in self._done:
                self._done.add((name, at))
                self._needs = waiting
                self._write(name, at)

    def sites_of(self, served: Served) -> list[Site]:
        """Return the sites where the update of a served variable runs, in the order of parts."""
        if served.is_whole:
            return [replica(served.parts[0].rank)]
        return [
            Site(f"part_{number}/{served.variable}", part.rank, served.variable, number)
            for number, part in enumerate(served.parts)
        ]

    def handle(self, name: str, site: Site) -> str:
        """Return the VarHandleOp of a variable at a site, which holds a part of it at a part's."""
        if (name, site) not in self._done:
            self._done.add((name, site))
            self._write(name, site)
        return f"{site.name}/{name}"

    def is_in_update(self, name: str) -> bool:
        """Whether a node belongs to the update of a served variable."""
        return name in self._update_of

    def _site_of(self, name: str, asking: Site) -> Site:
        """Return the site of the copy of a node that a node at `asking` reads."""
        served = self._update_of.get(name)
        if served is None or name not in served.divided:
            return replica(asking.rank)
        if served.is_whole:
            return replica(served.parts[0].rank)
        assert asking.variable == served.variable, (name, asking)
        return asking

    def _write(self, name: str, site: Site) -> None:
        node = self.training.view.nodes[name]
        copy = NodeDef()
        copy.CopyFrom(node)
        copy.name, copy.device = f"{site.name}/{name}", self.devices[site.rank]
        reseed(copy, site.rank)
        if node.op == "VarHandleOp":
            self._hold(copy, name, site)
        reading = site
        served = self._read_at_server.get(name)
        if served is not None:
            server = served.parts[0].rank
            copy.device = self.devices[server]
            if name in self.updates.users[served.variable]:
                reading = replica(server)
        data = [
            self._data(tensor, reading if place == 0 else site)
            for place, tensor in enumerate(self.training.view.inputs[name])
        ]
        control = [one for name_ in control_inputs(node) for one in self._after(name_, site)]
        control += self._after_replicas(name, site)
        del copy.input[:]
        copy.input.extend([*data, *(f"^{one}" for one in dict.fromkeys(control))])
        self.writer.add(copy)

    def _data(self, tensor: TensorName, site: Site) -> str:
        """Return what a copy at `site` reads where the program reads `tensor`."""
        gradient = self._gradient_at.get(tensor)
        if gradient is not None:
            averaged = self.averaged[gradient.variable]
            if site.variable == gradient.variable and site.part is not None:
                return averaged.parts[site.part]
            by_rank = averaged.values if tensor == gradient.values else averaged.indices
            return by_rank[site.rank]
        if site.variable is not None and tensor.node in self.served[site.variable].held:
            return self.handle(tensor.node, site)
        source = self._site_of(tensor.node, site)
        self._needs.append((tensor.node, source))
        name = f"{source.name}/{tensor}"
        if site.variable is not None and source != site:
            return self._part_of(tensor, name, site)
        return name

    def _part_of(self, tensor: TensorName, name: str, site: Site) -> str:
        """Return the part of a tensor of the variable's shape; scalars are the same for all."""
        assert site.variable is not None and site.part is not None
        variable, served = self.training.by_name[site.variable], self.served[site.variable]
        if self.training.types.shapes[tensor] != variable.shape or variable.shape == ():
            return name
        if (name, site) not in self._cuts:
            part, axis = served.parts[site.part], served.axis or 0
            start, extent = [0] * len(variable.shape), list(variable.shape)
            start[axis], extent[axis] = part.start, part.stop - part.start
            with self.writer.at(self.devices[site.rank], f"{site.name}/{tensor.node}"):
                dtype = tf.as_dtype(self.training.types.dtypes[tensor])
                self._cuts[name, site] = self.writer.cut(name, start, extent, dtype)
        return self._cuts[name, site]

    def _after(self, name: str, site: Site) -> list[str]:
        """Return the nodes that a copy at `site` follows where the program follows `name`."""
        served = self._update_of.get(name)
        if served is None or name not in served.divided:
            self._needs.append((name, replica(site.rank)))
            return [f"{replica(site.rank).name}/{name}"]
        sites = self.sites_of(served)
        if site in sites and (site.variable is not None or served.is_whole):
            self._needs.append((name, site))
            return [f"{site.name}/{name}"]
        if name not in served.writers:  # a read at the server, which concerns its own site only
            return []
        refreshed = self.refreshed.get((served.variable, site.rank))
        if refreshed is not None:
            return [refreshed]
        self._needs.extend((name, one) for one in sites)
        return [f"{one.name}/{name}" for one in sites]

    def _after_replicas(self, name: str, site: Site) -> list[str]:
        """Let a write at a server follow the reads of all replicas, if they read there."""
        served = self._update_of.get(name)
        if served is None or name not in served.writers or served.local_copy:
            return []
        reads = [one for one, of in self._read_at_server.items() if of is served]
        followed = []
        for rank in range(len(self.devices)):
            for read in reads:
                self._needs.append((read, replica(rank)))
                followed.append(f"{replica(rank).name}/{read}")
        return followed

    def _hold(self, copy: NodeDef, name: str, site: Site) -> None:
        copy.attr["shared_name"].s = copy.name.encode()
        copy.attr["container"].s = self.container.encode()
        served = self._held_by.get(name)
        axis, start, stop = None, 0, 0
        if site.part is not None and served is not None:
            part, axis = served.parts[site.part], served.axis
            start, stop = part.start, part.stop
            shape = list(self.training.by_name[name].shape)
            shape[axis or 0] = stop - start
            copy.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        is_copy = served is not None and site not in self.sites_of(served)
        self.handles.append(Handle(name, site, copy.name, is_copy, axis, start, stop))

    def _remote_reads(self) -> dict[str, Served]:
        """Return the replicas' nodes that run at the server of the variable that they read."""
        view = self.training.view
        read_at: dict[str, Served] = {}
        for served in self.served.values():
            if served.local_copy:
                continue
            for read in self.updates.users[served.variable] - served.update.nodes:
                read_at[read] = served
                takers = view.consumers.get(read, ())
                read_at.update({one: served for one in takers if is_gather(view, one, read)})
        return read_at
