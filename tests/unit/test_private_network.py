"""Servers without authentication listen only where nobody else can connect."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from autotune.errors import LaunchError
from runtime_rewriter.private_network import NetworkNamespace, new_network_namespace, refusal

PORT = 1
"""Nothing on this machine listens there. Another test might, at a port that the kernel chose."""
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of this thread needs root")


def in_a_thread(work) -> None:
    """Run `work` in a thread, whose namespace ends with it; raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@root_only
def test_a_port_of_the_namespace_is_reached_from_inside_only() -> None:
    ready, checked = threading.Event(), threading.Event()
    listeners: list[socket.socket] = []
    namespaces: list[NetworkNamespace] = []

    def listen() -> None:
        namespaces.append(new_network_namespace())
        listeners.append(socket.create_server(("0.0.0.0", PORT)))
        ready.set()
        checked.wait(10.0)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert ready.wait(10.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", PORT), timeout=5.0)

        def enter_and_connect() -> None:
            namespaces[0].enter()
            socket.create_connection(("127.0.0.1", PORT), timeout=5.0).close()
            assert [name for _, name in socket.if_nameindex()] == ["lo"]

        in_a_thread(enter_and_connect)
    finally:
        checked.set()
        thread.join()
        listeners[0].close()


def test_a_namespace_whose_holder_has_ended_is_not_entered() -> None:
    own = Path("/proc/self/ns/net")
    with pytest.raises(LaunchError, match="the rank that holds it has ended"):
        NetworkNamespace(str(own), own.stat().st_ino + 1).enter()


def test_the_refusal_states_the_rule_the_reason_and_the_fix() -> None:
    message = str(refusal("a server", "the hosts are on an ordinary network"))
    assert "without authentication" in message and "ordinary network; add" in message
    assert "--trusted-network" in message
    assert "autotune docs troubleshooting#untrusted-network" in message
