"""Deep gradient compression: only the largest elements are sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.lowering.device_costs import costs_of
from autotune.lowering.traffic import Collective
from autotune.whatif.base import Base
from autotune.whatif.changes.distributed import all_reduces, element_bytes, times_on
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.waiting import refuse_changed_messages, with_sending
from autotune.whatif.primitives import connect, insert, insert_calls
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if

USUAL_SHARE = 0.001
"""Deep Gradient Compression (ICLR 2018), sec. 4: 99.9 % of the elements stay."""
INDEX_BYTES = 4


@what_if(
    "deep_gradient_compression",
    title="deep gradient compression: 0.1 % of the elements are sent",
    source="Deep Gradient Compression (ICLR 2018); Daydream, Alg. 12",
    enact="model.register_comm_hook(state, hook)  # your hook gathers the largest elements; "
    "autotune tune --lossy tries the share 0.1",
)
def deep_gradient_compression(base: Base, question: Question) -> Base:
    """Each all-reduce becomes an all-gather of the largest elements of every worker.

    The amount is the share that is sent (`deep_gradient_compression=0.01`, usually 0.001): values
    and their numbers of 32 bits. A kernel behind the last gradient of a message finds them; before
    the first reader, one adds those of all workers. Their times per element are those of
    `lowering.device_costs`. Accuracy is not predicted; momentum correction costs nothing here.
    """
    share = question.amounts.get("deep_gradient_compression", USUAL_SHARE)
    if not 0 < share <= 1:
        raise InvalidInput(f"a share of the elements must lie in (0, 1], but is {share}")
    cluster = training_cluster(question)
    costs = costs_of("cuda" if base.on_device.any() else "cpu", base.device)
    refuse_changed_messages(base)
    messages = all_reduces(base)
    value_bytes = element_bytes(base, messages)
    elements = base.size_bytes[messages] / value_bytes
    gathered = cluster.world_size * np.ceil(share * elements)
    sent_bytes = gathered * (value_bytes + INDEX_BYTES)
    find_s = costs["top_k_find_s"] + costs["top_k_find_s_per_element"] * elements
    add_s = costs["top_k_add_s"] + costs["top_k_add_s_per_element"] * gathered
    gather_s = times_on(base, cluster).seconds(Collective.ALL_GATHER, sent_bytes)
    base = with_sending(base, messages, gather_s)
    sizes_bytes = base.size_bytes.copy()
    sizes_bytes[messages] = sent_bytes
    base = replace(base, size_bytes=sizes_bytes, messages="deep_gradient_compression")
    base = _read_later(base, messages, add_s)
    note = f"finding and adding the largest elements: {costs.top_k_find_s_per_element.source}"
    return replace(_found_before(base, messages, find_s), notes=(*base.notes, note))


def _read_later(base: Base, messages: IntArray, add_s: FloatArray) -> Base:
    """Add the elements of all workers in front of each message's first reader, on its queue."""
    durations_s = base.duration_s.copy()
    has_device = bool(base.on_device.any())
    for message, seconds in zip(messages.tolist(), add_s.tolist(), strict=True):
        readers = base.child[base.parent == message]
        readers = readers[(base.queue[readers] != base.queue[message])]
        readers = readers[(base.queue[readers] != NONE) & (base.on_device[readers] == has_device)]
        durations_s[readers[0] if len(readers) else message] += seconds
    return replace(base, duration_s=durations_s)


def _found_before(base: Base, messages: IntArray, find_s: FloatArray) -> Base:
    """Insert the search behind the last kernel that each message waits for."""
    has_device = bool(base.on_device.any())
    total: dict[int, float] = {}
    behind: dict[int, list[int]] = {}
    for message, seconds in zip(messages.tolist(), find_s.tolist(), strict=True):
        parents = base.parent[(base.child == message) & (base.later == 0)]
        parents = parents[(base.queue[parents] != base.queue[message])]
        parents = parents[(base.queue[parents] != NONE) & (base.on_device[parents] == has_device)]
        if has_device:
            parents = parents[base.launch[parents] != NONE]
        if len(parents):
            at = int(parents.max())
            total[at] = total.get(at, 0.0) + seconds
            behind.setdefault(at, []).append(message)
    after = np.array(sorted(total), dtype=np.int64)
    seconds = np.array([total[op] for op in after.tolist()])
    names = [f"find the largest of {base.names.ops[op]}" for op in after.tolist()]
    added = base.ops + np.arange(len(after))
    if has_device:
        base = insert(base, after, seconds, names, Kind.PACK)
    else:
        base, added = insert_calls(base, after, seconds, names, Kind.PACK)
    for op, at in zip(added.tolist(), after.tolist(), strict=True):
        base = connect(base, op, behind[at])
    return base
