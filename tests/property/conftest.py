"""Graphs that several tests use."""

from __future__ import annotations

import pytest

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import Dfg, Kind


@pytest.fixture
def chain() -> Dfg:
    """A hundred ops of one second, each behind the one before."""
    builder = DfgBuilder()
    queue = builder.queue("device")
    for op in range(100):
        builder.op(f"op{op}", queue, 1.0, Kind.FORWARD, [op - 1] if op else [])
    return builder.build()
