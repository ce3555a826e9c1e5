"""`autotune export`: write a measured strategy as the file that a training script loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autotune.commands.arguments import add_directory
from autotune.jobs.exports import chosen_decision, job_export, write_export
from autotune.jobs.workspace import Workspace, latest_job
from autotune.storage.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("job", nargs="?", help="default: the latest job")
    parser.add_argument(
        "--strategy",
        help="id of a measured strategy, or its beginning (default: the job's decision)",
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("best.json"), help="default best.json"
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workspace = Workspace.existing(options.directory)
    with Store.open_to_read(workspace.store_path) as store:
        job_id = options.job or latest_job(store)
        decision = chosen_decision(store, job_id, options.strategy)
        code = write_export(job_export(store, job_id, decision), options.output)
    data = {
        "job": job_id,
        "strategy": decision.strategy_id,
        "reason": decision.reason,
        "path": str(options.output),
        "horovod_script": str(code.written) if code.written else None,
        "removed": str(code.removed) if code.removed else None,
    }
    written = str(options.output)
    if code.written:
        written += f" and, as groups of Horovod, {code.written}"
    text = f"wrote {written}: {decision.strategy_id} of job {job_id}; {decision.reason}"
    if code.removed:
        text += f"; removed {code.removed}, the code of an earlier export for Horovod"
    return data, text
