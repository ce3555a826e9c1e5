"""Testbeds of real namespaces come and go: what is taken down, failed, interrupted or left over is gone. Needs root."""

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
from testbed_traffic import assert_nothing_is_left, assert_reaches, cluster

from autotune.cluster import Cluster, Host
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed import bed
from autotune.testbed.build import delete_namespace
from autotune.testbed.capabilities import TRIAL_THREAD, capabilities
from autotune.testbed.layout import Method
from autotune.testbed.machine import Process, attempt, inode, run
from autotune.testbed.state import States

ABLE = capabilities()
pytestmark = pytest.mark.skipif(not ABLE.possible, reason=ABLE.message)
NEEDS_LATENCY = pytest.mark.skipif(
    not (ABLE.means.tun or ABLE.means.netem), reason="neither netem nor /dev/net/tun"
)

OWNER = """
import sys, time
from pathlib import Path
from autotune.cluster import Cluster, Host
from autotune.testbed import bed
cluster = Cluster("c", tuple(Host(name, 1, 1.25e8, float(sys.argv[3]), 1e10, 5e-6) for name in "ab"))
bed.up(cluster, name=sys.argv[1], owned=True, directory=Path(sys.argv[2])); print("up", flush=True)
time.sleep(600)
"""


def test_testbeds_with_the_same_hosts_and_addresses_stand_side_by_side(
    bed_directory, bed_name
) -> None:
    first, second = f"{bed_name}a", f"{bed_name}b"
    with bed.running(cluster(100, 100), name=first, directory=bed_directory) as one:
        with bed.running(cluster(300, 300), name=second, directory=bed_directory) as other:
            assert [host.address for host in one.hosts] == [host.address for host in other.hosts]
            assert_reaches(one, [(0, 1)], [100])
            assert_reaches(other, [(0, 1)], [300])
        assert_reaches(one, [(1, 0)], [100])
    assert_nothing_is_left(bed_directory, (first, second))


def test_a_name_in_use_is_refused_and_its_testbed_goes_on(bed_directory, bed_name) -> None:
    made = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    with pytest.raises(InvalidInput, match=f"a testbed '{bed_name}' is up; choose another --name"):
        bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    assert_reaches(made, [(0, 1)], [100])
    assert bed.down(bed_name, directory=bed_directory) and not bed.down(
        bed_name, directory=bed_directory
    )
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_of_several_ups_of_one_name_one_succeeds_and_others_of_other_names_too(
    bed_directory, bed_name
) -> None:
    names = [bed_name, bed_name, bed_name, f"{bed_name}x", f"{bed_name}y"]

    def attempt_up(which: str) -> str:
        try:
            return bed.up(cluster(100, 100), name=which, directory=bed_directory).name
        except InvalidInput:
            return "refused"

    with ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(attempt_up, names))
    assert sorted(outcomes) == sorted(
        [bed_name, f"{bed_name}x", f"{bed_name}y", "refused", "refused"]
    )
    assert {status.layout.name for status in bed.testbeds(directory=bed_directory)} == {
        bed_name,
        f"{bed_name}x",
        f"{bed_name}y",
    }


