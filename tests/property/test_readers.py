"""Every reader gives a value or an `AutotuneError`, whatever becomes of a valid file.

The readers, their samples and the mutations are those of `benchmarks.fuzz_campaign`.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.errors import AutotuneError
from benchmarks.fuzz_campaign.inputs import emptied, seeded, write_input
from benchmarks.fuzz_campaign.readers import BY_NAME, READERS

NAMES = [reader.name for reader in READERS]
EXAMPLES = examples(25)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_accepts_its_sample(tmp_path: Path, name: str) -> None:
    reader = BY_NAME[name]
    for file, content in reader.sample().items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    reader.read(tmp_path)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rng=st.randoms(use_true_random=False))
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, name: str, rng: random.Random) -> None:
    reader, folder = BY_NAME[name], tmp_path / "input"
    write_input(reader, rng, emptied(folder))
    with suppress(AutotuneError):
        reader.read(folder)


def test_an_input_depends_on_its_seed_reader_and_number_only(tmp_path: Path) -> None:
    reader = BY_NAME["kineto"]
    contents = []
    for seed, number in ((0, 3), (0, 3), (0, 4), (1, 3)):
        write_input(reader, seeded(seed, "kineto", number), emptied(tmp_path))
        contents.append([path.read_bytes() for path in sorted(tmp_path.iterdir())])
    assert contents[0] == contents[1]
    assert contents[0] != contents[2] != contents[3] != contents[0]
