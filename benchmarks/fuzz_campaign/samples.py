"""A small valid sample of every kind of file, as file name -> content.

Traces and layer profiles are written here; the rest is what the product wrote
(`tests/stored/v0.1`, `datasets/trials`), cut down.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fuzz_campaign.formats import archive_of
from benchmarks.repository import ROOT

Files = dict[str, bytes]

STORED = ROOT / "tests" / "stored" / "v0.1"
DOMAIN = ROOT / "datasets" / "trials" / "resnet_digits.two_hosts.real"
RANKS, STEPS = 2, 2
STEP_US = 1000.0
_EPOCH_US = 1_700_000_000_000_000.0
_BACKWARD = "autograd::engine::evaluate_function"
_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"


def _json(data: Any) -> bytes:
    return json.dumps(data).encode()


def _kineto(rank: int) -> dict[str, Any]:
    """Two steps; each has two ops, a kernel, and an all-reduce on a second stream."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        place = {"pid": args.get("device", 100 + rank), "tid": args.get("stream", 1)}
        when = {"ts": _EPOCH_US + ts, "dur": dur}
        events.append({"ph": "X", "cat": cat, "name": name, **place, **when, "args": args})

    for step in range(STEPS):
        at, ids = step * STEP_US, step * 10
        add("user_annotation", f"ProfilerStep#{step}", at, 990.0)
        add("cpu_op", "aten::linear", at + 2, 10.0, **{"Sequence number": step})
        backward = {"External id": ids + 1, "Sequence number": step}
        add("cpu_op", f"{_BACKWARD}: AddmmBackward0", at + 15, 60.0, **backward)
        launch = {"correlation": ids + 1, "External id": ids + 1}
        add("cuda_runtime", "cudaLaunchKernel", at + 20, 6.0, **launch)
        add("kernel", "gemm", at + 40, 300.0, device=rank, stream=7, bytes=1000, **launch)
        described = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
        group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": RANKS}
        ordered = {"Seq": step, "Record function id": ids + 3, "Out msg nelems": 1000}
        add("cpu_op", "record_param_comms", at + 80, 20.0, **described, **group, **ordered)
        add("cuda_runtime", "cudaLaunchKernel", at + 85, 6.0, correlation=ids + 2)
        add("kernel", _KERNEL, at + 200, 250.0, device=rank, stream=20, correlation=ids + 2)
        add("cuda_runtime", "cudaDeviceSynchronize", at + 110, 450.0, correlation=ids + 4)
    flow = {"name": "fwdbwd", "cat": "fwdbwd", "id": 1, "pid": 100 + rank, "tid": 1}
    events.append({"ph": "s", "ts": _EPOCH_US + 6, **flow})
    events.append({"ph": "f", "ts": _EPOCH_US + 82, **flow})
    config = [{"pg_name": "0", "pg_size": RANKS, "ranks": list(range(RANKS))}]
    info = {"backend": "nccl", "rank": rank, "world_size": RANKS, "pg_config": config}
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "deviceProperties": [{"id": device, "name": "gpu"} for device in range(RANKS)],
        "baseTimeNanoseconds": 0,
        "host_name": "host",
        "traceEvents": events,
    }


@cache
def kineto() -> Files:
    return {f"rank{rank}.json": _json(_kineto(rank)) for rank in range(RANKS)}


@cache
def packed_kineto() -> Files:
    return {"rank0.json.gz": gzip.compress(kineto()["rank0.json"], compresslevel=1)}


@cache
def kineto_archive() -> Files:
    return {"traces.tar": archive_of(kineto())}


_NODES: tuple[dict[str, Any], ...] = (
    {"id": 0, "rank": 0, "name": "read", "op": "ReadVariableOp", "reads": "w"},
    {"id": 1, "rank": 0, "name": "product", "op": "MatMul", "phase": "forward", "inputs": [0]},
    {
        **{"id": 2, "rank": 0, "name": "gradient", "op": "MatMul", "phase": "backward"},
        **{"inputs": [1], "gradient_of": "w", "output_bytes": 4000, "scratch_bytes": 8},
    },
    {"id": 3, "rank": 0, "name": "push", "op": "_Send", "phase": "update", "inputs": [2]},
    {"id": 4, "rank": 1, "name": "arrived", "op": "_Recv", "phase": "update"},
    {
        **{"id": 5, "rank": 1, "name": "update", "op": "AssignSubVariableOp", "phase": "update"},
        **{"inputs": [4], "shared": [4]},
    },
)


