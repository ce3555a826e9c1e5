"""Testbeds of real namespaces: their rates and latencies, and that what is taken down, failed or left over is gone. Needs root."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autotune.cluster import Cluster, Host, PairLink
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed import bed
from autotune.testbed.build import delete_namespace
from autotune.testbed.capabilities import TRIAL_THREAD, capabilities
from autotune.testbed.layout import Method
from autotune.testbed.namespaces import inode
from autotune.testbed.processes import Process
from autotune.testbed.shell import attempt, run
from autotune.testbed.state import States

ABLE = capabilities()
pytestmark = pytest.mark.skipif(not ABLE.possible, reason=ABLE.message)
NEEDS_LATENCY = pytest.mark.skipif(not (ABLE.means.tun or ABLE.means.netem), reason="neither netem nor /dev/net/tun")
TRIES = 6
NEEDS_FILTERS = pytest.mark.skipif(not ABLE.means.filters, reason="tc has no u32 filter")

RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 5000)); print("ready", flush=True)
stream, _ = server.accept(); buffer = bytearray(1 << 20); total = warm = 0; began = time.perf_counter(); first = None
while count := stream.recv_into(buffer):
    total += count; now = time.perf_counter()
    if first is None and now - began > 0.25: first, warm = now, total
print((total - warm) / (now - first))
"""
SEND = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], 5000)); end = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end: stream.sendall(bytes(1 << 16))
"""
ECHO = """
import socket
server = socket.create_server(("", 5000)); print("ready", flush=True)
stream, _ = server.accept(); stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while word := stream.recv(64): stream.sendall(word)
"""
PING = """
import socket, statistics, sys, time
stream = socket.create_connection((sys.argv[1], 5000)); stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); times = []
for _ in range(40):
    began = time.perf_counter(); stream.sendall(b"x"); stream.recv(64); times.append(time.perf_counter() - began)
print(min(times), statistics.median(times))
"""
OWNER = """
import sys, time
from pathlib import Path
from autotune.cluster import Cluster, Host
from autotune.testbed import bed
cluster = Cluster("c", tuple(Host(name, 1, 1.25e8, float(sys.argv[3]), 1e10, 5e-6) for name in "ab"))
bed.up(cluster, name=sys.argv[1], owned=True, directory=Path(sys.argv[2])); print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where this test's testbeds are recorded; whatever it left is taken down."""
    yield tmp_path / "state"
    for status in bed.testbeds(directory=tmp_path / "state"):
        bed.down(status.layout.name, directory=tmp_path / "state")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"


def cluster(*mbit: float, latency_s: float = 5e-5, links: tuple[PairLink, ...] = (), inner: float = 1e10) -> Cluster:
    return Cluster("c", tuple(Host(f"h{i}", 1, rate * 1.25e5, latency_s, inner, 5e-6) for i, rate in enumerate(mbit)), links)


