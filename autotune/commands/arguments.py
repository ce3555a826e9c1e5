"""Arguments that several commands share; a job's settings come from their definition."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from autotune.tuning.job import SETTINGS
from autotune.tuning.settings import Kind, Setting

DIRECTORY = "autotune-jobs"
_TYPES: dict[Kind, Any] = {Kind.WHOLE: int, Kind.NUMBER: float, Kind.PATH: Path}


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(DIRECTORY),
        help=f"directory of the jobs (default {DIRECTORY})",
    )


def add_tracking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tracking-uri",
        help="MLflow tracking URI (default: that of the job; a new job takes MLFLOW_TRACKING_URI, "
        "else the file mlflow.db in --directory, which all jobs share)",
    )
    parser.add_argument(
        "--experiment", help="MLflow experiment (default: that of the job, else autotune)"
    )


def add_ray(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        help="a running Ray cluster, such as auto or 10.0.0.1:6379 (default: start a local one)",
    )
    parser.add_argument(
        "--master-ports",
        default="0-0",
        metavar="FIRST-LAST",
        help="ports rank 0 may listen on (default: any)",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        default="",
        metavar="RANKS",
        help="ranks of traces that do not state them: in the order of the files (0,1,2,3), or a "
        "pattern of their names ('worker{rank}_*.json')",
    )


def add_replay_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the replayed timeline (.json or .json.gz) for Perfetto",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report")


def add_settings(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add the options of the settings `names` (default: all), grouped as they are defined."""
    groups: dict[str, Any] = {}
    for setting in SETTINGS:
        if names is None or setting.name in names:
            if setting.group not in groups:
                groups[setting.group] = parser.add_argument_group(setting.group)
            options = filter(None, (setting.short_option, setting.option))
            groups[setting.group].add_argument(*options, dest=setting.name, **_option(setting))


def _option(setting: Setting) -> dict[str, Any]:
    options: dict[str, Any] = {"default": None}
    if setting.kind is Kind.SWITCH:
        return {**options, "action": argparse.BooleanOptionalAction, "help": _percent(setting.help)}
    if setting.choices is not None:
        options["choices"] = [member.value for member in setting.choices]
    if setting.kind in _TYPES:
        options["type"] = _TYPES[setting.kind]
    if setting.metavar:
        options["metavar"] = setting.metavar
    return {**options, "help": _percent(f"{setting.help} (default: {setting.default})")}


def _percent(text: str) -> str:
    """argparse formats help texts with %."""
    return text.replace("%", "%%")


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives, by name; raises `InvalidInput`."""
    given = {}
    for setting in SETTINGS:
        value = getattr(options, setting.name, None)
        if value is not None:
            given[setting.name] = setting.read(value, setting.option)
    return given
