"""Masks secrets in copies of a command or an error message that are stored, shown or sent on.

A secret is the value of an option or a variable with a telling name, the password in a URL, or a
string with the prefix of a well-known kind of token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
_SHORTEST = 6
"""Shorter values are words that occur elsewhere, too."""

_TELLING = re.compile(
    r"(token|secret|passw(or)?d|passwd|credential|api[_-]?key|access[_-]?key|private[_-]?key)"
    r"|(^|[_-])(key|pwd)$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"token(s|izer|ization|ized)|max[_-]?token|num[_-]?token", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)(?=@)")
_KNOWN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|AIza|pypi-|npm_|dop_v1_)"
    r"[A-Za-z0-9_\-]{8,}"
)


def masked_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words with the values of telling options and variables masked."""
    values = {value for value in _values_in(words) if len(value) >= _SHORTEST}
    hidden = []
    for position, word in enumerate(words):
        name, assigned, _ = word.partition("=")
        if assigned and _tells(name.lstrip("-")):
            word = f"{name}={MASK}"
        elif position and word in _values_in(words[position - 1 : position + 1]):
            word = MASK
        hidden.append(masked(word, values))
    return tuple(hidden)


def secrets_of(words: Sequence[str], environment: Mapping[str, str]) -> frozenset[str]:
    """The secret values in a command and its environment. A shell's PWD is the working folder."""
    named = {value for name, value in environment.items() if _tells(name) and name != "PWD"}
    return frozenset(v for v in named | _values_in(words) if len(v) >= _SHORTEST)


def masked(text: str, values: Iterable[str] = ()) -> str:
    """The text without these values, passwords in URLs, and strings with known prefixes."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _KNOWN.sub(MASK, _PASSWORD_IN_URL.sub(rf"\1:{MASK}", text))


def _tells(name: str) -> bool:
    return _TELLING.search(name) is not None and _NOT_SECRET.search(name) is None


def _values_in(words: Sequence[str]) -> set[str]:
    values = set()
    for position, word in enumerate(words):
        name, assigned, value = word.partition("=")
        if not _tells(name.lstrip("-")):
            continue
        if assigned:
            values.add(value)
        elif name.startswith("-") and position + 1 < len(words):
            values.add(words[position + 1])
    return {value for value in values if value and not value.startswith("-")}
