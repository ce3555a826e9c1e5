"""Where the logs of ranks are, if the ranks ran on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import LaunchError
from autotune.jobs.tune import _other_folders
from runtime_rewriter.world.placement import Launch
from runtime_rewriter.world.running import RunningScript
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.worker import Polled, ProcessExited

LOGS = ("/there/rank0.log", "/there/rank1.log")


class EndedRank:
    """Implements `Worker` for a process that ends at once."""

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None: ...
    def instruct(self, line: str) -> None: ...
    def terminate(self) -> None: ...
    def stop(self) -> None: ...
    def poll(self, timeout_s: float) -> Polled:
        return Polled((), ProcessExited(3, "no such file"))


class TwoHosts:
    """Implements `Placement` with a rank on each of two machines."""

    hosts = (("a", 1), ("b", 1))

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.workers = [EndedRank(), EndedRank()]

    def launch(self) -> Launch:
        return Launch(ScriptCommand("t.py", (), False, 2), ({}, {}), "", LOGS)

    def poll(self, timeout_s: float) -> list[Polled]:
        return [worker.poll(timeout_s) for worker in self.workers]

    def release(self) -> None: ...


@pytest.mark.parametrize(
    ("addresses", "output"),
    [
        (("10.0.0.1", "10.0.0.2"), "its output: /there/rank0.log on 10.0.0.1"),
        ((), "its output: /there/rank0.log"),
    ],
)
def test_a_script_that_does_not_start_names_the_host_of_its_output(addresses, output) -> None:
    script = RunningScript(lambda: TwoHosts(addresses), 5.0, 5.0, lambda text: None)
    with pytest.raises(LaunchError) as failed:
        script.ensure_running()
    assert str(failed.value).endswith(output)


def test_only_folders_elsewhere_are_named_with_the_decision() -> None:
    assert _other_folders(LOGS, Path("/jobs/a/logs")) == "/there"
    assert _other_folders(LOGS, Path("/there")) == ""
    assert _other_folders((), Path("/there")) == ""
