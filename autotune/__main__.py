"""The `autotune` command, also as `python -m autotune`."""

from typing import NoReturn

from autotune.cli import main
from autotune.deadlines import end_process


def console() -> NoReturn:
    """Run the command with the process's arguments, and exit with its status."""
    end_process(main())


if __name__ == "__main__":
    console()
