"""The `autotune` command: reads argv, runs one command, prints its result or its error.

Exit status: 0 done, 1 the job failed, 2 the input was wrong, 130 interrupted, 141 the reader of the
output closed it (as `head` does). `autotune tune --resume` continues an interrupted job.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import NoReturn

from autotune import __version__
from autotune.errors import AutotuneError, InvalidInput
from autotune.garbage import collection_paused
from autotune.printing import accept_any_character, discard, printable

OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""The status that a shell reports for a program that writes to a closed pipe."""
COMMANDS = {
    "tune": "tune a training script: autotune tune [options] -- torchrun ... train.py args",
    "init": "create a folder with an example script, cluster files and a job file",
    "probe": "measure the links of a cluster and write its cluster file",
    "show": "list the jobs, or show the trials and the decision of one job",
    "export": "write a measured strategy as a file for the training script",
    "run": "run a script with an exported strategy: autotune run --strategy best.json -- ...",
    "profile": "record training steps on every rank: autotune profile -- torchrun ... train.py",
    "track": "send to MLflow the results that could not be sent while tuning",
    "strategies": "compare hand-made strategies for a model on a cluster",
    "replay": "replay recorded traces and break an iteration down: autotune replay TRACE...",
    "what-if": "predict the speed-up of changes from traces: autotune what-if TRACE...",
    "optimize": "search for the fastest strategy by replay, without a cluster",
    "docs": "print a page of the documentation, or a section: autotune docs PAGE#SECTION",
    "testbed": "emulate clusters on this machine (Linux, root): check, up, status, down, exec",
}
"""Names and summaries. A command is the module `autotune.commands.NAME`, with `_` for `-`.

The module defines `add_arguments(parser)` and `run(options)`. Only the module of the given command
is loaded, so `autotune --help` stays instant.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script; return the exit status."""
    accept_any_character()
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:  # argparse ends by SystemExit after it printed a help text
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return OUTPUT_CLOSED
    except OSError as error:
        discard(sys.stdout)
        print(f"autotune: cannot print the result: {error.strerror or error}", file=sys.stderr)
        return 1


def _run(words: Sequence[str]) -> int:
    own_words, command = split_words(words)
    options = argparse.Namespace(json="--json" in own_words, interrupted="interrupted")
    try:
        options = argument_parser(own_words[:1]).parse_args(own_words)
        options.command = command
        data, text = options.run(options)
    except InvalidInput as error:
        return _fail(options, error, 2)
    except AutotuneError as error:
        return _fail(options, error, 1)
    except KeyboardInterrupt:
        return _fail(options, AutotuneError(options.interrupted), 130)
    except OSError as error:
        return _fail(options, AutotuneError(_refused_by_the_system(error)), 1)
    print(json.dumps(data, indent=2) if options.json else printable(text))
    return int(data.get("exit_status", 0))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into our own words and the user's command after the first `--`."""
    if "--" not in words:
        return list(words), []
    cut = list(words).index("--")
    return list(words[:cut]), list(words[cut + 1 :])


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `InvalidInput`, so that `--json` reports them as all others."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if message.startswith("unrecognized") and ".py" in message:
            message += "; put the command that starts the script after --"
        raise InvalidInput(message)


def argument_parser(loaded: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Build the parser with every command; only those in `loaded` get their own arguments."""
    parser = _Parser(
        prog="autotune",
        description="Find the fastest gradient synchronization for a training script.",
    )
    parser.set_defaults(interrupted="interrupted")
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        add_json(command)
        if name in loaded:
            with collection_paused():
                module = import_module(f"autotune.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )


def _fail(options: argparse.Namespace, error: AutotuneError, status: int) -> int:
    if options.json:
        data = {"error": str(error), "kind": type(error).__name__, "exit_status": status}
        if error.help_page:
            data["help"] = error.help_page
        print(json.dumps(data, indent=2))
    print(f"autotune: {printable(str(error))}", file=sys.stderr)
    return status


def _refused_by_the_system(error: OSError) -> str:
    """A full disk, a folder without permission or too long a name, wherever it was met."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}; check paths, permissions and free space"
