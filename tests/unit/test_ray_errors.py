"""Ray's failures in one line of our messages, without its tracebacks."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from autotune.errors import LaunchError, raised_line
from autotune.testbed.bed import BedHost
from autotune.testbed.ray_nodes import _await
from runtime_rewriter.world.ray_connection import in_one_line

SLOW = "The current node timed out during startup. The GCS may have become overloaded"
"""What Ray raises, as a plain `Exception`."""
CHAINED = f"""
import sys
def start():
    try:
        raise TimeoutError("no answer")
    except TimeoutError as error:
        raise Exception({SLOW!r}) from error
print("Usage stats collection is disabled.", flush=True)
start()
"""
HOST = BedHost("a", "at-a", "10.0.0.1", 1)


def failed_node(tmp_path: Path, script: str) -> str:
    """The message about a node whose process runs `script` and ends."""
    log = tmp_path / "node.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=output, stderr=subprocess.STDOUT
        )
        process.wait(30)
    with pytest.raises(LaunchError) as raised:
        _await(HOST, process, log)
    return str(raised.value)


def test_a_node_that_does_not_start_is_named_with_rays_reason_in_one_line(tmp_path: Path) -> None:
    node = "the Ray node of testbed host 'a' ended with status"
    again = "; start the command again"
    assert failed_node(tmp_path, CHAINED) == f"{node} 1: {SLOW}{again}"
    printed = "print('first'); print('the port is taken\\n'); raise SystemExit(3)"
    assert failed_node(tmp_path, printed) == f"{node} 3: the port is taken{again}"
    assert failed_node(tmp_path, "") == f"{node} 0: it printed nothing{again}"


def test_an_actors_error_is_its_last_line_and_another_error_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As it is imported, Ray reads whether this process will ever use tokens, as other tests do.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    from ray.exceptions import RayTaskError

    try:
        raise ValueError("the log cannot be written")
    except ValueError as error:
        task = RayTaskError("start", traceback.format_exc(), error)
        assert '  File "' in str(task.as_instanceof_cause())
        assert in_one_line(task.as_instanceof_cause()) == f"ValueError: {error}"
    assert in_one_line(RuntimeError("the actor died.\n\tclass_name: A")) == "the actor died."
    assert in_one_line(RuntimeError()) == "RuntimeError"
    assert raised_line("no traceback\nhere") == ""
