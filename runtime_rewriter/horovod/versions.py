"""Checks that the installed Horovod is one that the wrappers know."""

from __future__ import annotations

import sys
from types import ModuleType

from autotune.errors import InvalidInput

SUPPORTED = "0.28.1"


def check_horovod(horovod: ModuleType, framework: str) -> None:
    """Raise `InvalidInput` unless `horovod`, its module for `framework`, can be steered.

    The wrappers replace parts of Horovod that are not public.
    """
    version = getattr(sys.modules["horovod"], "__version__", "of unknown version")
    if version != SUPPORTED:
        raise InvalidInput(
            f"Horovod must be {SUPPORTED}, whose internals autotune knows, but this environment "
            f"has {version}; `make horovod` builds {SUPPORTED} (`autotune docs frameworks`)"
        )
    if not hasattr(horovod, "init"):
        raise InvalidInput(
            f"Horovod must be built for {framework}, but the one of this environment was not; "
            "`make horovod` builds it (`autotune docs frameworks`)"
        )
