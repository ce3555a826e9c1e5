"""What if feature maps were kept encoded between the passes?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.kernels.layer_roles import Layer, Role, convolutions, input_bytes, roles
from autotune.whatif.kernels.situations import execution_order
from autotune.whatif.kernels.stashes import Stash, stash_inputs
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.primitives import connect, insert
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

SPARSE_SHARE = Factor(
    0.625,
    0.25,
    0.875,
    "Jain et al. (ISCA 2018): values and one-byte columns of what ReLU leaves; assumed: it leaves "
    "50 % (20 %, 70 %)",
)
"""Bytes of a ReLU's output in compressed rows, as a share of all its bytes in single precision."""
BINARY_SHARE = 1 / 32
"""A bit for each value of 32 bits says whether it is positive."""


@dataclass(frozen=True)
class _Encoding:
    """A map: the ReLU's kernel whose rate counts, the op behind which the map is encoded, and the
    one before which it is decoded.

    `binary`: as a bit for each value. `layer`: the convolution that reads it, by its number.
    `size`: bytes of the map as a multiple of those of the ReLU's.
    """

    relu: int
    encoded_behind: int
    decoded_before: int
    binary: bool
    layer: int = NONE
    size: float = 1.0


def _memory(memory: ReplicaMemory, base: Base, question: Question) -> ReplicaMemory:
    """Inputs of convolutions behind a ReLU are sparse between the passes; others are not
    counted."""
    layers = convolutions(base)
    sparse = {one.layer for one in _encodings(base) if not one.binary}
    stash = Stash(left_share=SPARSE_SHARE.at(question.reading), back_ahead=0)
    return stash_inputs(memory, layers, stash, [n in sparse for n in range(len(layers))])


@what_if(
    "gist",
    title="encoding of feature maps (Gist, lossless)",
    source="Jain et al. (ISCA 2018); Daydream (USENIX ATC 2020), Alg. 11",
    enact="torch.autograd.graph.saved_tensors_hooks(encode, decode) around the model",
    memory=_memory,
)
def gist(base: Base, question: Question) -> Base:
    """Outputs of ReLUs are kept encoded between the passes, without loss.

    In front of a convolution the map of a ReLU, or of a pooling behind it, becomes sparse rows
    (SSDC); in front of a pooling a ReLU's map becomes a bit for each value (Binarize). An encoding
    kernel follows the layer's forward pass, and a decoding kernel precedes its backward pass, each
    with a launch. Their times follow the bytes, at the rate of the ReLU that wrote the map, which
    reads and writes it: counting and writing of sparse rows read the map twice. Assumes that the
    encoding runs on the same stream. Lossy encoding is left out. Reported memory counts the maps in
    front of convolutions only.
    """
    encodings = _encodings(base)
    share = SPARSE_SHARE.at(question.reading)
    sizes = np.array([one.size for one in encodings])
    relu_s = base.duration_s[[one.relu for one in encodings]] * sizes
    binary = np.array([one.binary for one in encodings])
    encode_s = relu_s / 2 * np.where(binary, 1 + BINARY_SHARE, 2 + share)
    decode_s = relu_s / 2 * np.where(binary, 1 + BINARY_SHARE, 1 + share)
    behind = [_launched_before(base, one) for one in encodings]
    base, _ = _inserted(base, [one.encoded_behind for one in encodings], encode_s, "encode")
    base, decoders = _inserted(base, behind, decode_s, "decode")
    return connect(base, decoders, [one.decoded_before for one in encodings])


def _launched_before(base: Base, one: _Encoding) -> int:
    """The last op of the ReLU's stream that is launched and begins before the map is decoded."""
    launched = base.on_device & (base.launch != NONE) & (base.queue == base.queue[one.relu])
    launched[one.decoded_before] = True
    order = execution_order(base, launched)
    return int(order[np.flatnonzero(order == one.decoded_before)[0] - 1])


def _inserted(
    base: Base, after: list[int], seconds: FloatArray, name: str
) -> tuple[Base, IntArray]:
    """Kernels behind `after`, and their numbers; several behind the same op follow each other."""
    places = np.array(after)
    numbers = np.zeros(len(places), dtype=np.int64)
    left = np.arange(len(places))
    while len(left):
        _, first = np.unique(places[left], return_index=True)
        now = left[np.sort(first)]
        names = [f"{name} {number}" for number in now]
        numbers[now] = base.ops + np.arange(len(now))
        base = insert(base, places[now], seconds[now], names, Kind.OTHER)
        left = np.setdiff1d(left, now)
    return base, numbers


def _sparse(base: Base, relu: int, layer: Layer, number: int) -> _Encoding:
    """The input of a convolution, written by a ReLU or by a pooling behind it."""
    operator = int(base.operator[relu])
    relu_bytes = None if operator == NONE else input_bytes(base.names.operators[operator])
    map_bytes = input_bytes(layer.operator)
    size = map_bytes / relu_bytes if relu_bytes and map_bytes else 1.0
    last, gradient = int(layer.forward[-1]), int(layer.backward[0])
    return _Encoding(relu, last, gradient, binary=False, layer=number, size=size)


def _encodings(base: Base) -> list[_Encoding]:
    """Maps between a ReLU and the convolution or pooling behind it, in order of the forward
    pass."""
    role = roles(base)
    role[(base.kind == Kind.UPDATE)] = Role.OTHER
    layers = convolutions(base)
    layer_of = {int(layer.forward[0]): number for number, layer in enumerate(layers)}
    shown = base.on_device & (role != Role.OTHER) & (role != Role.BATCHNORM)
    order = execution_order(base, shown)
    forward = [int(op) for op in order if base.kind[op] != Kind.BACKWARD]
    backward = [int(op) for op in order if base.kind[op] == Kind.BACKWARD]
    relus_back = [op for op in backward if role[op] == Role.RELU]
    relus = [op for op in forward if role[op] == Role.RELU]
    if not relus:
        raise InvalidInput("the trace has no ReLU, whose outputs Gist encodes")
    back_of = dict(zip(relus, reversed(relus_back), strict=False))
    encodings = []
    for place, op in enumerate(forward[:-1]):
        behind = forward[place + 1]
        if role[op] != Role.RELU or op not in back_of:
            continue
        if role[behind] == Role.POOL:
            encodings.append(_Encoding(op, behind, back_of[op], binary=True))
            behind = forward[min(place + 2, len(forward) - 1)]
        if behind in layer_of:
            encodings.append(_sparse(base, op, layers[layer_of[behind]], layer_of[behind]))
    if not encodings:
        raise InvalidInput(
            "Gist encodes ReLUs' outputs in front of convolutions or poolings, but no convolution "
            "or pooling of the trace follows a ReLU"
        )
    return encodings
