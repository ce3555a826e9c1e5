"""Text with units becomes SI numbers at the edge, and back for people."""

from __future__ import annotations

import math

import pytest

from autotune.errors import InvalidInput
from autotune.units import (
    format_bytes,
    format_rate,
    format_ratio,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (parse_bytes, {"16GB": 16 * 10**9, "512MiB": 512 * 2**20, "1.5 kB": 1500}),
        (parse_bytes, {"100": 100, 42: 42, "2e3B": 2000, "1T": 10**12}),
        (parse_bytes_per_s, {"1Gbit/s": 1.25e8, "25GbE": 3.125e9, "10GB/s": 1e10}),
        (parse_bytes_per_s, {"100 Mbps": 1.25e7, "1GiB/s": 2.0**30, 5e8: 5e8}),
        (parse_seconds, {"50us": 5e-5, "5µs": 5e-6, "5min": 300, "1.5h": 5400}),
        (parse_seconds, {"3 ms": 3e-3, 2: 2.0}),
    ],
)
def test_sizes_rates_and_times_become_bytes_and_seconds(parse, values):
    assert {text: parse(text, "x") for text in values} == values


NOT_FINITE = "must be finite and at least 0, but is"


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
        (parse_seconds, "50 d", "needs a time such as 50us, 30s or 5min, but is '50 d'"),
        (parse_bytes, -5, rf"memory {NOT_FINITE} -5\.0"),
        (parse_bytes, math.nan, f"{NOT_FINITE} nan"),
        (parse_bytes, "1e400GB", f"{NOT_FINITE} inf"),
        (parse_bytes, 10**400, f"{NOT_FINITE} inf"),
        (parse_bytes_per_s, math.inf, f"{NOT_FINITE} inf"),
        (parse_seconds, math.nan, f"{NOT_FINITE} nan"),
        (parse_seconds, "1e999s", f"{NOT_FINITE} inf"),
    ],
)
def test_a_value_that_is_no_quantity_is_refused_with_an_example(parse, value, message):
    with pytest.raises(InvalidInput, match=message):
        parse(value, "memory")


def test_a_rate_that_yaml_takes_for_text_is_bytes_per_second() -> None:
    assert parse_bytes_per_s("1e9", "rate") == parse_bytes_per_s(1e9, "rate") == 1e9
    assert math.copysign(1.0, parse_seconds(-0.0, "latency")) == 1.0


def test_people_read_three_digits_and_a_fitting_unit():
    seconds = {1.5: "1.5 s", 0.01234: "12.3 ms", 5e-5: "50 us", 2e-8: "20 ns"}
    seconds |= {119.0: "119 s", 120.0: "2 min", 1800.0: "30 min", 3600.0: "1 h", 5400.0: "1.5 h"}
    assert {value: format_seconds(value) for value in seconds} == seconds
    sizes = {25 * 2**20: "25 MiB", 2**30: "1 GiB", 1536: "1.5 KiB", 12: "12 B"}
    assert {value: format_bytes(value) for value in sizes} == sizes


def test_a_value_that_rounds_up_takes_the_next_unit_and_none_has_an_exponent():
    seconds = {0.9996: "1 s", 3599.0: "1 h", 3.6e7: "10000 h", 9.996e-7: "1 us", 1e-15: "0 ns"}
    assert {value: format_seconds(value) for value in seconds} == seconds
    sizes = {1020 * 2**20: "1020 MiB", 1023.9 * 2**20: "1 GiB", 5000 * 2**30: "5000 GiB"}
    assert {value: format_bytes(value) for value in sizes} == sizes
    assert format_rate(3e12) == "24000 Gbit/s"


def test_rates_of_links_are_formatted_in_bits():
    bits = {250e6: "250 Mbit/s", 1e9: "1 Gbit/s", 997.3e6: "997.3 Mbit/s", 2.5e9: "2.5 Gbit/s"}
    bits |= {64e3: "64 kbit/s", 10: "10 bit/s"}
    assert {value: format_rate(value / 8) for value in bits} == bits


def test_small_ratios_keep_three_digits() -> None:
    assert [format_ratio(ratio) for ratio in (12.345, 0.1, 0.0132)] == [
        "12.35x",
        "0.10x",
        "0.0132x",
    ]
