"""Execution traces of every schema complete the collectives of a Kineto trace."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Event, Job

from autotune.errors import InvalidInput
from autotune.profiling.formats.execution_trace import ExecutionTrace, read_execution_trace
from autotune.profiling.traces import TraceJob, read_job
from autotune.wire import WireMessage

TENSOR = [9, 6, 0, 250, 4, "cuda:0"]
FIRST_GROUP = {"pg_name": "0", "ranks": [], "group_size": 4}
SECOND_GROUP = {"pg_name": "7", "ranks": [1, 3], "group_size": 2}
GROUPS = json.dumps([FIRST_GROUP, SECOND_GROUP])
NO_IO: dict[str, Any] = {"values": [], "shapes": [], "types": []}


def field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def read(data: Any) -> ExecutionTrace:
    return read_execution_trace(io.BytesIO(json.dumps(data).encode()).read, "et_rank3.json")


def first_form() -> dict[str, Any]:
    """Schema 1.0.1: fields of the node; a group is a number."""
    rest: dict[str, Any] = {"tid": 1, "fw_parent": 0, "seq_id": -1, "scope": 0, "fw_tid": 0}
    rest |= {"op_schema": "", "outputs": []}
    thread: dict[str, Any] = {
        "name": "[pytorch|profiler|execution_graph|thread]",
        "id": 2,
        "rf_id": 0,
        "parent": 1,
    }
    comm: dict[str, Any] = {"name": "record_param_comms", "id": 5, "rf_id": 31, "parent": 2}
    inputs = [[TENSOR], 12, 94038, 3, "allreduce", [], []]
    nodes = [thread | {"inputs": [], **rest}, comm | {"inputs": inputs, **rest}]
    return {"schema": "1.0.1", "pid": 1, "nodes": nodes}


def attributes(**values: Any) -> list[dict[str, Any]]:
    return [{"name": name, "type": "uint64", "value": value} for name, value in values.items()]


def second_form() -> dict[str, Any]:
    """Schema 1.1.1: attributes; pairs for the sequence number and for the group."""

    def node(number: int, name: str, parent: int, rf_id: int, inputs: Any) -> dict[str, Any]:
        outputs: dict[str, Any] = {"values": [], "shapes": [], "types": [], "strides": []}
        ends = {"inputs": inputs, "outputs": outputs, "attrs": attributes(rf_id=rf_id, tid=1)}
        return {"id": number, "name": name, "ctrl_deps": parent, **ends}

    groups = {"values": [GROUPS], "shapes": [[]], "types": ["String"]}
    sent = [[TENSOR], [12, False], ["7", "dp"], 1, "allreduce", [], [], 1, 2, 2]
    nodes = [
        node(2, "[pytorch|profiler|execution_trace|thread]", 1, 0, NO_IO),
        node(3, "## process_group:init ##", 2, 1, groups),
        node(5, "record_param_comms", 2, 31, {"values": sent}),
    ]
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}


def chakra_form() -> dict[str, Any]:
    """Chakra's protocol buffers as JSON: lists of dependencies, numbers and inputs as text."""
    thread: dict[str, Any] = {"id": "2", "name": "[pytorch|profiler|execution_trace|thread]"}
    thread |= {"type": "METADATA_NODE", "attr": [{"name": "tid", "uint64Val": "1"}]}
    comm: dict[str, Any] = {"id": "5", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"}
    comm |= {"type": "COMM_COLL_NODE", "ctrlDeps": ["2"], "dataDeps": ["2"]}
    comm["inputs"] = {"values": str([TENSOR]), "shapes": "[[250]]", "types": "['Tensor(float)']"}
    comm["attr"] = [
        {"name": "rf_id", "int64Val": "31"},
        {"name": "tid", "uint64Val": "1"},
        {"name": "comm_type", "int64Val": "0"},
        {"name": "comm_size", "int64_val": "1000"},
        {"name": "pg_name", "string_val": "7"},
    ]
    return {"version": "0.0.4", "nodes": [thread, comm]}


@pytest.mark.parametrize(
    ("form", "schema"),
    [(first_form, "1.0.1"), (second_form, "1.1.1-chakra.0.0.4"), (chakra_form, "0.0.4")],
)
def test_every_schema_gives_the_same_collective(form: Any, schema: str) -> None:
    trace = read(form())
    assert (trace.schema, trace.process) == (schema, "" if form is chakra_form else "1")
    assert (trace.node_id[-1], trace.parent[-1], trace.rf_id[-1]) == (5, 2, 31)
    assert trace.thread.tolist() == [1] * trace.nodes and trace.input_bytes[-1] == 1000
    (comm,) = (trace.comms or trace.marks).values()
    assert (comm.name, comm.size_bytes) == ("all_reduce", 1000)
    assert comm.sequence == (-1 if form is chakra_form else 12)
    groups = {first_form: ("", ()), second_form: ("7", (1, 3)), chakra_form: ("7", ())}
    assert (comm.group, comm.group_ranks) == groups[form]


PROCESS = {"name": "pid", "uint64Val": "1"}
VALUE_FIELDS = {"int64Val": 9, "uint64Val": 13, "string_val": 29, "int64_val": 9}


def chakra_messages() -> bytes:
    """The nodes of `chakra_form` as Chakra's converter of PyTorch writes them, with the process."""
    data = chakra_form()
    messages = [field(1, data["version"]) + field(2, attribute(PROCESS))]
    for node in data["nodes"]:
        kind = {"METADATA_NODE": 1, "COMM_COLL_NODE": 7}[node["type"]]
        message = field(1, int(node["id"])) + field(2, node["name"]) + field(3, kind)
        for number, key in ((4, "ctrlDeps"), (5, "dataDeps")):
            packed = b"".join(varint(int(one)) for one in node.get(key, []))
            message += field(number, packed) if packed else b""
        inputs = node.get("inputs", {})
        texts = [field(1 + place, text) for place, text in enumerate(inputs.values())]
        message += field(8, b"".join(texts)) if texts else b""
        messages.append(message + b"".join(field(10, attribute(one)) for one in node["attr"]))
    return b"".join(varint(len(message)) + message for message in messages)


def attribute(one: dict[str, str]) -> bytes:
    (key,) = set(one) - {"name"}
    value: int | str = one[key] if key == "string_val" else int(one[key])
    return field(1, one["name"]) + field(VALUE_FIELDS[key], value)


def chakra_objects() -> bytes:
    """As Chakra's jsonizer writes them: the metadata, then each node, without a comma."""
    data = chakra_form()
    objects = [{"version": data["version"], "attr": [PROCESS]}, *data["nodes"]]
    return "".join(json.dumps(one, indent=2) for one in objects).encode()


@pytest.mark.parametrize(
    ("write", "name"), [(chakra_messages, "net.0.et"), (chakra_objects, "net.0.json")]
)
def test_files_of_chakra_are_read_with_their_process(
    write: Callable[[], bytes], name: str, tmp_path: Path
) -> None:
    """Neither was read: the one is no JSON, and the other one more than one JSON value."""
    (tmp_path / name).write_bytes(write())
    job = read_job(Job(ranks=2).run().write(tmp_path))
    (trace,) = job.execution_traces
    expected = read(chakra_form())
    assert (trace.schema, trace.process, trace.names) == ("0.0.4", "1", expected.names)
    for column in ("node_id", "parent", "rf_id", "thread", "input_bytes"):
        assert getattr(trace, column).tolist() == getattr(expected, column).tolist()
    assert trace.marks == expected.marks


def test_repeated_numbers_of_protocol_buffers_may_be_packed() -> None:
    message = WireMessage(field(4, 300) + field(4, varint(5) + varint(300)) + field(4, 7), "here")
    assert (message.numbers(4), message.numbers(5)) == ([300, 5, 300, 7], [])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (chakra_messages()[:-3], "cut off within message 2"),
        (chakra_messages() + varint(2**30), "at most 16777216 bytes, but it has 1073741824"),
        (chakra_messages() + varint(0), "node 2 is empty"),
        (chakra_messages() + varint(2) + b"\x0f\x00", "field of kind 7"),
        (chakra_objects()[:-3], "the file ends within it"),
        (chakra_objects() + b"[]", "node 2 must be an object"),
    ],
)
def test_damaged_files_of_chakra_are_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "net.et").write_bytes(data)
    with pytest.raises(InvalidInput, match=reason):
        read_job(tmp_path)


