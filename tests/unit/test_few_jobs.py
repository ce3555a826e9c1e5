"""Few tests of a machine run jobs at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import few_jobs

HOLDER = """
import few_jobs, pathlib, sys
with few_jobs.turn(1, 0.0, pathlib.Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.readline()
"""


def test_a_turn_is_taken_from_others_until_its_process_ends_in_any_way(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=Path(few_jobs.__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "True\n"
        with few_jobs.turn(1, 0.0, tmp_path) as mine:
            assert not mine
        with few_jobs.turn(2, 0.0, tmp_path) as mine:
            assert mine
        holder.kill()
        holder.wait(timeout=30)
        with few_jobs.turn(1, 100.0, tmp_path) as mine:
            assert mine
