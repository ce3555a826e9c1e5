"""Text with units becomes SI numbers at the edge, and back for people."""

from __future__ import annotations

import math

import pytest

from autotune.errors import InvalidInput
from autotune.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("100", 100),
        (42, 42),
        ("2e3B", 2000),
        ("1T", 10**12),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text, "x") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbit/s", 1.25e8),
        ("25GbE", 3.125e9),
        ("10GB/s", 1e10),
        ("100 Mbps", 1.25e7),
        ("1GiB/s", 2.0**30),
        (5e8, 5e8),
    ],
)
def test_rates_are_bytes_per_second(text, expected):
    assert parse_bytes_per_s(text, "x") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50us", 5e-5), ("5µs", 5e-6), ("5min", 300), ("1.5h", 5400), ("3 ms", 3e-3), (2, 2.0)],
)
def test_times_are_seconds(text, expected):
    assert parse_seconds(text, "x") == expected


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (
            parse_bytes,
            "16 bananas",
            "memory needs a size such as 16GB or 512MiB, but is '16 bananas'",
        ),
        (parse_bytes, True, "needs a size"),
        (parse_bytes_per_s, "1Gbit", "needs a rate such as 1Gbit/s or 10GB/s, but is '1Gbit'"),
        (parse_bytes_per_s, "-1GB/s", "needs a rate"),
        (parse_seconds, "50", "needs a time such as 50us, 30s or 5min, but is '50'"),
        (parse_bytes, -5, r"memory must be finite and at least 0, but is -5\.0"),
        (parse_bytes, math.nan, "must be finite and at least 0, but is nan"),
        (parse_bytes, "1e400GB", "must be finite and at least 0, but is inf"),
        (parse_bytes, 10**400, "must be finite and at least 0, but is inf"),
        (parse_bytes_per_s, math.inf, "must be finite and at least 0, but is inf"),
        (parse_seconds, math.nan, "must be finite and at least 0, but is nan"),
        (parse_seconds, "1e999s", "must be finite and at least 0, but is inf"),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_value_and_an_example(parse, value, message):
    with pytest.raises(InvalidInput, match=message):
        parse(value, "memory")


def test_people_read_three_digits_and_a_fitting_unit():
    assert [format_seconds(s) for s in (1.5, 0.01234, 5e-5, 2e-8)] == [
        "1.5 s",
        "12.3 ms",
        "50 us",
        "20 ns",
    ]
    assert [format_bytes(b) for b in (25 * 2**20, 2**30, 1536, 12)] == [
        "25 MiB",
        "1 GiB",
        "1.5 KiB",
        "12 B",
    ]


def test_rates_of_links_are_told_in_bits():
    assert [format_rate(value / 8) for value in (250e6, 1e9, 997.3e6, 2.5e9, 64e3, 10)] == [
        *("250 Mbit/s", "1 Gbit/s", "997.3 Mbit/s", "2.5 Gbit/s", "64 kbit/s", "10 bit/s")
    ]
