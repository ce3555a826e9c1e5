"""One input: a reader's sample with one file mutated, or replaced by something that is no file."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from benchmarks.fuzz_campaign.readers import Reader

ODD_SHARE = 0.01
"""Share of the inputs in which a file is a FIFO, a device, a folder or missing."""


def write_input(reader: Reader, rng: random.Random, folder: Path) -> None:
    """Write a mutated sample into the empty `folder`."""
    sample = reader.sample()
    chosen = rng.choice(list(reader.mutate))
    if rng.random() < ODD_SHARE:
        _write(sample, folder)
        _replace_by_odd(folder / chosen, rng)
        return
    files = {**sample, chosen: reader.mutate[chosen](sample[chosen], rng)}
    if rng.random() < 0.95:
        files = reader.finish(files)
    _write(files, folder)


def emptied(folder: Path) -> Path:
    """The folder, without anything that an earlier input left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def seeded(seed: int, reader: str, number: int) -> random.Random:
    """The generator of one input of a campaign."""
    return random.Random(f"{seed}/{reader}/{number}")


def _write(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _replace_by_odd(path: Path, rng: random.Random) -> None:
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.touch()
