"""`--address`: a running Ray cluster of two nodes, each on a loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from short_jobs import START_S

from autotune.cluster_file import read_cluster
from runtime_rewriter.ports import unclaimed_port

pytestmark = pytest.mark.job
SCRIPTS = Path(__file__).parents[1] / "scripts"
# Ray replaces 127.0.0.1 by the first real interface, but leaves other loopback addresses alone.
RAY_START = (sys.executable, "-m", "autotune.patient_ray", "start", "--block")
# Nobody reads what a monitor of logs would collect.
LEAN = ("--include-log-monitor", "false")
RAY = [*RAY_START, "--num-cpus", "2", "--object-store-memory", "100000000", *LEAN]
WAIT = """
import ray, sys, time
end_s = time.monotonic() + float(sys.argv[2])
while True:
    try:
        ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)
        break
    except ConnectionError:
        assert time.monotonic() < end_s, 'no node'
        time.sleep(1)
for count in (1, 2):
    while sum(node['Alive'] for node in ray.nodes()) < count:
        assert time.monotonic() < end_s, f'fewer than {count} nodes'
        time.sleep(0.2)
    print('nodes', count, flush=True)
"""
"""Prints how many nodes are alive whenever it is one more. One process waits for both nodes, since
each imports Ray."""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_server_port_wait_time_s": "240",
        # Ranks are actors with the sent files, for which Ray starts workers of their own.
        "RAY_prestart_worker_first_driver": "0",
    }
    return {**inherited, **settings, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def address(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = unclaimed_port("127.0.0.2")
    address = f"127.0.0.2:{port}"
    path = tmp_path_factory.mktemp("ray") / "nodes.log"
    log = path.open("w")
    head = ["--head", "--node-ip-address", "127.0.0.2", "--port", str(port)]
    head += ["--include-dashboard", "false", "--no-monitor"]
    second = ["--address", address, "--node-ip-address", "127.0.0.3"]
    nodes: list[subprocess.Popen[bytes]] = []
    wait = [sys.executable, "-c", WAIT, address, str(START_S)]
    waiting = subprocess.Popen(wait, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        for words in (head, second):
            node = subprocess.Popen(
                [*RAY, *words], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            nodes.append(node)
            assert _has_printed(waiting, f"nodes {len(nodes)}\n"), (
                f"Ray's nodes: {path.read_text()}"
            )
        assert waiting.wait(timeout=START_S) == 0
        yield address
    finally:
        waiting.kill()
        waiting.communicate()
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)  # `ray start --block` ends its processes
        for node in nodes:
            node.wait(timeout=START_S)
        log.close()


def _has_printed(process: subprocess.Popen[str], wanted: str) -> bool:
    """Read lines up to the wanted one; whether it came before the process ended."""
    assert process.stdout is not None
    return any(line == wanted for line in iter(process.stdout.readline, ""))


def report_of(
    address: str, mode: str, environment: dict[str, str], directory: Path
) -> dict[str, Any]:
    shutil.copy(SCRIPTS / "train_small.py", directory)
    command = [sys.executable, str(SCRIPTS / "train_at_address.py"), address, mode]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_ranks_run_host_by_host_on_the_nodes_of_an_address(address, environment, tmp_path) -> None:
    report = report_of(address, "run", environment, tmp_path)
    assert report["measured"], report["outcome"]
    name = socket.gethostname()
    assert report["hosts"] == [[name, 1], [f"{name}-1", 1]]
    assert report["addresses"] == ["127.0.0.3", "127.0.0.2"]
    assert report["local_ranks"] == ["0", "0"]
    assert report["master"] == "127.0.0.3"
    assert report["logs_exist"] == [True, True] and not report["logs_in_our_directory"]
    assert len(set(report["views"])) == 2, "each host has its own view of the sent directory"
    have = "127.0.0.2 with 2 CPUs, 127.0.0.3 with 2 CPUs"
    need = "the ranks need 2 hosts with 3, 1 CPUs (one for each rank), but the Ray cluster has "
    assert all(text in report["refusal"] for text in (need, *have.split(", ")))
    known = "no node is at unknown.example; the nodes are at 127.0.0.2, 127.0.0.3"
    assert known in report["unknown"]


@pytest.mark.slow
def test_a_directory_that_is_too_large_to_be_sent_is_refused_with_the_fix(
    address, environment, tmp_path
) -> None:
    (tmp_path / "data.bin").write_bytes(os.urandom(2 * 2**20))
    limited = {**environment, "RAY_max_grpc_message_size": str(2**20)}
    refusal = report_of(address, "refusal", limited, tmp_path)["refusal"]
    assert f"directory {tmp_path} must be sent to the hosts of the Ray cluster, but that" in refusal
    assert "use --shared-directory if this directory exists on every host" in refusal
    shared = report_of(address, "shared", limited, tmp_path)
    assert shared["measured"], shared["outcome"]


@pytest.mark.slow
def test_the_hosts_of_an_address_are_probed_into_a_cluster_file(
    address, environment, tmp_path
) -> None:
    options = ["--address", address, "--workers", "3", "--budget-time", "10s"]
    options += ["--directory", "jobs", "-o", "probed.yaml", "--json"]
    (tmp_path / "large.bin").write_bytes(os.urandom(2 * 2**20))  # nothing of the directory is sent
    limited = {**environment, "RAY_max_grpc_message_size": str(2**20)}
    command = [sys.executable, "-m", "autotune", "probe", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=limited, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "probed.yaml")
    assert sorted(host.devices for host in cluster.hosts) == [1, 2] and cluster.source == "measured"
    assert {host.address for host in cluster.hosts} == {"127.0.0.2", "127.0.0.3"}
    links = {(host.name, False) for host in cluster.hosts}
    links |= {(host.name, True) for host in cluster.hosts if host.devices == 2}
    assert {(link.host, link.inside) for link in cluster.link_fits} == links
    assert cluster.fit("all_reduce", 3) is not None
    assert json.loads(done.stdout)["conditions"]["network"] == "hosts"


def words_of(command_line: Path) -> list[str]:
    """The words of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return command_line.read_text().split("\0")
    return []


def test_a_frozen_cluster_of_others_is_left_alone_and_ends_the_command(
    address, environment, tmp_path
) -> None:
    port = address.rpartition(":")[2]
    [gcs] = [
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if f"--gcs_server_port={port}" in (words := words_of(entry)) and "gcs_server" in words[0]
    ]
    command = [sys.executable, str(SCRIPTS / "train_at_address.py"), address, "stuck"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "connected\n"
        os.kill(gcs, signal.SIGSTOP)
        try:
            output, errors = process.communicate("\n", timeout=START_S)
        finally:
            os.kill(gcs, signal.SIGCONT)
    refusal = json.loads(output)["refusal"]
    assert refusal.startswith("Ray no longer answers; look at `ray status`"), errors
    assert process.returncode == 0
