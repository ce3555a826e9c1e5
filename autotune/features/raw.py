"""Raw features: one row per shard, for simulators that read the strategy itself.

AutoSync's code uses a one-hot of 600 merge groups and one of 16 server devices. Instead we use:

- the message's place in the issue order instead of a group's arbitrary label, so that strategies
  with equal messages have equal rows (one-hot for the first 31, one column for the rest);
- scalars for relative place, bytes and number of messages, so that later messages differ too;
- the server's host (16 columns, and one for all further hosts), its bandwidth and its replicas;
- readiness and issue order, so that a model can detect a message that waits.

| columns | meaning | unit |
|---|---|---|
| `host_*` | one-hot host of the server; none for collectives | - |
| `message_*` | one-hot place of the message in the issue order | - |
| `compressor_*`, `primitive_*` (synchronizer) | one-hot | - |
| `hierarchical`, `sparse`, `cross_step` | 0 or 1 | - |
| `side_by_side` | 1: across steps with more than one message in flight | - |
| `size_share`, `wire_share` | gradient and wire bytes over the model's gradient bytes | - |
| `log_wire_bytes`, `log_message_bytes` | ln(1 + wire bytes) of shard and message | ln B |
| `message_share` | wire bytes of the message over those of the plan | - |
| `log_messages` | ln of the number of messages of the plan | - |
| `log_link` | ln of the server's or the ring's slowest bandwidth | ln B/s |
| `replica_share` | ranks on the server's host over the world size; 0 for collectives | - |
| `ready` | readiness of the gradient over the backward time | - |
| `issue` | place of the message over the number of messages | - |
| `log_transfer` | z of the message (`sync_cost`) | ln(1 + us) |
| `log_overhead_count`, `kernel_count`, `is_parameter_server` | z of the message | ln, -, - |
| `largest_share` | of a direct exchange: what the rank that owns most owns; 0 for others | - |
| `log_pieces` | ln of the pieces of a direct exchange | ln |
| `channel_share` | ln(1 + time on the channel over the step's computation time) | - |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import Float32Array, FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.costs.sync_cost import MessageCosts
from autotune.costs.timing import ready_times_s
from autotune.features.flat import FlatPlan
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES, Workload

HOST_COLUMNS = 16
MESSAGE_COLUMNS = 32
_COMPRESSORS = tuple(Compressor)
_SYNCHRONIZERS = tuple(Synchronizer)
_PLACE = {kind: place for place, kind in enumerate(_COMPRESSORS)}
_FLAGS = ("hierarchical", "sparse", "cross_step", "side_by_side")
_SCALARS = (
    "size_share",
    "wire_share",
    "log_wire_bytes",
    "log_message_bytes",
    "message_share",
    "log_messages",
    "log_link",
    "replica_share",
    "ready",
    "issue",
    "log_transfer",
    "log_overhead_count",
    "kernel_count",
    "is_parameter_server",
    "channel_share",
    "largest_share",
    "log_pieces",
)

RAW_FEATURES = (
    *(f"host_{number}" for number in range(HOST_COLUMNS)),
    "host_other",
    *(f"message_{number}" for number in range(MESSAGE_COLUMNS - 1)),
    "message_later",
    *(f"compressor_{kind.value}" for kind in _COMPRESSORS),
    *(f"primitive_{kind.operation}" for kind in _SYNCHRONIZERS),
    *_FLAGS,
    *_SCALARS,
)
"""Column names of a shard's row."""


def shard_rows(
    flat: FlatPlan, costs: MessageCosts, plan: Plan, workload: Workload, cluster: Cluster
) -> Float32Array:
    """One row per slice of `flat`, in its order; shape (S, len(RAW_FEATURES))."""
    one_hots = _message_one_hots(plan, costs)[flat.message]
    scalars = _scalars(flat, costs, plan, workload, cluster)
    rows: Float32Array = np.concatenate([one_hots, scalars], axis=1).astype(np.float32)
    return rows


def _message_one_hots(plan: Plan, costs: MessageCosts) -> FloatArray:
    """The 0/1 columns, shape (M, one-hots and flags)."""
    messages = plan.messages
    place = np.minimum(np.arange(len(messages)), MESSAGE_COLUMNS - 1)
    server = np.where(costs.is_parameter_server, np.minimum(costs.server, HOST_COLUMNS), -1)
    compressor = np.array([_PLACE.get(message.compressor, -1) for message in messages])
    synchronizer = np.array([_SYNCHRONIZERS.index(message.synchronizer) for message in messages])
    crossing = (plan.cross_step, (plan.limit or 1) > 1)
    flags = np.array(
        [(m.hierarchical, m.sparse is not SparseHandling.DENSE, *crossing) for m in messages],
        dtype=np.float64,
    )
    return np.concatenate(
        [
            _one_hot(server, HOST_COLUMNS + 1),
            _one_hot(place, MESSAGE_COLUMNS),
            _one_hot(compressor, len(_COMPRESSORS)),
            _one_hot(synchronizer, len(_SYNCHRONIZERS)),
            flags,
        ],
        axis=1,
    )


def _scalars(
    flat: FlatPlan, costs: MessageCosts, plan: Plan, workload: Workload, cluster: Cluster
) -> FloatArray:
    """The columns `_SCALARS`, shape (S, 17)."""
    message_wire = costs.wire_bytes
    message_elements = np.maximum(np.add.reduceat(flat.elements, flat.first), 1)
    share_of_message = flat.elements / message_elements[flat.message]
    element_bytes = np.array([DTYPE_BYTES[message.dtype] for message in plan.messages])
    grad = flat.elements * element_bytes[flat.message]
    wire = share_of_message * message_wire[flat.message]
    total = max(workload.grad_bytes, 1)
    devices = np.array([1 if len(cluster.hosts) == 1 else host.devices for host in cluster.hosts])
    hosts = np.where(costs.is_parameter_server, np.minimum(costs.server, len(devices) - 1), 0)
    count = len(plan.messages)
    per_message = np.column_stack(
        [
            np.log1p(message_wire),
            message_wire / max(message_wire.sum(), 1.0),
            np.full(count, np.log(count)),
            np.log(costs.link_bytes_per_s),
            costs.is_parameter_server * devices[hosts] / plan.world_size,
            np.arange(count) / count,
            np.log1p(costs.transfer_s * 1e6),
            np.log1p(costs.overhead_count),
            costs.kernel_count,
            costs.is_parameter_server,
            np.log1p(costs.channel_s / max(workload.compute_s, 1e-6)),  # 1 us: no division by 0
            [_largest_share(message, plan.world_size) for message in plan.messages],
            np.log([message.pieces for message in plan.messages]),
        ]
    )[flat.message]
    ready = np.zeros(len(grad))
    if workload.backward_s > 0:
        ready = ready_times_s(workload)[flat.variable] / workload.backward_s
    per_shard = np.column_stack([grad / total, wire / total, np.log1p(wire)])
    columns = [per_shard, per_message[:, :5], ready[:, None], per_message[:, 5:]]
    return np.concatenate(columns, axis=1)


def _largest_share(message: Message, ranks: int) -> float:
    if message.synchronizer is not Synchronizer.DIRECT_EXCHANGE:
        return 0.0
    return 1 / ranks if message.shares is None else max(message.shares)


def _one_hot(index: IntArray, size: int) -> FloatArray:
    """Rows of the identity; -1 gives a row of zeros. Shape (len(index), size)."""
    return np.equal(index[:, None], np.arange(size)).astype(np.float64)
