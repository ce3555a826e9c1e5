"""Yields the items of one large JSON array; memory is bounded by the largest item, not by the file.

A trace file is one object with a huge array (`{"schemaVersion": 1, ..., "traceEvents": [{...}]}`),
or the bare array. A text buffer moves over the stream. The C scanner of `json` cuts one value after
the other out of it, and reads more where the buffer ends within a value. The small fields next to
the array are yielded too.
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
"""Limit of one event or field. The largest ones (device properties, inputs) have some 100 kB."""

_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_NUMBERS = re.compile(
    r'("(?:[^"\\]|\\.)*(?:"|\\?\Z))|([-+]?\b(?:nan|inf(?:inity)?)(?=[\s,\]}]))',
    re.IGNORECASE | re.DOTALL,
)
"""Strings, which are left alone even where the buffer cuts them off; and bare nan and inf."""

_AFTER_NUMBER = " \t\r\n,]}:"

Read = Callable[[int], bytes]
"""`read(n)` returns up to n bytes, none at the end."""


class _EndsWithinValue(InvalidInput):
    """The text ends within a value."""


@dataclass(frozen=True)
class Field:
    """A value next to the array."""

    key: str
    value: Any


@dataclass
class JsonItems:
    """Iterate over the items of array `array_key`, or of a bare array, and the `Field`s next to it.

    Raises `InvalidInput`, naming `where` and the item, for text that is not JSON, is cut off, nests
    too deeply or holds a value above `MAX_VALUE_CHARS`. `replaced` counts bytes that are not UTF-8;
    `not_numbers` counts bare `nan` and `inf`, which some profilers write, and which become null.
    With `may_be_cut`, a bare array may end anywhere, even within an item; `cut` states that it did.
    """

    read: Read
    array_key: str
    where: str
    may_be_cut: bool = False
    cut: bool = False
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
        if not self.cut and self._peek():
            rest = self._text[self._at : self._at + 20]
            raise InvalidInput(
                f"{self.where} must end after its JSON value, but goes on with {rest!r}"
            )

    def in_a_row(self) -> Iterator[Any]:
        """The values of a text that holds one value behind the other, without an array."""
        while self._peek():
            value = self._value(f"value {self.items}")
            self.items += 1
            yield value

    def _object(self) -> Iterator[Any]:
        if self._peek() == "}":
            self._at += 1
            return
        seen: set[str] = set()
        while True:
            key = self._value("a key")
            if not isinstance(key, str):
                shown = repr(str(key)[:40])
                raise InvalidInput(f"{self.where} must have strings as keys, but has {shown}")
            if key in seen:
                raise InvalidInput(
                    f"{self.where} must name a field once, but has {key[:40]!r} again; is it more "
                    "than one file?"
                )
            seen.add(key)
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
        while not self._ends_here():
            try:
                value = self._value(f"item {self.items}")
            except _EndsWithinValue:
                if not self.may_be_cut:
                    raise
                self.cut = True
                return
            self.items += 1
            yield value
            if self._ends_here() or self._expect(",", "]") == "]":
                return
            if self._peek() == "]":  # some writers leave a comma after the last item
                self._at += 1
                return

    def _ends_here(self) -> bool:
        """Whether the text ends at the cursor, where that is permitted."""
        self.cut = self.cut or (self.may_be_cut and not self._peek())
        return self.cut

    def _value(self, what: str) -> Any:
        """The value at the cursor; reads on until it is complete."""
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise InvalidInput(f"{self.where}: {what} nests too deeply") from error
            except ValueError as error:
                problem = error
            else:
                if self._ended or self._is_complete(value, end):
                    self._at = end
                    return value
                problem = ValueError("cut off")
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                limit = f"JSON of at most {MAX_VALUE_CHARS} characters"
                raise InvalidInput(f"{self.where}: {what} must be {limit}: {problem}")
            if self._may_hold_not_numbers(problem) and self._without_not_numbers():
                continue
            if not self._more():
                cut_off = self._cut_off(problem)
                reason = "the file ends within it" if cut_off else str(problem)
                text = f"{self.where}: {what} is not JSON: {reason}; is the file complete?"
                raise _EndsWithinValue(text) if cut_off else InvalidInput(text)

    def _is_complete(self, value: Any, end: int) -> bool:
        """False for a number at the end of the buffer: its next digits may be in the next chunk."""
        if not isinstance(value, int | float):
            return True
        return end < len(self._text) and self._text[end] in _AFTER_NUMBER

    def _may_hold_not_numbers(self, problem: ValueError) -> bool:
        if not isinstance(problem, JSONDecodeError) or problem.pos >= len(self._text):
            return False
        return self._text[problem.pos] in "-+niNI"

    def _without_not_numbers(self) -> bool:
        """Replace bare `nan` and `inf` in the buffer; return whether there were any."""
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
        """The next character that is not white space, "" at the end."""
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
            problem = f"has {char!r}" if char else "ends there; is the file complete?"
            wanted = " or ".join(chars)
            raise InvalidInput(
                f"{self.where} must have {wanted} after item {self.items}, but {problem}"
            )
        return char

    def _more(self) -> bool:
        """Read on and drop the text before the cursor; return False at the end.

        Each read doubles the buffer, so the cost of a large value is not quadratic.
        """
        if self._ended:
            return False
        try:
            raw = self.read(max(CHUNK_BYTES, len(self._text) - self._at))
        except InvalidInput as error:
            raise InvalidInput(f"{error}; it ends after item {self.items}") from error
        text = self._decode.decode(raw, not raw)
        self.replaced += text.count("\ufffd")
        self._text = self._text[self._at :] + text
        self._at = 0
        self._ended = not raw
        return bool(raw) or bool(text)
