"""Commands that install a library which the script needs and this environment lacks, or has for
other versions."""

from __future__ import annotations

_BUILT_BY = {"horovod": "make horovod", "tensorflow": "make tensorflow"}


def missing_library_hint(error: BaseException) -> str:
    """How autotune installs the library that an import did not find or load; else empty."""
    if not isinstance(error, ImportError):
        return ""
    if isinstance(error, ModuleNotFoundError):
        library = str(error.name).partition(".")[0]
        if library not in _BUILT_BY:
            return ""
        return f"; `{_BUILT_BY[library]}` installs it (`autotune docs frameworks`)"
    if "horovod" in str(error) and "undefined symbol" in str(error):
        return (
            "; Horovod must be built for the installed PyTorch and TensorFlow, as `make horovod` "
            "does (`autotune docs frameworks`)"
        )
    return ""
