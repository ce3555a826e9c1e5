"""Reads the AutoSync dataset's folders (NeurIPS 2020, supplement sec. 9.2).

    MODEL/graph_item
    MODEL/CLUSTER/resource_spec.yml, or one file per trial in resource_spec/ or resource_specs/
    MODEL/CLUSTER/runtime/ID[.yml], or runtimes/
    MODEL/CLUSTER/strategies/ID

The layout, the messages' field numbers and the YAML keys follow the documentation of
petuum/autodist. No file of the dataset was available, so the rest is assumed (`ASSUMED`):

- the graph lists variables in forward order, so gradients become ready in the opposite order;
- a variable that a gather reads has a sparse gradient;
- the parts of a partitioned variable differ by at most one row, the larger ones first;
- compressor 1 (Horovod's) and 2 (the same with error feedback) both send 16 bits per number;
- a server lives on the first worker of its host;
- local replication at a server is the hierarchical reduction of the supplement's Eq. 2 (without it,
  AutoDist sums a host's gradients before it sends them all the same);
- a sparse variable is never replicated, as in AutoDist;
- `network_bandwidth` is in Gbit/s, 1 where it is missing;
- the computation was not measured: the workload has no times.

Nothing is executed or unpickled: protocol buffers are read field by field (`wire`), and YAML by the
safe loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster, Host
from autotune.dataset.autosync_graph import read_variables
from autotune.errors import InvalidInput
from autotune.files import read_bytes
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
from autotune.wire import WireMessage
from autotune.workload import Variable, Workload

ASSUMED = (
    "order of gradients, sparsity, sizes of parts, 16-bit compressors, servers on the first worker "
    "of a host, local replication as hierarchical reduction, Gbit/s"
)
MAX_GRAPH_BYTES = 2 * 2**30
MAX_STRATEGY_BYTES = 16 * 2**20
MAX_TRIALS = 100_000
GBIT_PER_S = 1e9 / 8
LATENCY_S, INNER_BYTES_PER_S, INNER_LATENCY_S = 50e-6, 10e9, 5e-6
"""The defaults of a cluster file."""
_RUNTIMES = ("runtime", "runtimes")
_SPECS = ("resource_spec", "resource_specs")
_SUFFIXES = ("", ".yml", ".yaml")
_COMPRESSORS = {0: Compressor.NONE, 1: Compressor.FP16, 2: Compressor.FP16}


@dataclass(frozen=True)
class AutosyncTrial:
    """`runtime_s`: measured seconds per step; `average_s`: the file's value, or their mean."""

    id: str
    strategy: Strategy
    cluster: Cluster
    runtime_s: tuple[float, ...]
    average_s: float


@dataclass(frozen=True)
class AutosyncDomain:
    """One model on one cluster. `left_out`: id of an unreadable trial -> the reason."""

    model: str
    cluster_name: str
    workload: Workload
    trials: tuple[AutosyncTrial, ...]
    left_out: Mapping[str, str]


def read_autosync(folder: Path) -> tuple[AutosyncDomain, ...]:
    """All domains below `folder`; unreadable trials are in `left_out`.

    Raises `InvalidInput` where there is no domain or a model's graph item is missing or broken.
    """
    clusters = sorted(path.parent for path in folder.glob("*/*/strategies") if path.is_dir())
    if not clusters:
        raise InvalidInput(f"{folder} must hold folders MODEL/CLUSTER/strategies, but has none")
    return tuple(_domain(cluster) for cluster in clusters)


def _domain(folder: Path) -> AutosyncDomain:
    model = folder.parent
    item = model / "graph_item"
    forward = read_variables(read_bytes(item, MAX_GRAPH_BYTES), str(item))
    workload = Workload(model.name, tuple(forward[::-1]), source="assumed")
    strategies = [path for path in sorted((folder / "strategies").iterdir()) if path.is_file()]
    if len(strategies) > MAX_TRIALS:
        limit = f"at most {MAX_TRIALS} strategies"
        raise InvalidInput(f"{folder} may hold {limit}, but has {len(strategies)}")
    trials, left_out = [], {}
    for path in strategies:
        try:
            trials.append(_trial(folder, path, workload))
        except InvalidInput as error:
            left_out[path.name] = str(error)
    return AutosyncDomain(model.name, folder.name, workload, tuple(trials), left_out)


def _trial(folder: Path, path: Path, workload: Workload) -> AutosyncTrial:
    runtime = _file_of(path.name, folder, _RUNTIMES)
    spec = _file_of(path.name, folder, _SPECS)
    spec = spec or next(iter(folder.glob("resource_spec.y*ml")), None)
    if runtime is None or spec is None:
        missing = "runtime" if runtime is None else "resource spec"
        raise InvalidInput(f"{path} needs a {missing}, but has none")
    cluster, workers = _cluster(spec, folder.name)
    runtime_s, average_s = _runtime(runtime)
    message = WireMessage(read_bytes(path, MAX_STRATEGY_BYTES), str(path))
    strategy = _strategy(message, workload, cluster, workers, str(path))
    return AutosyncTrial(path.name, strategy, cluster, runtime_s, average_s)


def _file_of(trial: str, folder: Path, names: tuple[str, ...]) -> Path | None:
    paths = (folder / name / f"{trial}{suffix}" for name in names for suffix in _SUFFIXES)
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isfinite(value) and value > 0


