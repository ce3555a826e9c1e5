"""Untrusted text into frozen dataclasses, with one clear error instead of a stack trace.

Sizes are bounded before parsing, numbers while parsing, and an unknown field is an error that names
the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from autotune.canonical import stored_fields
from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.yaml_reading import parse_yaml

T = TypeVar("T")


class _Strict:
    """Lets pydantic take only values of the type itself; an integer is a float, too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "strict": True}


StrictBool = Annotated[bool, _Strict()]
StrictInt = Annotated[int, _Strict()]
StrictFloat = Annotated[float, _Strict()]
"""Types of fields for which `parse` refuses "off" or 1 as a boolean, and true or "1" as a number.

Other fields are converted, as pydantic does.
"""

MAX_YAML_BYTES = 4 * 2**20
"""A probed cluster of 1000 hosts has 0.7 MB; the safe loader took 4 s for 0.3 MB (2 EPYC cores)."""
MAX_INTEGER_CHARACTERS = 20
"""A 64-bit integer and its sign fit. Python refuses to print more than 4300 digits."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error message quotes."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of JSON for half of a character beyond 16 bits."""

_quoted = reprlib.Repr()
_quoted.maxstring = _quoted.maxother = _quoted.maxlong = MAX_SHOWN


def read_json(path: Path) -> Any:
    """Read and parse a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """Parse JSON with finite numbers, signed integers of 64 bits, and each key once in an object.

    NaN and infinity (also as 1e999) have no canonical JSON.
    """

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise InvalidInput(f"{where} must hold finite numbers, but has {number[:40]}")
        return value

    def integer(number: str) -> int:
        if len(number) > MAX_INTEGER_CHARACTERS or not -(2**63) <= (value := int(number)) < 2**63:
            raise InvalidInput(
                f"{where} must hold integers of 64 bits, but one of {len(number)} characters is "
                f"{number[:40]}"
            )
        return value

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InvalidInput(
                f"{where} must name a key once in an object, but has {twice[:MAX_SHOWN]!r} more "
                "than once; delete one of them"
            )
        return values

    try:
        value = json.loads(
            text,
            parse_constant=finite,
            parse_float=finite,
            parse_int=integer,
            object_pairs_hook=distinct,
        )
        if _SURROGATE.search(text):  # half of a pair has no UTF-8, which raises a ValueError
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except InvalidInput:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: the text is a number
        raise InvalidInput(f"{where} must be JSON, but is not: {error}") from error


def read_yaml(path: Path) -> Any:
    """Read and parse YAML with the safe loader; for hand-written files."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))


def parse(kind: type[T], data: Any, where: str) -> T:
    """Validate plain `data` into the dataclass `kind`.

    Unknown fields are errors if the class sets `__pydantic_config__ = {"extra": "forbid"}`. Raises
    `InvalidInput` that names `where`, the field, the value and the rule.
    """
    from pydantic import ValidationError

    try:
        parsed: T = _adapter(cast(Hashable, kind)).validate_python(data)
        return parsed
    except ValidationError as error:
        raise InvalidInput(_explain(kind, error.errors(include_url=False), where)) from error


@cache
def _adapter(kind: Any) -> Any:
    """Cached: building one takes milliseconds, and a history holds hundreds of events."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def schema_of_stored(kind: type[Any], source: Any, handler: Any) -> Any:
    """`__get_pydantic_core_schema__` of a dataclass with `canonical.stored_as` fields."""
    from pydantic_core import core_schema

    fields = stored_fields(kind)

    def renamed(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, (stored_name, spellings) in fields.items():
            if name in data:
                raise ValueError(f"unknown field {name!r}; did you mean {stored_name!r}?")
            if stored_name not in data:
                raise ValueError(f"field {stored_name!r} is required, but missing")
            values = {spelling: value for value, spelling in spellings.items()}
            spelling = data.pop(stored_name)
            if not isinstance(spelling, str) or spelling not in values:
                known = ", ".join(values)
                raise ValueError(f"{stored_name} must be one of {known}, but is {spelling!r}")
            data[name] = values[spelling]
        return data

    return core_schema.no_info_before_validator_function(renamed, handler(source))


def refuse_newer(data: Any, newest: int, what: str, where: str) -> None:
    """Refuse a newer schema before its new fields are reported as unknown, and none of ours."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema < 1:
        raise InvalidInput(
            f"{where}: the schema of {what} must be from 1 to {newest}, but is {schema}"
        )
    if isinstance(schema, int) and schema > newest:
        raise InvalidInput(
            f"{where}: this version reads {what} schema {newest}, but the file has {schema}; "
            "update autotune"
        )


def _explain(kind: type[Any], problems: list[Any], where: str) -> str:
    lines = []
    for problem in problems[:5]:
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "unexpected_keyword_argument":
            lines.append(f"unknown field {path!r}{_suggestion(kind, problem['loc'])}")
        elif problem["type"] == "missing":
            lines.append(f"field {path!r} is required, but missing")
        else:
            rule = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            got = _quoted.repr(problem["input"])
            shown = "" if problem["type"] == "value_error" else f", but is {got[:MAX_SHOWN]}"
            lines.append(f"{path or 'the value'}: {rule}{shown}")
    more = len(problems) - 5
    return f"{where}: " + "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def _suggestion(kind: type[Any], location: tuple[int | str, ...]) -> str:
    known = _field_names(kind, location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known fields: {', '.join(known)}" if known else ""


def _field_names(kind: Any, path: tuple[int | str, ...]) -> list[str]:
    """Field names of the dataclass at `path` inside `kind`; none if it is not a dataclass."""
    from typing import get_args, get_type_hints

    for part in path:
        if isinstance(part, int):
            continue
        if not (is_dataclass(kind) and part in (hints := get_type_hints(kind))):
            return []
        kind = hints[part]
        while not is_dataclass(kind) and get_args(kind):
            inner = get_args(kind)
            kind = next((arg for arg in inner if is_dataclass(arg)), inner[0])
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the input of `parse` for the dataclass `kind`."""
    schema: dict[str, Any] = _adapter(cast(Hashable, kind)).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def check_utf8(what: str, text: str) -> None:
    """Raise `InvalidInput` if `text` has bytes of the system that are not UTF-8 (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise InvalidInput(
            f"{what} must be UTF-8, since jobs are stored so, but is {shown!r}; rename it"
        ) from error