def test_down_ends_every_process_inside_also_one_that_ignores_the_polite_signal(
    bed_directory, bed_name
) -> None:
    made = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    inside = subprocess.Popen(
        [*bed.words_inside(made.hosts[0].namespace), sys.executable, "-c", deaf],
        stdout=subprocess.PIPE,
    )
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
def test_what_a_killed_owner_left_is_removed_with_its_processes_by_the_next_up(
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
    inside = subprocess.Popen([*bed.words_inside(f"autotune.{bed_name}.b"), "sleep", "600"])
    assert bed.remove_leftovers(directory=bed_directory) == ()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert bed.testbeds(directory=bed_directory)[0].left_over
    assert record.scratch is not None and record.scratch.is_dir()
    (record.scratch / "session").mkdir()
    if record.relay:
        assert ends(lambda: not Process(record.relay.pid, record.relay.start_ticks).alive), (
            "the relay outlived its owner"
        )
    with bed.running(cluster(100, 100), name=f"{bed_name}n", directory=bed_directory):
        assert inside.wait(10) == -signal.SIGTERM
        assert [status.layout.name for status in bed.testbeds(directory=bed_directory)] == [
            f"{bed_name}n"
        ]
        assert not record.scratch.exists()
    assert_nothing_is_left(bed_directory, (bed_name, f"{bed_name}n"))


def test_a_half_made_testbed_of_a_dead_maker_is_a_leftover(bed_directory, bed_name) -> None:
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


def test_a_namespace_that_may_be_somebody_elses_is_left_alone_while_processes_run_inside(
    bed_directory, bed_name, caplog
) -> None:
    bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    path = States(bed_directory).path(bed_name)
    data = json.loads(path.read_text())
    data["namespaces"][-1]["inode"] = 0  # as if its maker had been killed while it was made
    path.write_text(json.dumps(data))
    doubtful = data["namespaces"][-1]["name"]
    inside = subprocess.Popen([*bed.words_inside(doubtful), "sleep", "600"])
    try:
        assert ends(lambda: Path(f"/proc/{inside.pid}/ns/net").stat().st_ino == inode(doubtful))
        bed.down(bed_name, directory=bed_directory)
        assert (
            inside.poll() is None
            and inode(doubtful) is not None
            and inode(data["namespaces"][1]["name"]) is None
        )
        assert (
            f"the namespace {doubtful} is left alone" in caplog.text
            and f"({inside.pid})" in caplog.text
        )
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


def test_a_namespace_made_anew_by_somebody_else_survives_down(bed_directory, bed_name) -> None:
    made = bed.up(cluster(100, 100), name=bed_name, directory=bed_directory)
    taken = made.hosts[0].namespace
    run(["ip", "netns", "delete", taken])
    run(["ip", "netns", "add", taken])
    try:
        before = inode(taken)
        bed.down(bed_name, directory=bed_directory)
        assert inode(taken) == before and inode(made.hosts[1].namespace) is None
    finally:
        run(["ip", "netns", "delete", taken])


def test_an_up_that_fails_on_the_way_is_undone(bed_directory, bed_name) -> None:
    beyond = Cluster(
        "c", (Host("h0", 1, 1.25e8, 5e-5, 1e10, 5e-6), Host("h1", 1, 1e30, 5e-5, 1e10, 5e-6))
    )  # no rate that tc can hold
    with pytest.raises(EmulationError, match=r"`tc -n autotune.* failed: "):
        bed.up(beyond, name=bed_name, directory=bed_directory)
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_an_interrupt_while_it_is_made_undoes_it(bed_directory, bed_name) -> None:
    main = threading.main_thread()
    assert threading.current_thread() is main

    def interrupt_once_begun() -> None:
        assert ends(lambda: inode(f"autotune.{bed_name}.h3") is not None)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts its background jobs with SIGINT ignored
    other = threading.Thread(target=interrupt_once_begun)
    other.start()
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            bed.running(cluster(*[100] * 60), name=bed_name, directory=bed_directory),
        ):
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)
    other.join()
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_a_termination_while_up_makes_a_testbed_undoes_it_and_speaks_of_no_job(
    bed_directory, bed_name, tmp_path
) -> None:
    hosts = ", ".join(f"{{name: h{number}, bandwidth: 100Mbit/s}}" for number in range(60))
    (tmp_path / "cluster.yaml").write_text(f"name: many\nhosts: [{hosts}]")
    words = [
        "testbed",
        "up",
        str(tmp_path / "cluster.yaml"),
        "--name",
        bed_name,
        "--state-directory",
        str(bed_directory),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ends(lambda: inode(f"autotune.{bed_name}.h3") is not None)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "autotune: interrupted\n")
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_trials_that_take_too_long_are_told_and_not_waited_for() -> None:
    able = capabilities(timeout_s=0.0)
    assert not able.possible and "an answer in time (the trials took more than 0 s)" in able.message
    assert ends(lambda: all(thread.name != TRIAL_THREAD for thread in threading.enumerate()))