def _tensorflow_trace(rank: int) -> dict[str, Any]:
    """A replica that pushes one gradient to a server, in each of two steps."""
    events: list[dict[str, Any]] = []
    starts_us = {0: 1.0, 1: 5.0, 2: 20.0, 3: 60.0, 4: 62.0, 5: 90.0}
    lengths_us = {0: 2.0, 1: 12.0, 2: 40.0, 4: 25.0, 5: 9.0}
    for step in range(STEPS):
        mark = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "tid": "step"}
        events.append({"ph": "X", "pid": "device", "ts": step * STEP_US, "dur": 99.0, **mark})
        for node in _NODES:
            if node["rank"] != rank:
                continue
            number = node["id"]
            args: dict[str, Any] = {"Record function id": number}
            sent = {"_Send": "send", "_Recv": "recv"}.get(node["op"])
            if sent is not None:
                args |= {"Collective name": sent, "In msg nelems": 4000, "dtype": "Byte"}
                args |= {"Process Group Ranks": "[0, 1]", "Group size": 2, "Root Rank": 0}
                args["autotune"] = {"transaction": "w;0;1", "queue_us": 3.0}
            named = f"tf:PUSH {node['name']}" if sent else node["name"]
            category = "user_annotation" if sent else "cpu_op"
            place = {"pid": "device", "tid": "transfers" if sent else "pool 0"}
            at = step * STEP_US + starts_us[number]
            when = {"ts": at, "dur": lengths_us.get(number, 0.0)}
            events.append(
                {"ph": "X", "cat": category, "name": named, **place, **when, "args": args}
            )
    info = {"backend": "tensorflow", "rank": rank, "world_size": RANKS}
    return {"distributedInfo": info, "host_name": "host", "traceEvents": events}


@cache
def tensorflow() -> Files:
    """A recording of TensorFlow: the traces of a replica and a server, and their graph."""
    graph = {
        "schema": 1,
        "devices": [
            {"rank": 0, "device": "/job:worker", "host": "a", "idle_bytes": 0, "peak_bytes": 4008},
            {"rank": 1, "device": "/job:ps", "host": "b"},
        ],
        "variables": [{"name": "w", "shape": [10, 100]}],
        "steps": {"recorded_s": [2e-4, 2e-4], "plain_s": [2e-4]},
        "graphNodes": list(_NODES),
    }
    traces = {f"rank{rank}.json": _json(_tensorflow_trace(rank)) for rank in range(RANKS)}
    return {"graph.json": _json(graph), **traces}


@cache
def execution_trace() -> Files:
    """A Kineto trace with the execution trace of its rank, in PyTorch's newer form."""
    tensor = [1, 2, 0, 1000, 4, "cuda:0"]
    init = '[{"pg_name": "0", "ranks": [0, 1], "group_size": 2}]'
    nodes: list[dict[str, Any]] = [
        {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1},
        {"id": 2, "name": "## process_group:init ##", "ctrl_deps": 1, "inputs": {"values": [init]}},
    ]
    for step in range(STEPS):
        inputs = [[tensor], [step, False], ["0", "default"], 0, "allreduce", 1000, 1000, "Float"]
        attributes = [
            {"name": "rf_id", "type": "uint64", "value": step * 10 + 3},
            {"name": "tid", "type": "uint64", "value": 1},
        ]
        node = {"id": 3 + step, "name": "record_param_comms", "ctrl_deps": 1, "attrs": attributes}
        outputs = {"values": [[tensor]]}
        nodes.append({**node, "inputs": {"values": inputs}, "outputs": outputs})
    trace = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}
    return {"et_rank0.json": _json(trace), "rank0.json": kineto()["rank0.json"]}


@cache
def chakra_trace() -> Files:
    nodes = [
        {
            "id": str(3 + step),
            "name": "all_reduce",
            "type": "COMM_COLL_NODE",
            "ctrlDeps": ["1"],
            "attr": [
                {"name": "comm_type", "int64Val": "0"},
                {"name": "comm_size", "int64Val": "4000"},
                {"name": "rf_id", "uint64Val": str(step * 10 + 3)},
                {"name": "pg_name", "stringVal": "0"},
            ],
            "inputs": {"values": "[[1, 2, 0, 1000, 4, 'cuda:0']]"},
        }
        for step in range(STEPS)
    ]
    return {"et_rank0.json": _json({"nodes": nodes}), "rank0.json": kineto()["rank0.json"]}


