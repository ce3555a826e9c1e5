"""Paths, setups, processes and output that several benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from autotune.jobs.campaign import domains
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.signals import terminable
from autotune.testbed.capabilities import capabilities

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
INTERRUPTED = 130
"""Exit status after a signal, as of `autotune`."""
END_S = 120.0
"""Longest time in which a process ends its ranks and removes their hosts."""


def cluster_file(name: str) -> Path:
    """Return the file of a cluster of `datasets/clusters` or `examples/clusters`."""
    return domains.cluster_file(ROOT, name)


def reference_data() -> Path | None:
    """Return the folder of measurements by others, None where it is absent."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("AUTOTUNE_REFERENCE_DATA", beside))
    return folder if folder.exists() else None


def print_result(result: tuple[str, Mapping[str, object]] | None) -> None:
    """Print a table and its keys as the last line; None ends the benchmark, without its data."""
    if result is None:
        raise SystemExit("without the reference data: set AUTOTUNE_REFERENCE_DATA")
    print(result[0])
    print(json.dumps(result[1]))


def setup_of(model: str, cluster: str) -> Setup:
    """Return a generated model or an example script on a cluster, with emulated accelerators."""
    return domains.setup_of(ROOT, model, cluster)


def machine() -> dict[str, object]:
    """Return the hardware for a benchmark's last line."""
    return {"cores": os.cpu_count(), "machine": platform.machine()}


def emulated_setting() -> dict[str, object]:
    """Return the conditions and the hardware of a benchmark on a testbed."""
    return {"network": "emulated", "accelerators": "emulated", **machine()}


def can_emulate() -> bool:
    """Return whether this machine can emulate hosts; if not, print the reason to stderr."""
    emulation = capabilities()
    if not emulation.possible:
        print(emulation.message, file=sys.stderr)
    return emulation.possible


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the lines of a benchmark's docstring."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=keep_lines)


def last_json(text: str) -> dict[str, Any]:
    """Parse the last line of a process's output."""
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def run_benchmark(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark and exit with its status.

    SIGTERM and SIGHUP end it as Ctrl-C does: what it started ends, too.
    """
    try:
        with terminable():
            status = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


@contextmanager
def child_process(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process that ends with the block, and at once by SIGTERM after an exception.

    At the end of the block its stdin is closed. It is in a session of its own, so that a terminal's
    Ctrl-C does not come twice. `options` as in `subprocess.Popen`.
    """
    with subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True, **options) as process:
        try:
            yield process
            if process.stdin is not None:
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            if process.poll() is None:
                _terminate(process)


def _terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def run_autotune(*words: str) -> str:
    """Run a command of `autotune` and return its output; progress goes to stderr."""
    command = [sys.executable, "-m", "autotune", *words]
    with child_process(command, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output