def test_nodes_without_ids_and_files_without_nodes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="node 0 must be an object with an id"):
        read({"nodes": [{"name": "a"}]})
    with pytest.raises(InvalidInput, match="must hold nodes"):
        read({"nodes": []})


def numbered(events: list[Event], with_ids: bool) -> list[Event]:
    """Host ops with a record-function id each, without arguments, as in Kineto of 2023."""
    out = []
    for number, event in enumerate(events):
        args = event["args"]
        if event["name"] == "record_param_comms":
            args = {"Record function id": number + 1} if with_ids else {}
        out.append(event | {"args": args})
    return out


def execution(events: list[Event], backwards: bool, names: str = "allreduce") -> dict[str, Any]:
    numbers = [
        number + 1 for number, event in enumerate(events) if event["name"] == "record_param_comms"
    ]
    nodes = []
    for sequence, rf_id in enumerate(numbers):
        tensor = [9, 6, 0, 1000 * (sequence % 4 + 1), 4, "cuda:0"]
        inputs = {"values": [[tensor], [sequence + 1, False], ["0", "default_pg"], 0, names]}
        node = {"id": 100 + rf_id, "name": "record_param_comms", "ctrl_deps": 2, "inputs": inputs}
        nodes.append({**node, "attrs": attributes(rf_id=rf_id, tid=1)})
    nodes = nodes[::-1] if backwards else nodes
    return {"schema": "1.1.1-chakra.0.0.4", "pid": events[0]["pid"], "nodes": nodes}


