"""`autotune run`: run an unchanged script with an exported strategy."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import TROUBLESHOOTING, InvalidInput
from autotune.export import read_export
from autotune.jobs.processes import shell_status
from autotune.jobs.several_hosts import (
    has_ranks_of,
    ranks_fix,
    refuse_other_hosts,
    refuse_repeated_start,
)
from autotune.jobs.stopping import signals_passed_on
from runtime_rewriter.world.command import read_command, with_launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", type=Path, required=True, help="the exported file")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run the script to its end; the exit status is the script's.

    With --json our stdout is reserved for the result, so that the script's goes to stderr.
    """
    if not options.command:
        raise InvalidInput(
            "nothing to run: autotune run --strategy best.json -- "
            "torchrun --nproc-per-node 2 train.py"
        )
    export = read_export(options.strategy)
    command = read_command(options.command)
    refuse_other_hosts(export, command, options.command, options.strategy, os.environ)
    if not has_ranks_of(export, command):
        raise InvalidInput(
            f"{options.strategy} was tuned for a world size of {export.world_size}, but the "
            f"command asks for {command.workers} workers; {ranks_fix(export)}, or tune for "
            f"{command.workers}",
            anchor="wrong-world-size",
        )
    refuse_repeated_start(command, os.environ)
    with tempfile.TemporaryDirectory(prefix="autotune-run-") as folder:
        report = Path(folder, "report")
        report.touch()
        mode = ("--strategy", str(options.strategy.resolve()), "--report", str(report))
        process = subprocess.Popen(
            with_launcher(command, export.world_size, mode),
            env={**os.environ, **command.environment},
            stdout=sys.stderr if options.json else None,
        )
        # torchrun, or mpirun, receives the signals and ends its ranks in its own time.
        with signals_passed_on(process, own_session=False):
            status = shell_status(process.wait())
        reported = report.read_text(encoding="utf-8").splitlines()
    if not reported:
        return {"exit_status": status, "strategy": None, "carrier": None}, (
            f"exit status {status}; no rank on this machine reported a model that trains by "
            f"{options.strategy} (`{TROUBLESHOOTING}#no-ddp`)"
        )
    chosen = export.strategy.id if export.strategy else "current setup"
    backend = reported[0] or None
    data = {"exit_status": status, "strategy": chosen, "carrier": backend}
    return data, f"ran with {chosen}{f' ({backend})' if backend else ''}, exit status {status}"
