"""Texts that are larger, deeper or more ambiguous than they look are refused with the place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autotune.errors import InvalidInput
from autotune.parsing import parse, parse_json
from autotune.tuning.job import read_job_file
from autotune.yaml_reading import MAX_VALUES, parse_yaml


def bomb(base, levels, width=9):
    lines = [f"a0: &a0 {base}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def merge_bomb(levels, width=9):
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * width)}]}}")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb("[x, x]", 30), merge_bomb(30)])
def test_nested_aliases_are_refused_before_they_are_built(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(f"{text}\ncommand: torchrun train.py\n")
    with pytest.raises(InvalidInput, match=f"at most {MAX_VALUES} values, but its aliases stand"):
        read_job_file(path)


def test_plain_aliases_and_merge_keys_are_read():
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", "f") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }
    assert parse_yaml("", "f") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 2}\na: 3", "f, line 3: a key may occur once, but 'a' also stands in line 1"),
        ("b:\n  - c: 1\n    'c': 2", "f, line 3: a key may occur once, but 'c' also .* in line 2"),
        ("a: &own [*own]", "f, line 1: an alias must not name a value that contains it"),
        ("a: 0x" + "f" * 5000, "f, line 1: a number may have at most 40 characters, but .* 5002"),
        ("a: " + "9" * 5000, "a number may have at most 40 characters, but one has 5000"),
        ("a: 1" + ":59" * 5000, "a number may have at most 40 characters, but one has 15001"),
        ("a: 010", "f, line 1: numbers must be decimal, but one is 010"),
        ("a: 1:30", "f, line 1: numbers must be decimal, but one is 1:30"),
        ('a: "h\\ud800"', "f, line 1: text must not have half of a surrogate pair"),
        ("[" * 100_000, "f must be YAML, but is not"),
        ("a: !!bool x", "f must be YAML, but is not"),
        ("a: !!int ''", "f must be YAML, but is not"),
        ("a: !!timestamp x", "f must be YAML, but is not"),
        ("? {a: b}\n: c", "f must be YAML, but is not"),
        ("a: 1\n---\nb: 2", "f must be YAML, but is not"),
        ("a: \x1b[2J", "f must be YAML, but is not"),
    ],
)
def test_odd_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(InvalidInput, match=message):
        parse_yaml(text, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": 1, "b": 2}}', "f must name a key once in an object, but has 'b' more than"),
        (
            '{"a": ' + "9" * 5000 + "}",
            "f must hold integers of 64 bits, but one of 5000 characters is 9999",
        ),
        ("9" * 19 + "9", "f must hold integers of 64 bits, but one of 20 characters is 999"),
        ("1e999", "f must hold finite numbers, but has 1e999"),
        ("NaN", "f must hold finite numbers, but has NaN"),
        ("[" * 100_000, "f must be JSON, but is not"),
        (5, "f must be JSON, but is not"),
        (None, "f must be JSON, but is not"),
        ('["\\ud800"]', "f must be JSON, but is not: .*surrogates not allowed"),
    ],
)
def test_odd_json_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        parse_json(text, "f")


def test_escaped_pairs_are_one_character():
    assert parse_json('"\\ud83d\\ude00"', "f") == "\U0001f600"


def test_64_bit_integers_are_read_exactly():
    assert parse_json("[9223372036854775807, -9223372036854775808]", "f") == [2**63 - 1, -(2**63)]


def test_a_wrong_value_is_quoted_in_part_also_if_it_is_huge():
    @dataclass(frozen=True)
    class Named:
        name: str

    for value in ([["x" * 10**6] * 100] * 100, {"a": "\x1b" * 10**6}):
        with pytest.raises(
            InvalidInput, match="name: Input should be a valid string, but is"
        ) as error:
            parse(Named, {"name": value}, "f")
        assert len(str(error.value)) < 200 and "\x1b" not in str(error.value)