def linked(folder: Path, with_ids: bool, backwards: bool, **words: str) -> TraceJob:
    job = Job(ranks=2, steps=2).run()
    job.events = [numbered(events, with_ids) for events in job.events]
    for rank, events in enumerate(job.events):
        data = execution(events, backwards, **words)
        (folder / f"et_{1 - rank}.json").write_text(json.dumps(data))
    return read_job(job.write(folder))


def test_collectives_are_linked_by_record_function_id_whatever_the_order(tmp_path: Path) -> None:
    job = linked(tmp_path, with_ids=True, backwards=True)
    assert [(link.by_id, link.in_order, link.collectives) for link in job.links] == [(8, 0, 8)] * 2
    assert not [repair for repair in job.repairs if "execution trace" in repair.what]
    rows = [(n + 1, 4000.0 * (n % 4 + 1), "0") for n in range(8)]
    for rank in job.collectives:
        comms = [one.comm for one in rank]
        assert [(comm.sequence, comm.size_bytes, comm.group) for comm in comms] == rows
    assert len(job.joints) == 8


def test_without_ids_collectives_are_linked_in_order_and_reported(tmp_path: Path) -> None:
    job = linked(tmp_path, with_ids=False, backwards=False)
    assert [(link.by_id, link.in_order) for link in job.links] == [(0, 8)] * 2
    in_order = "linked to the execution trace in order"
    assert sum(in_order in repair.what for repair in job.repairs) == 2
    assert [one.comm.sequence for one in job.collectives[1]] == list(range(1, 9))