def _cluster(path: Path, name: str) -> tuple[Cluster, dict[str, int]]:
    """The cluster, and the first worker of every address."""
    data = read_yaml(path)
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, list) or not nodes:
        raise InvalidInput(f"{path} must hold a list of nodes, but does not")
    hosts, first, workers = [], 0, {}
    for node in nodes:
        address, bandwidth, devices = _node(node, path)
        links = (bandwidth, LATENCY_S, INNER_BYTES_PER_S, INNER_LATENCY_S)
        hosts.append(Host(address, devices, *links, address=address))
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
        rule = "needs a bandwidth above 0 and a list of devices"
        raise InvalidInput(f"{path}: node {node['address']} {rule}")
    return str(node["address"]), float(gbit) * GBIT_PER_S, len(set(map(str, devices)))


def _strategy(
    message: WireMessage,
    workload: Workload,
    cluster: Cluster,
    workers: Mapping[str, int],
    where: str,
) -> Strategy:
    """strategy.proto: node_config 3, graph_config 4."""
    replicas = message.message(4).texts(1)
    if replicas and len(replicas) != cluster.world_size:
        rule = f"must have a replica per device, {cluster.world_size}"
        raise InvalidInput(f"{where} {rule}, but has {len(replicas)}")
    nodes = {_plain(node.text(1)): node for node in message.messages(3)}
    missing = [variable.name for variable in workload.variables if variable.name not in nodes]
    if missing:
        raise InvalidInput(f"{where} must configure every variable, but lacks {missing[0]!r}")
    variables = workload.variables
    return Strategy(tuple(_variable(nodes[one.name], one, workers, where) for one in variables))


def _variable(
    node: WireMessage, variable: Variable, workers: Mapping[str, int], where: str
) -> VariableStrategy:
    """Node: var_name 1, PS 2, all-reduce 3, partitioner 5, part_config 6, compressor 7."""
    parts = node.messages(6)
    counts = _counts(node.text(5), where)
    cut = [axis for axis, count in enumerate(counts) if count > 1]
    if not cut:
        shard = _shard(parts[0] if parts else node, variable, workers, where)
        return VariableStrategy(variable.name, (shard,), None, _sparse(variable, shard))
    axis = cut[0]
    fits = axis < len(variable.shape) and counts[axis] <= variable.shape[axis]
    if len(cut) > 1 or not fits or len(parts) != counts[axis]:
        rule = "must be cut along one axis with a configuration per part"
        raise InvalidInput(f"{where}: {variable.name!r} {rule}, but is cut {counts}")
    partition = even_partition(variable, axis, counts[axis])
    shards = tuple(_shard(part, variable, workers, where) for part in parts)
    return VariableStrategy(variable.name, shards, partition, _sparse(variable, shards[0]))


def _shard(node: WireMessage, variable: Variable, workers: Mapping[str, int], where: str) -> Shard:
    """Node: PS 2, all-reduce 3. AllReduceSynchronizer: group 3.

    Earlier versions have the compressor in field 2 of the latter.
    """
    if node.has(2):
        return _served(node.message(2), variable, workers, where)
    if not node.has(3):
        rule = f"{node.text(1)!r} must have a server or an all-reduce"
        raise InvalidInput(f"{where}: {rule}, but has neither")
    kind = node.message(3).number(2) or node.message(7).number(1)
    if kind not in _COMPRESSORS:
        known = sorted(_COMPRESSORS)
        raise InvalidInput(f"{where}: the compressor must be one of {known}, but is {kind}")
    return Shard(Synchronizer.ALL_REDUCE, _COMPRESSORS[kind], group=node.message(3).number(3))


def _served(
    server: WireMessage, variable: Variable, workers: Mapping[str, int], where: str
) -> Shard:
    """PSSynchronizer: destination 1, local replication 2, sync 3, staleness 4.

    A field that is absent is false or 0 (proto3).
    """
    address = server.text(1).split(":")[0]
    if address not in workers:
        rule = "a server must live on a node of the resource spec"
        raise InvalidInput(f"{where}: {rule}, but its destination is {server.text(1)!r}")
    rule = "only synchronous strategies are read"
    if staleness := server.number(4):
        raise InvalidInput(f"{where}: {rule}, but the staleness is {staleness}")
    if not server.number(3):
        raise InvalidInput(f"{where}: {rule}, but the server of {variable.name!r} has sync false")
    replicated = bool(server.number(2)) and not variable.sparse
    return Shard(Synchronizer.PARAMETER_SERVER, placement=workers[address], hierarchical=replicated)


def _sparse(variable: Variable, shard: Shard) -> SparseHandling:
    if not variable.sparse:
        return SparseHandling.DENSE
    served = shard.synchronizer is Synchronizer.PARAMETER_SERVER
    return SparseHandling.GATHER_SCATTER if served else SparseHandling.ALL_GATHER


def _counts(text: str, where: str) -> list[int]:
    """Parts along each axis."""
    counts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(count.isascii() and count.isdigit() and len(count) < 10 for count in counts):
        rule = "a partitioner must be numbers with commas, such as '1,2,1'"
        raise InvalidInput(f"{where}: {rule}, but is {text[:80]!r}")
    return [int(count) for count in counts]


def _plain(name: str) -> str:
    """The name without the output number of a tensor."""
    return name.partition(":")[0]
