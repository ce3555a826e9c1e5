"""Reads Chakra's own files: protocol buffers (`.et`), and the JSON that its jsonizer makes of them.

Both hold one `GlobalMetadata` and then the nodes, without anything around them: as messages that
follow their sizes, or as JSON objects in a row. Numbers of fields are those of et_def.proto
(mlcommons/chakra, schema/protobuf; MIT License). Only the fields that an execution trace needs are
read; times are those of Kineto.

| message | fields |
|---|---|
| GlobalMetadata | version 1, attr 2 |
| Node | id 1, name 2, type 3, ctrl_deps 4, inputs 8, outputs 9, attr 10 |
| IOInfo | values 1, as text |
| AttributeProto | name 1; int32 7, int64 9, uint32 11, uint64 13, bool 27; string 29 |

Fields with a default value, such as the id 0, are missing in both forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from autotune.errors import InvalidInput
from autotune.profiling.formats.execution_trace import ExecutionTrace, trace_of_nodes
from autotune.profiling.formats.json_stream import CHUNK_BYTES, Field, JsonItems, Read
from autotune.wire import LONGEST_VARINT, WireMessage, varint

MAX_MESSAGE_BYTES = 16 * 2**20
"""Limit of one node, as of one event in JSON."""
_WHOLE_VALUES, _TEXT_VALUE = (7, 9, 11, 13, 27), 29
_IN_A_ROW = re.compile(rb'\}\s*\{\s*"(?:id|name|type)"')
"""The end of an object and the first fields of a node; JSON has a comma between objects."""

ChakraReader = Callable[[Read, str], ExecutionTrace]


def chakra_reader(beginning: bytes) -> ChakraReader | None:
    """The reader for a file that begins so, None if it is none of Chakra's own."""
    if _begins_with_metadata(beginning):
        return read_messages
    is_row = beginning.lstrip().startswith(b"{") and b'"traceEvents"' not in beginning
    return read_objects if is_row and _IN_A_ROW.search(beginning) else None


def read_messages(read: Read, where: str) -> ExecutionTrace:
    """Read protocol buffers behind their sizes. Raises `InvalidInput` for any other file."""
    return trace_of_nodes(_decoded(read, where), where)


def read_objects(read: Read, where: str) -> ExecutionTrace:
    """Read JSON objects in a row. Raises `InvalidInput` for any other file."""
    return trace_of_nodes(_listed(read, where), where)


def _begins_with_metadata(beginning: bytes) -> bool:
    """Whether the first bytes are a size and a `GlobalMetadata` of this size."""
    try:
        size, at = varint(beginning, 0, "")
        metadata = WireMessage(beginning[at : at + size], "")
        metadata.text(1)
        attributes = metadata.messages(2)
    except InvalidInput:
        return False
    known = metadata.fields <= {1, 2} and all(one.has(1) for one in attributes)
    return known and 0 < size <= len(beginning) - at


def _decoded(read: Read, where: str) -> Iterator[Any]:
    """The fields of the metadata, and each node as JSON has it."""
    for number, data in enumerate(_sized(read, where)):
        message = WireMessage(data, f"{where}, message {number}")
        if number == 0:
            yield Field("version", message.text(1))
            yield from (Field(name, value) for name, value in _attributes(message, 2).items())
            continue
        if not message.fields:
            raise InvalidInput(f"{where}: node {number - 1} is empty; is the file damaged?")
        attributes = _attributes(message, 10)
        yield {
            "id": message.number(1),
            "name": message.text(2),
            "type": message.number(3),
            "ctrl_deps": message.numbers(4),
            "inputs": {"values": message.message(8).text(1)},
            "outputs": {"values": message.message(9).text(1)},
            "attr": [{"name": name, "value": value} for name, value in attributes.items()],
        }


def _attributes(message: WireMessage, number: int) -> dict[str, int | str | None]:
    """Name -> value of attributes, None for values of other types."""
    attributes: dict[str, int | str | None] = {}
    for one in message.messages(number):
        whole = [one.number(field) for field in _WHOLE_VALUES if one.has(field)]
        text = one.text(_TEXT_VALUE) if one.has(_TEXT_VALUE) else None
        attributes[one.text(1)] = whole[0] if whole else text
    return attributes


def _sized(read: Read, where: str) -> Iterator[bytes]:
    """Messages that follow their sizes. Raises `InvalidInput` for one that is cut off."""
    buffer, number = b"", 0
    while more := read(CHUNK_BYTES):
        buffer, at = buffer + more, 0
        while (span := _span(buffer, at, f"{where}, message {number}")) is not None:
            begin, at = span
            yield buffer[begin:at]
            number += 1
        buffer = buffer[at:]
    if buffer:
        raise InvalidInput(f"{where} is cut off within message {number}; is the file complete?")


def _span(buffer: bytes, at: int, where: str) -> tuple[int, int] | None:
    """Begin and end of the message at a place; None if the buffer ends within it."""
    number = buffer[at : at + LONGEST_VARINT]
    if len(number) < LONGEST_VARINT and all(byte >= 0x80 for byte in number):
        return None
    size, begin = varint(buffer, at, where)
    if size > MAX_MESSAGE_BYTES:
        limit = f"may have at most {MAX_MESSAGE_BYTES} bytes"
        raise InvalidInput(f"{where}: a message {limit}, but it has {size}")
    return (begin, begin + size) if begin + size <= len(buffer) else None


def _listed(read: Read, where: str) -> Iterator[Any]:
    """The fields of the metadata, and the nodes."""
    for number, value in enumerate(JsonItems(read, "", where).in_a_row()):
        if number > 0 or not isinstance(value, dict):
            yield {"id": 0, "name": "", **value} if isinstance(value, dict) else value
            continue
        yield Field("version", value.get("version"))
        attributes = value.get("attr")
        for one in attributes if isinstance(attributes, list) else []:
            if isinstance(one, dict):
                values = [given for key, given in one.items() if key.endswith("Val")]
                yield Field(str(one.get("name")), values[0] if values else None)
