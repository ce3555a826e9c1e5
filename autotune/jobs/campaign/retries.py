"""Worlds of trials that are made anew when they fail: a rank may not connect on a crowded machine, or die."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.errors import AutotuneError, InvalidInput

TRIES = 3
PAUSE_S = 5.0
"""Before a world is made anew."""


def persevere(
    name: str,
    attempt: Callable[[], None],
    trials: Callable[[], int],
    say: Callable[[str], None],
    pause_s: float = PAUSE_S,
) -> bool:
    """Whether `attempt` came to its end, which goes on where it was; not where it failed `TRIES` times without a trial in between.

    Where it cannot be gone on with at all (`InvalidInput`) it is not tried again. `trials`: how many there are by now.
    """
    failures = 0
    while failures < TRIES:
        before = trials()
        try:
            attempt()
            return True
        except InvalidInput as error:
            say(f"{name}: {error}")
            return False
        except (AutotuneError, OSError, RuntimeError) as error:
            failures = 1 if trials() > before else failures + 1
            say(f"{name}: the world failed, {failures} of {TRIES} times in a row: {error}")
            time.sleep(pause_s)
    return False
