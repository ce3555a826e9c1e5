"""Mutations of bytes, text and JSON structures; all choices come from one `random.Random`.

The same generator state gives the same result. A property test passes a generator that hypothesis
controls, a campaign one that is seeded per input.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

MANY_DIGITS = "9" * 5000
"""Python refuses to convert more than 4300 digits (`sys.int_info.default_max_str_digits`)."""

RAW_VALUES = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e308",
    "1e308",
    MANY_DIGITS,
    f"-{MANY_DIGITS}",
    f"0.{MANY_DIGITS}",
    "[" * 300 + "]" * 300,
    "[" * 900 + "]" * 900,
    "[" * 100_000,
    '{"a":' * 300 + "1" + "}" * 300,
    '{"a": 1, "a": 2}',
)
"""Values as they are written into the text; some of them are not JSON."""

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x" * 10_000,
    "nan",
    "1e999",
    "-5",
    "\x00",
    "\x1b[2J\x1b]0;title\x07",
    "../../../etc/passwd",
    "\ud800",
    "0" * 400,
    -1,
    0,
    1,
    2,
    1000,
    2**31 - 1,
    2**31,
    2**53,
    2**62,
    2**63,
    2**64,
    10**9,
    10**30,
    -(10**30),
    0.5,
    -0.5,
    5e-324,
    1e18,
    1e300,
    -1e300,
    [],
    {},
    [[]],
    [0] * 1000,
    [10**9] * 3,
    [2**20] * 4,
    {"": None},
)

_PLACEHOLDER = re.compile(r'"@raw(\d+)@"')


def mutated_json(data: Any, rng: random.Random) -> bytes:
    """JSON text of `data` after one to four mutations; it may not be JSON any more."""
    raw: list[str] = []
    holder = [copy.deepcopy(data)]
    for _ in range(_few(rng)):
        _mutate_once(holder, rng, raw)
    text = json.dumps(holder[0], ensure_ascii=rng.random() < 0.9)
    text = _PLACEHOLDER.sub(lambda match: raw[int(match.group(1))], text)
    return text.encode(errors="surrogatepass")


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some flipped, removed, repeated, inserted or cut off."""
    content = bytearray(data)
    for _ in range(_few(rng)):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(6)
        if kind == 0 and content:
            for _ in range(rng.choice((1, 1, 4, 32))):
                content[rng.randrange(len(content))] = rng.randrange(256)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at : at + rng.choice((1, 4, 64))]
        elif kind == 3:
            part = bytes(content[at : at + rng.choice((1, 16, 256))])
            content[at:at] = part * rng.choice((1, 2, 50))
        elif kind == 4:
            content[at:at] = rng.choice((b"\x00", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80" * 12))
        elif content:
            content[at : at + 8] = rng.choice((b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f" * 2))
    return bytes(content)


def mutated_text(text: str, rng: random.Random) -> bytes:
    """Text with words replaced by hostile ones, or with lines removed, repeated or swapped."""
    for _ in range(_few(rng)):
        if rng.random() < 0.6:
            words = list(re.finditer(r"[^\s,:;\[\]{}()=#]+", text))
            if words:
                word = rng.choice(words)
                text = text[: word.start()] + _hostile_word(rng) + text[word.end() :]
            continue
        lines = text.split("\n")
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(4)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(other, lines[at])
        elif kind == 2:
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] = rng.choice((" " * 7, "\t", "- ", "? ", "*a", "&a ")) + lines[at]
        text = "\n".join(lines)
    return text.encode(errors="surrogatepass")


def _few(rng: random.Random) -> int:
    return rng.choice((1, 1, 1, 2, 2, 3, 4))


def _hostile_word(rng: random.Random) -> str:
    value = rng.choice((*RAW_VALUES, *HOSTILE_VALUES))
    return value if isinstance(value, str) else json.dumps(value)


def _mutate_once(holder: list[Any], rng: random.Random, raw: list[str]) -> None:
    """Change one place of the structure in `holder[0]`."""
    parent, key = _place(holder, rng)
    value = parent[key]
    change = rng.choice(_CHANGES)
    parent[key] = change(value, rng, raw)
    if parent is not holder and rng.random() < 0.15:
        _restructure(parent, key, rng)


def _place(holder: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """A random container and key; every level is equally likely to be the last one."""
    parent, key = holder, 0
    while True:
        value = parent[key]
        size = len(value) if isinstance(value, list | dict) else 0
        if not size or rng.random() < 0.1:
            return parent, key
        chosen = rng.randrange(size)
        parent, key = value, list(value)[chosen] if isinstance(value, dict) else chosen


def _restructure(parent: Any, key: Any, rng: random.Random) -> None:
    """Remove, repeat or rename the value at `key`."""
    if isinstance(parent, list):
        other = rng.randrange(len(parent))
        kind = rng.randrange(3)
        if kind == 0:
            del parent[key]
        elif kind == 1:
            parent[key:key] = [parent[key]] * rng.choice((1, 2, 300))
        else:
            parent[key], parent[other] = parent[other], parent[key]
    elif rng.random() < 0.5:
        del parent[key]
    else:
        parent[rng.choice((*parent, "unknown", "", "schema"))] = parent.pop(key)


def _raw(value: Any, rng: random.Random, raw: list[str]) -> Any:
    raw.append(rng.choice(RAW_VALUES))
    return f"@raw{len(raw) - 1}@"


def _hostile(value: Any, rng: random.Random, raw: list[str]) -> Any:
    return copy.deepcopy(rng.choice(HOSTILE_VALUES))  # further mutations change it in place


def _other_type(value: Any, rng: random.Random, raw: list[str]) -> Any:
    if isinstance(value, bool | None):
        return rng.choice((0, "true", []))
    if isinstance(value, int | float):
        return rng.choice((str(value), [value], {"value": value}, float(value) + 0.5))
    if isinstance(value, str):
        return rng.choice(([value], {"name": value}, len(value), value.upper(), value * 3))
    if isinstance(value, list):
        return rng.choice((dict(enumerate(map(str, value))), value[0] if value else 0, [value]))
    return rng.choice((list(value), [[key, one] for key, one in value.items()], [value]))


def _near(value: Any, rng: random.Random, raw: list[str]) -> Any:
    """A plausible value nearby, which a check of types alone would let through."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return (
            value + rng.choice((-1, 1)) if rng.random() < 0.5 else value * rng.choice((-1, 10**6))
        )
    if isinstance(value, float):
        return value * rng.choice((-1.0, 0.0, 1e-9, 1e9, 1e30))
    if isinstance(value, list):
        return rng.choice((value[::-1], value * 2, value[:-1]))
    return _hostile(value, rng, raw)


_Change = Callable[[Any, random.Random, list[str]], Any]
_CHANGES: tuple[_Change, ...] = (_hostile, _hostile, _raw, _other_type, _near, _near)