@cache
def horovod_timeline() -> Files:
    """Two steps of two fused tensors on two ranks."""
    first = {"start_time_since_epoch_in_micros": int(_EPOCH_US)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": first}]
    for pid in (1, 2):
        name = {"name": f"allreduce.{pid}"}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": name})
    stages = ("ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")
    for step in range(STEPS):
        at = step * int(STEP_US)
        events.append({"ph": "i", "name": "CYCLE_START", "ts": at, "s": "g"})
        for pid in (1, 2):
            event = {"pid": pid, "ts": at + pid}
            events.append({"ph": "B", "name": "NEGOTIATE_ALLREDUCE", **event})
            events += [{"ph": "X", "name": str(rank), "dur": 0, **event} for rank in range(RANKS)]
            events.append({"ph": "E", **event})
        for place, stage in enumerate(stages):
            begin = at + 10 + 20 * place
            events += [{"ph": "B", "name": stage, "ts": begin, "pid": pid} for pid in (1, 2)]
            if place:
                events += [{"ph": "E", "ts": begin + 15, "pid": pid} for pid in (1, 2)]
        described = {"dtype": "float32", "shape": "[3, 4]"}
        events += [{"ph": "E", "ts": at + 99, "pid": pid, "args": described} for pid in (1, 2)]
    return {"timeline.json": _json(events)}


LAYERS = (
    ("Input0", 0, 0, "0.0", 0),
    ("Conv2d(3, 8, kernel_size=(3, 5), stride=(1, 1), groups=1, bias=False)", 1, 2, "64.0", 1440),
    ("BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True)", 0.2, 0.4, "[64.0; 8.0]", 64),
    ("Linear(in_features=4, out_features=2, bias=True)", 0.5, 1.5, "16.0", 40),
)


@cache
def layer_profile() -> Files:
    lines = [
        f"node{number} -- {text} -- forward_compute_time={forward:.3f}, "
        f"backward_compute_time={backward:.3f}, activation_size={size}, "
        f"parameter_size={parameters:.3f}"
        for number, (text, forward, backward, size, parameters) in enumerate(LAYERS, 1)
    ]
    lines += [f"\tnode{number} -- node{number + 1}" for number in range(1, len(LAYERS))]
    return {"profile.txt": "\n".join(lines).encode()}


def stored(*names: str) -> Files:
    """Files that an earlier version wrote, by their last name."""
    return {Path(name).name: (STORED / name).read_bytes() for name in names}


@cache
def workload() -> Files:
    data = json.loads(stored("recorded/job.json")["job.json"])["workload"]
    return {"workload.json": _json(data)}


@cache
def strategy() -> Files:
    return {"strategy.json": _json(_exported()["strategy"])}


@cache
def plan() -> Files:
    from autotune.export import read_export

    planned = read_export(STORED / "exported.json").plan()
    assert planned is not None
    return {"plan.json": planned.to_json().encode()}


def _exported() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(stored("exported.json")["exported.json"])
    return data


CLUSTER = """\
name: lab
hosts:
  - {name: a, devices: 2, bandwidth: 10Gbit/s, latency: 50us, memory: 16GB, cores: 8}
  - {name: b, devices: 2, bandwidth: 25Gbit/s, address: 10.0.0.2}
  - {name: c, devices: 1}
links:
  - {between: [a, b], bandwidth: 1Gbit/s, latency: 1ms}
"""


@cache
def cluster() -> Files:
    return {"cluster.yaml": CLUSTER.encode()}


@cache
def probed_cluster() -> Files:
    """A probed cluster with the first two of its fits: PyYAML needs 0.2 s for all of them."""
    lines = stored("probed.yaml")["probed.yaml"].decode().splitlines()
    fits = [number for number, line in enumerate(lines) if "primitive:" in line]
    return {"cluster.yaml": "\n".join(lines[: fits[2]]).encode()}


JOB = f"""\
command: torchrun --nproc-per-node 5 {ROOT / "examples" / "resnet_digits.py"} --epochs 3
testbed: cluster.yaml
budget_trials: 20
budget_time: 10min
seed: 3
"""


@cache
def job() -> Files:
    return {"job.yaml": JOB.encode(), **cluster()}


@cache
def store() -> Files:
    """The store of an earlier version, with its interrupted job only."""
    from autotune.storage.store import Store

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "autotune.db"
        shutil.copy(STORED / "jobs" / "autotune.db", path)
        with Store.open(path) as opened:
            opened.summary("interrupted")
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("DELETE FROM jobs WHERE id != 'interrupted'")
            for table in ("events", "trials", "outbox"):
                db.execute(f"DELETE FROM {table} WHERE job != 'interrupted'")
            db.commit()
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("VACUUM")
        db.close()
        return {"autotune.db": path.read_bytes()}


@cache
def dataset() -> Files:
    """The first trials of a collected domain."""
    from autotune.dataset.card import card_data, card_text
    from autotune.dataset.columns import table_bytes
    from autotune.dataset.folder import read_domain

    domain = read_domain(DOMAIN)
    domain = replace(domain, trials=domain.trials[:4])
    return with_sums(
        {
            "domain.json": (DOMAIN / "domain.json").read_bytes(),
            "card.json": _json(card_data(domain)),
            "card.md": card_text(domain).encode(),
            "trials.parquet": table_bytes(domain.trials, {}),
        }
    )


def with_sums(files: Files) -> Files:
    """The files of a domain with the sums that they have."""
    lines = [
        f"{hashlib.sha256(content).hexdigest()}  {name}"
        for name, content in sorted(files.items())
        if name != "SHA256SUMS"
    ]
    return {**files, "SHA256SUMS": "\n".join(lines).encode() + b"\n"}


@cache
def simulator() -> Files:
    folder = "simulator/data/data/simulator"
    return stored(f"{folder}/simulator.json", f"{folder}/weights.safetensors")


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer; numbers below 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    data = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, *_varint(len(data))]) + data


