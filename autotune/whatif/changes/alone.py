"""Training without `DistributedDataParallel`, from a recording with it."""

from __future__ import annotations

import re

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.primitives import remove
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if

_SYNCHRONIZATION = re.compile(
    r"torch::distributed|torch\.distributed|c10d::|record_param_comms|nccl:|gloo:|"
    r"aten::(?:un)?flatten_dense_tensors"
)
_UNPACK, _COPY = "aten::unflatten_dense_tensors", "aten::copy_"


@what_if(
    "alone",
    title="one process without DistributedDataParallel",
    source="Daydream, sec. 4.3 (remove)",
    enact="model = model.module",
)
def alone(base: Base, question: Question) -> Base:
    """Nothing is packed, sent or unpacked.

    - Removes collectives, and all ops of the operators of torch's reducer: scaling, copies between
      gradients and buckets, and the broadcast of buffers before the forward pass, with launches.
    - The time of the reducer's hooks outside of any operator stays.
    """
    removed = {
        number
        for number, one in enumerate(base.names.operators)
        if any(map(_SYNCHRONIZATION.match, (one.name, *one.around)))
    }
    removed |= _copies_of_buffers(base)
    ops = np.isin(base.operator, list(removed)) | (base.kind == Kind.COLLECTIVE)
    if not ops.any():
        raise InvalidInput("the trace must show a synchronization to remove, but it shows none")
    return remove(base, ops)


def _copies_of_buffers(base: Base) -> set[int]:
    """The operators that copy broadcast buffers back: those behind their unpacking on a thread."""
    copies: set[int] = set()
    for queue in np.unique(base.queue[~base.on_device & (base.queue != NONE)]):
        unpacked = False
        for op in base.queue_order(int(queue)).tolist():
            call = int(base.operator[op])
            if call == NONE:
                continue
            outer = base.names.operators[call].outer
            unpacked = outer == _UNPACK or (unpacked and outer == _COPY)
            if unpacked:
                copies.add(call)
    return copies
