"""Worlds and testbeds for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_world import local_world

from autotune.testbed import bed
from runtime_rewriter.world.world import World

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


@pytest.fixture
def bed_directory(tmp_path: Path) -> Iterator[Path]:
    """Where this test's testbeds are recorded; whatever it left is taken down."""
    yield tmp_path / "state"
    for status in bed.testbeds(directory=tmp_path / "state"):
        bed.down(status.layout.name, directory=tmp_path / "state")


@pytest.fixture
def bed_name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
