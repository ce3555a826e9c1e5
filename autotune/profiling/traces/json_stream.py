"""The items of one large JSON array, one at a time: memory is bounded by the largest item, not by the file.

Trace files are one object with a huge array (`{"schemaVersion": 1, ..., "traceEvents": [{...}, ...]}`) or the bare array. A buffer of text
moves over the stream, and the C scanner of `json` cuts one value after the other out of it; where the buffer ends within a value,
more is read. The small fields beside the array are yielded too; those that are too large to be of use are skipped without being held.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError
from typing import Any

from autotune.errors import InvalidInput

CHUNK_BYTES = 2**20
MAX_VALUE_CHARS = 16 * 2**20
"""Of one event or field. The largest that profilers write, device properties or the inputs of one op, have some 100 kB."""

_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_NUMBERS = re.compile(
    r'("(?:[^"\\]|\\.)*(?:"|\\?\Z))|([-+]?\b(?:nan|inf(?:inity)?)(?=[\s,\]}]))',
    re.IGNORECASE | re.DOTALL,
)
"""Strings, also one that the buffer cuts off, so that they are left alone; and what is no number although it stands for one."""

_BEHIND_NUMBER = " \t\r\n,]}:"

Read = Callable[[int], bytes]


@dataclass(frozen=True)
class Field:
    """A value beside the array."""

    key: str
    value: Any


@dataclass
class JsonItems:
    """Iterate over the items of the array `array_key` (or of a bare array) and the `Field`s beside it.

    `read(n)` gives up to n bytes, none at the end. Raises `InvalidInput`, naming `where` and the item, for text that is not JSON, is cut
    off, nests too deeply or holds a value above `MAX_VALUE_CHARS`. `replaced` counts bytes that were no UTF-8, `not_numbers` the
    bare `nan` and `inf`, which some profilers write and which are read as null.
    """

    read: Read
    array_key: str
    where: str
    replaced: int = 0
    not_numbers: int = 0
    items: int = 0
    _text: str = ""
    _at: int = 0
    _ended: bool = False
    _decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _json: json.JSONDecoder = field(
        default_factory=lambda: json.JSONDecoder(strict=False, parse_constant=lambda _: None)
    )

    def __iter__(self) -> Iterator[Any]:
        opening = self._next_char()
        if opening == "[":
            yield from self._array()
        elif opening == "{":
            yield from self._object()
        else:
            raise InvalidInput(
                f"{self.where} must hold a JSON object or array, but begins with {opening[:1]!r}"
            )
        if self._peek():
            raise InvalidInput(
                f"{self.where} must end behind its JSON value, but goes on with {self._text[self._at : self._at + 20]!r}"
            )

    def _object(self) -> Iterator[Any]:
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self._value("a key")
            if not isinstance(key, str):
                raise InvalidInput(
                    f"{self.where} must have strings as keys, but has {str(key)[:40]!r}"
                )
            self._expect(":")
            if key == self.array_key:
                self._expect("[")
                yield from self._array()
            else:
                yield Field(key, self._value(f"the field {key[:40]!r}"))
            if self._expect(",", "}") == "}":
                return

    def _array(self) -> Iterator[Any]:
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            value = self._value(f"item {self.items}")
            self.items += 1
            yield value
            if self._expect(",", "]") == "]":
                return
            if self._peek() == "]":  # a comma behind the last item: some writers leave one
                self._at += 1
                return

    def _value(self, what: str) -> Any:
        """The value at the cursor; reads on until it is complete."""
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise InvalidInput(f"{self.where}: {what} nests too deeply") from error
            except (JSONDecodeError, ValueError) as error:
                problem = error
            else:
                if self._ended or (
                    end < len(self._text)
                    and (self._text[end] in _BEHIND_NUMBER or not isinstance(value, int | float))
                ):
                    self._at = end
                    return value
                problem = ValueError(
                    "cut off"
                )  # of a number, "0." is in the buffer and "5," in the next chunk
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                raise InvalidInput(
                    f"{self.where}: {what} must be JSON of at most {MAX_VALUE_CHARS} characters: {problem}"
                )
            if self._may_hold_not_numbers(problem) and self._without_not_numbers():
                continue
            if not self._more():
                cut = "the file ends within it" if self._cut_off(problem) else str(problem)
                raise InvalidInput(
                    f"{self.where}: {what} is not JSON: {cut}; is the file complete?"
                )

    def _may_hold_not_numbers(self, problem: ValueError) -> bool:
        return (
            isinstance(problem, JSONDecodeError)
            and problem.pos < len(self._text)
            and self._text[problem.pos] in "-+niNI"
        )

    def _without_not_numbers(self) -> bool:
        """Replace bare `nan` and `inf` in what is buffered; whether there were any."""
        changed = 0

        def null(match: re.Match[str]) -> str:
            nonlocal changed
            if match.group(1) is not None:
                return match.group(1)
            changed += 1
            return "null"

        self._text = _NOT_NUMBERS.sub(null, self._text[self._at :])
        self._at = 0
        self.not_numbers += changed
        return changed > 0

    def _cut_off(self, problem: ValueError) -> bool:
        at = problem.pos if isinstance(problem, JSONDecodeError) else len(self._text)
        return at >= len(self._text.rstrip()) or "Unterminated string" in str(problem)

    def _peek(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _next_char(self) -> str:
        char = self._peek()
        self._at += 1
        return char

    def _expect(self, *chars: str) -> str:
        char = self._next_char()
        if char not in chars or not char:
            got = f"has {char!r}" if char else "ends there; is the file complete?"
            raise InvalidInput(
                f"{self.where} must have {' or '.join(chars)} behind item {self.items}, but {got}"
            )
        return char

    def _more(self) -> bool:
        """Read on and forget what lies before the cursor; False at the end. Twice as much each time: a large value costs no square."""
        if self._ended:
            return False
        raw = self.read(max(CHUNK_BYTES, len(self._text) - self._at))
        text = self._decode.decode(raw, not raw)
        self.replaced += text.count("\ufffd")
        self._text = self._text[self._at :] + text
        self._at = 0
        self._ended = not raw
        return bool(raw) or bool(text)
