"""YAML of untrusted files: the safe loader, with duplicate keys and bombs of aliases refused.

The checks run on the composed nodes, before any value exists: nested aliases and merge keys take a
few bytes in the file, and billions of values once they are built or printed.
"""

from __future__ import annotations

import re
from typing import Any

from autotune.errors import InvalidInput

MAX_VALUES = 500_000
"""Most values in a file with its aliases expanded: 10 000 hosts, a few hundred fits."""
MAX_DIGITS = 40
"""Most characters of a number. A float in full precision has 24, and Python prints up to 4300."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]+|.*:.*")
"""YAML 1.1 reads 010 as 8 and 1:30 as 90."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document; raises `InvalidInput` that names `where` and, if known, the line."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)  # not libyaml's, in which deep nesting ends the process
        root = loader.get_single_node()
        if root is None:
            return None
        _Checked(where).values(root)
        return loader.construct_document(root)
    except InvalidInput:
        raise
    # The safe loader converts `!!bool x`, `!!int ""` or the date 2024-99-99 without a check.
    except (
        *(yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        raise InvalidInput(f"{where} must be YAML, but is not: {error}") from error


class _Checked:
    """Counts the values below each node once, however many aliases name it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._values: dict[int, int] = {}
        self._open: set[int] = set()

    def values(self, node: Any) -> int:
        """The values that a node stands for with its aliases expanded."""
        if id(node) in self._values:
            return self._values[id(node)]
        if id(node) in self._open:
            raise InvalidInput(f"{self._at(node)}: an alias must not name a value that contains it")
        self._open.add(id(node))
        count = 1 + sum(self.values(child) for child in self._children(node))
        self._open.remove(id(node))
        if count > MAX_VALUES:
            raise InvalidInput(
                f"{self._where} may hold at most {MAX_VALUES} values, but its aliases stand for "
                "more; write them out"
            )
        self._values[id(node)] = count
        return count

    def _children(self, node: Any) -> list[Any]:
        if isinstance(node.value, str):
            if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
                raise InvalidInput(
                    f"{self._at(node)}: a number may have at most {MAX_DIGITS} characters, "
                    f"but one has {len(node.value)}"
                )
            if node.tag in _NUMBERS and _NOT_DECIMAL.fullmatch(node.value):
                raise InvalidInput(
                    f"{self._at(node)}: numbers must be decimal, but one is {node.value}, which "
                    "YAML reads in another base; write it as a decimal number, or quote it"
                )
            try:
                node.value.encode()
            except UnicodeEncodeError as error:
                raise InvalidInput(
                    f"{self._at(node)}: text must not have half of a surrogate pair, but is "
                    f"{node.value!r}; write the whole character"
                ) from error
            return []
        if node.value and isinstance(node.value[0], tuple):
            self._refuse_duplicates(node)
            return [child for pair in node.value for child in pair]
        return list(node.value)

    def _refuse_duplicates(self, mapping: Any) -> None:
        first: dict[tuple[str, str], Any] = {}
        for key, _ in mapping.value:
            if isinstance(key.value, str):
                earlier = first.setdefault((key.tag, key.value), key)
                if earlier is not key:
                    raise InvalidInput(
                        f"{self._at(key)}: a key may occur once, but {key.value[:80]!r} also "
                        f"stands in line {earlier.start_mark.line + 1}; delete one of them"
                    )

    def _at(self, node: Any) -> str:
        return f"{self._where}, line {node.start_mark.line + 1}"
