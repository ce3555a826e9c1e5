"""An invented miniature of the AutoSync dataset: two models and two clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ADDRESSES = ("10.0.0.1", "10.0.0.2")
VARIABLES = (("embedding", (50, 8)), ("dense/kernel", (8, 4)), ("dense/bias", (4,)))
"""Name and shape in forward order; the first is looked up by a gather."""
SPEC = """\
nodes:
  - {address: 10.0.0.1, gpus: [0, 1], cpus: [0], chief: true, network_bandwidth: 25}
  - {address: 10.0.0.2, gpus: [0, 1], cpus: [0], ssh_config: conf}
ssh: {conf: {username: someone, key_file: /nowhere}}
"""


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes) -> bytes:
    """A varint for a number, else bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def node(
    name: str, op: str, inputs: Sequence[str] = (), shape: Sequence[int] | None = None
) -> bytes:
    """A NodeDef inside a GraphDef; with a shape also float32."""
    data = field(1, name) + field(2, op) + b"".join(field(3, source) for source in inputs)
    if shape is not None:
        extents = b"".join(field(2, field(1, extent)) for extent in shape)
        data += field(5, field(1, "shape") + field(2, field(7, extents)))
        data += field(5, field(1, "dtype") + field(2, field(6, 1)))
    return field(1, data)


def graph_item() -> bytes:
    nodes = [node(name, "VarHandleOp", shape=shape) for name, shape in VARIABLES]
    nodes.append(node("global_step", "VarHandleOp", shape=()))
    nodes.append(node("read", "ReadVariableOp", ["dense/kernel"]))
    nodes.append(node("lookup", "ResourceGather", ["embedding", "ids:0"]))
    nodes.append(node("product", "MatMul", ["lookup", "read", "^global_step"]))
    pairs = b"".join(
        field(2, field(1, f"grad{index}:0") + field(2, f"{name}:0"))
        for index, (name, _) in enumerate(VARIABLES)
    )
    kind = field(1, "type.googleapis.com/tensorflow.GraphDef")
    return field(1, kind + field(2, b"".join(nodes))) + pairs


def server(
    address: str = "10.0.0.2", staleness: int = 0, sync: bool = True, replicated: bool = False
) -> bytes:
    """A server; as in proto3, a field that is false or 0 is absent."""
    fields = ((2, replicated), (3, sync), (4, staleness))
    settings = b"".join(field(number, int(value)) for number, value in fields if value)
    return field(2, field(1, f"{address}:CPU:0") + settings)


def all_reduce(group: int, compressor: int = 0) -> bytes:
    return field(3, field(1, 1) + (field(2, compressor) if compressor else b"") + field(3, group))


def strategy(configurations: Sequence[bytes], replicas: int = 4) -> bytes:
    """`configurations`: the bytes that follow each variable's name."""
    nodes = [
        field(3, field(1, f"{name}:0") + configuration)
        for (name, _), configuration in zip(VARIABLES, configurations, strict=True)
    ]
    devices = [f"{address}:GPU:{gpu}" for address in ADDRESSES for gpu in range(2)][:replicas]
    graph = field(4, b"".join(field(1, device) for device in devices))
    return field(1, "20200601T000000M000000") + b"".join(nodes) + graph


PARTS = field(5, "3,1") + b"".join(
    field(6, field(1, f"embedding/part_{part}:0") + server(ADDRESSES[part % 2]))
    for part in range(3)
)
STRATEGIES = {
    "first": strategy([PARTS, all_reduce(0), all_reduce(0)]),
    "second": strategy([server(), all_reduce(0, 1), all_reduce(1) + field(7, field(1, 2))]),
}
RUNTIMES = {
    "first": "runtime: [0.21, 0.2, 0.19]\naverage: 0.2\n",
    "second": '{"runtime": [0.3, 0.32]}',
}


CLUSTERS = (("aws", "runtime", None, ".yml"), ("in-house", "runtimes", "resource_specs", ""))
"""Name, folder of runtimes, folder of resource specs if it has one, suffix of runtimes."""


def write_miniature(folder: Path) -> None:
    """One cluster has a resource spec for all and plural names, the other one per trial."""
    for model in ("ncf", "vgg16"):
        for cluster, runtimes, specs, suffix in CLUSTERS:
            place = folder / model / cluster
            for name in filter(None, ("strategies", runtimes, specs)):
                (place / name).mkdir(parents=True, exist_ok=True)
            for identity, data in STRATEGIES.items():
                (place / "strategies" / identity).write_bytes(data)
                (place / runtimes / f"{identity}{suffix}").write_text(RUNTIMES[identity])
                if specs:
                    (place / specs / identity).write_text(SPEC)
            if specs is None:
                (place / "resource_spec.yml").write_text(SPEC)
        (folder / model / "graph_item").write_bytes(graph_item())
