"""Recomputation of activations (gradient checkpointing; Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.memory.recomputation import Run, recomputation_error, recomputed
from autotune.whatif.base import Base
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.primitives import insert
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

RECOMPUTED = "recompute block"
"""Names of the kernels that compute a block again."""
FEWEST_BLOCKS = 3
"""A part of the forward pass that repeats itself this often is a model's stack of blocks."""
LEAST_SHARE = 0.5
"""Equal blocks with fewer of the forward pass's kernels are a part that happens to repeat itself,
such as convolutions in a row, rather than the model's blocks."""
AGAIN = Factor(
    1.0, 0.95, 1.1, "assumed: inputs may lie in a cache, states of random numbers are kept"
)


def _memory(memory: ReplicaMemory, base: Base, question: Question) -> ReplicaMemory:
    """The modules that are numbered in one list and may be computed again keep no activations.

    Raises `InvalidInput` if there are fewer than `FEWEST_BLOCKS` of them.
    """
    lists: dict[str, list[int]] = {}
    for number, region in enumerate(memory.profile.regions):
        name, _, place = region.name.rpartition(".")
        if place.isdigit() and recomputation_error(region) is None:
            lists.setdefault(name, []).append(number)
    blocks = max(lists.values(), key=len, default=[])
    if len(blocks) < FEWEST_BLOCKS:
        raise InvalidInput(
            f"the memory of recomputation needs at least {FEWEST_BLOCKS} modules of one list that "
            f"may be computed again, but there are {len(blocks)}"
        )
    runs = [Run(number, number) for number in blocks]
    return replace(memory, profile=recomputed(memory.profile, runs))


@what_if(
    "recompute",
    title="recompute the activations of the repeated blocks",
    source="Chen et al. 2016, arXiv:1604.06174",
    enact="model.gradient_checkpointing_enable()",
    memory=_memory,
)
def recompute(base: Base, question: Question) -> Base:
    """Every block runs its forward pass again, right before its backward pass.

    - Blocks are the longest stretch of the forward pass in which the same kernels come again and
      again, such as the layers of a transformer. Work before and after it is not repeated.
    - A second forward pass takes as long as the first one, on the host and on the device.
    - The blocks' second passes are spread evenly over the backward pass.
    - Saving and restoring the state of random numbers takes no time.
    """
    forward = _in_launch_order(base, Kind.FORWARD)
    blocks = repeated_blocks([base.names.ops[op] for op in forward.tolist()])
    if blocks is None:
        raise InvalidInput(
            f"recomputation needs a forward pass with at least {FEWEST_BLOCKS} equal blocks, but "
            "its kernels do not repeat themselves"
        )
    if blocks.size < LEAST_SHARE * len(forward):
        raise InvalidInput(
            f"recomputation needs equal blocks with at least {LEAST_SHARE:.0%} of the forward "
            f"pass's {len(forward)} kernels, but the longest stretch of equal ones has "
            f"{blocks.size}; which layers would be computed again is unknown"
        )
    backward = _in_launch_order(base, Kind.BACKWARD)
    if len(backward) < blocks.count:
        raise InvalidInput(
            f"recomputation needs a backward pass, but the trace has {len(backward)} kernels of one"
        )
    ops = [
        forward[blocks.first + block * blocks.length :][: blocks.length]
        for block in range(blocks.count)
    ]
    again = AGAIN.at(question.reading)
    device_s = np.array([(base.duration_s[block] + base.gap_s[block]).sum() for block in ops])
    device_s *= again
    host_s = np.array([_host_s(base, block) for block in ops])
    at = backward[np.arange(blocks.count) * len(backward) // blocks.count]
    names = [f"{RECOMPUTED} {block}" for block in reversed(range(blocks.count))]
    grown = insert(base, at, device_s[::-1], names, Kind.BACKWARD)
    duration_s = grown.duration_s.copy()
    duration_s[base.ops + blocks.count :] = host_s[::-1]
    return replace(grown, duration_s=duration_s)


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `length` ops each, from op `first` on."""

    first: int
    length: int
    count: int

    @property
    def size(self) -> int:
        return self.length * self.count


def repeated_blocks(names: list[str]) -> Blocks | None:
    """The longest stretch of a sequence that consists of equal blocks, with the shortest blocks.

    None if fewer than `FEWEST_BLOCKS` are equal.
    """
    known: dict[str, int] = {}
    numbers = np.array([known.setdefault(name, len(known)) for name in names])
    best: Blocks | None = None
    for length in range(1, len(names) // FEWEST_BLOCKS + 1):
        same = np.concatenate([[False], numbers[:-length] == numbers[length:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, ends = edges[::2], edges[1::2]
        if not len(starts):
            continue
        longest = int(np.argmax(ends - starts))
        count = int(ends[longest] - starts[longest]) // length + 1
        if count >= FEWEST_BLOCKS and (best is None or count * length > best.size):
            best = Blocks(int(starts[longest]), length, count)
    return best


def _in_launch_order(base: Base, kind: Kind) -> IntArray:
    ops: IntArray = base.launched[base.kind[base.launched] == kind]
    return ops


def _host_s(base: Base, ops: IntArray) -> float:
    """How long the host works to launch `ops`, from the first call to the last one."""
    calls = base.launch[ops]
    order = base.queue_order(int(base.queue[calls[calls != NONE][0]]))
    inside = np.flatnonzero(np.isin(order, calls))
    stretch = order[inside[0] : inside[-1] + 1]
    return float((base.duration_s[stretch] + base.gap_s[stretch]).sum())
