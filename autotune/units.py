"""Units at the boundary: text such as `1Gbit/s`, `16GB` or `50us` becomes SI numbers only here."""

from __future__ import annotations

import math
import re

from autotune.errors import InvalidInput

_PREFIX = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
}
_NUMBER = r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*"
_BYTES = re.compile(_NUMBER + r"(|[kKMGT]|Ki|Mi|Gi)B?\s*$")
_RATE = re.compile(_NUMBER + r"(|[kKMGT]|Ki|Mi|Gi)(bit/s|bps|B/s|bE)\s*$")
_TIME = re.compile(_NUMBER + r"(|s|ms|us|µs|ns|min|h)\s*$")
_SECONDS = {"min": 60.0, "h": 3600.0}
_PER_SECOND = {"ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
"""Divisors, so that 50us is 5e-5 to the last bit."""


def parse_bytes(value: str | float, what: str) -> int:
    """`16GB` (decimal), `16GiB` (binary) or a plain number of bytes."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(_checked(value, what))
    match = _BYTES.match(str(value))
    if match is None:
        raise InvalidInput(f"{what} needs a size such as 16GB or 512MiB, but is {value!r}")
    return int(_checked(float(match[1]) * _PREFIX[match[2]], what))


def parse_bytes_per_s(value: str | float, what: str) -> float:
    """`1Gbit/s`, `25GbE` or `10GB/s`; a plain number is bytes per second."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _checked(value, what)
    if plain := re.match(_NUMBER + r"$", str(value)):  # 1e9 is text in YAML
        return _checked(float(plain[1]), what)
    match = _RATE.match(str(value))
    if match is None:
        raise InvalidInput(f"{what} needs a rate such as 1Gbit/s or 10GB/s, but is {value!r}")
    per_unit = 1.0 if match[3] == "B/s" else 1 / 8
    return _checked(float(match[1]) * _PREFIX[match[2]] * per_unit, what)


def parse_seconds(value: str | float, what: str) -> float:
    """`50us`, `5min` or `1.5h`; a plain number is seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _checked(value, what)
    match = _TIME.match(str(value))
    if match is None:
        raise InvalidInput(f"{what} needs a time such as 50us, 30s or 5min, but is {value!r}")
    seconds = float(match[1]) * _SECONDS.get(match[2], 1.0) / _PER_SECOND.get(match[2], 1.0)
    return _checked(seconds, what)


def _checked(value: float, what: str) -> float:
    try:
        number = float(value)
    except OverflowError:  # an integer above 1.8e308
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise InvalidInput(f"{what} must be finite and at least 0, but is {number}")
    return number + 0.0  # not -0.0, which is other content


_TIMES = (("h", 3600.0, 1), ("min", 60.0, 2), ("s", 1.0, 1), ("ms", 1e-3, 1), ("us", 1e-6, 1))
"""Units of time with their seconds, and the number from which each is used."""
_SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))


def format_seconds(seconds: float) -> str:
    """Three significant digits with a readable unit: `12.3 ms`, `30 min`, `1.5 h`."""
    for unit, scale, least in _TIMES:
        if abs(float(f"{seconds / scale:.3g}")) >= least:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def format_ratio(ratio: float) -> str:
    """Two decimals, or three digits of a small ratio: `1.54x`, `0.0132x`."""
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.3g}x"


def format_rate(bytes_per_s: float) -> str:
    """Bits per second, as link rates are quoted: `250 Mbit/s`."""
    for unit, scale in _RATES:
        if 8 * bytes_per_s >= scale:
            return f"{_digits(8 * bytes_per_s / scale, 4)} {unit}"
    return f"{_digits(8 * bytes_per_s, 4)} bit/s"


def format_bytes(count: float) -> str:
    """Three significant digits, or a whole number; binary prefixes, as bucket sizes are quoted."""
    for unit, scale in _SIZES:
        if abs(float(f"{count / scale:.3g}")) >= 1:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def _digits(value: float, significant: int = 3) -> str:
    """Format a number with this many significant digits, without an exponent."""
    text = f"{value:.{significant}g}"
    return f"{value:.0f}" if "e" in text else text
