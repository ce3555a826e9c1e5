"""Protocol buffers without their schema: the fields of a message as they stand on the wire.

Enough to read a few known messages of others (https://protobuf.dev/programming-guides/encoding/) without a generated module or the
library: nothing is called or imported by what a file says, and every length is checked against the bytes that there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.errors import InvalidInput

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_FIXED = {_I64: 8, _I32: 4}
_LONGEST_VARINT = 10

Value = int | bytes


class Message:
    """The fields of one message: number -> values in order. Fixed-width values are kept as bytes."""

    def __init__(self, data: bytes, where: str) -> None:
        self._where = where
        self._fields: dict[int, list[Value]] = {}
        for number, value in _fields(data, where):
            self._fields.setdefault(number, []).append(value)

    def texts(self, number: int) -> list[str]:
        try:
            return [value.decode() for value in self.blobs(number)]
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{self._where}: field {number} must be UTF-8 text, but byte {error.start} is not"
            ) from error

    def text(self, number: int) -> str:
        """The last one, as the format demands; "" where there is none."""
        return (self.texts(number) or [""])[-1]

    def number(self, number: int) -> int:
        """The last one; 0 where there is none."""
        values = self._fields.get(number, [0])
        if not isinstance(values[-1], int):
            raise InvalidInput(f"{self._where}: field {number} must be a number, but holds bytes")
        return values[-1]

    def has(self, number: int) -> bool:
        return number in self._fields

    def messages(self, number: int) -> list[Message]:
        return [Message(value, self._where) for value in self.blobs(number)]

    def message(self, number: int) -> Message:
        """The last one; empty where there is none."""
        return (self.messages(number) or [Message(b"", self._where)])[-1]

    def blobs(self, number: int) -> list[bytes]:
        found = []
        for value in self._fields.get(number, []):
            if not isinstance(value, bytes):
                raise InvalidInput(
                    f"{self._where}: field {number} must hold bytes, but is a number"
                )
            found.append(value)
        return found


def _fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise InvalidInput(f"{where} must be a protocol buffer, but has field 0 at byte {at}")
        if kind == _VARINT:
            value, at = _varint(data, at, where)
            yield number, value
            continue
        if kind == _LEN:
            size, at = _varint(data, at, where)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise InvalidInput(
                f"{where} must be a protocol buffer, but has a field of kind {kind} at byte {at}"
            )
        if at + size > len(data):
            raise InvalidInput(
                f"{where} must be a whole protocol buffer, but is cut off: field {number} has {size} bytes at byte {at}"
            )
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(data):
            raise InvalidInput(
                f"{where} must be a whole protocol buffer, but is cut off at byte {len(data)}"
            )
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise InvalidInput(
        f"{where} must be a protocol buffer, but has a number of more than {_LONGEST_VARINT} bytes at byte {at}"
    )
