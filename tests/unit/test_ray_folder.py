"""The folder of a local Ray cluster: private, gone afterwards, with everything that uses it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autotune.files import write_whole
from runtime_rewriter.world import ray_folder
from runtime_rewriter.world.ray_folder import PrivateFolder

CREATE = "from runtime_rewriter.world.ray_folder import PrivateFolder as P; f = P.create(); "
SLEEP = "import time; print(flush=True); time.sleep(60)"


def sleeper(folder: str = "") -> subprocess.Popen[bytes]:
    """A process with the folder's variable, which runs when this returns."""
    environment = {**os.environ, ray_folder.FOLDER_VARIABLE: folder}
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP], env=environment, stdout=subprocess.PIPE
    )
    with process.stdout as output:
        output.readline()
    return process


def test_a_folder_is_private_and_ends_with_its_processes() -> None:
    folder = PrivateFolder.create()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert os.environ[ray_folder.FOLDER_VARIABLE] == str(folder.path)
    (folder.path / "session").mkdir()
    user, other = sleeper(str(folder.path)), sleeper()
    folder.end()
    assert user.wait(timeout=60) == -signal.SIGKILL and other.poll() is None
    assert folder.guard.returncode is not None and not folder.path.exists()
    assert ray_folder.FOLDER_VARIABLE not in os.environ
    other.kill()
    other.wait()


def test_the_guard_of_a_killed_process_ends_what_it_left() -> None:
    code = f"{CREATE}print(f.path, flush=True); import time; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        folder = Path(process.stdout.readline().strip())
        user = sleeper(str(folder))
        process.kill()
    assert user.wait(timeout=60) == -signal.SIGKILL
    deadline_s = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not folder.exists()


def test_folders_without_a_lock_are_removed_and_those_of_running_jobs_kept() -> None:
    # A place of its own, where no other job removes abandoned folders.
    with tempfile.TemporaryDirectory(dir="/tmp") as place:

        def answer(code: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", CREATE + code],
                env={**os.environ, "TMPDIR": place},
                capture_output=True,
                text=True,
                check=True,
            )
            return done.stdout.strip()

        abandoned = Path(answer("f.guard.kill(); print(f.path)"))
        assert abandoned.exists() and abandoned.parent == Path(place)
        clean_up = "from runtime_rewriter.world.ray_folder import remove_abandoned as r; r(); "
        assert answer(f"{clean_up}print(f.path.exists()); f.end()") == "True"
        assert not abandoned.exists()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_results_respect_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "best.json", "{}", "the export")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == mode
