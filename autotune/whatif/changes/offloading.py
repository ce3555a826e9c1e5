"""What if feature maps were offloaded to the host between the passes?"""

from __future__ import annotations

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.kernels.layer_roles import Layer, convolutions, input_bytes
from autotune.whatif.kernels.situations import execution_order, stream_neighbours
from autotune.whatif.kernels.stashes import Stash, stash_inputs
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.primitives import add, connect, insert_calls, schedule, usual_launch
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import what_if

COPIES = "offloading"
LARGE_BYTES = 2**20
"""Copies of at least this size show the bandwidth to the host."""


def _memory(memory: ReplicaMemory, base: Base, question: Question) -> ReplicaMemory:
    """Inputs of convolutions leave the device, and return with the backward pass of the next
    one."""
    return stash_inputs(memory, convolutions(base), Stash(left_share=0.0, back_ahead=1))


@what_if(
    "vdnn",
    title="offloading of convolutions' inputs (vDNN; vdnn=GB/S)",
    source="Rhu et al. (MICRO 2016); Daydream (USENIX ATC 2020), Alg. 10, corrected",
    enact="torch.autograd.graph.save_on_cpu(pin_memory=True) around the convolutions",
    memory=_memory,
)
def vdnn(base: Base, question: Question) -> Base:
    """The input of every convolution is copied to the host, and back before its backward pass.

    vDNN's policy for convolutions: the copy begins with the layer's forward pass; the layer behind
    it waits until the copy is done, since only then its memory is free (not in the optimistic
    reading). The copy back begins with the backward pass of the convolution behind it, and its own
    backward pass waits for it. Copies take turns on a stream of their own: those to the host first,
    then in the order of their need. Their bandwidth is that of large copies in the trace, or `vdnn`
    in GB/s. Assumes pinned memory, and that copies do not slow kernels down. An input that two
    convolutions share is copied for each.
    """
    layers = convolutions(base)
    bytes_per_s = _bandwidth(base, question)
    sizes = np.array([_map_bytes(layer) for layer in layers])
    count = len(layers)
    firsts = np.array([layer.forward[0] for layer in layers])
    gradients = np.array([layer.backward[0] for layer in layers])
    # each map returns with the backward pass of the next convolution; the last one with its own
    triggers = np.append(gradients[1:], _first_backward(base, gradients[-1]))
    out_names = [f"offload {number}" for number in range(count)]
    back_names = [f"prefetch {number}" for number in range(count)]
    seconds = sizes / bytes_per_s
    before, behind = stream_neighbours(base)
    lasts = np.array([layer.forward[-1] for layer in layers])
    base, out_calls = _launched_with(base, firsts, out_names)
    base, back_calls = _launched_with(base, triggers[:-1], back_names[:-1])
    base, last_call = _launched_with(base, triggers[-1:], back_names[-1:])
    back_calls = np.append(back_calls, last_call)
    _, latency_s = usual_launch(base)
    base, out = add(base, COPIES, seconds, out_names, Kind.COPY, size_bytes=sizes, on_device=True)
    base, back = add(base, COPIES, seconds, back_names, Kind.COPY, size_bytes=sizes, on_device=True)
    base = connect(base, out_calls, out, delay_s=latency_s)
    base = connect(base, back_calls, back, delay_s=latency_s)
    base = connect(base, out, back)
    base = connect(base, back, gradients)
    for ops, starts in ((out, firsts), (back, triggers)):
        known = before[starts] != NONE
        base = connect(base, before[starts][known], ops[known])
        stream_end = _stream_end(base, behind, starts[~known])
        base = connect(base, stream_end, ops[~known], later=1)
    if question.reading is not Reading.OPTIMISTIC:
        known = behind[lasts] != NONE  # a convolution at the end of a step delays nothing in it
        base = connect(base, out[known], behind[lasts][known])
    copies = np.zeros(base.ops, dtype=np.bool_)
    copies[out], copies[back] = True, True
    return schedule(base, copies, np.concatenate([np.arange(count), 2 * count - np.arange(count)]))


def _stream_end(base: Base, behind: IntArray, ops: IntArray) -> IntArray:
    """The last device op of a step on the stream of each op."""
    ends = np.flatnonzero(base.on_device[: len(behind)] & (behind == NONE))
    of_queue = {int(base.queue[end]): int(end) for end in ends if base.queue[end] != NONE}
    return np.array([of_queue[int(base.queue[op])] for op in ops], dtype=np.int64)


def _map_bytes(layer: Layer) -> int:
    size = input_bytes(layer.operator)
    if size is None:
        raise InvalidInput(
            "offloading needs the sizes of the convolutions' inputs, but the trace does not state "
            "them; record with shapes (record_shapes=True)"
        )
    return size


def _bandwidth(base: Base, question: Question) -> float:
    """Bytes per second between host and device."""
    if (given := question.amounts.get("vdnn")) is not None:
        if not 0 < given < np.inf:
            raise InvalidInput(f"a bandwidth in GB/s must be above 0, but vdnn is {given}")
        return given * 1e9
    copies = (base.kind == Kind.COPY) & base.on_device & (base.size_bytes >= LARGE_BYTES)
    copies &= base.duration_s > 0
    if not copies.any():
        raise InvalidInput(
            "offloading needs the bandwidth between host and device, but the trace has no copy of "
            f"at least {LARGE_BYTES} bytes between them; state it in GB/s as vdnn=GB/S"
        )
    return float((base.size_bytes[copies] / base.duration_s[copies]).max())


def _first_backward(base: Base, otherwise: int) -> int:
    """The first device op of the backward pass on the stream of `otherwise` that is launched."""
    chosen = (base.kind == Kind.BACKWARD) & base.on_device & (base.launch != NONE)
    order = execution_order(base, chosen & (base.queue == base.queue[otherwise]))
    return int(order[0])


def _launched_with(base: Base, ops: IntArray, names: list[str]) -> tuple[Base, IntArray]:
    """Calls of copies, each behind the call that launches one of `ops`."""
    calls = base.launch[ops].astype(np.int64)
    if np.any(calls == NONE):
        raise InvalidInput("offloading needs the launches of all convolutions; one has none")
    call_s, _ = usual_launch(base)
    return insert_calls(base, calls, np.full(len(ops), call_s), [f"launch {one}" for one in names])
