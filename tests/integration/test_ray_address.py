"""`--address`: a Ray cluster of two nodes that somebody else started, each on an address of the loopback network."""

from __future__ import annotations

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

from autotune.cluster_file import read_cluster

SCRIPTS = Path(__file__).parents[1] / "scripts"
# Ray replaces 127.0.0.1 by the first real interface, but leaves other loopback addresses alone.
RAY = [
    str(Path(sys.executable).with_name("ray")),
    "start",
    "--block",
    "--num-cpus",
    "2",
    "--object-store-memory",
    "100000000",
]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**ours, **settings, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def address(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.2:{port}"
    log = (tmp_path_factory.mktemp("ray") / "nodes.log").open("w")
    head = [
        "--head",
        "--node-ip-address",
        "127.0.0.2",
        "--port",
        str(port),
        "--include-dashboard",
        "false",
    ]
    second = ["--address", address, "--node-ip-address", "127.0.0.3"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for words in (head, second):
            nodes.append(
                subprocess.Popen(
                    [*RAY, *words], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
            _wait_for_nodes(len(nodes), address, environment)
        yield address
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)  # `ray start --block` ends all that it started
        for node in nodes:
            node.wait(timeout=60)
        log.close()


def _wait_for_nodes(count: int, address: str, environment: dict[str, str]) -> None:
    lines = [
        "import ray, sys, time",
        "for _ in range(60):",
        "    try:",
        "        ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)",
        "        break",
        "    except ConnectionError:",
        "        time.sleep(1)",
        "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]):",
        "    time.sleep(0.2)",
    ]
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines), address, str(count)],
        env=environment,
        check=True,
        timeout=90,
    )


def seen_at(
    address: str, what: str, environment: dict[str, str], directory: Path
) -> dict[str, Any]:
    shutil.copy(SCRIPTS / "train_small.py", directory)
    command = [sys.executable, str(SCRIPTS / "train_at_address.py"), address, what]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_ranks_run_host_by_host_on_the_nodes_of_an_address(address, environment, tmp_path) -> None:
    seen = seen_at(address, "run", environment, tmp_path)
    assert seen["measured"], seen["outcome"]
    name = socket.gethostname()
    assert seen["hosts"] == [[name, 1], [f"{name}-1", 1]]
    assert seen["local_ranks"] == ["0", "0"]
    assert seen["master"] == "127.0.0.3"
    assert seen["logs_exist"] == [True, True] and not seen["logs_in_our_directory"]
    have = "127.0.0.2 with 2 CPUs, 127.0.0.3 with 2 CPUs"
    assert (
        "the ranks need 2 hosts with 3, 1 CPUs (one for each rank), but the Ray cluster has "
        in seen["refusal"]
    )
    assert all(node in seen["refusal"] for node in have.split(", "))


def test_a_directory_that_is_too_large_to_be_sent_is_refused_with_the_fix(
    address, environment, tmp_path
) -> None:
    (tmp_path / "data.bin").write_bytes(os.urandom(2 * 2**20))
    limited = {**environment, "RAY_max_grpc_message_size": str(2**20)}
    refusal = seen_at(address, "refusal", limited, tmp_path)["refusal"]
    assert (
        f"directory {tmp_path} must be sent to the hosts of the Ray cluster, but that failed"
        in refusal
    )
    assert "use --shared-directory if this directory exists on every host" in refusal
    shared = seen_at(address, "shared", limited, tmp_path)
    assert shared["measured"], shared["outcome"]


@pytest.mark.slow
def test_the_links_of_the_hosts_of_an_address_are_probed_into_a_cluster_file(
    address, environment, tmp_path
) -> None:
    options = [
        "--address",
        address,
        "--workers",
        "3",
        "--budget-time",
        "10s",
        "--directory",
        "jobs",
        "-o",
        "probed.yaml",
        "--json",
    ]
    (tmp_path / "large.bin").write_bytes(os.urandom(2 * 2**20))  # nothing of the directory is sent
    limited = {**environment, "RAY_max_grpc_message_size": str(2**20)}
    command = [sys.executable, "-m", "autotune", "probe", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=limited, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "probed.yaml")
    assert sorted(host.devices for host in cluster.hosts) == [1, 2] and cluster.source == "measured"
    measured = {(link.host, link.inside) for link in cluster.link_fits}
    assert measured == {(host.name, False) for host in cluster.hosts} | {
        (host.name, True) for host in cluster.hosts if host.devices == 2
    }
    assert cluster.fit("all_reduce", 3) is not None
    assert json.loads(done.stdout)["conditions"]["network"] == "hosts"