@pytest.mark.parametrize("with_ids", [True, False])
def test_nodes_of_other_collectives_are_not_linked_and_reported(
    tmp_path: Path, with_ids: bool
) -> None:
    job = linked(tmp_path, with_ids=with_ids, backwards=False, names="broadcast")
    assert [(link.by_id, link.in_order) for link in job.links] == [(0, 0)] * 2
    assert sum("execution trace not linked" in repair.what for repair in job.repairs) == 2
    assert {one.comm.sequence for one in job.collectives[0]} == {-1} and len(job.joints) == 8


def test_the_only_execution_trace_belongs_to_the_only_rank_if_it_states_no_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "et.json").write_text(json.dumps(chakra_form()))
    assert len(read_job(Job(ranks=1).run().write(tmp_path)).links) == 1
    left_out = read_job(Job(ranks=2).run().write(tmp_path))
    assert not left_out.links and any("process ids" in one.what for one in left_out.repairs)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([9, 6, 0, 10**30, 4, "cuda:0"], "node 2: there may be at most .* elements in a tensor"),
        ([9, 6, 0, 1, 10**6, "cuda:0"], "at most 16 bytes in an element"),
    ],
)
def test_tensors_beyond_any_device_are_refused(tensor: list[Any], reason: str) -> None:
    data = second_form()
    data["nodes"][2]["inputs"]["values"][0] = [tensor]
    with pytest.raises(InvalidInput, match=reason):
        read(data)


def test_groups_beyond_any_job_are_refused_before_they_are_expanded() -> None:
    data = second_form()
    for size in (10**9, 100_000):
        groups = [{"pg_name": str(n), "ranks": [], "group_size": size} for n in range(100)]
        data["nodes"][1]["inputs"]["values"] = [json.dumps(groups)]
        with pytest.raises(InvalidInput, match=r"at most \d+ ranks in"):
            read(data)


def test_an_execution_trace_of_an_absent_rank_is_reported(tmp_path: Path) -> None:
    (tmp_path / "et_rank5.json").write_text(json.dumps(second_form()))
    job = read_job(Job().run().write(tmp_path))
    assert not job.links and any("of no rank here" in repair.what for repair in job.repairs)


def contained(folder: Path, places: list[str]) -> TraceJob:
    """Two ranks of one process id, with their execution traces at `places` in `folder`."""
    job = Job(ranks=2, steps=2).run()
    job.events = [
        [event | {"pid": 1} if "stream" not in event["args"] else event for event in events]
        for events in (numbered(events, with_ids=True) for events in job.events)
    ]
    for place, events in zip(places, job.events, strict=True):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(json.dumps(execution(events, backwards=False)))
    for rank in range(2):
        (folder / f"{rank}").mkdir(exist_ok=True)
    job.write(folder)
    if places[0].startswith("0/"):
        for rank in range(2):
            (folder / f"rank{rank}.json.gz").rename(folder / f"{rank}" / "kineto.json.gz")
    return read_job(folder)


@pytest.mark.parametrize("places", [["0/et.json", "1/et.json"], ["et_0.json", "et_1.json"]])
def test_ranks_of_one_process_id_have_the_execution_traces_next_to_them(
    tmp_path: Path, places: list[str]
) -> None:
    job = contained(tmp_path, places)
    assert [(link.rank, link.by_id) for link in job.links] == [(0, 8), (1, 8)]
    taken = [repair.rank for repair in job.repairs if "by its path" in repair.what]
    assert sorted(taken) == [0, 1]
    sources = [Path(trace.source).name for trace in job.execution_traces]
    assert sources == [Path(place).name for place in places]


def test_execution_traces_that_may_be_of_several_ranks_are_left_out_with_the_reason(
    tmp_path: Path,
) -> None:
    """They were said to be of no rank here."""
    job = contained(tmp_path, ["first.json", "second.json"])
    assert not job.links and len(job.execution_traces) == 2
    left_out = [repair.what for repair in job.repairs if "left out" in repair.what]
    assert len(left_out) == 2 and all("of ranks 0, 1, and may be of any" in one for one in left_out)
