"""Gradient accumulation: a step over several micro-batches, as a profile and a workload.

The batch is cut into parts of equal size, and the gradients of the parts add up. Only the backward
pass of the last part synchronizes. Activations and temporaries outside the update shrink with the
batch. The times of the passes shrink too, except for a fixed share that every part pays
(`FixedShare`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autotune.errors import InvalidInput
from autotune.memory.segments import last_backward
from autotune.recordings.memory_profile import (
    PROPORTIONAL,
    FixedShare,
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    TensorRole,
)
from autotune.workload import Variable, Workload


def accumulated(
    profile: MemoryProfile, parts: int, fixed: FixedShare = PROPORTIONAL
) -> MemoryProfile:
    """The profile of a step over `parts` micro-batches. Raises `InvalidInput` below one part.

    From the second part on, a new gradient exists while it is added to the sum.
    """
    if parts < 1:
        raise InvalidInput(f"a batch has at least one part, but is to have {parts}")
    forward, backward = fixed.left(parts)
    computed = last_backward(profile) + 1
    shrunk = [
        replace(
            segment,
            seconds=segment.seconds * (forward if segment.phase is Phase.FORWARD else backward),
            relief_bytes=int(segment.relief_bytes * (1 / parts)),
        )
        for segment in profile.segments[:computed]
    ]
    lifetimes = tuple(
        lifetime
        for before in profile.lifetimes
        for lifetime in _accumulated(before, parts, computed)
    )
    regions = tuple(
        replace(
            region,
            passes=tuple(
                Pass(*(at + part * computed for at in (used.first, used.last, used.backward)))
                for part in range(parts)
                for used in region.passes
            ),
        )
        for region in profile.regions
    )
    segments = (*(shrunk * parts), *profile.segments[computed:])
    return replace(profile, segments=segments, lifetimes=lifetimes, regions=regions)


def accumulated_workload(
    workload: Workload, parts: int, fixed: FixedShare = PROPORTIONAL
) -> Workload:
    """The workload of `accumulated`, with source "assumed" for more than one part.

    Everything before the backward pass of the last part counts as the forward pass.
    """
    forward, backward = fixed.left(parts)

    def shrunk(variable: Variable) -> Variable:
        ready_s, needed_s = variable.ready_s, variable.needed_s
        return replace(
            variable,
            ready_s=None if ready_s is None else ready_s * backward,
            needed_s=None if needed_s is None else needed_s * forward,
        )

    forward_s = workload.forward_s * forward
    backward_s = workload.backward_s * backward
    return replace(
        workload,
        variables=tuple(map(shrunk, workload.variables)),
        forward_s=parts * forward_s + (parts - 1) * backward_s,
        backward_s=backward_s,
        source="assumed" if parts > 1 else workload.source,
    )


def _accumulated(lifetime: Lifetime, parts: int, computed: int) -> Iterator[Lifetime]:
    """One lifetime over the parts, of `computed` segments each, and the update."""
    born, dies = lifetime.born, lifetime.dies
    if born is None or dies is None:
        yield lifetime
        return
    behind = (parts - 1) * computed
    crosses_step = dies < born
    if born >= computed:  # born in the update
        dies_early = crosses_step and dies < computed
        yield replace(lifetime, born=born + behind, dies=dies if dies_early else dies + behind)
    elif lifetime.kind is TensorRole.GRADIENT:
        dies_early = crosses_step or dies < computed
        yield replace(lifetime, dies=dies if dies_early else dies + behind)
        for part in range(1, parts):
            yield replace(lifetime, born=born + part * computed, dies=born + part * computed)
    else:
        size_bytes = int(np.ceil(lifetime.bytes * (1 / parts)))
        for part in range(parts):
            start = born + part * computed
            if not crosses_step and dies < computed:
                end = dies + part * computed
            elif part + 1 < parts:  # until the next part creates its own
                end = start + computed
            else:
                end = dies if crosses_step else dies + behind
            yield replace(lifetime, bytes=size_bytes, born=start, dies=end)
