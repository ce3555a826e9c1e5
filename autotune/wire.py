"""Reads protocol buffers without their schema: the fields of a message in wire format.

It reads a few known messages (https://protobuf.dev/programming-guides/encoding/) without the
library or a generated module. A file cannot cause any call or import. Every length is checked
against the available bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.errors import InvalidInput

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_FIXED = {_I64: 8, _I32: 4}
LONGEST_VARINT = 10

Value = int | bytes


class WireMessage:
    """The fields of one message: number -> values in order, fixed-width values as bytes."""

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
        """The last value, as the format demands; "" without one."""
        return (self.texts(number) or [""])[-1]

    def number(self, number: int) -> int:
        """The last value; 0 without one."""
        values = self._fields.get(number, [0])
        if not isinstance(values[-1], int):
            raise InvalidInput(f"{self._where}: field {number} must be a number, but holds bytes")
        return values[-1]

    def numbers(self, number: int) -> list[int]:
        """All values of a repeated field of numbers, which a writer may pack into bytes."""
        numbers: list[int] = []
        for value in self._fields.get(number, []):
            packed, at = (value, 0) if isinstance(value, bytes) else (b"", 0)
            if isinstance(value, int):
                numbers.append(value)
            while at < len(packed):
                one, at = varint(packed, at, self._where)
                numbers.append(one)
        return numbers

    @property
    def fields(self) -> frozenset[int]:
        return frozenset(self._fields)

    def has(self, number: int) -> bool:
        return number in self._fields

    def messages(self, number: int) -> list[WireMessage]:
        return [WireMessage(value, self._where) for value in self.blobs(number)]

    def message(self, number: int) -> WireMessage:
        """The last value; empty without one."""
        return (self.messages(number) or [WireMessage(b"", self._where)])[-1]

    def blobs(self, number: int) -> list[bytes]:
        values = self._fields.get(number, [])
        blobs = [value for value in values if isinstance(value, bytes)]
        if len(blobs) < len(values):
            raise InvalidInput(f"{self._where}: field {number} must hold bytes, but is a number")
        return blobs


def _fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at, where)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise InvalidInput(f"{where} must be a protocol buffer, but has field 0 at byte {at}")
        if kind == _VARINT:
            value, at = varint(data, at, where)
            yield number, value
            continue
        if kind == _LEN:
            size, at = varint(data, at, where)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            problem = f"has a field of kind {kind} at byte {at}"
            raise InvalidInput(f"{where} must be a protocol buffer, but {problem}")
        if at + size > len(data):
            problem = f"is cut off: field {number} has {size} bytes at byte {at}"
            raise InvalidInput(f"{where} must be a whole protocol buffer, but {problem}")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """The number at a place of `data`, and the place of its end."""
    value = 0
    for index in range(LONGEST_VARINT):
        if at + index >= len(data):
            problem = f"is cut off at byte {len(data)}"
            raise InvalidInput(f"{where} must be a whole protocol buffer, but {problem}")
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    problem = f"has a number of more than {LONGEST_VARINT} bytes at byte {at}"
    raise InvalidInput(f"{where} must be a protocol buffer, but {problem}")