def started(host: bed.BedHost, program: str, *words: str) -> subprocess.Popen[str]:
    command = [*bed.words_inside(host.namespace), sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if program in (RECEIVE, ECHO):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def answer(server: subprocess.Popen[str], client: subprocess.Popen[str]) -> tuple[str, str]:
    told, asked = server.communicate(timeout=30)[0], client.communicate(timeout=30)[0]
    assert server.returncode == client.returncode == 0
    return told, asked


def goodput_mbit(made: bed.Testbed, pairs: list[tuple[int, int]], seconds: float = 0.9) -> list[float]:
    """Payload that streams between pairs of hosts get at the same time; each receiver and sender in one pair only."""
    receivers = [started(made.hosts[target], RECEIVE) for _, target in pairs]
    senders = [started(made.hosts[source], SEND, made.hosts[target].address, str(seconds)) for source, target in pairs]
    return [float(answer(*both)[0]) * 8e-6 for both in zip(receivers, senders, strict=True)]


def round_trip_s(made: bed.Testbed, source: int = 0, target: int = 1) -> tuple[float, float]:
    """Smallest and median of 40."""
    server = started(made.hosts[target], ECHO)
    smallest, median = answer(server, started(made.hosts[source], PING, made.hosts[target].address))[1].split()
    return float(smallest), float(median)


def assert_reaches(made: bed.Testbed, pairs: list[tuple[int, int]], expected_mbit: list[float], seconds: float = 0.9) -> None:
    """Streams that run at the same time get their rates. A busy machine may spoil a try or several, but a wrong rate spoils them all."""
    tries = []
    while len(tries) < TRIES:
        tries.append(goodput_mbit(made, pairs, seconds))
        if all(0.8 * rate <= got <= 1.05 * rate for got, rate in zip(tries[-1], expected_mbit, strict=True)):
            return
    raise AssertionError(f"expected {expected_mbit} Mbit/s, got {tries}")


def assert_nothing_is_left(directory: Path, names: tuple[str, ...]) -> None:
    assert bed.testbeds(directory=directory) == ()
    assert [path.name for path in directory.iterdir()] == ["lock"]
    named = {path.name for path in Path("/run/netns").iterdir()}
    assert not [
        namespace for name in names for namespace in named if namespace == f"autotune.{name}" or namespace.startswith(f"autotune.{name}.")
    ]


def test_an_even_cluster_has_its_rate_in_both_directions_at_once(directory, name) -> None:
    with bed.running(cluster(200, 200), name=name, directory=directory) as made:
        assert_reaches(made, [(0, 1), (1, 0)], [200, 200])
    assert_nothing_is_left(directory, (name,))


def test_an_uneven_cluster_has_each_hosts_rate_in_both_directions(directory, name) -> None:
    with bed.running(cluster(1000, 1000, 1000, 250), name=name, directory=directory) as made:
        assert_reaches(made, [(0, 1)], [1000])
        assert_reaches(made, [(3, 0)], [250])
        assert_reaches(made, [(2, 3)], [250])


def test_a_byte_scale_slows_the_links(directory, name) -> None:
    with bed.running(cluster(1000, 1000), name=name, byte_scale=10, directory=directory) as made:
        assert_reaches(made, [(0, 1)], [100])


@NEEDS_FILTERS
def test_pairs_have_their_own_rates_below_and_above_their_interfaces(directory, name) -> None:
    links = (PairLink(("h0", "h1"), 50 * 1.25e5, 5e-5), PairLink(("h0", "h2"), 400 * 1.25e5, 5e-5))
    with bed.running(cluster(200, 200, 200, links=links), name=name, directory=directory) as made:
        assert_reaches(made, [(0, 1)], [50])
        assert_reaches(made, [(2, 0)], [400])
        assert_reaches(made, [(2, 1)], [200])


def test_the_inside_of_a_host_is_shaped_where_it_is_slower_than_memory(directory, name) -> None:
    with bed.running(cluster(100, 100, inner=500 * 1.25e5), name=name, directory=directory) as made:
        assert_reaches(made, [(0, 0)], [500])


@NEEDS_LATENCY
@pytest.mark.parametrize("latency_s", [5e-4, 5e-3])
def test_added_latency_is_reached_and_the_rate_with_it(directory, name, latency_s) -> None:
    with bed.running(cluster(200, 200, latency_s=latency_s), name=name, directory=directory) as made:
        smallest_s, median_s = round_trip_s(made)
        assert_reaches(made, [(0, 1), (1, 0)], [200, 200], seconds=1.5)
    with bed.running(cluster(200, 200), name=name, directory=directory) as made:
        own_s, _ = round_trip_s(made)
    # What a busy machine adds is no fault: the usual trip is not shorter than twice the latency, and the best one not much longer.
    assert 2 * latency_s * 0.9 <= median_s
    assert smallest_s <= 2 * latency_s * 1.2 + own_s + 1e-3


@NEEDS_LATENCY
def test_only_the_named_pair_is_far_and_slow(directory, name) -> None:
    links = (PairLink(("h0", "h1"), 50 * 1.25e5, 4e-3),)
    with bed.running(cluster(200, 200, 200, links=links), name=name, directory=directory) as made:
        assert round_trip_s(made)[1] >= 7.2e-3
        assert round_trip_s(made, 0, 2)[0] < 4e-3
        assert_reaches(made, [(0, 1)], [50], seconds=1.5)
        assert_reaches(made, [(2, 0)], [200])


def test_testbeds_with_the_same_hosts_and_addresses_stand_side_by_side(directory, name) -> None:
    first, second = f"{name}a", f"{name}b"
    with bed.running(cluster(100, 100), name=first, directory=directory) as one:
        with bed.running(cluster(300, 300), name=second, directory=directory) as other:
            assert [host.address for host in one.hosts] == [host.address for host in other.hosts]
            assert_reaches(one, [(0, 1)], [100])
            assert_reaches(other, [(0, 1)], [300])
        assert_reaches(one, [(1, 0)], [100])
    assert_nothing_is_left(directory, (first, second))


def test_a_name_in_use_is_refused_and_its_testbed_goes_on(directory, name) -> None:
    made = bed.up(cluster(100, 100), name=name, directory=directory)
    with pytest.raises(InvalidInput, match=f"a testbed '{name}' is up; choose another --name"):
        bed.up(cluster(100, 100), name=name, directory=directory)
    assert_reaches(made, [(0, 1)], [100])
    assert bed.down(name, directory=directory) and not bed.down(name, directory=directory)
    assert_nothing_is_left(directory, (name,))


def test_of_several_ups_of_one_name_one_succeeds_and_others_of_other_names_too(directory, name) -> None:
    names = [name, name, name, f"{name}x", f"{name}y"]

    def attempt_up(which: str) -> str:
        try:
            return bed.up(cluster(100, 100), name=which, directory=directory).name
        except InvalidInput:
            return "refused"

    with ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(attempt_up, names))
    assert sorted(outcomes) == sorted([name, f"{name}x", f"{name}y", "refused", "refused"])
    assert {status.layout.name for status in bed.testbeds(directory=directory)} == {name, f"{name}x", f"{name}y"}


