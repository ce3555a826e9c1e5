"""Runs an `autotune` command inside the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.cli import main


def output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the stdout of a command that must succeed."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def json_output(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(output(capsys, *words, "--json"))
    return data


def error_output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the stderr of a command that must refuse its input."""
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err
