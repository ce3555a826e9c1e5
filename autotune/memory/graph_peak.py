"""Peak memory of one device that runs a data-flow graph, by a replay that counts references.

A node starts when its inputs have ended and a thread is free; among ready nodes the one with the
lowest `turn` starts first. Its outputs are allocated as it starts. An output is freed when the last
node that reads it, or reads an output that shares its memory, has ended. Scratch memory is freed
when the node ends.

Source: dPRO sec. 4.3 (memory from the lifetimes of a replay); TensorFlow's executor, which drops
its reference to an input when the node that reads it has ended.

| symbol | meaning | unit |
|---|---|---|
| N | nodes | - |
| turn | order among ready nodes, such as the recorded start | - |
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.errors import InvalidInput

Output = tuple[int, int]
"""A node and the number of its output."""


@dataclass(frozen=True)
class AllocatingNode:
    """One node of a graph.

    - `inputs`: nodes that end before it starts. `reads`: outputs that it holds until it ends.
    - `outputs`: bytes of new memory of each output; `shared`: for outputs without memory of their
      own, the outputs whose memory all of them use.
    - `scratch_bytes`: further memory while it runs. `needs_thread`: False for transfers.
    """

    inputs: tuple[int, ...] = ()
    reads: tuple[Output, ...] = ()
    outputs: tuple[int, ...] = (0,)
    shared: tuple[Output, ...] = ()
    scratch_bytes: int = 0
    seconds: float = 0.0
    turn: float = 0.0
    needs_thread: bool = True


@dataclass(frozen=True)
class GraphPeak:
    """The most bytes at once, above those between two steps; `at_s`: after the step's start."""

    peak_bytes: int
    at_s: float
    node: int


def graph_peak(nodes: Sequence[AllocatingNode], threads: int) -> GraphPeak:
    """Replay the nodes. Raises `InvalidInput` without a thread, or if they wait for each other."""
    if threads < 1:
        raise InvalidInput(f"a graph needs at least 1 thread to run on, but has {threads}")
    return _Replay(nodes, threads).run()


@dataclass
class _Replay:
    nodes: Sequence[AllocatingNode]
    free_threads: int
    live_bytes: int = 0
    peak: GraphPeak = GraphPeak(0, 0.0, -1)
    ready: list[tuple[float, int]] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.nodes)
        self.missing = [len(set(node.inputs)) for node in self.nodes]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for number, node in enumerate(self.nodes):
            for source in set(node.inputs):
                self.after[source].append(number)
        self.held = self._held()
        self.references: dict[Output, int] = {}
        for node in self.nodes:
            for buffer in self._read(node):
                self.references[buffer] = self.references.get(buffer, 0) + 1

    def _held(self) -> list[list[frozenset[Output]]]:
        """Node -> output -> the buffers in which it lies."""
        held: list[list[frozenset[Output]]] = [[] for _ in self.nodes]
        for number in _in_order(self.nodes, self.after, list(self.missing)):
            node = self.nodes[number]
            lent = [self._at(held, output) for output in node.shared]
            borrowed = frozenset().union(*lent)
            held[number] = [
                frozenset({(number, index)}) if size else borrowed
                for index, size in enumerate(node.outputs)
            ]
        return held

    @staticmethod
    def _at(held: Sequence[Sequence[frozenset[Output]]], output: Output) -> frozenset[Output]:
        of_node = held[output[0]]
        return of_node[min(output[1], len(of_node) - 1)] if of_node else frozenset()

    def _read(self, node: AllocatingNode) -> set[Output]:
        buffers: set[Output] = set()
        for output in node.reads:
            buffers |= self._at(self.held, output)
        return buffers

    def run(self) -> GraphPeak:
        for number, missing in enumerate(self.missing):
            if not missing:
                heapq.heappush(self.ready, (self.nodes[number].turn, number))
        ended = 0
        now_s = 0.0
        while True:
            self._start(now_s)
            if not self.running:
                break
            now_s, number = heapq.heappop(self.running)
            self._end(number)
            ended += 1
        assert ended == len(self.nodes)
        return self.peak

    def _start(self, now_s: float) -> None:
        kept: list[tuple[float, int]] = []
        while self.ready:
            turn, number = heapq.heappop(self.ready)
            node = self.nodes[number]
            if node.needs_thread and not self.free_threads:
                kept.append((turn, number))
                continue
            self.free_threads -= node.needs_thread
            self.live_bytes += sum(node.outputs) + node.scratch_bytes
            if self.live_bytes > self.peak.peak_bytes:
                self.peak = GraphPeak(self.live_bytes, now_s, number)
            heapq.heappush(self.running, (now_s + node.seconds, number))
        for one in kept:
            heapq.heappush(self.ready, one)

    def _end(self, number: int) -> None:
        node = self.nodes[number]
        self.free_threads += node.needs_thread
        self.live_bytes -= node.scratch_bytes
        for buffer in self._read(node):
            self.references[buffer] -= 1
            if not self.references[buffer]:
                self.live_bytes -= self.nodes[buffer[0]].outputs[buffer[1]]
        for index, size in enumerate(node.outputs):
            if size and not self.references.get((number, index)):
                self.live_bytes -= size
        for other in self.after[number]:
            self.missing[other] -= 1
            if not self.missing[other]:
                heapq.heappush(self.ready, (self.nodes[other].turn, other))


def _in_order(
    nodes: Sequence[AllocatingNode], after: Sequence[Sequence[int]], missing: list[int]
) -> list[int]:
    """Each node behind its inputs."""
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    if len(order) < len(nodes):
        raise InvalidInput(
            f"the nodes of a graph may not wait for each other, but {len(nodes) - len(order)} do"
        )
    return order