def test_down_ends_every_process_inside_also_one_that_ignores_the_polite_signal(directory, name) -> None:
    made = bed.up(cluster(100, 100), name=name, directory=directory)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    inside = subprocess.Popen([*bed.words_inside(made.hosts[0].namespace), sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    outside = subprocess.Popen(["sleep", "600"])
    try:
        assert inside.stdout is not None and inside.stdout.readline() == b"ready\n"
        assert bed.testbeds(directory=directory)[0].processes == ((inside.pid,), ())
        bed.down(name, directory=directory)
        assert inside.wait(10) == -signal.SIGKILL and outside.poll() is None
        inside.stdout.close()
    finally:
        outside.kill()
        outside.wait()
    assert_nothing_is_left(directory, (name,))


@pytest.mark.parametrize("latency_s", [5e-5, pytest.param(1e-3, marks=NEEDS_LATENCY)])
def test_what_a_killed_owner_left_is_removed_with_its_processes_by_the_next_up(directory, name, latency_s) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name, str(directory), str(latency_s)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    record = States(directory).read(name)
    assert record is not None and record.owned and not record.left_over
    inside = subprocess.Popen([*bed.words_inside(f"autotune.{name}.b"), "sleep", "600"])
    assert bed.remove_leftovers(directory=directory) == ()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert bed.testbeds(directory=directory)[0].left_over
    assert record.scratch is not None and record.scratch.is_dir()
    (record.scratch / "session").mkdir()
    if record.relay:
        assert ends(lambda: not Process(record.relay.pid, record.relay.start_ticks).alive), "the relay outlived its owner"
    with bed.running(cluster(100, 100), name=f"{name}n", directory=directory):
        assert inside.wait(10) == -signal.SIGTERM
        assert [status.layout.name for status in bed.testbeds(directory=directory)] == [f"{name}n"]
        assert not record.scratch.exists()
    assert_nothing_is_left(directory, (name, f"{name}n"))


def test_a_half_made_testbed_of_a_dead_maker_is_a_leftover(directory, name) -> None:
    bed.up(cluster(100, 100), name=name, directory=directory)
    path = States(directory).path(name)
    data = json.loads(path.read_text())
    data |= {"complete": False, "maker": {"pid": os.getpid(), "start_ticks": 1}}
    for namespace in data["namespaces"][1:]:
        namespace["inode"] = 0
    run(delete_namespace(data["namespaces"][2]["name"]))
    path.write_text(json.dumps(data))
    assert bed.remove_leftovers(directory=directory) == (name,)
    assert_nothing_is_left(directory, (name,))


def test_a_namespace_that_may_be_somebody_elses_is_left_alone_while_processes_run_inside(directory, name, caplog) -> None:
    bed.up(cluster(100, 100), name=name, directory=directory)
    path = States(directory).path(name)
    data = json.loads(path.read_text())
    data["namespaces"][-1]["inode"] = 0  # as if its maker had been killed while it was made
    path.write_text(json.dumps(data))
    doubtful = data["namespaces"][-1]["name"]
    inside = subprocess.Popen([*bed.words_inside(doubtful), "sleep", "600"])
    try:
        assert ends(lambda: Path(f"/proc/{inside.pid}/ns/net").stat().st_ino == inode(doubtful))
        bed.down(name, directory=directory)
        assert inside.poll() is None and inode(doubtful) is not None and inode(data["namespaces"][1]["name"]) is None
        assert f"the namespace {doubtful} is left alone" in caplog.text and f"({inside.pid})" in caplog.text
    finally:
        inside.kill()
        inside.wait()
        run(delete_namespace(doubtful))
    assert_nothing_is_left(directory, (name,))


def test_a_namespace_of_somebody_else_is_never_touched(directory, name) -> None:
    foreign = f"autotune.{name}.h1"
    run(["ip", "netns", "add", foreign])
    try:
        before = inode(foreign)
        with pytest.raises(InvalidInput, match=f"the namespace '{foreign}' exists, but no record"):
            bed.up(cluster(100, 100), name=name, directory=directory)
        assert inode(foreign) == before
    finally:
        run(["ip", "netns", "delete", foreign])
    assert_nothing_is_left(directory, (name,))


def test_a_namespace_made_anew_by_somebody_else_survives_down(directory, name) -> None:
    made = bed.up(cluster(100, 100), name=name, directory=directory)
    taken = made.hosts[0].namespace
    run(["ip", "netns", "delete", taken])
    run(["ip", "netns", "add", taken])
    try:
        before = inode(taken)
        bed.down(name, directory=directory)
        assert inode(taken) == before and inode(made.hosts[1].namespace) is None
    finally:
        run(["ip", "netns", "delete", taken])


def test_an_up_that_fails_on_the_way_is_undone(directory, name) -> None:
    beyond = Cluster("c", (Host("h0", 1, 1.25e8, 5e-5, 1e10, 5e-6), Host("h1", 1, 1e30, 5e-5, 1e10, 5e-6)))  # no rate that tc can hold
    with pytest.raises(EmulationError, match=r"`tc -n autotune.* failed: "):
        bed.up(beyond, name=name, directory=directory)
    assert_nothing_is_left(directory, (name,))


def test_an_interrupt_while_it_is_made_undoes_it(directory, name) -> None:
    main = threading.main_thread()
    assert threading.current_thread() is main

    def interrupt_once_begun() -> None:
        assert ends(lambda: inode(f"autotune.{name}.h3") is not None)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
    other = threading.Thread(target=interrupt_once_begun)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), bed.running(cluster(*[100] * 60), name=name, directory=directory):
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)
    other.join()
    assert_nothing_is_left(directory, (name,))


