"""Commands that install a library which the script needs and this environment lacks."""

from __future__ import annotations

_BUILT_BY = {"horovod": "make horovod", "tensorflow": "make tensorflow"}


def missing_library_hint(error: BaseException) -> str:
    """How autotune installs the library that an import did not find; else empty."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    library = str(error.name).partition(".")[0]
    if library not in _BUILT_BY:
        return ""
    return f"; `{_BUILT_BY[library]}` installs it (docs/frameworks.md)"
