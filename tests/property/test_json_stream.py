"""A JSON array, read in chunks of any size, equals `json.loads`; a cut-off one is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.errors import InvalidInput
from autotune.profiling.formats import json_stream
from autotune.profiling.formats.json_stream import Field, JsonItems

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.text(max_size=5).filter(lambda key: key != "traceEvents")


def reader(text: bytes, chunk: int) -> JsonItems:
    """Give at most `chunk` bytes at a time, whatever length is requested."""
    left = text

    def read(count: int) -> bytes:
        nonlocal left
        part, left = left[: min(count, chunk)], left[min(count, chunk) :]
        return part

    return JsonItems(read, "traceEvents", "test.json")


@settings(max_examples=examples(150), deadline=None)
@given(
    st.dictionaries(keys, values, max_size=3),
    st.lists(values, max_size=5),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_items_and_fields_are_those_of_the_whole_document(
    others: dict[str, Any], events: list[Any], chunk: int, ascii_only: bool, indent: int | None
) -> None:
    document = {**others, "traceEvents": events}
    written = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    text = written.encode(errors="surrogatepass")
    items = list(reader(text, chunk))
    whole = json.loads(text.decode(errors="replace"), strict=False)
    assert [item for item in items if not isinstance(item, Field)] == whole.pop("traceEvents")
    assert {item.key: item.value for item in items if isinstance(item, Field)} == whole


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_a_document_that_is_cut_off_anywhere_is_refused_in_one_way(
    events: list[Any], data: st.DataObject
) -> None:
    text = json.dumps({"a": 1, "traceEvents": events}).encode()
    with pytest.raises(InvalidInput):
        list(reader(text[: data.draw(st.integers(0, len(text) - 1))], 7))


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_it_raise_anything_else(text: bytes) -> None:
    for head in (b"", b'{"traceEvents": [', b'{"traceEvents": [{"name": '):
        with suppress(InvalidInput):
            list(reader(head + text, 5))


def test_bare_nan_and_inf_are_read_as_null_but_not_within_strings() -> None:
    rows = b'{"a": -nan, "b": "x: nan", "c": inf}, {"d": NaN}, {"e": -Infinity, "f": 1}'
    items = reader(b'{"traceEvents": [' + rows + b"]}", 11)
    assert list(items) == [{"a": None, "b": "x: nan", "c": None}, {"d": None}, {"e": None, "f": 1}]
    assert items.not_numbers >= 2


def test_values_that_nest_too_deeply_or_are_too_large_are_refused() -> None:
    with pytest.raises(InvalidInput, match="nests too deeply"):
        list(reader(b'{"traceEvents": [' + b"[" * 200_000, 2**16))
    with pytest.raises(InvalidInput, match=f"at most {json_stream.MAX_VALUE_CHARS} characters"):
        list(reader(b'{"traceEvents": ["' + b"x" * (json_stream.MAX_VALUE_CHARS + 2**20), 2**20))
    with pytest.raises(InvalidInput, match="must hold a JSON object or array"):
        list(reader(b'"text"', 3))
    assert list(reader(b"[1, 2,]", 2)) == [1, 2]
