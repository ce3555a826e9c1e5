"""Ports that a process chooses and another one binds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from runtime_rewriter import ports

LOOPBACK = "127.0.0.1"


def ephemeral(monkeypatch: pytest.MonkeyPatch, folder: Path, bounds: str) -> None:
    (folder / "range").write_text(bounds)
    monkeypatch.setattr(ports, "_RANGE", folder / "range")


def test_a_port_is_free_and_none_that_the_kernel_gives_to_others(tmp_path, monkeypatch) -> None:
    ephemeral(monkeypatch, tmp_path, "25000\t60999\n")
    for _ in range(50):
        port = ports.unclaimed_port(LOOPBACK)
        assert ports.LOWEST <= port < 25_000
        socket.create_server((LOOPBACK, port)).close()


def test_a_port_in_use_is_passed_over(tmp_path, monkeypatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        number = taken.getsockname()[1]
        assert ports.bound_port(LOOPBACK, number) is None
        ephemeral(monkeypatch, tmp_path, f"{number + 1}\t60999\n")
        monkeypatch.setattr(ports, "LOWEST", number - 1)
        monkeypatch.setattr(ports, "HIGHEST", number)
        assert ports.unclaimed_port(LOOPBACK) != number


@pytest.mark.parametrize("bounds", ["1024 60999", "unreadable"])
def test_without_room_below_the_range_or_without_a_range_a_port_is_found(
    tmp_path, monkeypatch, bounds: str
) -> None:
    ephemeral(monkeypatch, tmp_path, bounds)
    assert ports.unclaimed_port(LOOPBACK) > 0
