"""While it is frozen, the collector looks only at what was made since, and afterwards loses nothing by it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from runtime_rewriter.pytorch.garbage import freeze_garbage, thaw_garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    thaw_garbage()
    gc.unfreeze()
    if enabled:
        gc.enable()


def test_what_is_there_is_looked_at_no_more_until_it_is_thawed_or_frozen_again() -> None:
    node, old, third = Node(), Node(), Node()
    seen, gone, last = weakref.ref(node), weakref.ref(old), weakref.ref(third)
    del old
    freeze_garbage()
    assert gone() is None and gc.get_freeze_count() > 1000
    del node
    gc.collect()
    assert seen() is not None  # it was frozen while somebody held it
    freeze_garbage()
    assert seen() is None
    del third
    thaw_garbage()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert last() is None


def test_what_is_made_later_is_collected_as_ever() -> None:
    freeze_garbage()
    node = Node()
    seen = weakref.ref(node)
    del node
    gc.collect()
    assert seen() is None


def test_a_script_that_has_switched_collection_off_keeps_its_way() -> None:
    gc.unfreeze()
    freeze_garbage()
    gc.disable()
    freeze_garbage()
    assert (
        gc.get_freeze_count() == 0
    )  # nothing is kept from the collections that the script makes itself


def test_what_somebody_else_froze_is_left_alone() -> None:
    gc.freeze()
    thaw_garbage()
    assert gc.get_freeze_count() > 1000
