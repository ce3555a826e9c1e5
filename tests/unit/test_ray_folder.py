"""The folder of a local Ray cluster: private, gone afterwards, with everything that uses it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.files import write_whole
from runtime_rewriter.world import ray_folder


def test_a_folder_is_private_and_ends_with_its_processes() -> None:
    folder = ray_folder.make()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "session").mkdir()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(0.2)
    ray_folder.end(folder)
    assert sleeper.wait(timeout=10) == -9 and other.poll() is None
    assert not folder.exists()
    other.kill()
    other.wait()


def test_folders_of_killed_processes_are_removed_and_those_of_others_kept() -> None:
    code = "from runtime_rewriter.world import ray_folder; print(ray_folder.make())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = ray_folder.make()
    assert mine.exists() and not Path(dead.stdout.strip()).exists()
    ray_folder.end(mine)


def test_a_shutdown_that_hangs_is_given_up() -> None:
    assert ray_folder.within_deadline(lambda: None, 5.0)
    began_s = time.monotonic()
    assert not ray_folder.within_deadline(lambda: time.sleep(30), 0.2)
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_results_respect_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "best.json", "{}", "the export")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == mode
