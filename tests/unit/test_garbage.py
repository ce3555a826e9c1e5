"""The collector looks only at what was made since a plan was loaded, and loses nothing by it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from runtime_rewriter.garbage import settle_garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    if enabled:
        gc.enable()


def test_what_is_there_is_looked_at_no_more_until_it_is_called_again() -> None:
    node, old = Node(), Node()
    seen, gone = weakref.ref(node), weakref.ref(old)
    del old
    settle_garbage()
    assert gone() is None and gc.get_freeze_count() > 1000
    del node
    gc.collect()
    assert seen() is not None  # it was frozen while somebody held it
    settle_garbage()
    assert seen() is None


def test_what_is_made_later_is_collected_as_ever() -> None:
    settle_garbage()
    node = Node()
    seen = weakref.ref(node)
    del node
    gc.collect()
    assert seen() is None


def test_a_script_that_has_switched_collection_off_keeps_its_way() -> None:
    gc.unfreeze()
    gc.disable()
    settle_garbage()
    assert gc.get_freeze_count() == 0
