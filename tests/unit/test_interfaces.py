"""The interface that gloo gets on a host whose name resolves to loopback."""

from __future__ import annotations

import socket

import pytest

from runtime_rewriter.world.interfaces import interface_for_gloo, interface_of

UNUSED = "192.0.2.1"
"""An address for documentation (RFC 5737), which no interface has."""


def local_address() -> str:
    """The address from which this machine would send to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((UNUSED, 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no route to others")
        return str(probe.getsockname()[0])


def test_an_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(UNUSED) == ""


def test_gloo_gets_the_interface_of_the_node_where_its_own_choice_would_be_loopback() -> None:
    address = local_address()
    interface = interface_of(address)
    assert interface not in ("", "lo")
    assert interface_for_gloo(address, "localhost") == interface


def test_gloo_keeps_its_own_choice_where_it_reaches_other_hosts_or_none_can_be_reached() -> None:
    assert interface_for_gloo(UNUSED, "192.0.2.2") == ""
    assert interface_for_gloo("127.0.0.2", "localhost") == ""