def _varint(value: int) -> list[int]:
    return [value] if value < 0x80 else [value & 0x7F | 0x80, *_varint(value >> 7)]


@cache
def autosync() -> Files:
    """An invented domain in the AutoSync dataset's layout: one variable, one trial."""
    shape = _field(5, _field(1, "shape") + _field(2, _field(7, _field(2, _field(1, 8)))))
    dtype = _field(5, _field(1, "dtype") + _field(2, _field(6, 1)))
    node = _field(1, _field(1, "kernel") + _field(2, "VarHandleOp") + shape + dtype)
    graph = _field(1, _field(1, "type.googleapis.com/tensorflow.GraphDef") + _field(2, node))
    pair = _field(2, _field(1, "grad:0") + _field(2, "kernel:0"))
    server = _field(1, "10.0.0.1:CPU:0") + _field(3, 1)
    chosen = _field(3, _field(1, "kernel:0") + _field(2, server))
    replicas = _field(4, _field(1, "10.0.0.1:GPU:0") + _field(1, "10.0.0.1:GPU:1"))
    nodes = b"nodes:\n  - {address: 10.0.0.1, gpus: [0, 1], network_bandwidth: 25}\n"
    return {
        "model/graph_item": graph + pair,
        "model/cluster/resource_spec.yml": nodes,
        "model/cluster/runtime/1.yml": b"average: 0.1\nruntime: [0.1, 0.1]\n",
        "model/cluster/strategies/1": chosen + replicas,
    }


@cache
def messages() -> Files:
    """A line of the protocol between driver and ranks: the answer to a probe."""
    from autotune.cluster import Where
    from autotune.recordings.probe import LinkCost, ProbedLinks, ProbePoint, ProbeSeries
    from runtime_rewriter.protocol import ProbeAnswer, encode

    points = tuple(ProbePoint(4**k, 1e-4 + 4**k * 1e-9, 0.01, 5, 1e-5) for k in range(5, 12))
    series = (ProbeSeries("all_reduce", 2, Where.WORLD, False, points),)
    cost = LinkCost(1e9, 5e-5, 0.01, 0.02)
    links = ProbedLinks(((0, cost), (1, cost)), (((0, 1), cost),))
    return {"answer.json": encode(ProbeAnswer(series, links, {"torch": "2.13.0"}, 2)).encode()}
