"""`autotune init`: create a folder with an example script, cluster files and a job file."""

from __future__ import annotations

import argparse
import shlex
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput

SUFFIXES = (".yaml", ".py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("autotune-example"),
        help="folder to create (default autotune-example)",
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Write the files; raises `InvalidInput` if one of them exists or cannot be written."""
    folder: Path = options.folder
    with as_file(files("autotune") / "starter") as starter:
        contents = {
            path.relative_to(starter): path.read_bytes()
            for path in sorted(starter.rglob("*"))
            if path.suffix in SUFFIXES
        }
    existing = [str(folder / name) for name in contents if (folder / name).exists()]
    if existing:
        raise InvalidInput(
            f"`autotune init` does not overwrite files, but {', '.join(existing)} exist; "
            "name another folder"
        )
    try:
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    except OSError as error:
        for name in contents:  # so that the next attempt does not meet half of them
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        raise InvalidInput(
            f"the folder {folder} must be writable ({error.strerror}); name another one"
        ) from error
    written = [str(folder / name) for name in contents]
    data = {"folder": str(folder), "files": written}
    listing = "".join(f"  {name}\n" for name in written)
    return data, f"wrote\n{listing}next: cd {shlex.quote(str(folder))} && autotune tune job.yaml"
