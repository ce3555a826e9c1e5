"""A frozen collector examines only newer objects, and loses none afterwards."""

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
def restored_collector() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    yield
    thaw_garbage()
    gc.unfreeze()
    if frozen:  # by `conftest`: collections of later tests visit no imports
        gc.freeze()
    if enabled:
        gc.enable()


def test_existing_objects_are_collected_only_after_a_thaw_or_another_freeze() -> None:
    node, old, third = Node(), Node(), Node()
    held, unused, last = weakref.ref(node), weakref.ref(old), weakref.ref(third)
    del old
    freeze_garbage()
    assert unused() is None and gc.get_freeze_count() > 1000
    del node
    gc.collect()
    assert held() is not None  # it was in use when it was frozen
    freeze_garbage()
    assert held() is None
    del third
    thaw_garbage()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert last() is None


def test_newer_objects_are_collected_as_usual() -> None:
    freeze_garbage()
    node = Node()
    reference = weakref.ref(node)
    del node
    gc.collect()
    assert reference() is None


def test_a_script_without_automatic_collection_keeps_its_setting() -> None:
    gc.unfreeze()
    freeze_garbage()
    gc.disable()
    freeze_garbage()
    assert gc.get_freeze_count() == 0  # the script's own collections see every object


def test_objects_frozen_by_others_stay_frozen() -> None:
    gc.freeze()
    thaw_garbage()
    assert gc.get_freeze_count() > 1000
