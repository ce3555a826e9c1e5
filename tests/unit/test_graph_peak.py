"""The memory of a replayed data-flow graph, on graphs whose peaks are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.memory.graph_peak import AllocatingNode, graph_peak


def chain(sizes: list[int]) -> list[AllocatingNode]:
    """Each node reads the output of the one before."""
    return [
        AllocatingNode(
            inputs=(number - 1,) if number else (),
            reads=((number - 1, 0),) if number else (),
            outputs=(size,),
            seconds=1.0,
        )
        for number, size in enumerate(sizes)
    ]


def test_an_output_lives_until_its_last_reader_has_ended() -> None:
    nodes = chain([10, 20, 30, 5])
    assert graph_peak(nodes, threads=1).peak_bytes == 50
    nodes[3] = replace(nodes[3], inputs=(0, 2), reads=((0, 0), (2, 0)))
    peak = graph_peak(nodes, threads=1)
    assert (peak.peak_bytes, peak.at_s, peak.node) == (60, 2.0, 2)


def test_an_output_that_nobody_reads_is_freed_as_its_node_ends() -> None:
    nodes = [AllocatingNode(outputs=(7,)), AllocatingNode(inputs=(0,), outputs=(8,))]
    assert graph_peak(nodes, threads=1).peak_bytes == 8


def test_scratch_memory_is_freed_with_its_node() -> None:
    nodes = chain([10, 20, 30])
    nodes[1] = replace(nodes[1], scratch_bytes=100)
    assert graph_peak(nodes, threads=1).peak_bytes == 130


def test_a_shared_output_keeps_its_memory_alive_without_new_memory() -> None:
    nodes = chain([10, 0, 30, 5])
    nodes[1] = replace(nodes[1], shared=((0, 0),))
    assert graph_peak(nodes, threads=1).peak_bytes == 40
    nodes[1] = replace(nodes[1], shared=())
    assert graph_peak(nodes, threads=1).peak_bytes == 35


def test_outputs_of_one_node_are_freed_apart() -> None:
    split = AllocatingNode(outputs=(10, 20))
    first = AllocatingNode(inputs=(0,), reads=((0, 0),), outputs=(0,))
    second = AllocatingNode(inputs=(1,), reads=((0, 1),), outputs=(25,))
    assert graph_peak([split, first, second], threads=1).peak_bytes == 45


def test_more_threads_hold_more_and_transfers_need_none() -> None:
    nodes = [AllocatingNode(outputs=(10,), seconds=1.0) for _ in range(4)]
    assert [graph_peak(nodes, threads).peak_bytes for threads in (1, 2, 4)] == [10, 20, 40]
    transfers = [replace(node, needs_thread=False) for node in nodes]
    assert graph_peak(transfers, threads=1).peak_bytes == 40


def test_ready_nodes_start_in_their_turn() -> None:
    large = AllocatingNode(outputs=(100,), seconds=1.0, turn=2.0)
    kept = AllocatingNode(outputs=(10,), seconds=1.0, turn=1.0)
    reader = AllocatingNode(inputs=(0, 1), reads=((1, 0),), outputs=(0,))
    assert graph_peak([large, kept, reader], threads=1).peak_bytes == 110
    early = replace(large, turn=0.0)
    assert graph_peak([early, kept, reader], threads=1).peak_bytes == 100


def test_a_cycle_and_a_graph_without_threads_are_refused() -> None:
    with pytest.raises(InvalidInput, match="may not wait for each other, but 2 do"):
        graph_peak([AllocatingNode(inputs=(1,)), AllocatingNode(inputs=(0,))], threads=1)
    with pytest.raises(InvalidInput, match="at least 1 thread"):
        graph_peak([AllocatingNode()], threads=0)
