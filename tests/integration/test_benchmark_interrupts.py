"""A benchmark that SIGTERM ends leaves no process and no namespace behind. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testbed_traffic import assert_nothing_is_left

from autotune.testbed.capabilities import capabilities
from autotune.testbed.machine import Process

ABLE = capabilities()
pytestmark = pytest.mark.skipif(not ABLE.possible, reason=ABLE.message)
ROOT = Path(__file__).parents[2]
END_S = 60.0

BENCHMARK = """
import subprocess, sys, time
from pathlib import Path
from autotune.cluster import Cluster, Host
from autotune.testbed import bed
from benchmarks.repository import child_process, run_benchmark
program, directory, *names = sys.argv[1:]
cluster = Cluster("c", tuple(Host(name, 1, 1.25e8, 0.0, 1e10, 5e-6) for name in "ab"))

def main():
    with bed.running(cluster, name=names[0], directory=Path(directory)):
        if not names[1:]:
            print("up", flush=True)
            time.sleep(600)
        words = [sys.executable, "-c", program, program, directory, *names[1:]]
        with child_process(words, stdout=subprocess.PIPE) as child:
            print(child.pid, child.stdout.readline(), flush=True)
            time.sleep(600)

run_benchmark(main)
"""
"""A benchmark with hosts, and a child with hosts of its own."""


def test_sigterm_ends_a_benchmark_with_its_child_and_the_hosts_of_both(
    bed_directory, bed_name
) -> None:
    names = [f"{bed_name}p", f"{bed_name}c"]
    words = [sys.executable, "-c", BENCHMARK, BENCHMARK, str(bed_directory), *names]
    benchmark = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child = None
    try:
        assert benchmark.stdout is not None
        pid, up = benchmark.stdout.readline().split()
        assert up == "up"
        child = Process.of(int(pid))
        benchmark.send_signal(signal.SIGTERM)
        _, error = benchmark.communicate(timeout=END_S)
    finally:
        benchmark.kill()
        if child is not None and (left := child.alive):
            os.kill(child.pid, signal.SIGKILL)
    assert (benchmark.returncode, error) == (130, "interrupted\ninterrupted\n")
    assert not left
    assert_nothing_is_left(bed_directory, tuple(names))
