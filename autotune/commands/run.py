"""`autotune run --strategy best.json -- torchrun ... train.py`: the script as it is, with the exported strategy."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.export import read_export
from autotune.jobs.stopping import signals_passed_on
from autotune.strategy_space.backend import carrier_of
from runtime_rewriter.world.command import read_command, torchrun_with_launcher


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run the script to its end; the exit status is the script's."""
    if not options.command:
        raise InvalidInput(
            "nothing to run: autotune run --strategy best.json -- torchrun --nproc-per-node 2 train.py"
        )
    export = read_export(options.strategy)
    command = read_command(options.command)
    if command.workers is not None and command.workers != export.world_size:
        raise InvalidInput(
            f"{options.strategy} was tuned for a world size of {export.world_size}, but the command asks for {command.workers} workers; "
            f"use --nproc-per-node {export.world_size}, or tune for {command.workers}"
        )
    words = torchrun_with_launcher(
        command, export.world_size, ("--strategy", str(Path(options.strategy).resolve()))
    )
    status = _call(words)
    chosen = export.strategy.id if export.strategy else "current setup"
    plan = export.plan()
    carrier = None if plan is None else carrier_of(plan, export.variables)
    data = {"exit_status": status, "strategy": chosen, "carrier": carrier}
    return data, f"ran with {chosen}{f' ({carrier})' if carrier else ''}, exit status {status}"


def _call(words: list[str]) -> int:
    """Run to the end. What asks us to stop is passed on, so that torchrun ends its ranks itself and in its own time."""
    process = subprocess.Popen(words)
    with signals_passed_on(process, own_session=False):
        return process.wait()
