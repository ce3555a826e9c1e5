"""Restart a world that failed: on a crowded machine a rank may not connect, or may die."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.errors import AutotuneError, InvalidInput

TRIES = 3
PAUSE_S = 5.0
"""Before a world is restarted."""


def persevere(
    name: str,
    attempt: Callable[[], None],
    trials: Callable[[], int],
    log: Callable[[str], None],
    pause_s: float = PAUSE_S,
) -> bool:
    """Call `attempt`, which resumes its work, until it ends; return whether it did.

    Give up after `TRIES` failures without a trial in between, and at once after `InvalidInput`.
    `trials`: how many trials there are by now.
    """
    failures = 0
    while failures < TRIES:
        before = trials()
        try:
            attempt()
            return True
        except InvalidInput as error:
            log(f"{name}: {error}")
            return False
        except (AutotuneError, OSError, RuntimeError) as error:
            failures = 1 if trials() > before else failures + 1
            log(f"{name}: the world failed, {failures} of {TRIES} times in a row: {error}")
            time.sleep(pause_s)
    return False
