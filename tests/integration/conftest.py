"""Worlds for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_world import local_world

from runtime_rewriter.world import World

SMALL = Path(__file__).parents[1] / "scripts" / "train_small.py"


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """`make_world(*words, script=SMALL, **options of local_world)`; every world is closed in the end."""
    made: list[World] = []

    def make(*words: str, script: Path = SMALL, **options: Any) -> World:
        made.append(local_world(script, words, tmp_path, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
