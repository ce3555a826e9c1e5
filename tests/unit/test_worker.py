"""The supervisor of a real training process: its environment, its line, and its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.errors import LaunchError
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.world.worker import (
    ProcessExited,
    ProcessSupervisor,
    carried_environment,
    free_port,
)

ROOT = Path(__file__).parents[2]


def end_of(supervisor: ProcessSupervisor) -> ProcessExited:
    end_s = time.monotonic() + 240.0
    while time.monotonic() < end_s:
        polled = supervisor.poll(1.0)
        if polled.exited is not None:
            return polled.exited
    raise AssertionError("the end of the process was not noticed")


def start(supervisor: ProcessSupervisor, directory: Path, text: str, **environment: str) -> None:
    (directory / "script.py").write_text(text)
    supervisor.start(["script.py"], environment, str(directory), str(directory / "rank0.log"))


KILLED = """
import os, signal, stat, subprocess
print("Connection closed by peer", flush=True)
for name in os.listdir("/proc/self/fd"):
    try:
        if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            os.set_inheritable(int(name), True)
    except OSError:
        pass
subprocess.Popen(["sleep", "100"], close_fds=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Its child runs no fork hooks of Python and keeps every socket open, as a helper may."""

IMPORTS = """
import importlib.util, json, pickle, sys
import autotune.errors
datasets = importlib.util.find_spec("datasets")
json.dump([sys.path, sys.argv, datasets and str(datasets)], open("imports.json", "w"))
"""

FORKS = """
import os, stat, warnings
warnings.simplefilter("ignore")  # of a fork beside threads
def sockets():
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds.append(stat.S_ISSOCK(os.fstat(int(name)).st_mode))
        except OSError:
            pass
    return sum(kinds)
before = sockets()
child = os.fork()
if child == 0:
    os._exit(before - sockets())
os._exit(40 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Exits with 40 and the number of sockets that its child does not hold."""


@dataclass(frozen=True)
class Ends:
    """Two processes that one supervisor ran in `folder`, one after the other.

    Two for many tests: each imports torch, which takes seconds.
    """

    folder: Path
    environment: dict[str, str]
    killed: ProcessExited
    forked: ProcessExited


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("worker")
    environment = {"PYTHONPATH": str(folder / "of the driver")}
    supervisor = ProcessSupervisor()
    try:
        start(supervisor, folder, KILLED, **environment)
        killed = end_of(supervisor)
        start(supervisor, folder, IMPORTS + FORKS, **environment)
        return Ends(folder, environment, killed, end_of(supervisor))
    finally:
        supervisor.stop()


def test_a_killed_process_is_noticed_while_a_child_of_it_holds_the_line(ends: Ends) -> None:
    assert ends.killed.code == -9


def test_a_forked_child_does_not_hold_the_line(ends: Ends) -> None:
    assert ends.forked.code == 41, ends.forked.log_tail


def test_the_last_output_of_a_process_is_not_that_of_an_earlier_one(ends: Ends) -> None:
    assert ends.killed.log_tail == "Connection closed by peer\n"
    assert ends.forked.log_tail == ""


SUPERVISE = """
import sys
from runtime_rewriter.world.worker import ProcessSupervisor
assert "/vendored/by/ray" in sys.path
supervisor = ProcessSupervisor()
supervisor.start(["script.py"], {"PYTHONPATH": "/of/the/driver", "RANK": "3"}, "", "logs/rank0.log")
while supervisor.poll(1.0).exited is None:
    pass
"""


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a supervisor like those in Ray, whose process got no directory."""
    folder = tmp_path_factory.mktemp("supervised")
    (folder / "script.py").write_text(
        "import json, os; json.dump(dict(os.environ), open('environment.json', 'w'))"
    )
    ours = os.environ | {
        "RAY_AUTH_TOKEN": "secret",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(["/vendored/by/ray", "/of/ray", str(ROOT)]),
    }
    subprocess.run([sys.executable, "-c", SUPERVISE], cwd=folder, env=ours, check=True, timeout=240)
    return folder


def test_a_process_gets_our_packages_and_the_drivers_path_but_no_setting_of_ray(
    supervised: Path,
) -> None:
    child = json.loads((supervised / "environment.json").read_text())
    assert child["PYTHONPATH"] == "/of/the/driver"
    assert child["RANK"] == "3"
    assert not [name for name in child if name.startswith(("RAY_", "OMP_"))]


def test_without_a_directory_the_process_starts_where_its_supervisor_is(supervised: Path) -> None:
    assert (supervised / "environment.json").exists()
    assert (supervised / "logs" / "rank0.log").exists()


def test_a_script_imports_what_it_imports_without_us(ends: Ends) -> None:
    """Our checkout has a folder named datasets, as a library of that name has."""
    imports_file = ends.folder / "imports.json"
    assert imports_file.exists(), ends.forked.log_tail
    imports = json.loads(imports_file.read_text())
    plain = IMPORTS.replace("import autotune.errors", "")
    (ends.folder / "script.py").write_text(plain)
    environment = {"PATH": os.environ["PATH"], **ends.environment}
    words = [sys.executable, "-u", "script.py"]
    subprocess.run(words, cwd=ends.folder, env=environment, check=True, timeout=240)
    assert imports == json.loads(imports_file.read_text())


def test_ranks_on_other_hosts_get_the_drivers_settings_except_those_of_its_machine() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "src",
        "PATH": "/bin",
        "HOME": "/home/u",
        "RAY_JOB_ID": "1",
        "CONDA_PREFIX": "/c",
    }
    assert carried_environment(environment) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "src"}


def test_a_message_that_nobody_reads_raises_after_the_timeout() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        line = ControlLine(ours, send_timeout_s=0.2)
        with pytest.raises(ControlClosed, match="timed out"):
            line.send("x" * 2**24)
        line.close()


def test_an_address_of_another_machine_is_refused_with_the_systems_reason() -> None:
    reason = r"a port in 0-0 of 203\.0\.113\.5, but cannot: Cannot assign .*--node-ip-address"
    with pytest.raises(LaunchError, match=reason):
        free_port(0, 0, "203.0.113.5")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_port_of_an_address_of_ip_version_6_is_found() -> None:
    assert free_port(0, 0, "::1") > 0


def test_a_sign_of_life_that_nobody_reads_is_dropped_and_an_answer_still_arrives() -> None:
    ours, theirs = socket.socketpair()
    writer, reader = ControlLine(ours, send_timeout_s=1.0), ControlLine(theirs)
    for number in range(10_000):  # none of them waits
        writer.offer(f"heartbeat {number}")
    writer.send("answer")
    lines = []
    while (line := reader.receive(0.0)) is not None:
        lines.append(line)
    assert lines[:-1] == [f"heartbeat {number}" for number in range(len(lines) - 1)]
    assert len(lines) < 10_000 and lines[-1] == "answer"
    writer.offer("heartbeat")
    assert reader.receive(10.0) == "heartbeat"
    reader.close()
    with pytest.raises(ControlClosed):
        writer.offer("heartbeat")
    writer.close()