def test_a_termination_while_up_makes_a_testbed_undoes_it_and_speaks_of_no_job(directory, name, tmp_path) -> None:
    hosts = ", ".join(f"{{name: h{number}, bandwidth: 100Mbit/s}}" for number in range(60))
    (tmp_path / "cluster.yaml").write_text(f"name: many\nhosts: [{hosts}]")
    words = ["testbed", "up", str(tmp_path / "cluster.yaml"), "--name", name, "--state-directory", str(directory)]
    process = subprocess.Popen([sys.executable, "-m", "autotune", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ends(lambda: inode(f"autotune.{name}.h3") is not None)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "autotune: interrupted\n")
    assert_nothing_is_left(directory, (name,))


def test_trials_that_take_too_long_are_told_and_not_waited_for() -> None:
    able = capabilities(patience_s=0.0)
    assert not able.possible and "an answer in time (the trials took more than 0 s)" in able.message
    assert ends(lambda: all(thread.name != TRIAL_THREAD for thread in threading.enumerate()))


@NEEDS_LATENCY
def test_a_file_in_the_users_directory_is_not_taken_for_one_of_the_relays_modules(directory, name, tmp_path, monkeypatch) -> None:
    (tmp_path / "heapq.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with bed.running(cluster(100, 100, latency_s=1e-3), name=name, directory=directory):
        assert bed.testbeds(directory=directory)[0].relay_alive in (True, None)


def test_a_thread_that_entered_a_namespace_is_inside_and_comes_back(directory, name) -> None:
    outside = {interface for _, interface in socket.if_nameindex()}
    with bed.running(cluster(100, 100), name=name, directory=directory) as made:
        seen: list[set[str]] = []
        with bed.entered(made.hosts[0].namespace):
            inner = threading.Thread(target=lambda: seen.append({interface for _, interface in socket.if_nameindex()}))
            inner.start()
            inner.join()
            assert made.interface in seen[0] and "lo" in seen[0]
            assert made.hosts[0].address in run(["ip", "-br", "addr"])
        assert {interface for _, interface in socket.if_nameindex()} == outside
        with pytest.raises(KeyError), bed.entered(made.hosts[0].namespace):
            raise KeyError
        assert {interface for _, interface in socket.if_nameindex()} == outside
    with pytest.raises(EmulationError, match="cannot be entered"), bed.entered(made.hosts[0].namespace):
        pass


def test_the_command_line_makes_shows_uses_and_removes_a_testbed(directory, name, tmp_path) -> None:
    (tmp_path / "cluster.yaml").write_text("name: two\nhosts: [{name: a/1, bandwidth: 100Mbit/s}, {name: b, devices: 2}]")

    def autotune(action: str, *words: str, after: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autotune", "testbed", action, *words, "--state-directory", str(directory), *after]
        return subprocess.run(command, capture_output=True, text=True)

    assert "no testbed is up" in autotune("status").stdout
    made = json.loads(autotune("up", str(tmp_path / "cluster.yaml"), "--name", name, "--json").stdout)
    assert made["name"] == name and made["layout"]["hosts"][0]["link_bytes_per_s"] == 1.25e7
    assert "is up; choose another --name" in autotune("up", str(tmp_path / "cluster.yaml"), "--name", name).stderr
    assert "100 Mbit/s" in autotune("status").stdout and "own" in autotune("status").stdout
    inside = autotune("exec", name, "a/1", after=("--", "sh", "-c", "ip -br addr show eth0; exit 7"))
    assert inside.returncode == 7 and "10.77.0.1/16" in inside.stdout
    absent = autotune("exec", name, "c", after=("--", "true"))
    assert absent.returncode == 2 and "has no host 'c'; its hosts: a/1, b" in absent.stderr
    (directory / "newer.json").write_text('{"schema": 99}')
    status = autotune("status")
    assert status.returncode == 0 and "100 Mbit/s" in status.stdout
    assert "newer: its record cannot be read: " in status.stdout and "the file has 99; update autotune" in status.stdout.replace("\n", " ")
    assert json.loads(autotune("down", "--json").stdout) == {"removed": [name]}
    assert "the file has 99" in autotune("down", "newer").stderr
    (directory / "newer.json").unlink()
    assert "nothing to remove" in autotune("down", name).stdout
    assert "there is no testbed" in autotune("exec", name, "b", after=("--", "true")).stderr
    assert autotune("check").returncode == 0
    assert_nothing_is_left(directory, (name,))


@pytest.mark.skipif(attempt(["setpriv", "--version"]).reason != "", reason="setpriv is not installed")
def test_without_root_there_is_one_message_that_says_what_is_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        file = Path(folder) / "cluster.yaml"
        file.write_text("hosts: [{name: a}, {name: b}]")
        assert_refused_without_root(file)


def assert_refused_without_root(file: Path) -> None:
    program = "import sys; from autotune.cli import main; sys.exit(main(sys.argv[1:]))"
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, "-B", "-c", program, "testbed"]
    if attempt([*nobody[:6], sys.executable, "-c", "import autotune.cli"]).reason:
        pytest.skip("another user cannot read this checkout")
    refused = subprocess.run([*nobody, "up", str(file)], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "CAP_NET_ADMIN needed" in refused.stderr and "Loopback stays available: leave out --testbed" in refused.stderr
    checked = subprocess.run([*nobody, "check", "--json"], capture_output=True, text=True)
    assert checked.returncode == 2 and json.loads(checked.stdout)["possible"] is False


@NEEDS_LATENCY
def test_a_dead_relay_is_told(directory, name) -> None:
    bed.up(cluster(100, 100, latency_s=1e-3), name=name, directory=directory)
    record = States(directory).read(name)
    assert record is not None
    if record.layout.method is not Method.RELAY:
        pytest.skip("this kernel has netem, so no relay is used")
    assert record.relay is not None and bed.testbeds(directory=directory)[0].relay_alive is True
    os.kill(record.relay.pid, signal.SIGKILL)
    assert ends(lambda: bed.testbeds(directory=directory)[0].relay_alive is False)
    bed.down(name, directory=directory)
    assert_nothing_is_left(directory, (name,))


def ends(happened: Callable[[], bool], patience_s: float = 15.0) -> bool:
    """Wait until something is so; whether it was within the patience."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.005)
    return False
