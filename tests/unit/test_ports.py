"""Ports that a process chooses and another one binds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from runtime_rewriter.ports import HIGHEST, LOWEST, below_ephemeral, bound_port, unclaimed_port

LOOPBACK = "127.0.0.1"


def test_a_port_is_free_and_none_that_the_kernel_gives_to_others() -> None:
    for _ in range(50):
        port = unclaimed_port(LOOPBACK, range(LOWEST, 25_000))
        assert LOWEST <= port < 25_000
        socket.create_server((LOOPBACK, port)).close()


def test_a_port_in_use_is_passed_over() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        number = taken.getsockname()[1]
        assert bound_port(LOOPBACK, number) is None
        assert unclaimed_port(LOOPBACK, range(number, number + 1)) != number


@pytest.mark.parametrize(
    ("bounds", "ports"),
    [
        ("32768\t60999\n", range(LOWEST, HIGHEST + 1)),
        ("25000\t60999\n", range(LOWEST, 25_000)),
        ("1024 60999", range(0)),
        ("unreadable", range(LOWEST, HIGHEST + 1)),
    ],
)
def test_ports_lie_below_the_ephemeral_range(tmp_path: Path, bounds: str, ports: range) -> None:
    path = tmp_path / "ip_local_port_range"
    path.write_text(bounds)
    assert below_ephemeral(path) == ports
    assert unclaimed_port(LOOPBACK, below_ephemeral(path)) > 0


def test_without_a_stated_range_ports_are_those_below_linuxs_own(tmp_path: Path) -> None:
    assert below_ephemeral(tmp_path / "absent") == range(LOWEST, HIGHEST + 1)
