"""Other messages of DistributedDataParallel: the size of its buckets, gradients of 16 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.errors import InvalidInput
from autotune.lowering.device_costs import costs_of
from autotune.whatif.base import Base
from autotune.whatif.changes.distributed import (
    all_reduces,
    element_bytes,
    has_collectives,
    on_cluster,
    seconds_of,
    times_on,
)
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.waiting import ratio, refuse_changed_messages, sending_s, with_sending
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if

MIB = 2**20
HALF_BYTES = 2


@what_if(
    "bucket_size",
    title="data-parallel training with buckets of another size (bucket_size=MIB)",
    source="torch.nn.parallel.DistributedDataParallel; Daydream, Alg. 6",
    enact="model = DistributedDataParallel(model, bucket_cap_mb=MIB)",
)
def bucket_size(base: Base, question: Question) -> Base:
    """As `distributed`, with buckets of the amount in MiB, also the first one.

    Refused for a trace with collectives: how its copies would be grouped is not recorded.
    """
    amount = question.amounts.get("bucket_size")
    if amount is None or not amount > 0:
        raise InvalidInput(
            "what-if 'bucket_size' needs the size of a bucket in MiB above 0, such as "
            f"bucket_size=50, but the amount is {amount}"
        )
    if has_collectives(base):
        raise InvalidInput(
            "buckets of another size are predicted from the trace of one worker, but this trace "
            "holds collectives"
        )
    return on_cluster(base, question, training_cluster(question), bucket_bytes=int(amount * MIB))


@what_if(
    "fp16_gradients",
    title="gradients sent as 16 bits",
    source="torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    enact="model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
)
def fp16_gradients(base: Base, question: Question) -> Base:
    """Each all-reduce sends 2 bytes an element; a bucket is rounded before, copied back after.

    The rounding takes the time that packing with a cast takes in `lowering.device_costs`, within
    the message's own time: nothing else of the bucket can run meanwhile. Accuracy is not predicted.
    Messages of 16 bits or fewer stay; refused if there are no others.
    """
    refuse_changed_messages(base)
    ops = all_reduces(base)
    sizes = element_bytes(base, ops)
    wide = sizes > HALF_BYTES
    if not wide.any():
        raise InvalidInput(
            f"gradients are sent as 16 bits where they have more, but the {len(ops)} all-reduces "
            f"have elements of at most {sizes.max():.0f} bytes; leave this what-if out"
        )
    ops, sizes = ops[wide], sizes[wide]
    chosen = np.isin(np.arange(base.ops), ops)
    sizes_bytes = base.size_bytes.copy()
    sizes_bytes[ops] *= HALF_BYTES / sizes
    narrow = dict.fromkeys(ops.tolist(), HALF_BYTES)
    halved = replace(base, size_bytes=sizes_bytes, element_bytes={**base.element_bytes, **narrow})
    times = times_on(base, training_cluster(question))
    before_s, after_s = (seconds_of(one, chosen, times) for one in (base, halved))
    costs = costs_of("cuda" if base.on_device.any() else "cpu", base.device)
    cast_s = (costs["cast_s_per_byte"] + costs["unpack_s_per_byte"]) * base.size_bytes[ops]
    after = with_sending(halved, ops, ratio(after_s, before_s) * sending_s(base, ops) + cast_s)
    note = f"rounding of gradients: {costs.cast_s_per_byte.source}"
    return replace(after, notes=(*base.notes, note))
