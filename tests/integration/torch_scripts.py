"""Training scripts in processes of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

ABORTED_AT_EXIT = "terminate called without an active exception"


def run_script(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it, and once more where torch took it down at its very end.

    A rank of any DDP script on gloo, also of one that knows nothing of us, rarely ends that way on a busy machine: one of torch's threads
    is still at work while the interpreter goes away. All that the script did and printed was done by then.
    """
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    return done