@NEEDS_LATENCY
def test_a_file_in_the_users_directory_is_not_taken_for_one_of_the_relays_modules(
    bed_directory, bed_name, tmp_path, monkeypatch
) -> None:
    (tmp_path / "heapq.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with bed.running(cluster(100, 100, latency_s=1e-3), name=bed_name, directory=bed_directory):
        assert bed.testbeds(directory=bed_directory)[0].relay_alive in (True, None)


def test_a_thread_that_entered_a_namespace_is_inside_and_comes_back(
    bed_directory, bed_name
) -> None:
    outside = {interface for _, interface in socket.if_nameindex()}
    with bed.running(cluster(100, 100), name=bed_name, directory=bed_directory) as made:
        seen: list[set[str]] = []
        with bed.entered(made.hosts[0].namespace):
            inner = threading.Thread(
                target=lambda: seen.append({interface for _, interface in socket.if_nameindex()})
            )
            inner.start()
            inner.join()
            assert made.interface in seen[0] and "lo" in seen[0]
            assert made.hosts[0].address in run(["ip", "-br", "addr"])
        assert {interface for _, interface in socket.if_nameindex()} == outside
        with pytest.raises(KeyError), bed.entered(made.hosts[0].namespace):
            raise KeyError
        assert {interface for _, interface in socket.if_nameindex()} == outside
    with (
        pytest.raises(EmulationError, match="cannot be entered"),
        bed.entered(made.hosts[0].namespace),
    ):
        pass


def test_the_command_line_makes_shows_uses_and_removes_a_testbed(
    bed_directory, bed_name, tmp_path
) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: two\nhosts: [{name: a/1, bandwidth: 100Mbit/s}, {name: b, devices: 2}]"
    )

    def autotune(
        action: str, *words: str, after: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "autotune",
            "testbed",
            action,
            *words,
            "--state-directory",
            str(bed_directory),
            *after,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    assert "no testbed is up" in autotune("status").stdout
    made = json.loads(
        autotune("up", str(tmp_path / "cluster.yaml"), "--name", bed_name, "--json").stdout
    )
    assert made["name"] == bed_name and made["layout"]["hosts"][0]["link_bytes_per_s"] == 1.25e7
    assert (
        "is up; choose another --name"
        in autotune("up", str(tmp_path / "cluster.yaml"), "--name", bed_name).stderr
    )
    assert "100 Mbit/s" in autotune("status").stdout and "own" in autotune("status").stdout
    inside = autotune(
        "exec", bed_name, "a/1", after=("--", "sh", "-c", "ip -br addr show eth0; exit 7")
    )
    assert inside.returncode == 7 and "10.77.0.1/16" in inside.stdout
    absent = autotune("exec", bed_name, "c", after=("--", "true"))
    assert absent.returncode == 2 and "has no host 'c'; its hosts: a/1, b" in absent.stderr
    (bed_directory / "newer.json").write_text('{"schema": 99}')
    status = autotune("status")
    assert status.returncode == 0 and "100 Mbit/s" in status.stdout
    assert (
        "newer: its record cannot be read: " in status.stdout
        and "the file has 99; update autotune" in status.stdout.replace("\n", " ")
    )
    assert json.loads(autotune("down", "--json").stdout) == {"removed": [bed_name]}
    assert "the file has 99" in autotune("down", "newer").stderr
    (bed_directory / "newer.json").unlink()
    assert "nothing to remove" in autotune("down", bed_name).stdout
    assert "there is no testbed" in autotune("exec", bed_name, "b", after=("--", "true")).stderr
    assert autotune("check").returncode == 0
    assert_nothing_is_left(bed_directory, (bed_name,))


@pytest.mark.skipif(
    attempt(["setpriv", "--version"]).reason != "", reason="setpriv is not installed"
)
def test_without_root_there_is_one_message_that_says_what_is_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        file = Path(folder) / "cluster.yaml"
        file.write_text("hosts: [{name: a}, {name: b}]")
        assert_refused_without_root(file)


def assert_refused_without_root(file: Path) -> None:
    program = "import sys; from autotune.cli import main; sys.exit(main(sys.argv[1:]))"
    nobody = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        sys.executable,
        "-B",
        "-c",
        program,
        "testbed",
    ]
    if attempt([*nobody[:6], sys.executable, "-c", "import autotune.cli"]).reason:
        pytest.skip("another user cannot read this checkout")
    refused = subprocess.run([*nobody, "up", str(file)], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert (
        "CAP_NET_ADMIN needed" in refused.stderr
        and "Loopback stays available: leave out --testbed" in refused.stderr
    )
    checked = subprocess.run([*nobody, "check", "--json"], capture_output=True, text=True)
    assert checked.returncode == 2 and json.loads(checked.stdout)["possible"] is False


@NEEDS_LATENCY
def test_a_dead_relay_is_told(bed_directory, bed_name) -> None:
    bed.up(cluster(100, 100, latency_s=1e-3), name=bed_name, directory=bed_directory)
    record = States(bed_directory).read(bed_name)
    assert record is not None
    if record.layout.method is not Method.RELAY:
        pytest.skip("this kernel has netem, so no relay is used")
    assert record.relay is not None and bed.testbeds(directory=bed_directory)[0].relay_alive is True
    os.kill(record.relay.pid, signal.SIGKILL)
    assert ends(lambda: bed.testbeds(directory=bed_directory)[0].relay_alive is False)
    bed.down(bed_name, directory=bed_directory)
    assert_nothing_is_left(bed_directory, (bed_name,))


def ends(happened: Callable[[], bool], patience_s: float = 15.0) -> bool:
    """Wait until something is so; whether it was within the patience."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.005)
    return False
