"""Thousands of strategies are a million small objects without a cycle among them, which the collector walks again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside the block; afterwards it is as it was. Half of the time of sampling is saved thereby."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
