"""Refreshes the replicas' copies of served variables after the servers' updates.

A message's variables are pulled as they were pushed: concatenated, in one transfer per replica.
"""

from __future__ import annotations

from collections import defaultdict

import tensorflow as tf

from autotune.strategy_space.plan import Message, Plan
from runtime_rewriter.tensorflow.copies import Copies, Site, replica
from runtime_rewriter.tensorflow.graph_view import control_inputs
from runtime_rewriter.tensorflow.serving import Served
from runtime_rewriter.tensorflow.synchronization import SCOPE


class Refreshes:
    """Writes the refreshing nodes of all served variables with local copies."""

    def __init__(self, plan: Plan, copies: Copies) -> None:
        self.plan, self.copies, self.writer = plan, copies, copies.writer
        self.copied = {name: one for name, one in copies.served.items() if one.local_copy}
        for served in self.copied.values():
            for rank in self._ranks(served):
                node = f"{SCOPE}/refreshed/{replica(rank).name}/{served.variable}"
                copies.refreshed[served.variable, rank] = node

    def write(self) -> None:
        """Write the nodes, once all updates are copied."""
        pulled: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
        for number, message in enumerate(self.plan.messages):
            for key, start, tensor in self._pull(number, message):
                pulled[key].append((start, tensor))
        for (variable, rank), parts in pulled.items():
            self._assign(self.copied[variable], rank, [tensor for _, tensor in sorted(parts)])

    def targets(self, rank: int) -> list[str]:
        return [node for (_, at), node in self.copies.refreshed.items() if at == rank]

    def _ranks(self, served: Served) -> list[int]:
        """Return the ranks with a copy; the server of a whole variable reads its own."""
        ranks = range(len(self.copies.devices))
        return [rank for rank in ranks if not (served.is_whole and served.parts[0].rank == rank)]

    def _pull(self, number: int, message: Message) -> list[tuple[tuple[str, int], int, str]]:
        """Read a message's updated variables at their server; split them on each rank."""
        slices = [part for part in message.slices if part.variable in self.copied]
        if not slices or message.owner is None:
            return []
        dtype, devices = tf.as_dtype(message.dtype), self.copies.devices
        with self.writer.at(devices[message.owner], f"{SCOPE}/message_{number}/pull"):
            flat = [
                self.writer.reshape(self._updated(part.variable, part.start), [-1], dtype)
                for part in slices
            ]
            sent = self.writer.identity(self.writer.concat(flat, 0, dtype), dtype, "pulled")
        pulled = []
        for rank, device in enumerate(devices):
            wanting = [part for part in slices if rank in self._ranks(self.copied[part.variable])]
            if not wanting:
                continue
            with self.writer.at(device, f"{SCOPE}/message_{number}/rank_{rank}/pull"):
                sizes = [part.elements for part in slices]
                split = self.writer.split(sent, sizes, 0, dtype)
                for part, tensor in zip(slices, split, strict=True):
                    shape = list(self.copies.training.by_name[part.variable].shape)
                    if part.axis is not None:
                        shape[part.axis] = part.stop - part.start
                    shaped = self.writer.reshape(tensor, shape, dtype)
                    pulled.append(((part.variable, rank), part.start, shaped))
        return pulled

    def _updated(self, variable: str, start: int) -> str:
        served = self.copied[variable]
        sites = self.copies.sites_of(served)
        place = [part.start for part in served.parts].index(start)
        handle = self.copies.handle(variable, sites[place])
        writers = [f"{sites[place].name}/{name}" for name in served.update.writers]
        dtype = tf.as_dtype(self.copies.training.by_name[variable].dtype)
        return self.writer.node("ReadVariableOp", "updated", [handle], writers, dtype=dtype)

    def _assign(self, served: Served, rank: int, parts: list[str]) -> None:
        """Set a replica's copy, after the replica's own reads of it."""
        copies, site = self.copies, replica(rank)
        variable = copies.training.by_name[served.variable]
        dtype = tf.as_dtype(variable.dtype)
        before = self._before(served)
        copies.copy(before, site)
        with self.writer.at(copies.devices[rank], f"{SCOPE}/refreshed/{site.name}"):
            value = self.writer.concat(parts, served.axis or 0, dtype)
            inputs = [copies.handle(variable.name, site), value]
            reads = [f"{site.name}/{name}" for name in before]
            self.writer.node("AssignVariableOp", variable.name, inputs, reads, dtype=dtype)

    def _before(self, served: Served) -> list[str]:
        """Return what the program runs before it writes the variable, outside of updates."""
        nodes = self.copies.training.view.nodes
        before = [one for name in served.update.writers for one in control_inputs(nodes[name])]
        return [one for one in dict.fromkeys(before) if not self.copies.is_in_update(one)]


def update_targets(copies: Copies, served: Served) -> list[tuple[str, Site]]:
    """Return the writers of a served variable at each of its sites."""
    return [(name, site) for site in copies.sites_of(served) for name in served.update.writers]
