"""Testbeds of real namespaces leave nothing: removed, failed, interrupted or left over.

Needs root.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import error_output, output
from testbed_traffic import ABLE, assert_nothing_is_left, assert_reaches, cluster

from autotune.cluster import Cluster, Host
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed import bed
from autotune.testbed.build import delete_namespace
from autotune.testbed.capabilities import TRIAL_THREAD, capabilities
from autotune.testbed.layout import Method
from autotune.testbed.machine import attempt, inode, run
from autotune.testbed.state import States

pytestmark = pytest.mark.skipif(not ABLE.possible, reason=ABLE.message)
NEEDS_LATENCY = pytest.mark.skipif(
    not (ABLE.means.tun or ABLE.means.netem), reason="neither netem nor /dev/net/tun"
)

TESTBED = [sys.executable, "-m", "autotune", "testbed"]
OWNER = """
import sys, time
from pathlib import Path
from autotune.cluster import Cluster, Host
from autotune.testbed import bed
hosts = (Host(name, 1, 1.25e8, float(sys.argv[3]), 1e10, 5e-6) for name in "ab")
cluster = Cluster("c", tuple(hosts))
bed.up(cluster, name=sys.argv[1], owned=True, directory=Path(sys.argv[2])); print("up", flush=True)
time.sleep(600)
"""
IGNORE_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def test_testbeds_with_equal_hosts_and_addresses_run_side_by_side(bed_directory, bed_name) -> None:
    first, second = f"{bed_name}a", f"{bed_name}b"
    with bed.running(cluster(100, 100), name=first, directory=bed_directory) as one:
        with bed.running(cluster(300, 300), name=second, directory=bed_directory) as other:
            assert [host.address for host in one.hosts] == [host.address for host in other.hosts]
            assert_reaches(one, [(0, 1)], [100])
            assert_reaches(other, [(0, 1)], [300])
        assert_reaches(one, [(1, 0)], [100])
    assert_nothing_is_left(bed_directory, (first, second))


def test_a_name_in_use_is_refused_and_its_testbed_keeps_running(bed_directory, bed_name) -> None:
    testbed = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    with pytest.raises(InvalidInput, match=f"a testbed '{bed_name}' is up; choose another --name"):
        bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    assert_reaches(testbed, [(0, 1)], [100])
    assert bed.down(bed_name, directory=bed_directory)
    assert not bed.down(bed_name, directory=bed_directory)
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_one_of_several_simultaneous_ups_of_a_name_succeeds(bed_directory, bed_name) -> None:
    names = [bed_name, f"{bed_name}x", f"{bed_name}y"]

    def attempt_up(name: str) -> str:
        try:
            return bed.up(cluster(100, 100), name=name, directory=bed_directory).name
        except InvalidInput:
            return "refused"

    with ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(attempt_up, [bed_name, bed_name, *names]))
    assert sorted(outcomes) == sorted([*names, "refused", "refused"])
    running = {status.layout.name for status in bed.testbeds(directory=bed_directory)}
    assert running == set(names)


def test_down_ends_every_process_inside_even_one_that_ignores_sigterm(
    bed_directory, bed_name
) -> None:
    testbed = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    words = [*bed.words_inside(testbed.hosts[0].namespace), sys.executable, "-c", IGNORE_SIGTERM]
    inside = subprocess.Popen(words, stdout=subprocess.PIPE)
    outside = subprocess.Popen(["sleep", "600"])
    try:
        assert inside.stdout is not None and inside.stdout.readline() == b"ready\n"
        assert bed.testbeds(directory=bed_directory)[0].processes == ((inside.pid,), ())
        bed.down(bed_name, directory=bed_directory)
        assert inside.wait(10) == -signal.SIGKILL and outside.poll() is None
        inside.stdout.close()
    finally:
        outside.kill()
        outside.wait()
    assert_nothing_is_left(bed_directory, (bed_name,))


@pytest.mark.parametrize("latency_s", [5e-5, pytest.param(1e-3, marks=NEEDS_LATENCY)])
def test_the_next_up_removes_the_testbed_and_processes_of_a_killed_owner(
    bed_directory, bed_name, latency_s
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, bed_name, str(bed_directory), str(latency_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    record = States(bed_directory).read(bed_name)
    assert record is not None and record.owned and not record.left_over
    second = f"autotune.{bed_name}.b"
    inside = subprocess.Popen([*bed.words_inside(second), "sleep", "600"])
    assert happens(lambda: Path(f"/proc/{inside.pid}/ns/net").stat().st_ino == inode(second))
    assert bed.remove_leftovers(directory=bed_directory) == ()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert bed.testbeds(directory=bed_directory)[0].left_over
    assert record.scratch is not None and record.scratch.is_dir()
    (record.scratch / "session").mkdir()
    if record.relay:
        assert happens(lambda: not record.relay.alive), "the relay outlived its owner"
    with bed.running(cluster(100, 100), name=f"{bed_name}n", directory=bed_directory):
        assert inside.wait(60) == -signal.SIGTERM
        (status,) = bed.testbeds(directory=bed_directory)
        assert status.layout.name == f"{bed_name}n"
        assert not record.scratch.exists()
    assert_nothing_is_left(bed_directory, (bed_name, f"{bed_name}n"))


def test_a_testbed_that_cannot_be_removed_ends_no_job_and_stops_no_other_testbed(
    bed_directory, bed_name, caplog, monkeypatch
) -> None:
    def stuck(namespaces: object) -> None:
        raise EmulationError("processes 7 inside the testbed could not be ended in 10 s")

    with monkeypatch.context() as kernel:
        kernel.setattr(bed, "end_all_inside", stuck)
        with bed.running(cluster(100, 100), name=bed_name, directory=bed_directory):
            pass
        assert f"the testbed {bed_name} could not be removed: processes 7" in caplog.text
        path = States(bed_directory).path(bed_name)
        data = json.loads(path.read_text())
        data["maker"] = {"pid": os.getpid(), "start_ticks": 1}
        path.write_text(json.dumps(data))
        other = bed.up(cluster(100, 100), name=f"{bed_name}n", directory=bed_directory)
        assert f"the testbed {bed_name} of a dead process stays: processes 7" in caplog.text
    assert bed.down(other.name, directory=bed_directory)
    assert bed.remove_leftovers(directory=bed_directory) == (bed_name,)
    assert_nothing_is_left(bed_directory, (bed_name, f"{bed_name}n"))


def test_an_incomplete_testbed_of_a_dead_maker_is_a_leftover(bed_directory, bed_name) -> None:
    bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    path = States(bed_directory).path(bed_name)
    data = json.loads(path.read_text())
    data |= {"complete": False, "maker": {"pid": os.getpid(), "start_ticks": 1}}
    for namespace in data["namespaces"][1:]:
        namespace["inode"] = 0
    run(delete_namespace(data["namespaces"][2]["name"]))
    path.write_text(json.dumps(data))
    assert bed.remove_leftovers(directory=bed_directory) == (bed_name,)
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_a_namespace_of_unknown_owner_is_kept_while_processes_run_inside(
    bed_directory, bed_name, caplog
) -> None:
    bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    path = States(bed_directory).path(bed_name)
    data = json.loads(path.read_text())
    data["namespaces"][-1]["inode"] = 0  # as if its maker had been killed meanwhile
    path.write_text(json.dumps(data))
    doubtful = data["namespaces"][-1]["name"]
    inside = subprocess.Popen([*bed.words_inside(doubtful), "sleep", "600"])
    try:
        assert happens(lambda: Path(f"/proc/{inside.pid}/ns/net").stat().st_ino == inode(doubtful))
        bed.down(bed_name, directory=bed_directory)
        assert inside.poll() is None and inode(doubtful) is not None
        assert inode(data["namespaces"][1]["name"]) is None
        assert f"the namespace {doubtful} is left alone" in caplog.text
        assert f"({inside.pid})" in caplog.text
    finally:
        inside.kill()
        inside.wait()
        run(delete_namespace(doubtful))
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_a_namespace_of_somebody_else_is_never_touched(bed_directory, bed_name) -> None:
    foreign = f"autotune.{bed_name}.h1"
    run(["ip", "netns", "add", foreign])
    try:
        before = inode(foreign)
        with pytest.raises(InvalidInput, match=f"the namespace '{foreign}' exists, but no record"):
            bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
        assert inode(foreign) == before
    finally:
        run(["ip", "netns", "delete", foreign])
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_a_namespace_that_somebody_else_created_again_survives_down(
    bed_directory, bed_name
) -> None:
    testbed = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    taken = testbed.hosts[0].namespace
    run(["ip", "netns", "delete", taken])
    run(["ip", "netns", "add", taken])
    try:
        before = inode(taken)
        bed.down(bed_name, directory=bed_directory)
        assert inode(taken) == before and inode(testbed.hosts[1].namespace) is None
    finally:
        run(["ip", "netns", "delete", taken])


def test_an_up_that_fails_halfway_is_undone(bed_directory, bed_name) -> None:
    rates = (1.25e8, 1.0)
    hosts = (Host(f"h{i}", 1, rate, 5e-5, 1e10, 5e-6) for i, rate in enumerate(rates))
    beyond = Cluster("c", tuple(hosts))
    with pytest.raises(EmulationError, match=r"`tc -n autotune.* failed: "):
        # tc cannot represent the second rate after scaling
        bed.up(beyond, name=bed_name, directory=bed_directory, byte_scale=1e12)
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_an_interrupt_during_up_undoes_it(bed_directory, bed_name) -> None:
    main = threading.main_thread()
    assert threading.current_thread() is main

    def interrupt_once_begun() -> None:
        assert happens(lambda: inode(f"autotune.{bed_name}.h3") is not None)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell starts background jobs with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = threading.Thread(target=interrupt_once_begun)
    other.start()
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            bed.running(cluster(*[100] * 200), name=bed_name, directory=bed_directory),
        ):
            time.sleep(120)
    finally:
        signal.signal(signal.SIGINT, before)
    other.join()
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_an_interrupted_command_has_ended_when_the_interrupt_is_raised(tmp_path) -> None:
    begun, sent, ended = (tmp_path / name for name in ("begun", "sent", "ended"))

    def interrupt_once_begun() -> None:
        assert happens(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)
        sent.touch()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = threading.Thread(target=interrupt_once_begun)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait = f"while [ ! -e {sent} ]; do sleep 0.05; done"
            attempt(["sh", "-c", f"touch {begun}; {wait}; touch {ended}"])
        assert ended.exists()
    finally:
        signal.signal(signal.SIGINT, before)
    other.join()


def test_a_termination_during_up_undoes_it_with_a_short_message(
    bed_directory, bed_name, tmp_path
) -> None:
    hosts = ", ".join(f"{{name: h{number}, bandwidth: 100Mbit/s}}" for number in range(200))
    (tmp_path / "cluster.yaml").write_text(f"name: many\nhosts: [{hosts}]")
    words = [*TESTBED, "up", str(tmp_path / "cluster.yaml"), "--name", bed_name]
    process = subprocess.Popen(
        [*words, "--state-directory", str(bed_directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert happens(lambda: inode(f"autotune.{bed_name}.h3") is not None)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "autotune: interrupted\n")
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_capability_trials_that_take_too_long_are_reported_and_abandoned() -> None:
    able = capabilities(timeout_s=0.0)
    assert not able.possible and "an answer in time (the trials took more than 0 s)" in able.message
    assert happens(lambda: all(thread.name != TRIAL_THREAD for thread in threading.enumerate()))


@NEEDS_LATENCY
def test_the_relay_imports_nothing_from_the_users_directory(
    bed_directory, bed_name, tmp_path, monkeypatch
) -> None:
    (tmp_path / "heapq.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with bed.running(cluster(100, 100, latency_s=1e-3), name=bed_name, directory=bed_directory):
        assert bed.testbeds(directory=bed_directory)[0].relay_alive in (True, None)


def interfaces() -> set[str]:
    return {interface for _, interface in socket.if_nameindex()}


def test_a_thread_enters_a_namespace_with_its_new_threads_and_always_comes_back(
    bed_directory, bed_name
) -> None:
    outside = interfaces()
    with bed.running(cluster(100, 100), name=bed_name, directory=bed_directory) as testbed:
        namespace = testbed.hosts[0].namespace
        with bed.entered(namespace):
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(interfaces).result() >= {testbed.interface, "lo"}
            assert testbed.hosts[0].address in run(["ip", "-br", "addr"])
        assert interfaces() == outside
        with pytest.raises(KeyError), bed.entered(namespace):
            raise KeyError
        assert interfaces() == outside
    with pytest.raises(EmulationError, match="cannot be entered"), bed.entered(namespace):
        pass


def test_the_command_line_creates_shows_uses_and_removes_a_testbed(
    bed_directory, bed_name, tmp_path, capsys
) -> None:
    file = tmp_path / "cluster.yaml"
    hosts = "[{name: a/1, bandwidth: 100Mbit/s}, {name: b, devices: 2}]"
    file.write_text(f"name: two\nhosts: {hosts}")
    state = ("--state-directory", str(bed_directory))

    def shown(*words: str) -> str:
        return output(capsys, "testbed", *words, *state)

    def refused(*words: str) -> str:
        return error_output(capsys, "testbed", *words, *state)

    def execute(host: str, *command: str) -> subprocess.CompletedProcess[str]:
        words = ["exec", bed_name, host, *state, "--", *command]
        return subprocess.run([*TESTBED, *words], capture_output=True, text=True)

    assert "no testbed is up" in shown("status")
    up = json.loads(shown("up", str(file), "--name", bed_name, "--json"))
    assert up["name"] == bed_name and up["layout"]["hosts"][0]["link_bytes_per_s"] == 1.25e7
    assert "is up; choose another --name" in refused("up", str(file), "--name", bed_name)
    assert "100 Mbit/s" in shown("status") and "own" in shown("status")
    inside = execute("a/1", "sh", "-c", "ip -br addr show eth0; exit 7")
    assert inside.returncode == 7 and "10.77.0.1/16" in inside.stdout
    absent = execute("c", "true")
    assert absent.returncode == 2 and "has no host 'c'; its hosts: a/1, b" in absent.stderr
    (bed_directory / "newer.json").write_text('{"schema": 99}')
    status = shown("status")
    assert "100 Mbit/s" in status
    assert "newer: its record cannot be read: " in status
    assert "the file has 99; update autotune" in status.replace("\n", " ")
    assert json.loads(shown("down", "--json")) == {"removed": [bed_name]}
    assert "the file has 99" in refused("down", "newer")
    (bed_directory / "newer.json").unlink()
    assert "nothing to remove" in shown("down", bed_name)
    assert "there is no testbed" in execute("b", "true").stderr
    assert shown("check")
    assert_nothing_is_left(bed_directory, (bed_name,))


@pytest.mark.skipif(
    attempt(["setpriv", "--version"]).reason != "", reason="setpriv is not installed"
)
def test_without_root_one_message_states_what_is_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        file = Path(folder) / "cluster.yaml"
        file.write_text("hosts: [{name: a}, {name: b}]")
        assert_refused_without_root(file)


def assert_refused_without_root(file: Path) -> None:
    program = "import sys; from autotune.cli import main; sys.exit(main(sys.argv[1:]))"
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    nobody = [*as_nobody, sys.executable, "-B", "-c", program, "testbed"]
    if attempt([*as_nobody, sys.executable, "-c", "import autotune.cli"]).reason:
        pytest.skip("another user cannot read this checkout")
    refused = subprocess.run([*nobody, "up", str(file)], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "CAP_NET_ADMIN needed" in refused.stderr
    assert "Loopback stays available: leave out --testbed" in refused.stderr
    checked = subprocess.run([*nobody, "check", "--json"], capture_output=True, text=True)
    assert checked.returncode == 2 and json.loads(checked.stdout)["possible"] is False


@NEEDS_LATENCY
def test_the_status_shows_a_dead_relay(bed_directory, bed_name) -> None:
    bed.up(cluster(100, 100, latency_s=1e-3), name=bed_name, directory=bed_directory)
    record = States(bed_directory).read(bed_name)
    assert record is not None
    if record.layout.method is not Method.RELAY:
        pytest.skip("this kernel has netem, so no relay is used")
    assert record.relay is not None and bed.testbeds(directory=bed_directory)[0].relay_alive is True
    os.kill(record.relay.pid, signal.SIGKILL)
    assert happens(lambda: bed.testbeds(directory=bed_directory)[0].relay_alive is False)
    bed.down(bed_name, directory=bed_directory)
    assert_nothing_is_left(bed_directory, (bed_name,))


def happens(condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Wait until the condition holds; False after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.005)
    return False
