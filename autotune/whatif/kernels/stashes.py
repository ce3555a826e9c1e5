"""Keeps layers' inputs off the device between the passes: the memory of vDNN and Gist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput
from autotune.memory.segments import first_backward, ready_segments
from autotune.recordings.memory_profile import Lifetime, MemoryProfile, TensorRole
from autotune.whatif.base import Operator
from autotune.whatif.kernels.layer_roles import Layer, input_bytes
from autotune.whatif.memory import ReplicaMemory

ALLOCATED_BYTES = 2**21
"""CUDA's allocator of torch rounds large blocks up to a multiple of this."""
SAME_SIZE = 0.01
"""By how much a tensor may be larger than a layer's input: a profile adds up tensors of equal
lifetimes, such as a normalization's output and its statistics."""


@dataclass(frozen=True)
class Stash:
    """How a tensor is kept from its layer's forward pass to its backward pass.

    `left_share`: bytes that stay on the device. `back_ahead`: by how many layers the whole tensor
    is back before its layer's backward pass.
    """

    left_share: float
    back_ahead: int


def stash_inputs(
    memory: ReplicaMemory,
    layers: Sequence[Layer],
    stash: Stash,
    chosen: Sequence[bool] | None = None,
) -> ReplicaMemory:
    """The memory of a replica that stashes inputs of `layers`, all in the order of the forward
    pass.

    `chosen`: whether a layer's input is stashed; by default all are. A layer's input is the
    youngest activation of its size that is alive from the layer's forward to its backward pass. An
    input that an earlier layer stashes is not stashed again. Raises `InvalidInput` if the batch is
    in parts, or if the profile's variables are not those of the layers.
    """
    if memory.parts > 1:
        raise InvalidInput(
            "each part of a batch stashes its inputs, so the memory is known only if accumulate is "
            "named behind this what-if, such as vdnn+accumulate"
        )
    profile = memory.profile
    passes = _passes(profile, layers)
    turn = first_backward(profile)
    lifetimes = list(profile.lifetimes)
    whole_bytes = [one.bytes for one in lifetimes]
    for number, layer in enumerate(layers):
        forward, _ = passes[number]
        ahead = number + stash.back_ahead
        back = passes[ahead][1] if ahead < len(layers) else turn
        recorded_bytes = input_bytes(layer.operator)
        assert recorded_bytes is not None, "a layer's weight was found by its size"
        size = math.ceil(recorded_bytes * memory.times)
        at = _tensor(lifetimes, whole_bytes, forward, passes[number][1], size)
        skipped = chosen is not None and not chosen[number]
        if skipped or at is None or back <= forward + 1:
            continue
        whole = lifetimes[at]
        assert whole.born is not None and whole.dies is not None
        part = replace(whole, bytes=size, variable=None)
        lifetimes[at] = replace(whole, bytes=whole.bytes - size)
        lifetimes.append(replace(part, dies=forward))
        lifetimes.append(replace(part, born=back))
        if stash.left_share:
            left = math.ceil(size * stash.left_share)
            lifetimes.append(replace(part, bytes=left, born=forward + 1, dies=back - 1))
    return replace(memory, profile=replace(profile, lifetimes=tuple(lifetimes)))


def _tensor(
    lifetimes: Sequence[Lifetime],
    whole_bytes: Sequence[int],
    forward: int,
    backward: int,
    size: int,
) -> int | None:
    """The number of the youngest activation of about `size` bytes, or else of one with more.

    None if an earlier layer stashes it. Which of several tensors of one size it is does not change
    the bytes alive.
    """
    best: tuple[tuple[bool, int], int] | None = None
    for number, one in enumerate(lifetimes[: len(whole_bytes)]):
        born, dies, whole = one.born, one.dies, whole_bytes[number]
        if one.kind is not TensorRole.ACTIVATION or whole < size:
            continue
        if born is None or dies is None or not born < forward < backward <= dies:
            continue
        key = whole - size <= SAME_SIZE * size + ALLOCATED_BYTES, born
        if best is None or key > best[0]:
            best = key, number
    if best is None or lifetimes[best[1]].bytes < size:
        return None
    return best[1]


def _passes(profile: MemoryProfile, layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """(segment of the forward pass, of the backward pass) of each layer, by its weight."""
    size_of = {
        one.variable: one.bytes for one in profile.lifetimes if one.kind is TensorRole.PARAMETER
    }
    ready_at = ready_segments(profile)
    reads = iter(
        (at, name) for at, segment in enumerate(profile.segments) for name in segment.reads
    )
    passes = []
    for layer in layers:
        size = input_bytes(layer.operator, 1)
        sizes = (size, _float_bytes(layer.operator))
        for at, name in reads:
            if size_of.get(name) in sizes and name in ready_at:
                passes.append((at, ready_at[name]))
                break
        else:
            raise InvalidInput(
                f"the recorded memory must read a weight of {size} bytes for layer "
                f"{len(passes) + 1} of {len(layers)} ({layer.operator.name}), but reads none; are "
                "trace and memory of the same training?"
            )
    return passes


def _float_bytes(operator: Operator) -> int | None:
    """Bytes of an operator's weight in single precision: autocast reads it in another one."""
    inputs = operator.inputs
    if inputs is None or len(inputs.dims) < 2 or not inputs.dims[1]:
        return None
    return 4 * math.prod(inputs.dims[1])
