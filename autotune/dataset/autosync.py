"""Reads the AutoSync dataset's folders (NeurIPS 2020, supplement sec. 9.2): graph item, resource specs, strategies, runtimes.

    MODEL/graph_item
    MODEL/CLUSTER/resource_spec.yml, or one file per trial in resource_spec/ or resource_specs/
    MODEL/CLUSTER/runtime/ID[.yml], or runtimes/
    MODEL/CLUSTER/strategies/ID

The layout, the messages' field numbers and the YAML keys are as petuum/autodist documents them. No file of the dataset was at hand, so
what follows from here on is assumed, and `ASSUMED` says it to whoever uses the result:

- variables stand in the graph in forward order, so gradients become ready in the opposite order;
- a variable that a gather reads has a sparse gradient;
- a partitioned variable is cut into parts that differ by at most one row, the larger ones first;
- compressor 1 (Horovod's) and 2 (the same with error feedback) both send 16 bits per number;
- a server lives on the first worker of its host, and `network_bandwidth` is in Gbit/s, 1 where it is missing;
- nothing was measured of the computation: the workload has no times.

Nothing is executed or unpickled: protocol buffers are read field by field (`wire`), YAML by the safe loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster, Host
from autotune.dataset.autosync_graph import read_variables
from autotune.dataset.wire import Message
from autotune.errors import InvalidInput
from autotune.parsing import read_yaml
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

ASSUMED = "order of gradients, sparsity, sizes of parts, 16-bit compressors, servers on the first worker of a host, Gbit/s"
MAX_GRAPH_BYTES = 2 * 2**30
MAX_STRATEGY_BYTES = 16 * 2**20
MAX_TRIALS = 100_000
GBIT_PER_S = 1e9 / 8
LATENCY_S, INNER_BYTES_PER_S, INNER_LATENCY_S = 50e-6, 10e9, 5e-6
"""The defaults of a cluster file."""
_RUNTIMES, _SPECS, _STRATEGIES = (
    ("runtime", "runtimes"),
    ("resource_spec", "resource_specs"),
    ("strategies",),
)
_SUFFIXES = ("", ".yml", ".yaml")
_COMPRESSORS = {0: Compressor.NONE, 1: Compressor.FP16, 2: Compressor.FP16}


@dataclass(frozen=True)
class AutosyncTrial:
    """`runtime_s`: seconds per step, as often as it was measured; `average_s` as the file says, or their mean."""

    id: str
    strategy: Strategy
    cluster: Cluster
    runtime_s: tuple[float, ...]
    average_s: float


@dataclass(frozen=True)
class AutosyncDomain:
    """One model on one cluster. `left_out`: id of a trial -> why it could not be read."""

    model: str
    cluster_name: str
    workload: Workload
    trials: tuple[AutosyncTrial, ...]
    left_out: Mapping[str, str]


def read_autosync(folder: Path) -> tuple[AutosyncDomain, ...]:
    """All domains below `folder`. A trial that cannot be read is left out and told of.

    Raises `InvalidInput` where there is no domain or a model's graph item is missing or broken.
    """
    found = []
    for cluster in sorted(path.parent for path in folder.glob("*/*/strategies") if path.is_dir()):
        found.append(_domain(cluster))
    if not found:
        raise InvalidInput(f"{folder} must hold folders MODEL/CLUSTER/strategies, but has none")
    return tuple(found)


def _domain(folder: Path) -> AutosyncDomain:
    model = folder.parent
    forward = read_variables(
        _bytes(model / "graph_item", MAX_GRAPH_BYTES), str(model / "graph_item")
    )
    workload = Workload(model.name, tuple(forward[::-1]), source="assumed")
    strategies = [path for path in sorted((folder / "strategies").iterdir()) if path.is_file()]
    if len(strategies) > MAX_TRIALS:
        raise InvalidInput(
            f"{folder} may hold at most {MAX_TRIALS} strategies, but has {len(strategies)}"
        )
    trials, left_out = [], {}
    for path in strategies:
        try:
            trials.append(_trial(folder, path, workload))
        except InvalidInput as error:
            left_out[path.name] = str(error)
    return AutosyncDomain(model.name, folder.name, workload, tuple(trials), left_out)


def _trial(folder: Path, path: Path, workload: Workload) -> AutosyncTrial:
    runtime = _beside(folder, _RUNTIMES, path.name)
    spec = _beside(folder, _SPECS, path.name) or next(iter(folder.glob("resource_spec.y*ml")), None)
    if runtime is None or spec is None:
        raise InvalidInput(
            f"{path} needs a {'runtime' if runtime is None else 'resource spec'} beside it, but has none"
        )
    cluster, workers = _cluster(spec, folder.name)
    runtime_s, average_s = _runtime(runtime)
    strategy = _strategy(
        Message(_bytes(path, MAX_STRATEGY_BYTES), str(path)), workload, cluster, workers, str(path)
    )
    return AutosyncTrial(path.name, strategy, cluster, runtime_s, average_s)


def _beside(folder: Path, names: tuple[str, ...], identity: str) -> Path | None:
    paths = (folder / name / f"{identity}{suffix}" for name in names for suffix in _SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _runtime(path: Path) -> tuple[tuple[float, ...], float]:
    data = read_yaml(path)
    values = data.get("runtime", []) if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(_positive(value) for value in values):
        raise InvalidInput(f"{path} must hold 'runtime', a list of seconds above 0, but does not")
    average = data.get("average", sum(values) / len(values) if values else None)
    if not _positive(average):
        raise InvalidInput(f"{path} must hold 'average', seconds above 0, but has {average!r}")
    return tuple(float(value) for value in values), float(average)


def _positive(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value)
        and value > 0
    )


def _cluster(path: Path, name: str) -> tuple[Cluster, dict[str, int]]:
    """The cluster, and the first worker of every address."""
    data = read_yaml(path)
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, list) or not nodes:
        raise InvalidInput(f"{path} must hold a list of nodes, but does not")
    hosts, first, workers = [], 0, {}
    for node in nodes:
        address, bandwidth, devices = _node(node, path)
        hosts.append(
            Host(
                address,
                devices,
                bandwidth,
                LATENCY_S,
                INNER_BYTES_PER_S,
                INNER_LATENCY_S,
                address=address,
            )
        )
        workers[address] = first
        first += devices
    return Cluster(name, tuple(hosts)), workers


def _node(node: Any, path: Path) -> tuple[str, float, int]:
    """Address, bytes per second, workers."""
    if not isinstance(node, dict) or not isinstance(node.get("address"), str | int | float):
        raise InvalidInput(f"{path}: a node must have an address, but one is {str(node)[:80]}")
    gbit = node.get("network_bandwidth", 1)
    devices = node.get("gpus") or node.get("cpus") or [0]
    if not _positive(gbit) or not isinstance(devices, list):
        raise InvalidInput(
            f"{path}: node {node['address']} needs a bandwidth above 0 and a list of devices"
        )
    return str(node["address"]), float(gbit) * GBIT_PER_S, len(set(map(str, devices)))


def _strategy(
    message: Message, workload: Workload, cluster: Cluster, workers: Mapping[str, int], where: str
) -> Strategy:
    """strategy.proto: node_config 3, graph_config 4."""
    replicas = message.message(4).texts(1)
    if replicas and len(replicas) != cluster.world_size:
        raise InvalidInput(
            f"{where} must have a replica per device, {cluster.world_size}, but has {len(replicas)}"
        )
    nodes = {_plain(node.text(1)): node for node in message.messages(3)}
    missing = [variable.name for variable in workload.variables if variable.name not in nodes]
    if missing:
        raise InvalidInput(f"{where} must configure every variable, but lacks {missing[0]!r}")
    return Strategy(
        tuple(
            _variable(nodes[variable.name], variable, workers, where)
            for variable in workload.variables
        )
    )


def _variable(
    node: Message, variable: Variable, workers: Mapping[str, int], where: str
) -> VariableStrategy:
    """Node: var_name 1, PS 2, all-reduce 3, partitioner 5, part_config 6, compressor 7."""
    parts = node.messages(6)
    counts = _counts(node.text(5), where)
    cut = [axis for axis, count in enumerate(counts) if count > 1]
    if not cut:
        shard = _shard(parts[0] if parts else node, workers, where)
        return VariableStrategy(variable.name, (shard,), None, _sparse(variable, shard))
    axis = cut[0]
    if (
        len(cut) > 1
        or axis >= len(variable.shape)
        or len(parts) != counts[axis]
        or counts[axis] > variable.shape[axis]
    ):
        raise InvalidInput(
            f"{where}: {variable.name!r} must be cut along one axis with a configuration per part, but is cut {counts}"
        )
    partition = even_partition(variable, axis, counts[axis])
    shards = tuple(_shard(part, workers, where) for part in parts)
    return VariableStrategy(variable.name, shards, partition, _sparse(variable, shards[0]))


def _shard(node: Message, workers: Mapping[str, int], where: str) -> Shard:
    """PSSynchronizer: destination 1, staleness 4. AllReduceSynchronizer: compressor 2 (in earlier versions), group 3."""
    if node.has(2):
        server = node.message(2)
        address = server.text(1).split(":")[0]
        if address not in workers:
            raise InvalidInput(
                f"{where}: a server must live on a node of the resource spec, but its destination is {server.text(1)!r}"
            )
        if server.number(4):
            raise InvalidInput(
                f"{where}: only synchronous strategies are read, but the staleness is {server.number(4)}"
            )
        return Shard(Synchronizer.PARAMETER_SERVER, placement=workers[address])
    if not node.has(3):
        raise InvalidInput(
            f"{where}: {node.text(1)!r} must have a server or an all-reduce, but has neither"
        )
    kind = node.message(3).number(2) or node.message(7).number(1)
    if kind not in _COMPRESSORS:
        raise InvalidInput(
            f"{where}: the compressor must be one of {sorted(_COMPRESSORS)}, but is {kind}"
        )
    return Shard(Synchronizer.ALL_REDUCE, _COMPRESSORS[kind], group=node.message(3).number(3))


def _sparse(variable: Variable, shard: Shard) -> SparseHandling:
    if not variable.sparse:
        return SparseHandling.DENSE
    served = shard.synchronizer is Synchronizer.PARAMETER_SERVER
    return SparseHandling.GATHER_SCATTER if served else SparseHandling.ALL_GATHER


def _counts(text: str, where: str) -> list[int]:
    """Parts along each axis."""
    counts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(count.isascii() and count.isdigit() and len(count) < 10 for count in counts):
        raise InvalidInput(
            f"{where}: a partitioner must be numbers with commas, such as '1,2,1', but is {text[:80]!r}"
        )
    return [int(count) for count in counts]


def _plain(name: str) -> str:
    """Without the output number that a tensor's name has."""
    return name.partition(":")[0]


def _bytes(path: Path, most: int) -> bytes:
    try:
        if (size := path.stat().st_size) > most:
            raise InvalidInput(f"{path} may hold at most {most} bytes, but has {size}")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error
